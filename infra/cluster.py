"""What a cluster is, and the verbs that every provider of clusters knows."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infra import processes
from infra.bootstrap import NodeReport

if TYPE_CHECKING:
    from infra.config import ClusterConfig


@dataclass(frozen=True)
class ClusterRequest:
    """The machines that are wanted.

    Attributes:
        name: by which the cluster is found again, from any process; one path component.
        lease_seconds: a cluster whose owner has not renewed its lease for this long ends itself.
        stop_seconds: that ranks have, once they are asked to stop, before they are killed.
    """

    name: str
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    lease_seconds: float
    stop_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_name("cluster name", self.name)


@dataclass(frozen=True)
class Node:
    """One machine: `node_id` is its own and changes with a replacement, `index` is its place in the cluster."""

    node_id: str
    index: int
    address: str


@dataclass(frozen=True)
class Owner:
    """The process that holds a cluster, told from a later one of the same pid by its host, boot and start."""

    host: str
    boot_id: str
    process: processes.Process

    @staticmethod
    def current() -> "Owner":
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Owner(socket.gethostname(), boot_id, processes.this_process())

    def may_live(self) -> bool:
        """False only where this machine knows that the process has ended; about another host nothing is known."""
        here = Owner.current()
        if self.host != here.host:
            return True
        return self.boot_id == here.boot_id and processes.is_alive(self.process)


@dataclass(frozen=True)
class Cluster:
    """Machines that exist; `created_at` in seconds since the epoch."""

    request: ClusterRequest
    provider: str
    nodes: tuple[Node, ...]
    created_at: float
    owner: Owner

    @property
    def name(self) -> str:
        return self.request.name

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Cluster":
        """The inverse of `dataclasses.asdict`."""
        owner = data["owner"]
        return Cluster(
            request=ClusterRequest(**data["request"]),
            provider=data["provider"],
            nodes=tuple(Node(**node) for node in data["nodes"]),
            created_at=data["created_at"],
            owner=Owner(owner["host"], owner["boot_id"], processes.Process(**owner["process"])),
        )


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster as a janitor sees it; `lease_expires_at` in seconds since the epoch."""

    cluster: Cluster
    lease_expires_at: float

    def expired(self, now: float) -> bool:
        return now > self.lease_expires_at


@dataclass(frozen=True)
class Job:
    """What all ranks of a cluster run: `python -m module arguments`, under torchrun.

    Attributes:
        generation: counts the attempts; each has its own rendezvous and logs.
        environment: added to what the ranks inherit.
    """

    name: str
    generation: int
    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("job name", self.name)


@dataclass(frozen=True)
class JobHandle:
    """One generation that was launched; its ranks meet at `endpoint` under the name `rendezvous_id`."""

    cluster: Cluster
    job: Job
    rendezvous_id: str
    endpoint: str


@dataclass(frozen=True)
class NodeStatus:
    """A node's part of a generation: it runs, or has a report, or was lost."""

    node: Node
    running: bool
    report: NodeReport | None

    @property
    def lost(self) -> bool:
        return not self.running and self.report is None

    @property
    def succeeded(self) -> bool:
        return self.report is not None and self.report.exit_code == 0


@dataclass(frozen=True)
class JobStatus:
    """All nodes' parts of a generation."""

    nodes: tuple[NodeStatus, ...]

    @property
    def running(self) -> bool:
        return any(node.running for node in self.nodes)

    @property
    def succeeded(self) -> bool:
        return all(node.succeeded for node in self.nodes)

    @property
    def failed(self) -> bool:
        """Whether a node has ended without success; others may run on."""
        return any(not node.running and not node.succeeded for node in self.nodes)


class Provider(Protocol):
    """Allocates machines and runs jobs on them. Whatever it needs to find a cluster again is kept outside of the
    process, so that a second process can continue or end what a dead one began.

        cluster = provider.provision(request)
        try:
            handle = provider.launch(cluster, job)
            while provider.watch(handle).running: ...
        finally:
            provider.terminate(cluster.name)
    """

    def provision(self, request: ClusterRequest) -> Cluster:
        """Allocates the machines, owned by this process; what a dead owner left under the name is ended first.

        Raises:
            ClusterBusy: another owner that lives holds the name.
        """

    def launch(self, cluster: Cluster, job: Job) -> JobHandle:
        """Starts a generation on all nodes that the cluster has by now, with a rendezvous of its own; ends what still
        runs of an earlier one."""

    def watch(self, handle: JobHandle) -> JobStatus:
        """How each node stands now; does not wait."""

    def stop(self, handle: JobHandle) -> None:
        """Ends the generation on all nodes, gently at first, and returns when it is dead; twice is fine."""

    def replace_node(self, cluster: Cluster, node_id: str) -> Cluster:
        """Ends a node and puts another in its place."""

    def terminate(self, name: str) -> None:
        """Ends the cluster, whoever owns it, and returns when nothing is left; twice is fine, so is an unknown
        name."""

    def renew(self, cluster: Cluster) -> None:
        """Moves the lease's end to `lease_seconds` from now.

        Raises:
            InfraError: the cluster was terminated or has another owner.
        """

    def find(self, name: str) -> Cluster | None:
        """The cluster of this name, whoever owns it."""

    def list_clusters(self) -> list[ClusterRecord]:
        """All clusters with their leases, sorted by name."""


def open_provider(config: "ClusterConfig") -> Provider:
    """The provider that the configuration names."""
    if config.provider == "ec2":
        raise ValueError("cluster.provider 'ec2' is not available in this version; use 'local'")
    from infra.local import LocalProvider, default_state_dir  # it builds on this module

    return LocalProvider(default_state_dir())


def check_name(what: str, name: str) -> None:
    """Raises ValueError where the name is not a single path component."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"{what} {name!r} must be one path component that does not start with a dot")
    if len(os.fsencode(name)) > 200:
        raise ValueError(f"{what} {name!r} must have at most 200 bytes")
