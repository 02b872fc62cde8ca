"""Clusters of real processes on this machine."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import processes
from infra.cluster import Cluster, ClusterRequest, Job, Owner, open_provider
from infra.config import ClusterConfig
from infra.errors import ClusterBusy, InfraError, WorkerFailed, WorkersKilled
from infra.launcher import run_job, run_with_restarts
from infra.lease import kept_lease
from infra.local import MARKER, LocalProvider, default_state_dir

NAME = "a+b épo=3 ✓ 1"
TESTS = str(Path(__file__).parent)
PYTHONPATH = os.pathsep.join([str(Path(TESTS).parent), TESTS])


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LocalProvider]:
    provider = LocalProvider(tmp_path / "state")
    yield provider
    for record in provider.list_clusters():
        provider.terminate(record.cluster.name)
    assert of_cluster(provider) == set()


def request(nodes: int = 1, ranks_per_node: int = 1, lease_seconds: float = 60) -> ClusterRequest:
    return ClusterRequest(NAME, nodes, ranks_per_node, threads_per_rank=3, lease_seconds=lease_seconds)


def of_cluster(provider: LocalProvider, name: str = NAME) -> set[processes.Process]:
    return processes.marked(MARKER, str(provider._clusters / name))


def job(mode: str, directory: Path, *arguments: str) -> Job:
    return Job("train", 0, "cluster_worker", (mode, str(directory), *arguments), {"PYTHONPATH": TESTS})


def run(
    provider: LocalProvider, cluster: Cluster, job: Job, on_tick: Callable[[], None] = lambda: None, **options: Any
) -> None:
    run = run_with_restarts if "max_restarts" in options else run_job
    run(
        provider,
        cluster,
        job,
        last_sign=lambda: None,
        on_tick=on_tick,
        start_timeout_seconds=120,
        stall_timeout_seconds=120,
        **options,
    )


def facts(directory: Path, rank: int) -> dict[str, Any]:
    return json.loads((directory / f"rank-{rank}.json").read_text())


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def start_owner(provider: LocalProvider) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process that holds the cluster; its ranks sleep where a directory is given."""
    owners = []

    def start(lease_seconds: float, *directory: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "cluster_owner", str(provider._state_dir), NAME, str(lease_seconds)]
        owner = subprocess.Popen(
            [*command, *map(str, directory)],
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
        )
        owners.append(owner)
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"provisioned\n"
        if directory:
            assert wait_for((directory[0] / "rank-1.json").exists, 60)
        return owner

    yield start
    for owner in owners:
        owner.kill()
        owner.communicate()


def test_a_job_on_two_nodes(
    provider: LocalProvider, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = provider.provision(request(nodes=2, lease_seconds=6))
    assert provider.find(NAME) == cluster
    leases: set[float] = set()

    def tick() -> None:
        leases.update(record.lease_expires_at for record in provider.list_clusters())

    with kept_lease(provider, cluster):
        run(provider, cluster, job("succeed", tmp_path, "--odd", "a b", "✓", ""), tick)

    for rank in (0, 1):
        seen = facts(tmp_path, rank)
        environment = seen["environment"]
        assert seen["arguments"] == ["succeed", str(tmp_path), "--odd", "a b", "✓", ""]
        assert seen["cwd"] == str(tmp_path)
        assert environment["WORLD_SIZE"] == "2"
        assert environment["OMP_NUM_THREADS"] == "3"
        assert environment["JUMBO_NODE"] == f"node-{rank}"
        (log,) = (provider._state_dir / "logs" / NAME / "train" / "generation-0" / f"node-{rank}").rglob("stdout.log")
        assert log.read_text() == f"rank {rank} is done\n"
    assert len(leases) > 1  # renewed while it ran
    assert of_cluster(provider) == set()
    assert capfd.readouterr() == ("", "")


def test_the_first_rank_that_raises_is_the_error(provider: LocalProvider, tmp_path: Path) -> None:
    cluster = provider.provision(request(nodes=2))
    with pytest.raises(WorkerFailed) as caught:
        run(provider, cluster, job("fail", tmp_path))
    error = caught.value
    assert (error.rank, error.node, error.exit_code) == (1, "node-1", 1)
    assert str(error).splitlines()[0] == "rank 1 on node-1 failed (exit code 1): KeyError: 'the real reason'"
    assert 'raise KeyError("the real reason")' in error.traceback
    assert error.log.name == "stderr.log"
    assert error.log.exists()
    assert of_cluster(provider) == set()
    # The peer's own reason is kept, taken from its stderr.
    report = (provider._state_dir / "logs" / NAME / "train" / "generation-0" / "node-0" / "exit.json").read_text()
    assert "ConnectionError: closed by peer" in report


@pytest.mark.slow
def test_a_peer_that_had_to_be_killed_is_not_the_error(provider: LocalProvider, tmp_path: Path) -> None:
    cluster = provider.provision(request(ranks_per_node=2))
    with pytest.raises(WorkerFailed, match=r"rank 1 on node-0 failed .*KeyError: 'the real reason'"):
        run(provider, cluster, job("fail_beside_deaf", tmp_path))


def test_a_killed_rank_restarts_the_job_at_another_endpoint(
    provider: LocalProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = provider.provision(request(ranks_per_node=2))
    with caplog.at_level(logging.WARNING):
        run(provider, cluster, job("be_killed_once", tmp_path), max_restarts=1)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "rank 1 on node-0 was ended by SIGKILL" in warning
    logs = provider._state_dir / "logs" / NAME / "train"
    specs = [json.loads((logs / f"generation-{g}" / "node-0" / "spec.json").read_text()) for g in (0, 1)]
    assert specs[0]["endpoint"] != specs[1]["endpoint"]
    assert specs[0]["rendezvous_id"] != specs[1]["rendezvous_id"]
    assert of_cluster(provider) == set()


def test_a_killed_supervisor_takes_its_ranks_along(provider: LocalProvider, tmp_path: Path) -> None:
    cluster = provider.provision(request(nodes=2))

    def tick() -> None:
        if (tmp_path / "rank-0.json").exists() and (tmp_path / "rank-1.json").exists():
            os.kill(int(facts(tmp_path, 1)["environment"]["JUMBO_SUPERVISOR"]), signal.SIGKILL)
            pid = facts(tmp_path, 1)["pid"]
            assert wait_for(lambda: pid not in {process.pid for process in of_cluster(provider)}, 5)
            tmp_path.joinpath("rank-0.json").unlink()

    with pytest.raises(WorkersKilled, match="node-1 was lost"):
        run(provider, cluster, job("sleep", tmp_path), tick)
    assert of_cluster(provider) == set()


def test_a_killed_torchrun_is_told_in_one_line(provider: LocalProvider, tmp_path: Path) -> None:
    cluster = provider.provision(request(nodes=2))

    def tick() -> None:
        if all((tmp_path / f"rank-{rank}.json").exists() for rank in (0, 1)):
            status = Path(f"/proc/{facts(tmp_path, 1)['pid']}/status").read_text()
            os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)
            tmp_path.joinpath("rank-0.json").unlink()

    with pytest.raises(WorkersKilled) as caught:
        run(provider, cluster, job("sleep", tmp_path), tick)
    assert str(caught.value) == "torchrun on node-1 was ended by SIGKILL, as the kernel does when memory runs out"
    assert of_cluster(provider) == set()


def test_an_interrupt_ends_the_ranks_first(provider: LocalProvider, tmp_path: Path) -> None:
    cluster = provider.provision(request())

    def tick() -> None:
        if (tmp_path / "rank-0.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(provider, cluster, job("sleep", tmp_path), tick)
    assert of_cluster(provider) == set()
    report = (provider._state_dir / "logs" / NAME / "train" / "generation-0" / "node-0" / "exit.json").read_text()
    assert json.loads(report)["reason"] == "stopped"


def test_nodes_end_themselves_when_nobody_renews_their_lease(
    provider: LocalProvider, tmp_path: Path, start_owner: Callable[..., subprocess.Popen[bytes]]
) -> None:
    owner = start_owner(5, tmp_path)
    assert len(of_cluster(provider)) == 4  # supervisor, torchrun, 2 ranks
    owner.kill()
    # The owner's output ends with it: no node holds its stream.
    owner.communicate(timeout=5)
    assert wait_for(lambda: not of_cluster(provider), 5 + 15)
    report = (provider._state_dir / "logs" / NAME / "sleep" / "generation-0" / "node-0" / "exit.json").read_text()
    assert json.loads(report)["reason"] == "lease expired"
    assert json.loads(report)["exit_code"] == 75
    (record,) = provider.list_clusters()  # what the janitor sees
    assert record.cluster.owner.process.pid == owner.pid
    assert record.expired(time.time())
    assert not record.expired(record.lease_expires_at - 1)


def test_a_dead_owners_cluster_is_taken_over_at_once(
    provider: LocalProvider, tmp_path: Path, start_owner: Callable[..., subprocess.Popen[bytes]]
) -> None:
    owner = start_owner(3600, tmp_path)
    left = of_cluster(provider)
    owner.kill()
    owner.wait()
    cluster = provider.provision(request())
    assert len(left) == 4
    assert not any(processes.is_alive(process) for process in left)
    assert cluster.owner == Owner.current()
    assert provider.find(NAME) == cluster


def test_a_living_owners_cluster_is_busy_until_its_lease_lapses(
    provider: LocalProvider, start_owner: Callable[..., subprocess.Popen[bytes]]
) -> None:
    owner = start_owner(3600)
    with pytest.raises(ClusterBusy, match=rf"is held by pid {owner.pid} on .* since 20\d\d-"):
        provider.provision(request())
    held = provider.find(NAME)
    assert held is not None
    (provider._clusters / NAME / "lease.json").write_text(json.dumps({"expires_at": time.time() - 1}))
    provider.provision(request())
    # The earlier owner finds out, whatever it tries.
    with pytest.raises(InfraError, match=f"was taken over by pid {os.getpid()}"):
        provider.renew(held)
    with pytest.raises(InfraError, match="was taken over"):
        provider.launch(held, Job("train", 0, "cluster_worker"))


def test_a_reused_pid_is_not_the_owner(provider: LocalProvider) -> None:
    cluster = provider.provision(request())
    path = provider._clusters / NAME / "cluster.json"
    data = json.loads(path.read_text())
    data["owner"]["process"]["started"] -= 1  # this pid, but an earlier process
    path.write_text(json.dumps(data))
    assert provider.provision(request()).created_at > cluster.created_at


def test_terminate_twice_and_what_does_not_exist(provider: LocalProvider) -> None:
    cluster = provider.provision(request())
    assert [record.cluster for record in provider.list_clusters()] == [cluster]
    provider.terminate(NAME)
    provider.terminate(NAME)
    provider.terminate("unknown")
    assert provider.list_clusters() == []
    assert provider.find(NAME) is None
    assert list(provider._clusters.iterdir()) == []
    with pytest.raises(InfraError, match="was terminated"):
        provider.renew(cluster)


def test_a_replaced_node_keeps_its_place(provider: LocalProvider) -> None:
    cluster = provider.provision(request(nodes=3))
    replaced = provider.replace_node(cluster, "node-1")
    assert provider.find(NAME) == replaced
    assert [node.index for node in replaced.nodes] == [0, 1, 2]
    assert [old == new for old, new in zip(cluster.nodes, replaced.nodes, strict=True)] == [True, False, True]
    with pytest.raises(ValueError, match="has no node 'node-1'"):
        provider.replace_node(replaced, "node-1")
    # Who still has the cluster as it was launches on the nodes that there are.
    assert provider.launch(cluster, Job("train", 0, "cluster_worker")).cluster == replaced


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "../x", ".hidden", "a\0b", "x" * 201, "é" * 101])
def test_names_that_are_no_path_component_are_refused(provider: LocalProvider, name: str) -> None:
    with pytest.raises(ValueError, match="cluster name"):
        ClusterRequest(name, 1, 1, 1, 60)
    with pytest.raises(ValueError, match="job name"):
        Job(name, 0, "tasks.worker")
    with pytest.raises(ValueError, match="cluster name"):
        provider.terminate(name)


def test_open_provider_and_its_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster\.provider 'ec2' is not available in this version; use 'local'"):
        open_provider(ClusterConfig(provider="ec2"))
    monkeypatch.delenv("JUMBO_STATE_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_state_dir() == Path.home() / ".local/state/jumbo"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "jumbo"
    monkeypatch.setenv("JUMBO_STATE_DIR", str(tmp_path / "other"))
    assert default_state_dir() == tmp_path / "other"
    assert isinstance(open_provider(ClusterConfig()), LocalProvider)


def test_a_state_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^JUMBO_STATE_DIR \({tmp_path}/file\) cannot be used: Not a directory$"):
        LocalProvider(tmp_path / "file")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "clusters").touch()
    with pytest.raises(ValueError, match=rf"^JUMBO_STATE_DIR \({tmp_path}/state\) cannot be used: File exists$"):
        LocalProvider(tmp_path / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_state_directory_of_another_user_is_named() -> None:
    code = """
import os, sys
from pathlib import Path
from infra.local import LocalProvider
LocalProvider(Path(sys.argv[1], "state"))
os.seteuid(65534)
for name in ("state", "other"):
    try:
        LocalProvider(Path(sys.argv[1], name))
    except ValueError as error:
        print(error)
"""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # pytest's own are closed to others
        command = [sys.executable, "-c", code, directory]
        said = subprocess.run(command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, capture_output=True, check=True)
    assert said.stdout.decode().splitlines() == [
        f"JUMBO_STATE_DIR ({directory}/state) cannot be used: {directory}/state is not writable",
        f"JUMBO_STATE_DIR ({directory}/other) cannot be used: Permission denied",
    ]


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    """A node runs it before anything is installed there."""
    code = "import sys, infra.bootstrap; print(sorted({'torch', 'boto3', 'pydantic', 'prefect'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
