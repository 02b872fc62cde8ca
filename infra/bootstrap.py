"""A node's supervisor: runs one generation of a job under torchrun, ends it when the node's lease lapses, and reports.

    python -m infra.bootstrap SPEC.json

It is all that a machine needs beside the job's own code, so it imports the standard library alone. It leaves
`exit.json` as its last act: a node without that file and without this process was lost.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from infra import processes

GRACE_SECONDS = 10
"""Between SIGTERM, on which ranks may save, and SIGKILL."""
POLL_SECONDS = 0.1
EXIT_LEASE_EXPIRED = 75  # EX_TEMPFAIL of sysexits.h
EXIT_STOPPED = 128 + signal.SIGTERM
TAIL_BYTES = 16_384
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

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


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed: `time` is of its last word, `traceback` is empty where a signal ended it."""

    rank: int
    exit_code: int
    traceback: str
    time: float
    log: str


@dataclass(frozen=True)
class NodeReport:
    """How a generation ended on one node; the content of `exit.json`."""

    exit_code: int
    reason: Reason
    failures: tuple[RankFailure, ...] = ()
    agent_error: str = ""

    @staticmethod
    def read(directory: Path) -> "NodeReport | None":
        """The report in a node's directory; None where the node has not ended, or was lost."""
        try:
            data = json.loads((directory / "exit.json").read_bytes())
        except FileNotFoundError:
            return None
        failures = tuple(RankFailure(**failure) for failure in data.pop("failures"))
        return NodeReport(**data, failures=failures)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes the file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1))
    partial.replace(path)


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
            agent.wait(GRACE_SECONDS + 1)
        except subprocess.TimeoutExpired:
            agent.kill()
    this = processes.this_process()
    processes.end(lambda: processes.descendants([this]), grace_seconds=0)
    return _report(spec, agent.wait(processes.KILL_SECONDS), reason)


def _start_agent(spec: NodeSpec) -> subprocess.Popen[bytes]:
    directory = Path(spec.directory)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(spec.nodes), "--nproc-per-node", str(spec.ranks_per_node), "--max-restarts", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", spec.endpoint, "--rdzv-id", spec.rendezvous_id]
    command += ["--rdzv-conf", f"is_host={str(spec.index == 0).lower()}", "--local-addr", spec.address]
    command += ["--shutdown-timeout", str(GRACE_SECONDS), "--event-log-handler", "console"]
    command += ["--log-dir", str(directory / "ranks"), "--redirects", "3", "-m", spec.module, *spec.arguments]
    environment = os.environ | {
        "JUMBO_SUPERVISOR": str(os.getpid()),
        "OMP_NUM_THREADS": str(spec.threads_per_rank),
        "TORCHELASTIC_ERROR_FILE": str(directory / "agent_error.json"),
        # Ranks would otherwise share the agents' store, whose keys outlive a failed attempt (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
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


def _report(spec: NodeSpec, agent_exit_code: int, reason: Reason | None) -> NodeReport:
    if agent_exit_code == 0:
        return NodeReport(0, "succeeded")
    failures = tuple(sorted(_failures(spec), key=lambda failure: failure.time))
    if reason == "lease expired":
        return NodeReport(EXIT_LEASE_EXPIRED, reason, failures)
    if reason == "stopped":
        return NodeReport(EXIT_STOPPED, reason, failures)
    directory = Path(spec.directory)
    error, _ = _recorded_error(directory / "agent_error.json")
    log = without_events((directory / "agent.log").read_text(errors="replace"))
    return NodeReport(agent_exit_code, "failed", failures, "" if failures else error or _tail_of(log))


def _failures(spec: NodeSpec) -> Iterator[RankFailure]:
    """The ranks of this node that the agent saw fail, and those that left a traceback before it ended them."""
    directory = Path(spec.directory)
    ranks, exit_codes = _agent_events(directory / "agent.log")
    for rank_directory in directory.glob("ranks/*/attempt_*/[0-9]*"):
        local_rank = int(rank_directory.name)
        log = rank_directory / "stderr.log"
        traceback, when = _recorded_error(rank_directory / "error.json")
        if not traceback and local_rank not in exit_codes:
            continue
        exit_code = exit_codes.get(local_rank, 1)
        if not traceback:
            when = log.stat().st_mtime
            traceback = _tail(log) if exit_code > 0 else ""
        rank = ranks.get(local_rank, spec.index * spec.ranks_per_node + local_rank)
        yield RankFailure(rank, exit_code, traceback, when, str(log))


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


def _recorded_error(path: Path) -> tuple[str, float]:
    """The traceback that torch's `record` wrote, and when. Its own timestamp has whole seconds, too coarse to tell
    the first failure from those it caused; the file's has not."""
    try:
        message = json.loads(path.read_bytes())["message"]
    except (FileNotFoundError, json.JSONDecodeError):  # killed while it wrote
        return "", 0.0
    text = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
    return text, path.stat().st_mtime


def without_events(text: str) -> str:
    """torchrun's output without the events that it prints as JSON, which speak to programs alone."""
    return "\n".join(line for line in text.splitlines() if '{"name": "torchelastic.' not in line).strip()


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return _tail_of(file.read().decode(errors="replace"))


def _tail_of(text: str) -> str:
    """The first traceback in the text's last part and all after it; without one, its last 20 lines."""
    text = text[-TAIL_BYTES:].strip()
    _, found, rest = text.partition("Traceback (most recent call last):")
    return found + rest if found else "\n".join(text.splitlines()[-20:])


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
