"""Clusters on this machine: each node is simulated by one supervisor with its ranks.

    <state_dir>/clusters/<name>/cluster.json, lease.json
    <state_dir>/logs/<name>/<job>/generation-<g>/node-<i>/     outlives the cluster, for whoever asks what went wrong

Every process of a cluster carries the path of its record in the environment variable JUMBO_CLUSTER_RECORD; that, not a
list of pids, is how they are all found, whoever started them and whatever they became.
"""

import fcntl
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import infra
from infra import processes
from infra.bootstrap import NodeReport, NodeSpec
from infra.cluster import (
    Cluster,
    ClusterRecord,
    ClusterRequest,
    Job,
    JobHandle,
    JobStatus,
    Node,
    NodeStatus,
    Owner,
    check_name,
)
from infra.errors import ClusterBusy, InfraError
from infra.rank_files import write_json

logger = logging.getLogger(__name__)

MARKER = "JUMBO_CLUSTER_RECORD"
NODE_MARKER = "JUMBO_NODE"
RENDEZVOUS_MARKER = "JUMBO_RENDEZVOUS"
LOCK_SECONDS = 60.0
REPORT_SECONDS = 5.0
"""What a supervisor needs beyond the time that ranks have to stop: to kill the rest, and to write its report."""


def default_state_dir() -> Path:
    """$JUMBO_STATE_DIR, else jumbo/ in $XDG_STATE_HOME, else ~/.local/state/jumbo."""
    if "JUMBO_STATE_DIR" in os.environ:
        return Path(os.environ["JUMBO_STATE_DIR"]).absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "jumbo"


class LocalProvider:
    """The `Provider` of clusters on this machine."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir.absolute()
        self._clusters = self._state_dir / "clusters"
        try:
            self._clusters.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"JUMBO_STATE_DIR ({self._state_dir}) cannot be used: {error.strerror}") from error
        for path in (self._state_dir, self._clusters):
            if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                raise ValueError(f"JUMBO_STATE_DIR ({self._state_dir}) cannot be used: {path} is not writable")
        # Those that this process started, by rendezvous and node: their exit waits for their parent to collect it.
        self._supervisors: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def provision(self, request: ClusterRequest) -> Cluster:
        owner = Owner.current()
        with self._lock():
            earlier = self._record(request.name)
            if earlier is not None:
                _check_free(earlier, owner)
                logger.warning("cluster %s: ending what pid %d left", request.name, earlier.cluster.owner.process.pid)
            self._terminate(request.name)
            nodes = tuple(Node(f"node-{index}", index, _address(index)) for index in range(request.nodes))
            cluster = Cluster(request, "local", nodes, time.time(), owner)
            # Made aside and renamed: a record that stands is whole.
            partial = self._clusters / f".{request.name}.{uuid.uuid4().hex[:8]}"
            partial.mkdir()
            write_json(partial / "cluster.json", asdict(cluster))
            write_json(partial / "lease.json", _lease(request))
            partial.rename(self._directory(request.name))
        return cluster

    def launch(self, cluster: Cluster, job: Job) -> JobHandle:
        with self._lock():
            cluster = self._owned(cluster)
            self.renew(cluster)
            self._end_processes(cluster.name, grace_seconds=0)
            endpoint = f"{cluster.nodes[0].address}:{_free_port(cluster.nodes[0].address)}"
            handle = JobHandle(cluster, job, f"{job.name}-{job.generation}-{uuid.uuid4().hex[:8]}", endpoint)
            try:
                for node in cluster.nodes:
                    self._start_supervisor(handle, node)
            except BaseException:
                self._end_processes(cluster.name, grace_seconds=0)
                raise
        logger.info("job %s, generation %d: logs in %s", job.name, job.generation, self._log_dir(handle))
        return handle

    def watch(self, handle: JobHandle) -> JobStatus:
        statuses = []
        for node in handle.cluster.nodes:
            supervisor = self._supervisors.get((handle.rendezvous_id, node.node_id))
            running = supervisor is not None and supervisor.poll() is None
            report = None if running else NodeReport.read(self._log_dir(handle) / f"node-{node.index}")
            statuses.append(NodeStatus(node, running, report))
        return JobStatus(tuple(statuses))

    def stop(self, handle: JobHandle) -> None:
        # By the generation, not by the cluster: that may have another owner by now, and other processes.
        of_generation = partial(processes.marked, RENDEZVOUS_MARKER, handle.rendezvous_id)
        processes.end(of_generation, handle.cluster.request.stop_seconds + REPORT_SECONDS)
        self._collect()

    def replace_node(self, cluster: Cluster, node_id: str) -> Cluster:
        with self._lock():
            cluster = self._owned(cluster)
            node = next((node for node in cluster.nodes if node.node_id == node_id), None)
            if node is None:
                raise ValueError(f"cluster {cluster.name!r} has no node {node_id!r}")
            processes.end(
                lambda: self._processes(cluster.name) & processes.marked(NODE_MARKER, node_id),
                cluster.request.stop_seconds + REPORT_SECONDS,
            )
            fresh = Node(f"node-{node.index}-{uuid.uuid4().hex[:8]}", node.index, node.address)
            nodes = tuple(fresh if old == node else old for old in cluster.nodes)
            cluster = replace(cluster, nodes=nodes)
            write_json(self._directory(cluster.name) / "cluster.json", asdict(cluster))
        return cluster

    def terminate(self, name: str) -> None:
        check_name("cluster name", name)
        with self._lock():
            self._terminate(name)

    def renew(self, cluster: Cluster) -> None:
        self._owned(cluster)
        try:
            write_json(self._directory(cluster.name) / "lease.json", _lease(cluster.request))
        except FileNotFoundError:
            raise InfraError(f"cluster {cluster.name!r} was terminated") from None

    def find(self, name: str) -> Cluster | None:
        check_name("cluster name", name)
        record = self._record(name)
        return record.cluster if record else None

    def list_clusters(self) -> list[ClusterRecord]:
        names = sorted(path.name for path in self._clusters.iterdir() if not path.name.startswith("."))
        records = (self._record(name) for name in names)
        return [record for record in records if record is not None]

    def _directory(self, name: str) -> Path:
        return self._clusters / name

    def _log_dir(self, handle: JobHandle) -> Path:
        job = handle.job
        return self._state_dir / "logs" / handle.cluster.name / job.name / f"generation-{job.generation}"

    def _record(self, name: str) -> ClusterRecord | None:
        directory = self._directory(name)
        try:
            cluster = Cluster.from_dict(json.loads((directory / "cluster.json").read_bytes()))
            lease = json.loads((directory / "lease.json").read_bytes())
        except FileNotFoundError:
            return None
        return ClusterRecord(cluster, lease["expires_at"])

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keeps other processes from provisioning, launching and terminating; ends with this process at the latest."""
        path = self._state_dir / "lock"
        deadline = time.monotonic() + LOCK_SECONDS
        with path.open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise InfraError(f"{path} was locked by another process for {LOCK_SECONDS:.0f} s") from None
                    time.sleep(0.05)
            yield

    def _owned(self, cluster: Cluster) -> Cluster:
        """The cluster with the nodes that it has by now. Raises InfraError where it is not this owner's any more."""
        record = self._record(cluster.name)
        if record is None:
            raise InfraError(f"cluster {cluster.name!r} was terminated")
        if record.cluster.owner != cluster.owner or record.cluster.created_at != cluster.created_at:
            raise InfraError(f"cluster {cluster.name!r} was taken over by pid {record.cluster.owner.process.pid}")
        return record.cluster

    def _terminate(self, name: str) -> None:
        record = self._record(name)
        self._end_processes(name, record.cluster.request.stop_seconds + REPORT_SECONDS if record else 0)
        directory = self._directory(name)
        if directory.exists():
            # Out of sight at once, since a removal can be cut short.
            directory.rename(self._clusters / f".{name}.{uuid.uuid4().hex[:8]}")
        for remains in self._clusters.glob(".*"):
            shutil.rmtree(remains)

    def _processes(self, name: str) -> set[processes.Process]:
        return processes.marked(MARKER, str(self._directory(name)))

    def _end_processes(self, name: str, grace_seconds: float) -> None:
        processes.end(lambda: self._processes(name), grace_seconds)
        self._collect()

    def _collect(self) -> None:
        running = {key: supervisor for key, supervisor in self._supervisors.items() if supervisor.poll() is None}
        self._supervisors = running

    def _start_supervisor(self, handle: JobHandle, node: Node) -> None:
        cluster, job = handle.cluster, handle.job
        directory = self._log_dir(handle) / f"node-{node.index}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        spec = NodeSpec(
            index=node.index,
            nodes=len(cluster.nodes),
            ranks_per_node=cluster.request.ranks_per_node,
            threads_per_rank=cluster.request.threads_per_rank,
            rendezvous_id=handle.rendezvous_id,
            endpoint=handle.endpoint,
            address=node.address,
            module=job.module,
            arguments=job.arguments,
            directory=str(directory),
            lease=str(self._directory(cluster.name) / "lease.json"),
            stop_seconds=cluster.request.stop_seconds,
        )
        write_json(directory / "spec.json", asdict(spec))
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | dict(job.environment)
        environment |= {MARKER: str(self._directory(cluster.name)), NODE_MARKER: node.node_id}
        environment[RENDEZVOUS_MARKER] = handle.rendezvous_id
        # Ranks import the project from where this process did, in whatever directory it works.
        roots = [str(Path(infra.__file__).parent.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
        # No stream is inherited: whoever waits for the end of this process's output must not wait for its nodes.
        with (directory / "supervisor.log").open("wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "infra.bootstrap", str(directory / "spec.json")],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._supervisors[handle.rendezvous_id, node.node_id] = supervisor


def _check_free(record: ClusterRecord, owner: Owner) -> None:
    """Raises ClusterBusy where another owner that lives holds the cluster by a valid lease."""
    cluster, other = record.cluster, record.cluster.owner
    if other != owner and other.may_live() and not record.expired(time.time()):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(cluster.created_at))
        raise ClusterBusy(f"cluster {cluster.name!r} is held by pid {other.process.pid} on {other.host} since {since}")


def _lease(request: ClusterRequest) -> dict[str, float]:
    return {"expires_at": time.time() + request.lease_seconds}


def _address(index: int) -> str:
    """A loopback address for each node. The rendezvous ranks the nodes by their address as text, so all have the same
    width: node i then holds the same ranks in every generation."""
    return f"127.0.{100 + index // 100}.{100 + index % 100}"


def _free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return listener.getsockname()[1]
