"""Runs a job on a cluster from its launch to its end, and starts it again where that makes sense."""

import logging
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from infra.bootstrap import NodeReport
from infra.cluster import Cluster, Job, JobHandle, JobStatus, Provider
from infra.errors import InfraError, Preempted, Stalled, TransientError, WorkerFailed, WorkersKilled
from infra.rank_files import RankSign, without_events

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 60.0  # before a restart
# Once a node has failed, the others may still say why: the first failure can be theirs. A lost node is reason enough.
PEER_SECONDS = 5.0
# A rank tells every second that it lives; and a node needs some seconds to end, in which it doesn't.
SILENT_SECONDS = 10.0
MESSAGE_CHARACTERS = 2000  # of an agent's output
TRANSIENT_AGENT_ERRORS = ("Rendezvous", "DistNetworkError", "DistStoreError")

LastSign = Callable[[], float | None]
Reports = list[tuple[str, NodeReport]]
"""Of each node that has one, with its id."""


def run_with_restarts(
    provider: Provider,
    cluster: Cluster,
    job: Job,
    *,
    last_sign: LastSign,
    on_tick: Callable[[], None],
    start_timeout_seconds: float,
    stall_timeout_seconds: float,
    max_restarts: int,
) -> None:
    """`run_job`, again with the next generation after a TransientError or a preemption, up to `max_restarts` times. A
    node that was lost is replaced before."""
    for restart in range(max_restarts + 1):
        try:
            run_job(
                provider,
                cluster,
                replace(job, generation=job.generation + restart),
                last_sign=last_sign,
                on_tick=on_tick,
                start_timeout_seconds=start_timeout_seconds,
                stall_timeout_seconds=stall_timeout_seconds,
            )
            return
        except (TransientError, Preempted) as error:
            if restart == max_restarts or (isinstance(error, Preempted) and not error.restartable):
                raise
            if isinstance(error, WorkersKilled):
                for node_id in error.lost_nodes:
                    provider.replace_node(cluster, node_id)
            logger.warning("job %s: %s; restart %d of %d", job.name, error, restart + 1, max_restarts)
            # What was too busy is not asked again by all at once, nor at once.
            time.sleep(random.uniform(0.5, 1.0) * min(2.0**restart, LONGEST_PAUSE_SECONDS))


def run_job(
    provider: Provider,
    cluster: Cluster,
    job: Job,
    *,
    last_sign: LastSign,
    on_tick: Callable[[], None],
    start_timeout_seconds: float,
    stall_timeout_seconds: float,
) -> None:
    """Launches one generation and returns when all its ranks have succeeded. However it ends, by an exception of any
    kind too, the generation is dead when this returns.

    Args:
        last_sign: the time of the ranks' last sign of life, by any clock; None before the first.
        on_tick: called several times a second.

    Raises:
        WorkerFailed: the first rank that failed, with its own traceback.
        WorkersKilled: ranks or nodes ended without one.
        Preempted: the ranks left because they were asked to.
        Stalled: no sign of life in `start_timeout_seconds` after the launch, or in `stall_timeout_seconds` after the
            last; or a rank waited for another for longer than it may.
    """
    silence = _Silence(last_sign, start_timeout_seconds, stall_timeout_seconds)
    handle = provider.launch(cluster, job)
    stalled = None
    try:
        ended = _wait(provider, handle, silence, on_tick)
    except Stalled as error:
        stalled = error
    finally:
        provider.stop(handle)
    if stalled is not None:
        raise Stalled("; ".join([str(stalled), *_stuck(_reports(provider.watch(handle)))]))
    if not ended.succeeded:
        raise _failure(ended, provider.watch(handle))


class _Silence:
    """Time since the ranks' last sign of life, by this process's clock: a sign is a change in what `last_sign` says."""

    def __init__(self, last_sign: LastSign, start_timeout_seconds: float, stall_timeout_seconds: float) -> None:
        self._last_sign = last_sign
        self._seen = last_sign()  # an earlier generation's
        self._since = time.monotonic()
        self._started = False
        self._start_timeout_seconds = start_timeout_seconds
        self._stall_timeout_seconds = stall_timeout_seconds

    def check(self) -> None:
        sign = self._last_sign()
        if sign != self._seen:
            self._seen, self._since, self._started = sign, time.monotonic(), True
        silent = time.monotonic() - self._since
        if not self._started and silent > self._start_timeout_seconds:
            raise Stalled(f"the ranks gave no sign of life within {self._start_timeout_seconds:g} s of the launch")
        if self._started and silent > self._stall_timeout_seconds:
            raise Stalled(f"the ranks have been silent for {self._stall_timeout_seconds:g} s")


def _wait(provider: Provider, handle: JobHandle, silence: _Silence, on_tick: Callable[[], None]) -> JobStatus:
    """The status when all nodes have ended, or one is lost, or `PEER_SECONDS` after the first has failed."""
    failed = None
    while True:
        status = provider.watch(handle)
        now = time.monotonic()
        if status.failed and failed is None:
            failed = now
        if not status.running or any(node.lost for node in status.nodes):
            return status
        if failed is not None and now - failed > PEER_SECONDS:
            return status
        if failed is None:
            silence.check()
        on_tick()
        time.sleep(POLL_SECONDS)


def _failure(ended: JobStatus, stopped: JobStatus) -> InfraError:
    """Why a generation failed: `ended` is how it stood when that was known, `stopped` when all of it was dead."""
    lost = tuple(node.node.node_id for node in ended.nodes if node.lost)
    if lost:
        return WorkersKilled(f"{', '.join(lost)} was lost", lost)
    reports = _reports(stopped)
    expired = [node_id for node_id, report in reports if report.reason == "lease expired"]
    if expired:
        return WorkersKilled(f"{', '.join(expired)} ended itself: its lease was not renewed in time")
    # A signal to torchrun comes from outside; it kills the node's ranks, and their peers fail because of that.
    for node_id, report in reports:
        if report.reason == "failed" and report.exit_code < 0:
            return WorkersKilled(f"torchrun on {node_id} was ended by {_signal(report.exit_code, report.oom_kills)}")
    if any(report.failures for _, report in reports):
        return _rank_failure(reports)
    for node_id, report in reports:
        if report.reason == "failed" and "SignalException" not in report.agent_error:  # what torchrun raises at SIGTERM
            message = f"torchrun on {node_id} failed (exit code {report.exit_code}): {_readable(report.agent_error)}"
            transient = any(name in report.agent_error for name in TRANSIENT_AGENT_ERRORS)
            return TransientError(message) if transient else InfraError(message)
    return Preempted(None, _stands(reports))


def _rank_failure(reports: Reports) -> InfraError:
    """What the first failing rank says; the others failed because of it."""
    failures = [(failure, node_id, report) for node_id, report in reports for failure in report.failures]
    first, node_id, report = min(failures, key=lambda failure: failure[0].time)
    if first.preempted:
        saved = [failure.saved_step for failure, _, _ in failures if failure.saved_step is not None]
        return Preempted(max(saved, default=None), _stands(reports))
    log = Path(first.log)
    if first.timed_out:
        stuck = _stuck(reports) or ["which rank it waited for is not known"]
        message = f"rank {first.rank} on {node_id} has waited for other ranks for too long; {'; '.join(stuck)}"
        return Stalled(f"{message} (log: {log})\n{first.traceback.strip()}")
    if first.lost_storage:
        return TransientError(f"rank {first.rank} on {node_id}: {first.lost_storage} (log: {log})")
    if first.traceback or first.exit_code > 0:
        return WorkerFailed(first.rank, node_id, first.exit_code, first.traceback, log)
    ended = _signal(first.exit_code, report.oom_kills)
    return WorkersKilled(f"rank {first.rank} on {node_id} was ended by {ended} (log: {log})")


def _stuck(reports: Reports) -> list[str]:
    """The ranks that the others waited for, each with what is known of it: those that gave no sign any more, or else
    those that were not waiting themselves."""
    failures = {failure.rank: failure for _, report in reports for failure in report.failures}
    present, silent = [], []
    for node_id, report in reports:
        for sign in report.signs:
            failure = failures.get(sign.rank)
            if failure is None and sign.silent_seconds > SILENT_SECONDS:
                silent.append(_tell(sign, node_id, f" and has given no sign of life for {sign.silent_seconds:.0f} s"))
            elif (failure is None or failure.preempted) and not sign.waiting:
                present.append(_tell(sign, node_id))
    return silent or present


def _tell(sign: RankSign, node_id: str, silence: str = "") -> str:
    if not sign.place:
        return f"rank {sign.rank} on {node_id} never gave a sign of life"
    return f"rank {sign.rank} on {node_id} is stuck{silence}: {sign.phase}, step {sign.step}, at {sign.place}"


def _reports(status: JobStatus) -> Reports:
    return [(node.node.node_id, node.report) for node in status.nodes if node.report is not None]


def _stands(reports: Reports) -> bool:
    """Whether nobody asked a node as such to stop."""
    return all(report.reason != "stopped" for _, report in reports)


def _signal(exit_code: int, oom_kills: int) -> str:
    """The signal's name, and what it says where it says something."""
    name = next((known.name for known in signal.Signals if known == -exit_code), f"signal {-exit_code}")
    if name != "SIGKILL":
        return name
    return "SIGKILL by the kernel: memory ran out" if oom_kills else "SIGKILL, as the kernel does when memory runs out"


def _readable(agent_error: str) -> str:
    """The whole lines at the end of what torchrun said, as many as fit in a message."""
    text = without_events(agent_error) or "no output"
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    cut = text[-MESSAGE_CHARACTERS:]
    return "...\n" + (cut.partition("\n")[2] or cut)
