import json
import math
import time
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from model.metrics import ATTEMPTS, MetricsLog, parse_lines


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    log = MetricsLog(tmp_path / "metrics" / "train.jsonl")
    log.rewind(0)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1 / step})
    return log


def test_lines_are_whole_when_write_returns(log: MetricsLog) -> None:
    assert steps(log.path) == [1, 2, 3, 4, 5]
    assert json.loads(log.path.read_text().splitlines()[2])["loss"] == 1 / 3  # bit for bit


@pytest.mark.parametrize(("step", "left"), [(0, []), (3, [1, 2, 3]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_rewind_cuts_what_is_later(log: MetricsLog, step: int, left: list[int]) -> None:
    last = log.rewind(step)
    assert steps(log.path) == left
    assert last == ({"step": left[-1], "loss": 1 / left[-1]} if left else None)
    log.write({"step": step + 1})
    assert steps(log.path) == [*left, step + 1]


@pytest.mark.parametrize(
    ("last", "step", "missing"),
    [(0, 5, "steps 1 to 5"), (3, 5, "steps 4 to 5"), (4, 5, "step 5"), (5, 5, None), (5, 2, None), (0, 0, None)],
)
def test_steps_without_a_line_are_named(
    log: MetricsLog, caplog: pytest.LogCaptureFixture, last: int, step: int, missing: str | None
) -> None:
    log.rewind(last)
    caplog.clear()
    log.rewind(step)
    expected = f"{log.path} lacks {missing}, lost or deleted; the run goes on without them"
    assert caplog.messages == ([expected] if missing else [])


def test_a_log_that_was_deleted_begins_again(log: MetricsLog, caplog: pytest.LogCaptureFixture) -> None:
    log.path.unlink()
    assert log.rewind(5) is None
    assert "lacks steps 1 to 5" in caplog.text
    log.write({"step": 6})
    assert steps(log.path) == [6]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_cut(log: MetricsLog, cut: int) -> None:
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    log.rewind(5)
    log.write({"step": 5})
    assert steps(log.path) == [1, 2, 3, 4, 5]


def test_a_damaged_line_is_named(log: MetricsLog) -> None:
    log.path.write_bytes(log.path.read_bytes().replace(b'{"step": 2', b"\0\0\0\0\0\0\0\0\0\0"))
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2, is not a JSON object with a step"):
        log.rewind(5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(log: MetricsLog, value: float) -> None:
    log.write({"step": 6, "loss": value})
    assert json.loads(log.path.read_text().splitlines()[-1]) == {"step": 6, "loss": None}


def attempts(log: MetricsLog) -> list[tuple[int, int]]:
    lines = parse_lines(log.path.with_name(ATTEMPTS).read_bytes(), "")
    assert all(abs(line["time"] - time.time()) < 600 for line in lines)
    return [(line["first_step"], line["lost_steps"]) for line in lines]


def test_every_attempt_is_noted_with_the_steps_it_takes_again(log: MetricsLog) -> None:
    assert log.begin(0) is None
    assert attempts(log) == [(0, 5)]
    for step in (1, 2, 3, 4):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')  # a kill
    again = MetricsLog(log.path)
    assert again.begin(2) == {"step": 2}
    assert steps(log.path) == [1, 2]
    again.begin(2)
    assert attempts(log) == [(0, 5), (2, 2), (2, 0)]


@pytest.mark.parametrize("torn", [b"{", b'{"time": 1.0, "first_step": 2, "lost_steps": 0}'])
def test_a_torn_attempt_is_cut(log: MetricsLog, torn: bytes) -> None:
    log.begin(5)
    with log.path.with_name(ATTEMPTS).open("ab") as file:
        file.write(torn)
    log.begin(4)
    assert attempts(log) == [(5, 0), (4, 1)]


def test_goodput_is_read_from_the_files(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "train.jsonl")
    assert log.goodput().share is None
    log.begin(0)
    assert log.goodput().wall_seconds == 0
    log.write({"step": 1, "time": log._made + 20, "step_seconds": 15.0, "loader_seconds": 5.0})
    found = log.goodput()
    assert (found.useful_seconds, found.restarts) == (10.0, 0)
    assert found.share == pytest.approx(0.5, rel=1e-6)


def test_what_is_no_object_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    content = b'{"step": 1}\n\xff\0{\n[2]\n\n{"step": 3}\n{"step": 4'
    assert parse_lines(content, "a.jsonl") == [{"step": 1}, {"step": 3}]
    assert caplog.messages == [f"a.jsonl, line {n}, is not a JSON object; it is left out" for n in (2, 3, 4)]
    assert parse_lines(b"", "a.jsonl") == []


def scalars(directory: Path, name: str) -> list[tuple[int, float, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value, event.wall_time) for event in events.Scalars(name)]


def test_tensorboard_shows_every_step_once(tmp_path: Path) -> None:
    """Killed after step 5, with a checkpoint of step 3: what was lost is taken again, with other values."""
    first = MetricsLog(tmp_path / "metrics" / "train.jsonl", tensorboard=True)
    first.begin(0)
    for step in range(1, 6):
        first.write({"step": step, "time": 100.0 + step, "loss": float(step), "skipped": "", "slow_ranks": (1,)})
    # No close: writing a line is enough.
    with closing(MetricsLog(first.path, tensorboard=True)) as second:
        second.begin(3)
        for step in (4, 5, 6):
            second.write({"step": step, "time": 200.0 + step, "loss": math.nan if step == 5 else -float(step)})
    directory = tmp_path / "metrics" / "tensorboard"
    assert scalars(directory, "loss") == [
        (1, 1.0, 101.0),
        (2, 2.0, 102.0),
        (3, 3.0, 103.0),
        (4, -4.0, 204.0),
        (6, -6.0, 206.0),
    ]
    first.close()


def test_without_tensorboard_nothing_is_written_for_it(log: MetricsLog) -> None:
    log.begin(5)
    assert {path.name for path in log.path.parent.iterdir()} == {"train.jsonl", "attempts.jsonl"}
    log.close()
