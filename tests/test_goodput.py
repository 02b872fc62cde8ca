import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.goodput import Goodput, goodput


def line(step: int, time: float, **other: Any) -> dict[str, Any]:
    return {"step": step, "time": time, "step_seconds": 10.0, "loader_seconds": 1.0} | other


def attempt(time: float, first_step: int = 0, lost_steps: int = 0) -> dict[str, Any]:
    return {"time": time, "first_step": first_step, "lost_steps": lost_steps}


def test_an_unbroken_run() -> None:
    """4 steps of 10 s, 1 s of each for the loader, and 5 s before the first: 36 of 45 s."""
    lines = [line(step, 105.0 + 10 * step) for step in (1, 2, 3, 4)]
    found = goodput(lines, [attempt(100.0)])
    assert found == Goodput(useful_seconds=36.0, wall_seconds=45.0, restarts=0, lost_steps=0)
    assert found.share == 0.8


def test_what_a_kill_cost_counts() -> None:
    """Killed in step 4 with a checkpoint of step 2, and started again later: step 3 is taken twice, counts once."""
    lines = [line(1, 115.0), line(2, 125.0), line(3, 215.0), line(4, 225.0)]
    found = goodput(lines, [attempt(100.0), attempt(200.0, 2, 1)])
    assert found == Goodput(useful_seconds=36.0, wall_seconds=125.0, restarts=1, lost_steps=1)
    assert found.share == pytest.approx(36 / 125)


def test_attempts_that_left_no_step_count() -> None:
    """The second goes on at step 2, the third only at step 1, the fourth dies before its first step."""
    lines = [line(1, 115.0), line(2, 315.0), line(3, 325.0)]
    attempts = [attempt(100.0), attempt(200.0, 2), attempt(300.0, 1, 5), attempt(400.0, 3)]
    assert goodput(lines, attempts) == Goodput(27.0, 300.0, 3, 5)


def test_a_run_killed_before_its_first_checkpoint_was_restarted() -> None:
    assert goodput([], [attempt(100.0), attempt(160.0, 0, 3)]) == Goodput(0.0, 60.0, 1, 3)


def test_skipped_steps_are_of_no_use() -> None:
    lines = [line(1, 110.0), line(2, 120.0, skipped="spike", loss=None)]
    assert goodput(lines, [attempt(100.0)]) == Goodput(9.0, 20.0, 0, 0)


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    """On the second host it is 1,000 s earlier: the 25 s of each attempt are left, and what lay between is unknown."""
    lines = [line(1, 10_015.0), line(2, 10_025.0), line(3, 9_215.0), line(4, 9_225.0)]
    assert goodput(lines, [attempt(10_000.0), attempt(9_200.0, 2)]) == Goodput(36.0, 50.0, 1, 0)


def test_without_the_file_of_attempts_the_first_step_is_the_start() -> None:
    lines = [line(1, 115.0), line(2, 125.0)]
    assert goodput(lines, []) == Goodput(18.0, 20.0, 0, 0)
    resumed = [line(1, 115.0), line(2, 135.0)]  # it was lost, and begun again by a resume
    assert goodput(resumed, [attempt(120.0, 1)]) == Goodput(18.0, 30.0, 1, 0)


def test_lines_of_before_there_was_a_time_tell_nothing() -> None:
    old = [{"step": 1, "loss": 2.0, "step_seconds": 10.0}, {"step": 2, "loss": 2.0, "step_seconds": 10.0}]
    assert goodput(old, []) == Goodput(0.0, 0.0, 0, 0)
    assert goodput(old, []).share is None
    assert goodput([], []).share is None
    assert goodput([*old, line(3, 115.0)], [attempt(100.0, 2)]) == Goodput(9.0, 15.0, 1, 0)


odd = st.none() | st.text() | st.booleans() | st.floats() | st.integers(-(10**9), 10**12)
objects = st.dictionaries(
    st.sampled_from(["step", "time", "step_seconds", "loader_seconds", "skipped", "first_step", "lost_steps"]), odd
)


@given(st.lists(objects, max_size=6), st.lists(objects, max_size=4))
def test_whatever_the_files_say_the_share_is_one(lines: list[dict[str, Any]], attempts: list[dict[str, Any]]) -> None:
    found = goodput(lines, attempts)
    assert math.isnan(found.useful_seconds) is False
    assert 0 <= found.useful_seconds <= found.wall_seconds
    assert 0 <= found.restarts <= len(attempts)
    assert found.lost_steps >= 0
