"""The gate before training: what was measured on the cluster, held against what the configuration demands."""

import operator
from dataclasses import dataclass

from model.config import ScalingConfig


@dataclass(frozen=True)
class AllReduce:
    """The bus bandwidth of an all-reduce over all ranks."""

    mib: int
    gb_per_second: float


@dataclass(frozen=True)
class ShortRun:
    """A few steps of the real model on the whole cluster, all on the same batch."""

    steps: int
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class ScalingMeasurement:
    """What `probe.measure` found."""

    ranks: int
    copies: int
    """Of the model: the data-parallel ranks."""
    all_reduce: tuple[AllReduce, ...]
    tokens_per_second_one_copy: float
    tokens_per_second: float
    peak_memory_gib: float
    checkpoint_save_seconds: float
    checkpoint_load_seconds: float
    short_run: ShortRun

    @property
    def efficiency(self) -> float:
        """Throughput of all ranks over (copies x throughput of one copy of the model with the same work for each)."""
        return self.tokens_per_second / (self.copies * self.tokens_per_second_one_copy)


RELATIONS = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Check:
    """One measured value beside its bound."""

    name: str
    measured: float
    relation: str
    """How the measured value must stand to the bound: one of `RELATIONS`."""
    bound: float
    unit: str
    passed: bool
    explanation: str


def gate(measurement: ScalingMeasurement, config: ScalingConfig) -> list[Check]:
    """Every check; training may start when all have passed. A measurement that is not a number passes none."""
    largest = max(measurement.all_reduce, key=lambda point: point.mib)
    run = measurement.short_run
    return [
        _check(
            "all-reduce", largest.gb_per_second, "≥", config.min_all_reduce_gb_per_second, "GB/s",
            f"Bus bandwidth at {largest.mib}\u00a0MiB over {measurement.ranks} ranks.",
        ),
        _check(
            "throughput", measurement.tokens_per_second, "≥", config.min_tokens_per_second, "tokens/s",
            "Training steps of the real model on the whole cluster.",
        ),
        _check(
            "efficiency", measurement.efficiency, "≥", config.min_efficiency, "",
            f"{measurement.copies} copies of the model, against as many times the "
            f"{measurement.tokens_per_second_one_copy:,.0f}\u00a0tokens/s of one copy alone.",
        ),
        _check("peak memory", measurement.peak_memory_gib, "≤", config.max_peak_memory_gib, "GiB", "The fullest rank."),
        _check(
            "checkpoint save", measurement.checkpoint_save_seconds, "≤", config.max_checkpoint_save_seconds, "s",
            "Until the marker is stored; training goes on meanwhile.",
        ),
        _check(
            "checkpoint load", measurement.checkpoint_load_seconds, "≤", config.max_checkpoint_load_seconds, "s",
            "Download, verification and load on all ranks.",
        ),
        _check(
            "short run", run.last_loss, "<", run.first_loss, "nats/token",
            f"The loss after {run.steps} steps on one batch must be below the first: the model learns on this cluster.",
        ),
    ]  # fmt: skip


def _check(name: str, measured: float, relation: str, bound: float, unit: str, explanation: str) -> Check:
    return Check(name, measured, relation, bound, unit, RELATIONS[relation](measured, bound), explanation)
