"""PipelineConfig: the one configuration. It is the flow's parameter, the preset file, the environment and the command
line at once."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import ClusterConfig
from model.config import EvaluationConfig, ModelConfig, ScalingConfig, Section, TrainingConfig
from model.data.config import DataConfig, TokenizerConfig, TokensConfig
from model.parallel_plan import ParallelConfig, ParallelPlan, plan_parallelism
from tasks.pool import PIECE_TIMEOUT_MINUTES


class EngineConfig(Section):
    """What prepares the data; never part of the result."""

    kind: Literal["processes", "ray"] = Field(
        "processes", description="A pool of processes on this machine, or Ray (extra 'ray') for more machines."
    )
    processes: int | None = Field(None, ge=1, le=1024, description="Processes; empty means one for every CPU.")
    memory_gib: float = Field(
        4.0, gt=0.1, description="Memory for what documents are brought together in: duplicates, repeats."
    )
    piece_timeout_minutes: float = Field(
        PIECE_TIMEOUT_MINUTES, gt=0, le=10_080, description="Longest that one piece of the work may take."
    )
    ray_address: str = Field("", description="Address of a Ray cluster; empty starts one on this machine.")


class PipelineConfig(Section):
    """Everything that one run is made of."""

    run_uri: str = Field(
        "runs/demo", min_length=1, title="Run directory", description="Where the run lives: a path, file: or s3:// URI."
    )

    @field_validator("run_uri")
    @classmethod
    def _without_trailing_slash(cls, uri: str) -> str:
        return uri.rstrip("/") or uri

    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random choice of the run.")
    engine: EngineConfig = Field(EngineConfig(), title="Engine", description="What prepares the data.")
    data: DataConfig = Field(DataConfig(), title="Data", description="From raw text to documents.")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), title="Tokenizer", description="The vocabulary.")
    tokens: TokensConfig = Field(TokensConfig(), title="Token shards", description="Token shards.")
    model: ModelConfig = Field(ModelConfig(), title="Model", description="The shape of the GPT.")
    training: TrainingConfig = Field(TrainingConfig(), title="Training", description="How the model is trained.")
    parallel: ParallelConfig = Field(ParallelConfig(), title="Parallelism", description="The model over the ranks.")
    cluster: ClusterConfig = Field(ClusterConfig(), title="Cluster", description="The machines.")
    scaling: ScalingConfig = Field(ScalingConfig(), title="Scaling validation", description="The gate before training.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), title="Evaluation", description="How the model is judged.")

    def parallel_plan(self) -> ParallelPlan:
        """The place of every rank of the cluster."""
        return plan_parallelism(
            self.parallel,
            self.cluster.nodes * self.cluster.ranks_per_node,
            self.model,
            self.training,
            vocab_size=self.tokenizer.vocab_size,
            ranks_per_node=self.cluster.ranks_per_node,
        )

    @model_validator(mode="after")
    def _the_plan_is_valid(self) -> Self:
        self.parallel_plan()
        return self
