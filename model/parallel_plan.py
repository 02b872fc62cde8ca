"""How the work is laid over the ranks: the configuration, and the plan that it makes for a number of ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Literal

from pydantic import Field, ValidationError

from model.config import ModelConfig, Section, TrainingConfig
from model.data.config import TokenizerConfig

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
    config: ParallelConfig,
    world_size: int,
    model: ModelConfig,
    training: TrainingConfig,
    *,
    vocab_size: int,
    ranks_per_node: int,
) -> ParallelPlan:
    """The plan for so many ranks.

    Raises:
        ValueError: the model, the batch, the vocabulary or the ranks do not fit it; names settings that do.
    """
    request = _Request(config, model, training, vocab_size, world_size, ranks_per_node)
    if refusal := request.refusal():
        rule, settings = refusal
        raise ValueError(f"{rule}: {_remedy(request, settings)}")
    return request.plan()


@dataclass(frozen=True)
class _Request:
    """What a plan is wanted for."""

    parallel: ParallelConfig
    model: ModelConfig
    training: TrainingConfig
    vocab_size: int
    world_size: int
    ranks_per_node: int

    @property
    def dp(self) -> int:
        return self.world_size // (self.parallel.tp * self.parallel.pp)

    def plan(self) -> ParallelPlan:
        options = self.parallel.model_dump()
        return ParallelPlan(shards=self.dp // self.parallel.replicas, **options)

    def refusal(self) -> tuple[str, tuple[str, ...]] | None:
        """The first rule that is broken, and settings of which one may mend it; None where all are kept."""
        return self._ranks_refusal() or self._tensor_refusal() or self._pipeline_refusal()

    def _ranks_refusal(self) -> tuple[str, tuple[str, ...]] | None:
        parallel = self.parallel
        if self.world_size % (parallel.tp * parallel.pp):
            rule = (
                f"parallel.tp ({parallel.tp}) x parallel.pp ({parallel.pp}) must divide the {self.world_size} ranks "
                f"(cluster.nodes x cluster.ranks_per_node)"
            )
            return rule, ("parallel.tp", "parallel.pp", "cluster.nodes")
        if self.dp % parallel.replicas:
            rule = f"parallel.replicas ({parallel.replicas}) must divide the {self.dp} data-parallel ranks"
            return rule, ("parallel.replicas",)
        return None

    def _tensor_refusal(self) -> tuple[str, tuple[str, ...]] | None:
        tp, model = self.parallel.tp, self.model
        # The width is divisible by the heads, and so by what divides them.
        for name, size in (("model.n_head", model.n_head), ("model.seq_len", model.seq_len)):
            if size % tp:
                return f"{name} ({size}) must be divisible by parallel.tp ({tp})", ("parallel.tp",)
        if self.vocab_size % tp:
            rule = f"the vocabulary ({self.vocab_size} pieces) must be divisible by parallel.tp ({tp})"
            return rule, ("tokenizer.vocab_size", "parallel.tp")
        if self.ranks_per_node % tp:
            rule = (
                f"parallel.tp ({tp}) must divide cluster.ranks_per_node ({self.ranks_per_node}), "
                "because its ranks exchange too much to be on different machines"
            )
            return rule, ("parallel.tp",)
        return None

    def _pipeline_refusal(self) -> tuple[str, tuple[str, ...]] | None:
        pp, stages_per_rank = self.parallel.pp, self.parallel.stages_per_rank
        if pp == 1:
            if stages_per_rank > 1:
                rule = f"parallel.stages_per_rank ({stages_per_rank}) needs a pipeline, parallel.pp above 1"
                return rule, ("parallel.stages_per_rank", "parallel.pp")
            return None
        if pp * stages_per_rank > self.model.n_layer:
            rule = (
                f"parallel.pp ({pp}) x parallel.stages_per_rank ({stages_per_rank}) makes "
                f"{pp * stages_per_rank} stages, more than model.n_layer ({self.model.n_layer})"
            )
            return rule, ("parallel.stages_per_rank", "parallel.pp")
        batch, micro = self.training.global_batch_size, self.training.micro_batch_size
        batch_settings = ("training.global_batch_size", "training.micro_batch_size")
        if batch % (self.dp * micro):
            rule = (
                f"with a pipeline, training.global_batch_size ({batch}) must be a multiple of dp ({self.dp}) x "
                f"training.micro_batch_size ({micro})"
            )
            return rule, batch_settings
        micro_batches = batch // (self.dp * micro)
        if micro_batches % pp if stages_per_rank > 1 else micro_batches < pp:
            wanted = "a multiple of" if stages_per_rank > 1 else "at least"
            rule = f"the pipeline needs {wanted} parallel.pp ({pp}) micro-batches in a step and gets {micro_batches}"
            return rule, batch_settings
        return None

    def choices(self, setting: str) -> Iterable[int]:
        """Values of a setting that could mend what is wrong with the one there is, the nearest first."""
        parallel, training = self.parallel, self.training
        if setting == "cluster.nodes":
            row = parallel.tp * parallel.pp
            nodes = _multiple(self.world_size // self.ranks_per_node, row // gcd(row, self.ranks_per_node))
            return (nodes,)
        if setting == "tokenizer.vocab_size":
            above = _multiple(self.vocab_size, parallel.tp)
            return (above, above - parallel.tp)
        if setting == "training.global_batch_size":
            part = self.dp * training.micro_batch_size
            least = _multiple(max(training.global_batch_size, part * parallel.pp), part)
            return (least, _multiple(least, part * parallel.pp))
        if setting == "training.micro_batch_size":
            return range(training.micro_batch_size - 1, 0, -1)
        wanted = getattr(parallel, setting.removeprefix("parallel."))
        most = self.model.n_layer if setting == "parallel.stages_per_rank" else self.world_size
        return sorted(range(1, most + 1), key=lambda value: (abs(value - wanted), value))

    def with_setting(self, setting: str, value: int) -> "_Request":
        """Raises ValidationError where the value is out of the setting's own bounds."""
        section, name = setting.split(".")
        if section == "cluster":
            return replace(self, world_size=value * self.ranks_per_node)
        if section == "tokenizer":
            return replace(self, vocab_size=TokenizerConfig(vocab_size=value).vocab_size)
        changed = getattr(self, section).model_dump() | {name: value}
        return replace(self, **{section: type(getattr(self, section)).model_validate(changed)})


def _remedy(request: _Request, settings: Iterable[str]) -> str:
    """Of each of the settings the nearest value with which alone the plan is accepted."""
    found = []
    for setting in settings:
        for value in request.choices(setting):
            if _is_accepted(request, setting, value):
                found.append(f"{setting} to {value}")
                break
    return "set " + (", or ".join(found) or "parallel.tp, pp, stages_per_rank and replicas to 1")


def _is_accepted(request: _Request, setting: str, value: int) -> bool:
    try:
        return request.with_setting(setting, value).refusal() is None
    except ValidationError:
        return False


def _multiple(size: int, of: int) -> int:
    """The least multiple that is not below."""
    return -(-size // of) * of
