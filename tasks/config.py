"""PipelineConfig: the one configuration. It is the flow's parameter, the preset file, the environment and the command
line at once."""

from pydantic import Field, field_validator

from infra.config import ClusterConfig
from model.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ScalingConfig,
    Section,
    TokenizerConfig,
    TokensConfig,
    TrainingConfig,
)


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
    data: DataConfig = Field(DataConfig(), title="Data", description="From raw text to documents.")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), title="Tokenizer", description="The vocabulary.")
    tokens: TokensConfig = Field(TokensConfig(), title="Token shards", description="Token shards.")
    model: ModelConfig = Field(ModelConfig(), title="Model", description="The shape of the GPT.")
    training: TrainingConfig = Field(TrainingConfig(), title="Training", description="How the model is trained.")
    cluster: ClusterConfig = Field(ClusterConfig(), title="Cluster", description="The machines.")
    scaling: ScalingConfig = Field(ScalingConfig(), title="Scaling validation", description="The gate before training.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), title="Evaluation", description="How the model is judged.")
