"""What a rank leaves in its directory on its node: signs of life, why it failed, that it was preempted.

torchrun gives every rank a directory, that of its error file. Ranks write there, and their node's supervisor reads,
which imports the standard library alone.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import StorageUnavailable

TAIL_BYTES = 16_384
TIMED_OUT = re.compile(r"Timed out waiting|Watchdog caught collective operation timeout")
"""What gloo, NCCL and `tasks.watchdog` say of a rank that has waited too long for the others."""


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended without success.

    Attributes:
        traceback: empty where a signal ended it, or where it was preempted.
        time: of its last word.
        preempted: whether it left because it was asked to.
        saved_step: of the newest complete checkpoint when it was preempted; None where it did not get so far.
    """

    rank: int
    exit_code: int
    traceback: str
    time: float
    log: str
    preempted: bool = False
    saved_step: int | None = None

    @property
    def timed_out(self) -> bool:
        return TIMED_OUT.search(self.traceback) is not None

    @property
    def lost_storage(self) -> str:
        """What it says of a storage that was unavailable; empty where that was not the reason."""
        last = self.traceback.strip().rpartition("\n")[2]
        name, _, message = last.partition(": ")
        return message if name == f"{StorageUnavailable.__module__}.{StorageUnavailable.__name__}" else ""


@dataclass(frozen=True)
class RankSign:
    """A rank's last sign of life, which a thread of its own gives about once a second.

    Attributes:
        place: where its main thread was, the innermost call first; empty before its first sign.
        waiting: whether that was a call of torch.distributed, which waits for other ranks.
        silent_seconds: since then, when the node's part of the job had ended.
    """

    rank: int
    phase: str
    step: int
    place: str
    waiting: bool
    silent_seconds: float


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes the file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1))
    partial.replace(path)


# The rank's side


def write_sign(phase: str, step: int, place: str, waiting: bool) -> None:
    sign = {"phase": phase, "step": step, "place": place, "waiting": waiting, "time": time.time()}
    write_json(_own_directory() / "sign.json", sign)


def write_preemption(saved_step: int | None) -> None:
    write_json(_own_directory() / "preempted.json", {"saved_step": saved_step})


def write_error(traceback: str) -> None:
    """Says why the rank fails where it does not get to raise; as torch's `record` does."""
    write_json(_own_directory() / "error.json", {"message": traceback})


def _own_directory() -> Path:
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent


# The supervisor's side; `first_rank` is that of the node, `directory` the node's


def read_failures(directory: Path, first_rank: int) -> Iterator[RankFailure]:
    """The ranks of a node that the agent saw fail, and those that left a word before it ended them."""
    ranks, exit_codes = _agent_events(directory / "agent.log")
    for local_rank, own in _rank_directories(directory).items():
        log = own / "stderr.log"
        rank = ranks.get(local_rank, first_rank + local_rank)
        preemption = _read(own / "preempted.json")
        if preemption is not None:
            when = (own / "preempted.json").stat().st_mtime
            yield RankFailure(rank, os.EX_TEMPFAIL, "", when, str(log), True, preemption["saved_step"])
            continue
        traceback, when = recorded_error(own / "error.json")
        if not traceback and local_rank not in exit_codes:
            continue
        exit_code = exit_codes.get(local_rank, 1)
        if not traceback:
            when = log.stat().st_mtime
            said = _tail(log)
            # NCCL's watchdog aborts the process when a collective times out.
            told = exit_code > 0 or (exit_code == -signal.SIGABRT and TIMED_OUT.search(said))
            traceback = said if told else ""
        yield RankFailure(rank, exit_code, traceback, when, str(log))


def read_signs(directory: Path, first_rank: int, now: float) -> Iterator[RankSign]:
    """The last sign of every rank of a node that was started."""
    ranks, _ = _agent_events(directory / "agent.log")
    for local_rank, own in sorted(_rank_directories(directory).items()):
        sign = _read(own / "sign.json") or {"phase": "start", "step": 0, "place": "", "waiting": False}
        when = sign.pop("time", own.stat().st_mtime)
        yield RankSign(ranks.get(local_rank, first_rank + local_rank), silent_seconds=now - when, **sign)


def _rank_directories(directory: Path) -> dict[int, Path]:
    """By local rank."""
    return {int(path.name): path for path in directory.glob("ranks/*/attempt_*/[0-9]*")}


def _agent_events(log: Path) -> tuple[dict[int, int], dict[int, int]]:
    """From torchrun's log: local rank -> rank of those that started, local rank -> exit code of those that failed.

    torchrun counts as failed also the ranks that it ended itself because another had failed; they are left out.
    """
    ranks, exit_codes = {}, {}
    text = log.read_text(errors="replace")
    ended_by_agent = set(re.findall(r"Sending process (\d+) closing signal", text))
    for line in text.splitlines():
        if not line.startswith('{"name": "torchelastic.worker.status.'):
            continue
        event = json.loads(line)
        if event["source"] != "WORKER":
            continue
        worker = json.loads(event["metadata"]["metadata"])
        (local_rank,), (exit_code,) = worker["local_rank"], worker["exit_code"]
        ranks[local_rank] = event["metadata"]["global_rank"]
        if exit_code is not None and event["metadata"]["worker_id"] not in ended_by_agent:
            exit_codes[local_rank] = exit_code
    return ranks, exit_codes


def recorded_error(path: Path) -> tuple[str, float]:
    """The traceback that torch's `record` wrote, and when. Its own timestamp has whole seconds, too coarse to tell
    the first failure from those it caused; the file's has not."""
    data = _read(path)
    if data is None:
        return "", 0.0
    message = data["message"]
    text = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
    return text, path.stat().st_mtime


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):  # torch's own file may be torn: killed while it wrote
        return None
    return data


def without_events(text: str) -> str:
    """torchrun's output without the events that it prints as JSON, which speak to programs alone."""
    return "\n".join(line for line in text.splitlines() if '{"name": "torchelastic.' not in line).strip()


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return tail_of(file.read().decode(errors="replace"))


def tail_of(text: str) -> str:
    """The first traceback in the text's last part and all after it; without one, its last 20 lines."""
    text = text[-TAIL_BYTES:].strip()
    _, found, rest = text.partition("Traceback (most recent call last):")
    return found + rest if found else "\n".join(text.splitlines()[-20:])
