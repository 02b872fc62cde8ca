"""What can be seen of a training run from outside: its newest step, its generations, and what rank 0 says of
checkpoints."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from infra.chaos.victims import Victim, find_victims
from infra.storage import Storage
from tasks.heartbeat import HeartbeatReader

METRICS = "metrics/train.jsonl"
# Of a generation of the training: node 0 has rank 0, and torchrun's directory has the rendezvous' name.
_RANK_0_LOGS = "logs/*/train/generation-*/node-0/ranks/*/attempt_0/0/stderr.log"
_RESUMED = re.compile(r"resumed at step (\d+) of")
_SKIPPED = re.compile(r"skipped step-(\d+)")
_NOT_SAVED = re.compile(r"step-(\d+) was not saved")


class Progress:
    """How far the training is. The sign of life that a killed generation left is not taken for the next one's."""

    def __init__(self, storage: Storage, state_dir: Path) -> None:
        self._storage, self._state_dir = storage, state_dir
        self._heartbeat = HeartbeatReader(storage)
        self._sign_time = 0.0
        self._generation = ""
        self._since = 0.0
        self._gone: set[str] = set()
        self.step: int | None = None
        """The step of the generation that trains now; None while none does."""
        self.changed = time.monotonic()
        """When there was last a new sign."""

    def look(self) -> None:
        """Take notice of a new sign of life, if there is one."""
        sign = self._heartbeat.last()
        if sign.get("time", 0.0) <= self._sign_time:
            return
        self._sign_time = sign["time"]
        generation = next((v.generation for v in self.victims() if v.role == "rank"), "")
        if generation != self._generation:
            self._generation, self._since, self.step = generation, time.time(), None
        if not generation or generation in self._gone or sign["time"] < self._since:
            return
        self.changed = time.monotonic()
        self.step = sign["step"] if sign["phase"] in ("training", "validation") else None

    def forget(self) -> None:
        """Of the generation there is, expect no more."""
        self._gone.add(self._generation)
        self.step = None

    def victims(self) -> list[Victim]:
        return find_victims(self._state_dir)

    def newest_step(self) -> int:
        """Of the metrics as they are stored, and of the last sign of life."""
        try:
            lines = self._storage.read(METRICS).splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        whole = next((line for line in reversed(lines) if line.endswith(b"\n")), b'{"step": 0}')
        return max(json.loads(whole)["step"], self.step or 0)


class RankLog:
    """What rank 0 of every generation has logged."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._read: dict[Path, int] = {}

    def news(self) -> Iterator[tuple[str, int]]:
        """What has happened since the last call: ("launched", generation), ("resumed", step), ("skipped", step) or
        ("not saved", step)."""
        for path in sorted(self._state_dir.glob(_RANK_0_LOGS)):
            if path not in self._read:
                self._read[path] = 0
                yield "launched", int(path.parts[-7].removeprefix("generation-"))
            try:
                with path.open("rb") as file:
                    file.seek(self._read[path])
                    text = file.read()
            except FileNotFoundError:  # the flow that runs now makes room for its own
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            yield from _events(whole.decode(errors="replace"))


def _events(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        for what, pattern in (("resumed", _RESUMED), ("skipped", _SKIPPED), ("not saved", _NOT_SAVED)):
            if match := pattern.search(line):
                yield what, int(match[1])
                break
