"""Keeps a cluster's lease while its owner works, also where the owner is busy with something else for long."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from infra.cluster import Cluster, Provider
from infra.errors import InfraError

logger = logging.getLogger(__name__)


@contextmanager
def kept_lease(provider: Provider, cluster: Cluster) -> Iterator[None]:
    """Renews the lease in the background until the block ends; a lease that was lost is reported and let go."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(cluster.request.lease_seconds / 4):
            try:
                provider.renew(cluster)
            except InfraError as error:  # taken over, or terminated: the job on it fails by itself
                logger.warning("%s", error)
                return

    thread = threading.Thread(target=renew, name=f"lease of {cluster.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10)


def end_own(provider: Provider, cluster: Cluster) -> None:
    """Terminates the cluster unless another owner has taken its name over."""
    found = provider.find(cluster.name)
    if found is None or (found.owner, found.created_at) == (cluster.owner, cluster.created_at):
        provider.terminate(cluster.name)
