"""How the work is laid over the ranks: the configuration, and the plan that it makes for a number of ranks."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import Field

from model.config import ModelConfig, Section, TrainingConfig

Checkpointing = Literal["none", "selective", "full"]


class ParallelConfig(Section):
    """How the model is laid over the ranks. Results do not depend on it but for the order of sums; a run may go on with
    another layout."""

    tp: int = Field(
        1, ge=1, le=1024, description="Ranks that share every layer's matrices (tensor parallel); within a machine."
    )
    pp: int = Field(1, ge=1, le=1024, description="Ranks in a row that hold a share of the layers each (pipeline).")
    stages_per_rank: int = Field(
        1, ge=1, le=64, description="Pipeline stages on a rank; with more than one they are interleaved, to wait less."
    )
    replicas: int = Field(
        1,
        ge=1,
        le=4096,
        description="Copies of the sharded state over the data-parallel ranks (HSDP); 1 has one, FSDP.",
    )
    checkpointing: Checkpointing = Field(
        "none",
        description="Activations to compute again rather than keep: 'none', the cheap ones ('selective'), or all of a "
        "block ('full').",
    )
    compile: bool = Field(False, description="Compile each block with torch.compile; slow to start, faster on GPUs.")


@dataclass(frozen=True)
class ParallelPlan:
    """The place of every rank. The axes of the mesh, from outermost: pp, replicas, shards, tp."""

    replicas: int = 1
    shards: int = 1
    tp: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    checkpointing: Checkpointing = "none"
    compile: bool = False

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.replicas * self.shards

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def n_stages(self) -> int:
        return self.pp * self.stages_per_rank

    def stage_layers(self, n_layer: int) -> list[range]:
        """The layers of each stage, as even as they go. Where they do not, the last stages, of which the very last has
        the head too, have one less."""
        even, longer = divmod(n_layer, self.n_stages)
        bounds = [stage * even + min(stage, longer) for stage in range(self.n_stages + 1)]
        return [range(first, end) for first, end in pairwise(bounds)]


def plan_parallelism(
    config: ParallelConfig, world_size: int, model: ModelConfig, training: TrainingConfig
) -> ParallelPlan:
    """The plan for so many ranks.

    Raises:
        ValueError: the model, the batch or the ranks do not fit it; names a setting that does.
    """
    shared = config.tp * config.pp
    if world_size % shared:
        raise ValueError(
            f"parallel.tp ({config.tp}) x parallel.pp ({config.pp}) must divide the {world_size} ranks: "
            f"use {_multiple(world_size, shared)} ranks, or {_divisors(world_size, config.tp * config.pp, 'tp x pp')}"
        )
    dp = world_size // shared
    if dp % config.replicas:
        raise ValueError(
            f"parallel.replicas ({config.replicas}) must divide the {dp} data-parallel ranks: "
            f"{_divisors(dp, config.replicas, 'replicas')}"
        )
    _check_tensor_parallel(config, model)
    plan = ParallelPlan(
        config.replicas,
        dp // config.replicas,
        config.tp,
        config.pp,
        config.stages_per_rank,
        config.checkpointing,
        config.compile,
    )
    _check_pipeline(plan, model, training)
    return plan


def _check_tensor_parallel(config: ParallelConfig, model: ModelConfig) -> None:
    for name, size in (("n_head", model.n_head), ("seq_len", model.seq_len), ("d_model", model.d_model)):
        if size % config.tp:
            fix = _divisors(size, config.tp, "tp")
            raise ValueError(f"model.{name} ({size}) must be divisible by parallel.tp ({config.tp}): {fix}")


def check_vocabulary(plan: ParallelPlan, vocab_size: int) -> None:
    """Raises ValueError where the head cannot be split, which is known once there is a tokenizer."""
    if vocab_size % plan.tp:
        raise ValueError(
            f"the vocabulary ({vocab_size} pieces) must be divisible by parallel.tp ({plan.tp}): "
            f"{_divisors(vocab_size, plan.tp, 'tp')}, or tokenizer.vocab_size {_multiple(vocab_size, plan.tp)}"
        )


def _check_pipeline(plan: ParallelPlan, model: ModelConfig, training: TrainingConfig) -> None:
    if plan.pp == 1:
        if plan.stages_per_rank > 1:
            raise ValueError(
                f"parallel.stages_per_rank ({plan.stages_per_rank}) needs a pipeline: set parallel.pp above 1"
            )
        return
    if plan.n_stages > model.n_layer:
        raise ValueError(
            f"parallel.pp ({plan.pp}) x parallel.stages_per_rank ({plan.stages_per_rank}) makes {plan.n_stages} "
            f"stages, more than model.n_layer ({model.n_layer}): use {model.n_layer} stages or fewer"
        )
    batch, micro = training.global_batch_size, training.micro_batch_size
    if batch % (plan.dp * micro):
        raise ValueError(
            f"with a pipeline, training.global_batch_size ({batch}) must be a multiple of dp ({plan.dp}) x "
            f"training.micro_batch_size ({micro}): use {_multiple(batch, plan.dp * micro)}"
        )
    micro_batches, least = batch // (plan.dp * micro), plan.n_stages
    if plan.stages_per_rank > 1:
        least = plan.pp
    if micro_batches < least or (plan.stages_per_rank > 1 and micro_batches % plan.pp):
        rule = f"a multiple of pp ({plan.pp})" if plan.stages_per_rank > 1 else f"at least {least}"
        needed = _multiple(max(micro_batches, least), plan.pp if plan.stages_per_rank > 1 else 1)
        raise ValueError(
            f"the pipeline needs {rule} micro-batches in a step and gets {micro_batches}: "
            f"use training.global_batch_size {needed * plan.dp * micro}, or a smaller training.micro_batch_size"
        )


def _multiple(size: int, of: int) -> int:
    """The least multiple that is not below."""
    return -(-size // of) * of


def _divisors(size: int, wanted: int, name: str) -> str:
    """The divisors next to what was wanted."""
    below = next(d for d in range(min(wanted, size), 0, -1) if size % d == 0)
    above = next((d for d in range(wanted, size + 1) if size % d == 0), None)
    choices = [below] if above in (None, below) else [below, above]
    return f"{name} can be {' or '.join(map(str, choices))}"
