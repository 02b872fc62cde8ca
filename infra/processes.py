"""Processes of this machine by Linux's /proc: who lives, who descends from whom, and their certain end."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.errors import InfraError

KILL_SECONDS = 10.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """One process, told from a later one of the same pid by its start, in clock ticks after boot."""

    pid: int
    started: int


def this_process() -> Process:
    entry = _stat(os.getpid())
    assert entry is not None
    return entry[0]


def is_alive(process: Process) -> bool:
    """Whether the process runs; a zombie does not."""
    entry = _stat(process.pid)
    return entry is not None and entry[0] == process


def marked(name: str, value: str) -> set[Process]:
    """All living processes, but this one, that were started with the environment variable `name` = `value`."""
    marker = os.fsencode(f"{name}={value}")
    found = set()
    for process in _table():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or another user's
        if marker in environment.split(b"\0") and process.pid != os.getpid():
            found.add(process)
    return found


def descendants(roots: Iterable[Process]) -> set[Process]:
    """The living children of `roots`, their children, and so on."""
    table = _table()
    by_parent: dict[int, list[Process]] = {}
    for process, parent in table.items():
        by_parent.setdefault(parent, []).append(process)
    found: set[Process] = set()
    pending = [root.pid for root in roots if root in table]
    while pending:
        children = [child for child in by_parent.get(pending.pop(), []) if child not in found]
        found.update(children)
        pending.extend(child.pid for child in children)
    return found


def end(find: Callable[[], set[Process]], grace_seconds: float) -> None:
    """Ends every process that `find` gives, with all its descendants, and returns when they are dead.

    The outermost ones get SIGTERM and pass it on as they see fit; whatever lives after `grace_seconds` gets SIGKILL.

    Raises:
        InfraError: a process outlives SIGKILL.
    """
    targets: set[Process] = set()

    def living() -> set[Process]:
        # Children are noted while their parent lives: once it is dead, nothing leads to them.
        found = targets | find()
        targets.update(found, descendants(found))
        return {process for process in targets if is_alive(process)}

    left = living()
    _signal(_outermost(left), signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = living()
    deadline = time.monotonic() + KILL_SECONDS
    while left:
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in sorted(left, key=lambda process: process.pid))
            raise InfraError(f"processes {pids} still live {KILL_SECONDS:.0f} s after SIGKILL")
        _signal(left, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        left = living()


def _outermost(processes: set[Process]) -> set[Process]:
    table = _table()
    pids = {process.pid for process in processes}
    return {process for process in processes if table.get(process) not in pids}


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue


def _table() -> dict[Process, int]:
    """Every living process with the pid of its parent."""
    entries = (_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return dict(entry for entry in entries if entry is not None)


def _stat(pid: int) -> tuple[Process, int] | None:
    """The process and its parent's pid; None where it has ended. Source: proc_pid_stat(5), fields 3, 4 and 22."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19])), int(fields[1])
