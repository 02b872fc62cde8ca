"""The launcher's decisions, on a provider whose nodes do what a script says; real nodes are in test_local_cluster."""

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import launcher
from infra.bootstrap import NodeReport, NodeSpec, _report
from infra.cluster import Cluster, ClusterRequest, Job, JobHandle, JobStatus, Node, NodeStatus, Owner
from infra.errors import InfraError, Preempted, Stalled, TransientError, WorkerFailed, WorkersKilled
from infra.launcher import run_job, run_with_restarts
from infra.local import LocalProvider
from infra.rank_files import RankFailure, RankSign

NODES = (Node("node-0", 0, "10.0.0.1"), Node("node-1", 1, "10.0.0.2"))
SUCCEEDED = NodeReport(0, "succeeded")
STOPPED = NodeReport(143, "stopped")
# As torchrun prints it, shortened.
EVENT = '{"name": "torchelastic.worker.status.SUCCEEDED", "source": "AGENT", "timestamp": 0, "metadata": {"rank": 0}}'


def failed(*failures: RankFailure, agent_error: str = "", signs: tuple[RankSign, ...] = ()) -> NodeReport:
    return NodeReport(1, "failed", failures, agent_error, signs)


def raised(rank: int, message: str, time: float) -> RankFailure:
    return RankFailure(rank, 1, f"Traceback (most recent call last):\n  ...\n{message}", time, f"/log/{rank}")


def preempted(rank: int, saved_step: int | None, time: float) -> RankFailure:
    return RankFailure(rank, 75, "", time, f"/log/{rank}", True, saved_step)


def sign(rank: int, place: str, waiting: bool, silent_seconds: float = 1.0) -> RankSign:
    return RankSign(rank, "training", 12, place, waiting, silent_seconds)


class Termination(BaseException):
    """As an orchestrator raises in the main thread when a run is cancelled."""


class ScriptedProvider(LocalProvider):
    """Node i shows `script[generation][i]`: its report, "running" for ever (stopped: STOPPED), or "lost"."""

    def __init__(self, *script: tuple[NodeReport | str, NodeReport | str]) -> None:
        self.script = script
        self.stopped_report = STOPPED
        self.launched: list[int] = []
        self.stopped: list[int] = []
        self.replaced: list[str] = []
        request = ClusterRequest("c", 2, 1, 1, lease_seconds=0.15)
        self.cluster = Cluster(request, "scripted", NODES, 0.0, Owner.current())

    def launch(self, cluster: Cluster, job: Job) -> JobHandle:
        self.launched.append(job.generation)
        return JobHandle(cluster, job, f"r-{job.generation}", "10.0.0.1:1")

    def watch(self, handle: JobHandle) -> JobStatus:
        generation = handle.job.generation
        stopped = generation in self.stopped
        statuses = []
        for node, act in zip(NODES, self.script[generation], strict=True):
            running = act == "running" and not stopped
            report = (
                act if isinstance(act, NodeReport) else self.stopped_report if act == "running" and stopped else None
            )
            statuses.append(NodeStatus(node, running, report))
        return JobStatus(tuple(statuses))

    def stop(self, handle: JobHandle) -> None:
        self.stopped.append(handle.job.generation)

    def replace_node(self, cluster: Cluster, node_id: str) -> Cluster:
        self.replaced.append(node_id)
        return cluster

    def run(
        self,
        *,
        last_sign: launcher.LastSign = lambda: None,
        on_tick: Callable[[], None] = lambda: None,
        start_timeout_seconds: float = 5.0,
        stall_timeout_seconds: float = 5.0,
        max_restarts: int | None = None,
    ) -> None:
        job = Job("train", 0, "tasks.worker")
        common = {
            "last_sign": last_sign,
            "on_tick": on_tick,
            "start_timeout_seconds": start_timeout_seconds,
            "stall_timeout_seconds": stall_timeout_seconds,
        }
        if max_restarts is None:
            run_job(self, self.cluster, job, **common)  # type: ignore[arg-type]
        else:
            run_with_restarts(self, self.cluster, job, **common, max_restarts=max_restarts)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "PEER_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "LONGEST_PAUSE_SECONDS", 0.01)


def test_success_on_all_nodes_returns() -> None:
    provider = ScriptedProvider((SUCCEEDED, SUCCEEDED))
    provider.run()
    assert provider.stopped == [0]


def test_the_first_failure_is_the_reason_whichever_node_it_is_on() -> None:
    first, second = raised(1, "KeyError: 'x'", time=100.25), raised(0, "RuntimeError: connection closed", time=100.5)
    with pytest.raises(WorkerFailed) as caught:
        ScriptedProvider((failed(second), failed(first))).run()
    assert (caught.value.rank, caught.value.node, caught.value.log) == (1, "node-1", Path("/log/1"))
    assert str(caught.value).splitlines()[0] == "rank 1 on node-1 failed (exit code 1): KeyError: 'x'"
    assert caught.value.traceback in str(caught.value)


def test_worker_failed_survives_pickling() -> None:
    error = WorkerFailed(3, "node-1", 1, "Traceback\nKeyError: 'x'", Path("/log"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.exit_code, copy.log) == (str(error), 3, 1, Path("/log"))


def test_a_node_that_outlives_the_first_failure_is_stopped_after_a_bounded_time() -> None:
    provider = ScriptedProvider((failed(raised(0, "KeyError: 'x'", 1.0)), "running"))
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 0 on node-0"):
        provider.run()
    assert 0.1 < time.monotonic() - started < 2
    assert provider.stopped == [0]


def test_a_killed_rank_is_the_reason_for_the_traceback_of_its_peer() -> None:
    killed = RankFailure(0, -9, "", 100.0, "/log/0")
    peer = raised(1, "RuntimeError: connection closed", 100.5)
    with pytest.raises(WorkersKilled, match=r"rank 0 on node-0 was ended by SIGKILL, as the kernel does"):
        ScriptedProvider((failed(killed), failed(peer))).run()


def test_an_abort_that_a_failure_caused_is_not_the_reason() -> None:
    aborted = RankFailure(0, -6, "", 700.0, "/log/0")
    with pytest.raises(WorkerFailed, match="rank 1 on node-1"):
        ScriptedProvider((failed(aborted), failed(raised(1, "KeyError: 'x'", 100.0)))).run()


def test_an_exit_without_output_is_a_failure_of_the_worker() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 on node-0 failed \(exit code 3\): no output"):
        ScriptedProvider((failed(RankFailure(0, 3, "", 1.0, "/log/0")), SUCCEEDED)).run()


def test_a_lost_node_is_named() -> None:
    with pytest.raises(WorkersKilled, match="node-1 was lost"):
        ScriptedProvider(("running", "lost")).run()


def test_a_lost_node_is_replaced_before_the_restart() -> None:
    provider = ScriptedProvider(("running", "lost"), (SUCCEEDED, SUCCEEDED))
    provider.run(max_restarts=1)
    assert (provider.launched, provider.replaced) == ([0, 1], ["node-1"])


# case R9
def test_the_rank_that_others_waited_for_is_named() -> None:
    waited = raised(0, "RuntimeError: Timed out waiting 5000ms for recv operation to complete", 100.0)
    asked = preempted(1, None, 104.0)  # it left when torchrun asked it to
    busy = sign(1, "prefetch.py:24 prefetch", waiting=False)
    signs = (sign(0, "distributed_c10d.py:1 all_reduce", waiting=True),)
    with pytest.raises(Stalled) as caught:
        ScriptedProvider((failed(waited, signs=signs), failed(asked, signs=(busy,)))).run()
    assert str(caught.value).splitlines()[0] == (
        "rank 0 on node-0 has waited for other ranks for too long; "
        "rank 1 on node-1 is stuck: training, step 12, at prefetch.py:24 prefetch (log: /log/0)"
    )
    assert waited.traceback in str(caught.value)
    # One that gives no sign any more is stuck, wherever it was; one that never was heard of, too.
    silent = sign(1, "distributed_c10d.py:1 all_reduce", waiting=True, silent_seconds=40.2)
    with pytest.raises(
        Stalled, match=r"rank 1 on node-1 is stuck and has given no sign of life for 40 s: training, st"
    ):
        ScriptedProvider((failed(waited, signs=signs), NodeReport(143, "stopped", (), "", (silent,)))).run()
    with pytest.raises(Stalled, match=r"rank 1 on node-1 never gave a sign of life"):
        ScriptedProvider((failed(waited, signs=signs), failed(asked, signs=(sign(1, "", waiting=False),)))).run()
    with pytest.raises(Stalled, match=r"which rank it waited for is not known"):
        ScriptedProvider((failed(waited, signs=signs), "running")).run()


def test_silence_of_all_names_the_stuck_rank() -> None:
    provider = ScriptedProvider(("running", SUCCEEDED))
    signs = (sign(0, "distributed_c10d.py:1 all_reduce", waiting=True), sign(1, "x.py:1 x", waiting=False))
    provider.stopped_report = NodeReport(143, "stopped", (), "", signs)
    with pytest.raises(
        Stalled, match=r"within 0\.1 s of the launch; rank 1 on node-0 is stuck: training, step 12, at x"
    ):
        provider.run(start_timeout_seconds=0.1)


# case R8
def test_a_preemption_is_told_as_what_it_is_and_continued() -> None:
    step_9 = (failed(preempted(0, 9, 100.0)), failed(preempted(1, 9, 100.1)))
    with pytest.raises(Preempted) as caught:
        ScriptedProvider(step_9).run()
    assert not isinstance(caught.value, TransientError)
    assert str(caught.value) == "the job was preempted at step 9, which is saved; run again, it continues from there"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    provider = ScriptedProvider(step_9, (SUCCEEDED, SUCCEEDED))
    provider.run(max_restarts=1)
    assert provider.launched == [0, 1]
    with pytest.raises(Preempted, match="step 9"):
        ScriptedProvider(step_9, step_9).run(max_restarts=1)


def test_a_preemption_that_a_failure_caused_is_not_the_reason() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 on node-1 .*KeyError"):
        ScriptedProvider((failed(preempted(0, None, 104.0)), failed(raised(1, "KeyError: 'x'", 100.0)))).run()


def test_a_node_that_was_asked_to_stop_is_not_used_again() -> None:
    stopped = NodeReport(143, "stopped", (preempted(1, 9, 100.0),))
    provider = ScriptedProvider((failed(preempted(0, 9, 100.1)), stopped))
    with pytest.raises(Preempted, match="step 9"):
        provider.run(max_restarts=2)
    assert provider.launched == [0]


def test_a_signal_to_torchrun_before_its_ranks_listen() -> None:
    error = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    with pytest.raises(Preempted, match="stopped from outside, before its ranks had saved"):
        ScriptedProvider((failed(agent_error=error), "running")).run()


def test_the_kernels_count_of_processes_that_it_ended_for_memory_is_told() -> None:
    killed = NodeReport(1, "failed", (RankFailure(0, -9, "", 1.0, "/log/0"),), oom_kills=1)
    with pytest.raises(WorkersKilled, match="rank 0 on node-0 was ended by SIGKILL by the kernel: memory ran out"):
        ScriptedProvider((killed, "running")).run()


def test_a_storage_that_was_unavailable_is_tried_again() -> None:
    lost = raised(1, "infra.errors.StorageUnavailable: s3://b/run/tokens/x: SlowDown: reduce your rate", 1.0)
    provider = ScriptedProvider((failed(lost), "running"), (SUCCEEDED, SUCCEEDED))
    provider.run(max_restarts=1)
    assert provider.launched == [0, 1]
    with pytest.raises(TransientError, match="rank 1 on node-0: s3://b/run/tokens/x: SlowDown: reduce your rate"):
        ScriptedProvider((failed(lost), "running")).run()


def test_a_lapsed_lease_is_named() -> None:
    with pytest.raises(WorkersKilled, match="node-0 ended itself: its lease was not renewed in time"):
        ScriptedProvider((NodeReport(75, "lease expired"), "running")).run()


def test_errors_of_the_agent_are_retried_only_where_they_are_about_the_rendezvous() -> None:
    with pytest.raises(TransientError, match="RendezvousConnectionError"):
        ScriptedProvider((failed(agent_error="RendezvousConnectionError: no store"), "running")).run()
    with pytest.raises(InfraError, match="No module named torch") as caught:
        ScriptedProvider((failed(agent_error="No module named torch"), "running")).run()
    assert not isinstance(caught.value, TransientError)


def test_a_killed_torchrun_is_the_reason_for_what_its_peers_say() -> None:
    killed = NodeReport(-9, "failed", agent_error=f"{EVENT}\n{EVENT}")
    peer = failed(raised(1, "RuntimeError: connection closed", 1.0))
    provider = ScriptedProvider((peer, killed), (SUCCEEDED, SUCCEEDED))
    provider.run(max_restarts=1)
    assert provider.launched == [0, 1]
    with pytest.raises(WorkersKilled) as caught:
        ScriptedProvider((killed, peer)).run()
    assert str(caught.value) == "torchrun on node-0 was ended by SIGKILL, as the kernel does when memory runs out"


def test_the_message_about_the_agent_is_readable_and_bounded() -> None:
    lines = [f"{EVENT}\nline {index}: something that torchrun said" for index in range(500)]
    with pytest.raises(InfraError) as caught:
        ScriptedProvider((failed(agent_error="\n".join(lines)), "running")).run()
    message = str(caught.value)
    assert message.startswith("torchrun on node-0 failed (exit code 1): ...\nline ")
    assert message.endswith("line 499: something that torchrun said")
    assert 1500 < len(message) < 2100
    assert "torchelastic" not in message
    # What is told apart by its name is, wherever the name stands.
    with pytest.raises(TransientError):
        ScriptedProvider((failed(agent_error="\n".join(["DistStoreError", *lines])), "running")).run()


def test_a_report_holds_what_torchrun_said_and_not_its_events(tmp_path: Path) -> None:
    said = "W0101 torch/distributed/run.py: no GPU"
    (tmp_path / "agent.log").write_text("\n".join([said, *[EVENT] * 100]))
    spec = NodeSpec(0, 1, 1, 1, "r", "h:1", "h", "m", (), str(tmp_path), "lease", 10)
    assert _report(spec, 1, None) == NodeReport(1, "failed", (), said)


def test_a_job_stopped_from_outside_is_not_retried() -> None:
    with pytest.raises(InfraError, match="stopped from outside") as caught:
        ScriptedProvider((STOPPED, STOPPED)).run()
    assert not isinstance(caught.value, TransientError)


def test_no_first_sign_in_time() -> None:
    provider = ScriptedProvider(("running", "running"))
    with pytest.raises(Stalled, match=r"no sign of life within 0\.1 s of the launch"):
        provider.run(last_sign=lambda: 12.0, start_timeout_seconds=0.1)  # 12.0: of an earlier generation
    assert provider.stopped == [0]


def test_silence_after_signs() -> None:
    signs = iter(range(20))
    provider = ScriptedProvider(("running", "running"))
    with pytest.raises(Stalled, match=r"silent for 0\.2 s"):
        provider.run(last_sign=lambda: next(signs, 19), start_timeout_seconds=0.1, stall_timeout_seconds=0.2)
    assert next(signs, None) is None  # it waited for as long as there were signs


@pytest.mark.parametrize("error", [RuntimeError("disk"), KeyboardInterrupt(), Termination()])
def test_the_generation_is_stopped_before_an_exception_leaves(error: BaseException) -> None:
    provider = ScriptedProvider(("running", "running"))

    def tick() -> None:
        raise error

    with pytest.raises(type(error)):
        provider.run(on_tick=tick)
    assert provider.stopped == [0]


def test_only_transient_errors_restart_and_with_the_next_generation(caplog: pytest.LogCaptureFixture) -> None:
    killed = failed(RankFailure(0, -9, "", 1.0, "/log/0"))
    provider = ScriptedProvider((killed, "running"), (SUCCEEDED, SUCCEEDED))
    provider.run(max_restarts=2)
    assert provider.launched == [0, 1]
    assert "ended by SIGKILL" in caplog.text
    assert "restart 1 of 2" in caplog.text

    provider = ScriptedProvider((failed(raised(0, "KeyError: 'x'", 1.0)), SUCCEEDED))
    with pytest.raises(WorkerFailed):
        provider.run(max_restarts=2)
    assert provider.launched == [0]


def test_after_the_last_restart_the_last_error_leaves() -> None:
    killed = [failed(RankFailure(rank, -9, "", 1.0, "/log")) for rank in range(3)]
    provider = ScriptedProvider(*((report, SUCCEEDED) for report in killed))
    with pytest.raises(WorkersKilled, match="rank 2"):
        provider.run(max_restarts=2)
    assert provider.launched == [0, 1, 2]
    assert provider.stopped == [0, 1, 2]
