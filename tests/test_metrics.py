import json
import math
from pathlib import Path

import pytest

from model.metrics import MetricsLog


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
