"""A lease is kept while its owner works, and an owner ends only the cluster that is its own."""

import dataclasses
import time
from pathlib import Path

import pytest

from infra.cluster import Cluster, ClusterRequest
from infra.lease import end_own, kept_lease
from infra.local import LocalProvider


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path)


@pytest.fixture
def cluster(provider: LocalProvider) -> Cluster:
    return provider.provision(ClusterRequest("c", 1, 1, 1, lease_seconds=0.8))


def test_the_lease_is_renewed_while_the_block_runs_and_not_after(provider: LocalProvider, cluster: Cluster) -> None:
    with kept_lease(provider, cluster):
        time.sleep(1.2)
        (record,) = provider.list_clusters()
        assert not record.expired(time.time())
    time.sleep(1.2)
    (record,) = provider.list_clusters()
    assert record.expired(time.time())


def test_a_lost_lease_is_reported_once_and_let_go(
    provider: LocalProvider, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with kept_lease(provider, cluster):
        provider.terminate("c")
        time.sleep(0.7)
    assert [record.getMessage() for record in caplog.records] == ["cluster 'c' was terminated"]


def test_an_owner_does_not_end_its_successors_cluster(provider: LocalProvider, cluster: Cluster) -> None:
    former = dataclasses.replace(cluster, created_at=cluster.created_at - 100)
    end_own(provider, former)
    assert provider.find("c") == cluster
    end_own(provider, cluster)
    assert provider.find("c") is None
    end_own(provider, cluster)  # twice is fine
