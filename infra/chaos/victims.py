"""The processes of a run that can be hit, found by the marks that the local provider gives them."""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from infra import processes
from infra.local import MARKER, NODE_MARKER, RENDEZVOUS_MARKER

KILL_SECONDS = 10.0

Role = Literal["supervisor", "torchrun", "rank", "helper"]
"""A helper was started by one of the others."""


@dataclass(frozen=True)
class Victim:
    """A process of a cluster; `generation` is the rendezvous of its job, a new one at every launch."""

    process: processes.Process
    role: Role
    node: str
    generation: str

    def send(self, number: signal.Signals) -> None:
        """The signal, unless the process has ended."""
        if processes.is_alive(self.process):
            try:
                os.kill(self.process.pid, number)
            except ProcessLookupError:
                return


def find_victims(state_dir: Path) -> list[Victim]:
    """Every living process of the clusters of a state directory."""
    found = []
    for record in (state_dir / "clusters").glob("[!.]*"):
        for process in processes.marked(MARKER, str(record)):
            variables = _environment(process)
            if RENDEZVOUS_MARKER in variables:
                node, generation = variables[NODE_MARKER], variables[RENDEZVOUS_MARKER]
                found.append(Victim(process, _role(variables), node, generation))
    for role in get_args(Role):
        inherited = processes.descendants(victim.process for victim in found if victim.role == role)
        found = [replace(v, role="helper") if v.role == role and v.process in inherited else v for v in found]
    return sorted(found, key=lambda victim: victim.process.pid)


def _role(variables: dict[str, str]) -> Role:
    """By what a supervisor gives torchrun, and that its ranks."""
    if "LOCAL_RANK" in variables:
        return "rank"
    return "torchrun" if "JUMBO_SUPERVISOR" in variables else "supervisor"


def kill_all(state_dir: Path) -> None:
    """SIGKILL of every process of the clusters, those that they start meanwhile too; returns when none lives."""
    deadline = time.monotonic() + KILL_SECONDS
    while victims := find_victims(state_dir):
        assert time.monotonic() < deadline, "processes outlive SIGKILL"
        kill(victims)
        time.sleep(0.02)


def kill(victims: Iterable[Victim]) -> None:
    for victim in victims:
        victim.send(signal.SIGKILL)


def _environment(process: processes.Process) -> dict[str, str]:
    try:
        text = Path(f"/proc/{process.pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return {}
    return dict(part.partition("=")[::2] for part in os.fsdecode(text).split("\0"))
