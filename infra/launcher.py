"""Runs a job on a cluster from its launch to its end, and starts it again where that makes sense."""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from infra.bootstrap import without_events
from infra.cluster import Cluster, Job, JobHandle, JobStatus, Provider
from infra.errors import InfraError, Stalled, TransientError, WorkerFailed, WorkersKilled

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# Once a node has failed, the others may still say why: the first failure can be theirs. A lost node is reason enough.
PEER_SECONDS = 5.0
MESSAGE_CHARACTERS = 2000  # of an agent's output
TRANSIENT_AGENT_ERRORS = ("Rendezvous", "DistNetworkError", "DistStoreError")

LastSign = Callable[[], float | None]


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
    """`run_job`, again with the next generation after a TransientError, up to `max_restarts` times."""
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
        except TransientError as error:
            if restart == max_restarts:
                raise
            logger.warning("job %s: %s; restart %d of %d", job.name, error, restart + 1, max_restarts)


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
        Stalled: no sign of life in `start_timeout_seconds` after the launch, or in `stall_timeout_seconds` after the
            last.
    """
    silence = _Silence(last_sign, start_timeout_seconds, stall_timeout_seconds)
    handle = provider.launch(cluster, job)
    try:
        ended = _wait(provider, handle, silence, on_tick)
    finally:
        provider.stop(handle)
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
    lost = [node.node.node_id for node in ended.nodes if node.lost]
    if lost:
        return WorkersKilled(f"{', '.join(lost)} was lost")
    reports = [(node.node.node_id, node.report) for node in stopped.nodes if node.report is not None]
    expired = [node_id for node_id, report in reports if report.reason == "lease expired"]
    if expired:
        return WorkersKilled(f"{', '.join(expired)} ended itself: its lease was not renewed in time")
    # A signal to torchrun comes from outside; it kills the node's ranks, and their peers fail because of that.
    for node_id, report in reports:
        if report.reason == "failed" and report.exit_code < 0:
            return WorkersKilled(f"torchrun on {node_id} was ended by {_signal(report.exit_code)}")
    failures = [(failure, node_id) for node_id, report in reports for failure in report.failures]
    if failures:
        first, node_id = min(failures, key=lambda pair: pair[0].time)
        log = Path(first.log)
        if first.traceback or first.exit_code > 0:
            return WorkerFailed(first.rank, node_id, first.exit_code, first.traceback, log)
        return WorkersKilled(f"rank {first.rank} on {node_id} was ended by {_signal(first.exit_code)} (log: {log})")
    for node_id, report in reports:
        if report.reason == "failed":
            message = f"torchrun on {node_id} failed (exit code {report.exit_code}): {_readable(report.agent_error)}"
            transient = any(name in report.agent_error for name in TRANSIENT_AGENT_ERRORS)
            return TransientError(message) if transient else InfraError(message)
    return InfraError("the job was stopped from outside")


def _signal(exit_code: int) -> str:
    """The signal's name, and what it says where it says something."""
    name = next((known.name for known in signal.Signals if known == -exit_code), f"signal {-exit_code}")
    return f"{name}, as the kernel does when memory runs out" if name == "SIGKILL" else name


def _readable(agent_error: str) -> str:
    """The whole lines at the end of what torchrun said, as many as fit in a message."""
    text = without_events(agent_error) or "no output"
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    cut = text[-MESSAGE_CHARACTERS:]
    return "...\n" + (cut.partition("\n")[2] or cut)
