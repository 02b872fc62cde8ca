"""How much of a run's time went into training: judged from its files alone, over kills and resumes."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Goodput:
    """What became of a run's time since its first start."""

    useful_seconds: float
    """In steps that stand and were not skipped, less what they waited for data."""
    wall_seconds: float
    """From the first attempt's start to the last line of the metrics, what lies between attempts included."""
    restarts: int
    lost_steps: int
    """Taken, and taken again because no checkpoint held them."""

    @property
    def share(self) -> float | None:
        """Useful time over wall time; None where the files do not tell."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else None


def goodput(lines: Sequence[Line], attempts: Sequence[Line]) -> Goodput:
    """The goodput of a run.

    Whatever is missing or no number counts as nothing: a file that was lost, lines of before there was a `time`. Where
    a clock goes back, the time between the two is taken to be none.

    Args:
        lines: of train.jsonl: every step that stands, once.
        attempts: of attempts.jsonl: every attempt, in order.
    """
    timed = [line for line in lines if _number(line, "time") and _number(line, "step")]
    useful = sum(
        max(0.0, _number(line, "step_seconds") - _number(line, "loader_seconds"))
        for line in timed
        if not line.get("skipped")
    )
    wall = sum(max(0.0, later - earlier) for earlier, later in pairwise(_times(timed, attempts)))
    return Goodput(
        useful_seconds=useful,
        wall_seconds=max(wall, useful),
        # Without the first attempt in the file, all that are there are restarts.
        restarts=sum(number > 0 or _number(attempt, "first_step") > 0 for number, attempt in enumerate(attempts)),
        lost_steps=int(sum(max(0.0, _number(attempt, "lost_steps")) for attempt in attempts)),
    )


def _times(timed: Sequence[Line], attempts: Sequence[Line]) -> Iterator[float]:
    """When each thing happened that the files know of, in the order in which they happened.

    Before an attempt come the lines that neither it nor a later one has cut: theirs are the steps up to the first of
    all these.
    """
    pending = deque(timed)
    for number, attempt in enumerate([*attempts, {}]):
        kept = min((_number(later, "first_step") for later in attempts[number:]), default=math.inf)
        while pending and pending[0]["step"] <= kept:
            line = pending.popleft()
            yield from (line["time"] - _number(line, "step_seconds"), line["time"])
        if began := _number(attempt, "time"):
            yield began


def _number(line: Line, name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
