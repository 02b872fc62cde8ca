"""The guard skips what would do harm, counts it, and does the same after a resume."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import MODEL, TRAINING, Layout, batches, local_digests, make_learner, make_trainer
from ranks import run
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.config import TrainingConfig
from model.learner import Learner, StepResult
from model.pipeline import Batches
from model.spikes import NOT_FINITE, SPIKE, SpikeGuard

GUARDED = TRAINING.model_copy(
    update={
        "steps": 12,
        "ramp_start_batch_size": 8,
        "decay_tokens": 1000,
        "checkpoint_every_steps": 5,
        "spike_window_steps": 8,
        "spike_sigmas": 20.0,  # of so few steps the deviation says little
    }
)

# These run on ranks.


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


POISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "spike": lambda loss: loss * 1000,
    "nan": lambda loss: loss * math.nan,
    "gradient": _NanGradient.apply,
}


def poison(learner: Learner, poisons: dict[int, str]) -> None:
    """Changes what the model finds in these steps."""
    steps: list[int] = []
    take_step = learner.step

    def step(number: int, batches: Batches, learning_rate: float) -> StepResult:
        steps.append(number)
        return take_step(number, batches, learning_rate)

    def changed(module: torch.nn.Module, given: Any, output: Tensor) -> Tensor:
        name = poisons.get(steps[-1]) if module.training else None
        return POISONS[name](output) if name else output

    learner.step = step  # type: ignore[method-assign]
    if learner.stages[-1].is_last:
        learner.stages[-1].register_forward_hook(changed)


def poisoned_steps(layout: Layout, poisons: dict[int, str], left_out: set[int]) -> list[tuple[StepResult, bool]]:
    """What each step measured, and whether it changed a parameter or what the optimizer knows."""
    learner = make_learner(layout, MODEL, GUARDED)
    poison(learner, poisons)
    found = []
    for number in sorted(set(range(12)) - left_out):
        before = local_digests(learner, ("model.", "optimizer."))
        result = learner.step(number, batches(learner, layout, 8 * number, 8), 0.01)
        found.append((result, local_digests(learner, ("model.", "optimizer.")) != before))
    return found


def poisoned_run(root: Path, layout: Layout, steps: int, poisons: dict[int, str]) -> list[int]:
    """The steps of the checkpoints that were made, all of them finite."""
    trainer = make_trainer(root, layout, MODEL, GUARDED.model_copy(update={"steps": steps}))
    poison(trainer.learner, poisons)
    saved, save = [], trainer.checkpointer.save

    def checked_save(step: int, state: dict[str, Tensor], identity: dict[str, Any]) -> None:
        saved.append(step)
        for tensor in state.values():
            assert (tensor.to_local() if isinstance(tensor, DTensor) else tensor).isfinite().all()
        save(step, state, identity)

    trainer.checkpointer.save = checked_save  # type: ignore[method-assign]
    trainer.run()
    return saved


# The tests.


def guard(window: int = 128) -> SpikeGuard:
    return SpikeGuard(6.0, window)


def fed(*losses: float, window: int = 128) -> SpikeGuard:
    """A guard that has judged these losses, each with a gradient norm of 1."""
    made = guard(window)
    for loss in losses:
        made.judge(loss, 1.0)
    return made


def test_the_defaults_are_six_deviations_above_the_last_128_steps() -> None:
    config = TrainingConfig()
    assert (config.spike_sigmas, config.spike_window_steps) == (6.0, 128)


def test_a_spike_is_more_than_six_deviations_above_the_mean() -> None:
    # 64 times 1 and 64 times 3 have the mean 2 and the deviation 1, so 8 is the last value that is none.
    for value, verdict in [(7.999, ""), (8.001, SPIKE), (-100.0, "")]:
        assert fed(*[1.0, 3.0] * 64).judge(value, 1.0) == verdict
    made = guard()
    for norm in [1.0, 3.0] * 64:
        made.judge(5.0, norm)
    assert made.judge(5.0, 8.001) == SPIKE
    assert made.skipped == 1


@pytest.mark.parametrize("window", [2, 7, 128])
def test_it_acts_from_half_a_window_on(window: int) -> None:
    half = math.ceil(window / 2)
    assert fed(*[1.0] * (half - 1), window=window).judge(1e9, 1.0) == ""
    assert fed(*[1.0] * half, window=window).judge(1e9, 1.0) == SPIKE


def test_only_the_last_window_counts() -> None:
    """What is older than 128 steps is forgotten: a deviation of 1 is then one of 0.1."""
    made = fed(*[1.0, 3.0] * 64, *[1.9, 2.1] * 63)
    assert made.judge(2.0, 1.0) == ""
    assert made.judge(2.0, 1.0) == ""
    assert made.judge(3.0, 1.0) == SPIKE


@pytest.mark.parametrize("known", [128, 1000])
def test_a_change_that_lasts_is_accepted_after_four_steps(known: int) -> None:
    """With k of 128 at the new level, it is sqrt((128 - k) / k) deviations above the mean: 11.3, 7.9, 6.5 for k = 1 to
    3, and 5.6 for 4."""
    made = fed(*[2.0] * known)
    assert [made.judge(5.0, 1.0) for _ in range(200)] == [SPIKE] * 4 + [""] * 196
    assert made.skipped == 4


def test_after_a_spike_the_run_goes_on() -> None:
    made = fed(*[2.0, 2.1] * 64, 900.0)
    assert made.skipped == 1
    assert [made.judge(2.0, 1.0) for _ in range(200)] == [""] * 200


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_number_is_skipped_at_once_and_forgotten(value: float, place: int) -> None:
    one, other = guard(), guard()
    measured = [1.0, 1.0]
    measured[place] = value
    for step in range(100):
        assert one.judge(*measured) == NOT_FINITE
        assert one.judge(2.0 + step % 2, 1.0) == other.judge(2.0 + step % 2, 1.0) == ""
    assert one.skipped == 100
    assert other.skipped == 0
    assert torch.equal(one.state()["guard.recent"], other.state()["guard.recent"])
    assert all(tensor.isfinite().all() for tensor in one.state().values())


@given(loss=st.floats(1e-12, 1e12), norm=st.floats(1e-12, 1e12), steps=st.integers(1, 200))
def test_steps_that_are_all_alike_are_no_spikes(loss: float, norm: float, steps: int) -> None:
    made = guard()
    assert [made.judge(loss, norm) for _ in range(steps)] == [""] * steps


NUMBERS = st.one_of(st.floats(0, 10), st.sampled_from([math.nan, math.inf, 1e3, 1e30]))


@given(
    measured=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=60),
    saved=st.integers(0, 60),
    window=st.integers(2, 16),
)
def test_after_a_resume_it_judges_as_if_there_had_been_none(
    measured: list[tuple[float, float]], saved: int, window: int
) -> None:
    """A checkpoint is loaded into the live tensors, in place."""
    unbroken, first, resumed = guard(window), guard(window), guard(window)
    expected = [unbroken.judge(*both) for both in measured]
    found = [first.judge(*both) for both in measured[:saved]]
    live = resumed.state()
    for name, tensor in first.state().items():
        live[name].copy_(tensor)
    found += [resumed.judge(*both) for both in measured[saved:]]
    assert found == expected
    assert resumed.skipped == unbroken.skipped == sum(map(bool, expected))


@pytest.mark.parametrize("layout", [Layout(), Layout(2, {"pp": 2})], ids=["alone", "pp2"])
def test_a_skipped_step_leaves_everything_as_it_was(layout: Layout) -> None:
    """The steps after it are those of a run that never took it."""
    poisons = {5: "nan", 7: "spike", 9: "gradient"}
    why = {5: NOT_FINITE, 7: SPIKE, 9: NOT_FINITE}
    poisoned = run(poisoned_steps, layout.world_size, layout, poisons, set())
    without = run(poisoned_steps, layout.world_size, layout, {}, set(poisons))
    for of_rank, expected in zip(poisoned, without, strict=True):
        assert [result.skipped for result, _ in of_rank] == [why.get(step, "") for step in range(12)]
        assert [changed for _, changed in of_rank] == [step not in poisons for step in range(12)]
        assert [found for step, found in enumerate(of_rank) if step not in poisons] == expected
        assert math.isfinite(of_rank[9][0].loss)
        assert math.isnan(of_rank[9][0].gradient_norm)


def test_a_run_skips_its_bad_steps_and_keeps_nothing_that_is_no_number(tmp_path: Path) -> None:
    """Checkpoints are due at steps 5, 10 and 12; of steps 5 and 6 there is none. The third of the bad steps comes after
    a resume, whose guard has to know the steps before it."""
    poisons = {4: "nan", 5: "gradient", 8: "spike"}
    layout = Layout(2)
    assert run(poisoned_run, 2, tmp_path / "unbroken", layout, 12, poisons) == [[7, 10, 12]] * 2
    assert run(poisoned_run, 2, tmp_path / "resumed", layout, 7, poisons) == [[7]] * 2
    assert run(poisoned_run, 2, tmp_path / "resumed", layout, 12, poisons) == [[10, 12]] * 2
    unbroken, resumed = lines(tmp_path / "unbroken"), lines(tmp_path / "resumed")
    assert resumed == unbroken
    assert [line[1] for line in unbroken] == [None, None, None, None, NOT_FINITE, NOT_FINITE, None, None, SPIKE] + [
        None
    ] * 3
    assert [line[2] for line in unbroken] == [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]


def lines(root: Path) -> list[tuple[float | None, str | None, int]]:
    parsed = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    return [(line["loss"], line.get("skipped"), line["skipped_steps"]) for line in parsed]
