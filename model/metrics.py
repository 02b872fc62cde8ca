"""The training log: JSON lines on rank 0, one a step, and one of every attempt to train."""

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.goodput import Goodput, goodput

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts.jsonl"  # beside the log


class MetricsLog:
    """Lines with a `step`, appended in order; no step stands twice, whatever was killed on the way.

    Args:
        tensorboard: whether the numbers also go to tensorboard/ beside the log. Needs the package of that name.
    """

    def __init__(self, path: Path, tensorboard: bool = False) -> None:
        self.path = path
        self._attempts = path.with_name(ATTEMPTS)
        self._made = time.time()
        self._tensorboard = tensorboard
        self._writer: SummaryWriter | None = None

    def begin(self, step: int) -> dict[str, Any] | None:
        """Rewind to `step`, to go on from there: an attempt, which began when this log was made."""
        last, lost = self._rewind(step)
        there = self._attempts.read_bytes() if self._attempts.exists() else b""
        attempt = json.dumps({"time": self._made, "first_step": step, "lost_steps": lost})
        _replace(self._attempts, there[: there.rfind(b"\n") + 1] + attempt.encode() + b"\n")
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # From there on, TensorBoard forgets what earlier attempts wrote.
            self._writer = SummaryWriter(str(self.path.with_name("tensorboard")), purge_step=step + 1)
        return last

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Cut away what an interrupted run wrote after `step`, a torn last line included.

        Lines up to `step` that are not there any more, because the file was lost or deleted, are named in a warning.

        Returns:
            The last line that stays.

        Raises:
            ValueError: a line before the last is not a JSON object with a step.
        """
        return self._rewind(step)[0]

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, with null for what is no number; it is in the file, whole, when this returns."""
        line = {name: _null_for_nan(value) for name, value in line.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._writer:
            for name, value in line.items():
                if isinstance(value, int | float) and name not in ("step", "time"):
                    self._writer.add_scalar(name, value, line["step"], line.get("time"))
            self._writer.flush()

    def goodput(self) -> Goodput:
        """Of the run until now, all attempts together."""
        lines, attempts = (
            parse_lines(path.read_bytes(), path.name) if path.exists() else [] for path in (self.path, self._attempts)
        )
        return goodput(lines, attempts)

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _rewind(self, step: int) -> tuple[dict[str, Any] | None, int]:
        """The last line that stays, and how many steps were cut away."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        kept, last = 0, None
        for number, text in enumerate(content.splitlines(keepends=True), start=1):
            if not text.endswith(b"\n"):
                break
            line = self._parse(text, number)
            if line["step"] > step:
                break
            kept, last = kept + len(text), line
        if kept < len(content):
            _replace(self.path, content[:kept])
        first_missing = last["step"] + 1 if last else 1
        if first_missing <= step:
            missing = f"step {step}" if first_missing == step else f"steps {first_missing} to {step}"
            logger.warning("%s lacks %s, lost or deleted; the run goes on without them", self.path, missing)
        return last, content.count(b"\n", kept)

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
            int(line["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path}, line {number}, is not a JSON object with a step") from error
        return line


def parse_lines(content: bytes, name: str) -> list[dict[str, Any]]:
    """The JSON objects of a log, as it may lie there after any kill: without a torn last line.

    Any other line that is none is left out, with a warning.
    """
    lines = []
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        else:
            logger.warning("%s, line %d, is not a JSON object; it is left out", name, number)
    return lines


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _null_for_nan(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
