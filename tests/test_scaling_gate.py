import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from ranks import run

from infra.storage import FileStorage
from model.checkpoint import Checkpointer
from model.config import ModelConfig, ScalingConfig, TrainingConfig
from model.data.tokens.batches import TokenDataset
from model.data.tokens.mixture import Mixture, Source
from model.parallel import build_mesh
from model.parallel_plan import ParallelPlan
from model.planning.probe import measure
from model.planning.scaling import AllReduce, ScalingMeasurement, ShortRun, gate

MEASURED = ScalingMeasurement(
    ranks=4,
    copies=4,
    all_reduce=(AllReduce(16, 5.0), AllReduce(1, 1.0)),
    tokens_per_second_one_copy=1000.0,
    tokens_per_second=3000.0,
    peak_memory_gib=10.0,
    checkpoint_save_seconds=20.0,
    checkpoint_load_seconds=30.0,
    short_run=ShortRun(steps=10, first_loss=9.0, last_loss=8.0),
)


def failed(measurement: ScalingMeasurement, **bounds: float) -> list[str]:
    return [check.name for check in gate(measurement, ScalingConfig(**bounds)) if not check.passed]


def test_efficiency_is_of_as_many_single_ranks() -> None:
    assert MEASURED.efficiency == 0.75


def test_the_defaults_pass() -> None:
    assert failed(MEASURED) == []
    assert len(gate(MEASURED, ScalingConfig())) == 7


@pytest.mark.parametrize(
    ("name", "bound", "met", "missed"),
    [
        ("all-reduce", "min_all_reduce_gb_per_second", 5.0, 5.1),  # at the largest message, in whatever order
        ("throughput", "min_tokens_per_second", 3000.0, 3001.0),
        ("efficiency", "min_efficiency", 0.75, 0.76),
        ("peak memory", "max_peak_memory_gib", 10.0, 9.9),
        ("checkpoint save", "max_checkpoint_save_seconds", 20.0, 19.9),
        ("checkpoint load", "max_checkpoint_load_seconds", 30.0, 29.9),
    ],
)
def test_each_bound_is_held(name: str, bound: str, met: float, missed: float) -> None:
    assert failed(MEASURED, **{bound: met}) == []
    assert failed(MEASURED, **{bound: missed}) == [name]
    (check,) = [check for check in gate(MEASURED, ScalingConfig(**{bound: missed})) if check.name == name]
    assert check.bound == missed
    assert check.relation == ("≥" if bound.startswith("min") else "≤")
    assert check.explanation


@pytest.mark.parametrize("last_loss", [9.0, 9.5, math.nan, math.inf])
def test_a_short_run_that_does_not_learn_fails(last_loss: float) -> None:
    assert failed(replace(MEASURED, short_run=ShortRun(10, 9.0, last_loss))) == ["short run"]


def test_what_is_not_a_number_passes_nothing() -> None:
    assert failed(replace(MEASURED, tokens_per_second=math.nan)) == ["throughput", "efficiency"]


def measure_on_ranks(root: Path) -> ScalingMeasurement:
    data = TokenDataset([[np.arange(500, dtype=np.uint32) % 40]], 8)
    group = dist.new_group(backend="gloo")
    plan = ParallelPlan(shards=dist.get_world_size())
    return measure(
        model_config=ModelConfig(n_layer=1, n_head=2, d_model=16, seq_len=8),
        training_config=TrainingConfig(global_batch_size=8, micro_batch_size=2, ramp_start_batch_size=8),
        scaling_config=ScalingConfig(all_reduce_mib=(1, 2), warmup_steps=1, timed_steps=2, short_run_steps=4),
        vocab_size=40,
        seed=0,
        data=data,
        order=Mixture([Source("", len(data))], 0),
        plan=plan,
        mesh=build_mesh(plan, "cpu"),
        checkpointer=Checkpointer(FileStorage(root / "checkpoints"), 1, group),
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cluster_is_measured_by_all_its_ranks(tmp_path: Path, world_size: int) -> None:
    measurements = run(measure_on_ranks, world_size, tmp_path)
    measurement = measurements[0]
    assert measurements == [measurement] * world_size
    assert measurement.ranks == world_size
    assert [point.mib for point in measurement.all_reduce] == [1, 2]
    # With one rank nothing crosses a link: the bandwidth's factor 2 (n - 1) / n is 0.
    assert all((point.gb_per_second > 0) == (world_size > 1) for point in measurement.all_reduce)
    assert measurement.tokens_per_second > 0
    assert measurement.tokens_per_second_one_copy > 0
    assert 0 < measurement.peak_memory_gib < 64
    assert measurement.checkpoint_save_seconds > 0
    assert measurement.checkpoint_load_seconds > 0
    assert measurement.short_run.steps == 4
    assert measurement.short_run.last_loss < measurement.short_run.first_loss
    assert all(check.passed for check in gate(measurement, ScalingConfig()))
