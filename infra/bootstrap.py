"""A node's supervisor: runs one generation of a job under torchrun, ends it when the node's lease lapses, and reports.

    python -m infra.bootstrap SPEC.json

It is all that a machine needs beside the job's own code, so it imports the standard library alone. It leaves
`exit.json` as its last act: a node without that file and without this process was lost.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from infra import processes
from infra.rank_files import (
    RankFailure,
    RankSign,
    read_failures,
    read_signs,
    recorded_error,
    tail_of,
    without_events,
    write_json,
)

POLL_SECONDS = 0.1
EXIT_STOPPED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

LAUNCHED_AT = "JUMBO_LAUNCHED_AT"
"""In a rank's environment: the time at which its node began to start it."""
# A rank whose collective times out is aborted, and leaves the last 2,000 of them on its node's disk: who was missing.
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
}

_LIBC = ctypes.CDLL(None, use_errno=True)

Reason = Literal["succeeded", "failed", "stopped", "lease expired"]


@dataclass(frozen=True)
class NodeSpec:
    """What one node runs in one generation of a job.

    Attributes:
        index: this node's place; node 0 hosts the rendezvous.
        endpoint: HOST:PORT of the rendezvous, new in each generation.
        address: of this node, as the others reach it.
        directory: where this node's logs and its `exit.json` go.
        lease: file with the time at which the node must end itself.
        stop_seconds: between SIGTERM, on which ranks may save, and SIGKILL.
    """

    index: int
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    rendezvous_id: str
    endpoint: str
    address: str
    module: str
    arguments: tuple[str, ...]
    directory: str
    lease: str
    stop_seconds: float

    @property
    def first_rank(self) -> int:
        return self.index * self.ranks_per_node


@dataclass(frozen=True)
class NodeReport:
    """How a generation ended on one node; the content of `exit.json`.

    Attributes:
        oom_kills: processes that the kernel ended on the machine meanwhile, because memory ran out.
    """

    exit_code: int
    reason: Reason
    failures: tuple[RankFailure, ...] = ()
    agent_error: str = ""
    signs: tuple[RankSign, ...] = ()
    oom_kills: int = 0

    @staticmethod
    def read(directory: Path) -> "NodeReport | None":
        """The report in a node's directory; None where the node has not ended, or was lost."""
        try:
            data = json.loads((directory / "exit.json").read_bytes())
        except FileNotFoundError:
            return None
        failures = tuple(RankFailure(**failure) for failure in data.pop("failures"))
        signs = tuple(RankSign(**sign) for sign in data.pop("signs"))
        return NodeReport(**data, failures=failures, signs=signs)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends. A rank calls it first, so that it never outlives its
    node's agent."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The agent may have died before the call; its ranks were then handed to the supervisor, or to init.
    supervisor = os.environ.get("JUMBO_SUPERVISOR")
    if supervisor is not None and os.getppid() in (1, int(supervisor)):
        os.kill(os.getpid(), signal.SIGKILL)


def supervise(spec: NodeSpec) -> NodeReport:
    """Runs the node's part of the job to its end, whichever it is; nothing that it started is left."""
    stop_requested = False

    def request_stop(number: int, frame: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, request_stop)
    # Ranks live in sessions of their own; if the agent dies, they become this process's children and are found.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    oom_kills = _oom_kills()
    agent = _start_agent(spec)
    reason: Reason | None = None
    while agent.poll() is None and reason is None:
        time.sleep(POLL_SECONDS)
        if stop_requested:
            reason = "stopped"
        elif _lease_expired(Path(spec.lease)):
            reason = "lease expired"
    if reason is not None and agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(spec.stop_seconds + 1)
        except subprocess.TimeoutExpired:
            agent.kill()
    this = processes.this_process()
    processes.end(lambda: processes.descendants([this]), grace_seconds=0)
    return _report(spec, agent.wait(processes.KILL_SECONDS), reason, _oom_kills() - oom_kills)


def _start_agent(spec: NodeSpec) -> subprocess.Popen[bytes]:
    directory = Path(spec.directory)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(spec.nodes), "--nproc-per-node", str(spec.ranks_per_node), "--max-restarts", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", spec.endpoint, "--rdzv-id", spec.rendezvous_id]
    command += ["--rdzv-conf", f"is_host={str(spec.index == 0).lower()}", "--local-addr", spec.address]
    command += ["--shutdown-timeout", str(round(spec.stop_seconds)), "--event-log-handler", "console"]
    command += ["--log-dir", str(directory / "ranks"), "--redirects", "3", "-m", spec.module, *spec.arguments]
    environment = (
        os.environ
        | {
            "JUMBO_SUPERVISOR": str(os.getpid()),
            "OMP_NUM_THREADS": str(spec.threads_per_rank),
            "TORCHELASTIC_ERROR_FILE": str(directory / "agent_error.json"),
            # Ranks would otherwise share the agents' store, whose keys outlive a failed attempt (pytorch#135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            LAUNCHED_AT: repr(time.time()),
        }
        | _NCCL
    )
    environment["TORCH_FR_DUMP_TEMP_FILE"] = str(directory / "nccl_trace_rank_")
    environment.pop("LOGLEVEL", None)  # above INFO it would silence the events that the report is made of
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    with (directory / "agent.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_supervisor,
        )


def _lease_expired(lease: Path) -> bool:
    try:
        return time.time() > json.loads(lease.read_bytes())["expires_at"]
    except FileNotFoundError:
        return True  # the cluster is gone


def _report(spec: NodeSpec, agent_exit_code: int, reason: Reason | None, oom_kills: int = 0) -> NodeReport:
    if agent_exit_code == 0:
        return NodeReport(0, "succeeded")
    directory = Path(spec.directory)
    failures = tuple(sorted(read_failures(directory, spec.first_rank), key=lambda failure: failure.time))
    signs = tuple(read_signs(directory, spec.first_rank, time.time()))
    if reason == "lease expired":
        return NodeReport(os.EX_TEMPFAIL, reason, failures, signs=signs)
    if reason == "stopped":
        return NodeReport(EXIT_STOPPED, reason, failures, signs=signs)
    error, _ = recorded_error(directory / "agent_error.json")
    error = error or tail_of(without_events((directory / "agent.log").read_text(errors="replace")))
    return NodeReport(agent_exit_code, "failed", failures, "" if failures else error, signs, oom_kills)


def _oom_kills() -> int:
    """Since boot, by the kernel's count; 0 where it keeps none. Source: proc_vmstat(5)."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except FileNotFoundError:
        return 0
    return int(fields.get("oom_kill", 0))


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def main() -> int:
    data = json.loads(Path(sys.argv[1]).read_bytes())
    spec = NodeSpec(**(data | {"arguments": tuple(data["arguments"])}))
    report = supervise(spec)
    write_json(Path(spec.directory) / "exit.json", asdict(report))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
