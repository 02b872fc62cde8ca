"""The training log: JSON lines on rank 0, one a step."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class MetricsLog:
    """Lines with a `step`, appended in order; no step stands twice, whatever was killed on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Cut away what an interrupted run wrote after `step`, a torn last line included.

        Lines up to `step` that are not there any more, because the file was lost or deleted, are named in a warning.

        Returns:
            The last line that stays.

        Raises:
            ValueError: a line before the last is not a JSON object with a step.
        """
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
            replacement = self.path.with_name(self.path.name + ".partial")
            replacement.write_bytes(content[:kept])
            os.replace(replacement, self.path)
        first_missing = last["step"] + 1 if last else 1
        if first_missing <= step:
            missing = f"step {step}" if first_missing == step else f"steps {first_missing} to {step}"
            logger.warning("%s lacks %s, lost or deleted; the run goes on without them", self.path, missing)
        return last

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, with null for what is no number; it is in the file, whole, when this returns."""
        text = json.dumps({name: _null_for_nan(value) for name, value in line.items()}, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
            int(line["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path}, line {number}, is not a JSON object with a step") from error
        return line


def _null_for_nan(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
