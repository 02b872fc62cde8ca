"""The cluster of a run: provisioned when there is work for it, terminated in every outcome, and how jobs run on it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from infra.cluster import Cluster, ClusterRequest, Job, open_provider
from infra.config import ClusterConfig
from infra.launcher import run_with_restarts
from infra.lease import end_own, kept_lease
from infra.pricing import cost_usd
from infra.storage import open_storage
from tasks.config import PipelineConfig
from tasks.heartbeat import HeartbeatReader
from tasks.manifest import digest
from tasks.stage import say_outcome, stage_task
from tasks.worker import WorkerJob

ARTIFACT_SECONDS = 5.0


@contextmanager
def cluster_for(config: PipelineConfig, needed: bool = True) -> Iterator[Cluster | None]:
    """The run's cluster while the block runs; None when it is not `needed`, since all its stages are done."""
    if not needed:
        yield None
        return
    cluster = provision(config)
    provider = open_provider(config.cluster)
    try:
        with kept_lease(provider, cluster):
            yield cluster
    finally:
        try:
            terminate(config, cluster)
        finally:
            # Whatever became of the task above, when Prefect's server is gone too: ending twice is fine.
            end_own(provider, cluster)


@stage_task("provision")
def provision(config: PipelineConfig) -> Cluster:
    """Allocate the machines; what a dead run of the same run directory left is ended first."""
    started = time.monotonic()
    cluster = config.cluster
    request = ClusterRequest(
        cluster_name(config),
        cluster.nodes,
        cluster.ranks_per_node,
        cluster.threads_per_rank,
        cluster.lease_seconds,
        cluster.stop_seconds,
    )
    provisioned = open_provider(cluster).provision(request)
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    say_outcome("provision", "done", time.monotonic() - started, f"{nodes} x {cluster.ranks_per_node} ranks")
    return provisioned


@stage_task("terminate")
def terminate(config: PipelineConfig, cluster: Cluster) -> None:
    """End the machines; returns when nothing is left."""
    started = time.monotonic()
    end_own(open_provider(config.cluster), cluster)
    say_outcome("terminate", "done", time.monotonic() - started, "nothing is left running")


@task
def end_expired_clusters() -> list[str]:
    """End the clusters whose lease has expired or whose owner is known to be dead."""
    started = time.monotonic()
    provider = open_provider(ClusterConfig())
    ended = []
    for record in provider.list_clusters():
        if record.expired(time.time()) or not record.cluster.owner.may_live():
            provider.terminate(record.cluster.name)
            ended.append(record.cluster.name)
    say_outcome("janitor", "done", time.monotonic() - started, f"ended {', '.join(ended)}" if ended else "none to end")
    return ended


def cluster_name(config: PipelineConfig) -> str:
    """The same for every process that works on this run directory."""
    return f"jumbo-{digest(open_storage(config.run_uri).uri)[:16]}"


def run_on_cluster(
    cluster: Cluster | None, job: WorkerJob, progress: Callable[[dict[str, Any]], None]
) -> tuple[bytes, float]:
    """Run a job on all ranks, again after kills; the result that rank 0 stored, and what the machines cost.

    Args:
        progress: Called several times a second with the newest heartbeat.

    Raises:
        WorkerFailed: a rank raised; carries that rank's own traceback.
        TransientError: the ranks were killed or stuck more often than `cluster.max_restarts`.
        Preempted: they were asked to stop as often as that, or their nodes were.
    """
    assert cluster is not None, "a stage that needs machines runs, but none were provisioned"
    config, storage = job.config.cluster, open_storage(job.config.run_uri)
    heartbeat = HeartbeatReader(storage)
    started = time.monotonic()
    earlier = heartbeat.last().get("time")

    def on_tick() -> None:
        sign = heartbeat.last()
        if sign.get("time") != earlier:  # not what an earlier job left
            progress(sign)

    run_with_restarts(
        open_provider(config),
        cluster,
        Job(job.kind, 0, "tasks.worker", (job.model_dump_json(),)),
        last_sign=lambda: heartbeat.last().get("time"),
        on_tick=on_tick,
        start_timeout_seconds=config.start_timeout_seconds,
        stall_timeout_seconds=config.stall_timeout_seconds,
        max_restarts=config.max_restarts,
    )
    usd = cost_usd(config.provider, config.instance_type, config.nodes, time.monotonic() - started)
    return storage.read(job.result), usd


class ProgressArtifact:
    """A progress bar in the Prefect UI."""

    def __init__(self, key: str, description: str) -> None:
        self._id = create_progress_artifact(0.0, key=key, description=description)
        self._updated = time.monotonic()

    def update(self, share: float) -> None:
        """Show `share` of the work as done, at most once in a few seconds, but at once when all is."""
        now = time.monotonic()
        if now - self._updated >= ARTIFACT_SECONDS or share >= 1:
            self._updated = now
            update_progress_artifact(self._id, 100 * share)  # type: ignore[arg-type]
