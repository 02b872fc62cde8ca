"""The life of a training job on real processes: preempted, stuck, killed, vanished; it goes on from its newest step."""

import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, write_corpus

from flows.preparation import preparation
from infra import processes
from infra.cluster import ClusterRequest, Job
from infra.errors import Preempted, Stalled, WorkerFailed
from infra.launcher import run_with_restarts
from infra.lease import kept_lease
from infra.local import MARKER, NODE_MARKER, LocalProvider
from infra.storage import open_storage
from tasks.config import PipelineConfig
from tasks.heartbeat import HeartbeatReader
from tasks.watchdog import SAME_REQUEST_SECONDS
from tasks.worker import WorkerJob

UNTIMED = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "batch_size", "validation_loss")
WAIT_SECONDS = 5  # of a rank for another


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> PipelineConfig:
    root = tmp_path_factory.mktemp("prepared")
    config = tiny_config(root / "run", write_corpus(root))
    preparation(config)
    return config


class Life:
    """A training job of its own; `script` is what happens to it: at which step of its ranks, and what is done then."""

    def __init__(self, prepared: PipelineConfig, root: Path, fault: str = "none", **layers: Any) -> None:
        self.run, state = root / "run", root / "state"
        shutil.copytree(prepared.run_uri, self.run)
        cluster = {"ranks_per_node": 2, "collective_timeout_seconds": WAIT_SECONDS, "stop_seconds": 5}
        training = {"steps": 60, "checkpoint_every_steps": 5, "validate_every_steps": 7}
        layers = {
            "cluster": cluster | layers.pop("cluster", {}),
            "training": training | layers.pop("training", {}),
        } | layers
        self.config = tiny_config(self.run, prepared.data.sources[0].uri, tokens={"max_epochs": 100}, **layers)
        self.provider = LocalProvider(state)
        of = self.config.cluster
        self.cluster = self.provider.provision(
            ClusterRequest("life", of.nodes, of.ranks_per_node, 1, 60, of.stop_seconds)
        )
        worker = WorkerJob(kind="train", config=self.config, result="metrics/outcome.json")
        environment = {"PYTHONPATH": str(Path(__file__).parent)}
        self.job = Job("train", 0, "life_worker", (fault, worker.model_dump_json()), environment)
        self.record, self.logs = str(state / "clusters" / "life"), state / "logs" / "life" / "train"

    def train(self, *script: tuple[int | str, Callable[["Life"], None]], max_restarts: int = 0) -> None:
        """Each act of the script waits for a step, or for a phase, that is new since the one before."""
        heartbeat = HeartbeatReader(open_storage(str(self.run)))
        acts, seen = list(script), heartbeat.last()

        def tick() -> None:
            nonlocal seen
            sign = heartbeat.last()
            if not acts or sign == seen:
                return
            when, act = acts[0]
            if sign["phase"] == when or (
                sign["phase"] == "training" and isinstance(when, int) and sign["step"] >= when
            ):
                acts.pop(0)
                act(self)
                seen = heartbeat.last()

        with kept_lease(self.provider, self.cluster):
            run_with_restarts(
                self.provider,
                self.cluster,
                self.job,
                last_sign=lambda: heartbeat.last().get("time"),
                on_tick=tick,
                start_timeout_seconds=120,
                stall_timeout_seconds=90,
                max_restarts=max_restarts,
            )
        assert not acts, "it ended too early"

    def processes(self, named: str = "") -> set[processes.Process]:
        """Those of the cluster; of one kind by a word of their command line."""
        found = processes.marked(MARKER, self.record)
        return {p for p in found if named in Path(f"/proc/{p.pid}/cmdline").read_text(errors="replace").split("\0")}

    def rank(self, rank: int) -> int:
        """Its pid."""
        (found,) = self.processes() & processes.marked("RANK", str(rank))
        return found.pid

    def metrics(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.run / "metrics/train.jsonl").read_text().splitlines()]
        return [{name: line[name] for name in UNTIMED if name in line} for line in lines]

    def newest(self) -> int:
        """The step of the newest complete checkpoint."""
        return max(int(path.parent.name[5:]) for path in self.run.glob("checkpoints/*/complete.json"))


@pytest.fixture
def life(prepared: PipelineConfig, tmp_path: Path) -> Iterator[Callable[..., Life]]:
    lives: list[Life] = []

    def make(fault: str = "none", **layers: Any) -> Life:
        lives.append(Life(prepared, tmp_path / str(len(lives)), fault, **layers))
        return lives[-1]

    yield make
    for made in lives:
        made.provider.terminate("life")
        assert made.processes() == set()


def send(number: signal.Signals, who: Callable[[Life], list[int]]) -> Callable[[Life], None]:
    def act(life: Life) -> None:
        for pid in who(life):
            os.kill(pid, number)

    return act


def rank_1(life: Life) -> list[int]:
    return [life.rank(1)]


def torchrun(life: Life) -> list[int]:
    return [process.pid for process in life.processes("torch.distributed.run")]


def everyone(life: Life) -> list[int]:
    return [process.pid for process in life.processes()]


def last_node(life: Life) -> list[int]:
    cluster = life.provider.find("life")
    assert cluster is not None
    return [process.pid for process in life.processes() & processes.marked(NODE_MARKER, cluster.nodes[-1].node_id)]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "infra.launcher"]


# cases R8 and R9
def test_preempted_and_stuck_and_preempted_again(life: Callable[..., Life], caplog: pytest.LogCaptureFixture) -> None:
    """SIGTERM to a rank; then a rank whose loader hangs; then SIGTERM to every process, where saves are in flight."""
    job = life("sleep_in_the_loader_once", training={"steps": 5000, "checkpoint_every_steps": 1})
    with caplog.at_level(logging.WARNING), pytest.raises(Preempted) as caught:
        job.train(
            (3, send(signal.SIGTERM, rank_1)),
            (5, lambda life: None),
            (30, send(signal.SIGTERM, everyone)),
            max_restarts=5,
        )
    first, second = messages(caplog)
    saved = int(re.findall(r"the job was preempted at step (\d+), which is saved", first)[0])
    agent_log = (job.logs / "generation-0" / "node-0" / "agent.log").read_text()
    assert set(re.findall(r'"exit_code\\": \[(\d+)\]', agent_log.replace('\\\\"', '\\"'))) == {"75"}
    waited = "rank 0 on node-0 has waited for other ranks for too long; rank 1 on node-0 is stuck: "
    assert re.search(f"{waited}(training|validation), step", second)  # both read batches
    assert "prefetch.py" in second.splitlines()[0]
    assert "Timed out waiting" in second
    # The checkpoint is of the very step that ended last, and each generation went on from the newest.
    assert caught.value.step == job.newest() == job.metrics()[-1]["step"] >= 30
    assert [line["step"] for line in job.metrics()] == list(range(1, job.newest() + 1))
    attempts = [json.loads(line) for line in (job.run / "metrics/attempts.jsonl").read_text().splitlines()]
    assert [attempt["first_step"] for attempt in attempts][:2] == [0, saved]
    assert len(attempts) == 3
    assert not caught.value.restartable  # its node was asked to stop, too


@pytest.fixture(scope="module")
def unbroken(prepared: PipelineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    job = Life(prepared, tmp_path_factory.mktemp("unbroken"))
    job.train()
    job.provider.terminate("life")
    parts = json.loads((job.run / "metrics/outcome.json").read_text())["startup_seconds"]
    expected = "torchrun imports process_group model_build checkpoint_load first_step first_batch"
    assert " ".join(parts) == expected
    assert all(seconds >= 0 for seconds in parts.values())
    return job.metrics()


@pytest.mark.slow
def test_a_node_that_vanishes_is_replaced(
    life: Callable[..., Life], unbroken: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    job = life(cluster={"nodes": 2, "ranks_per_node": 1})
    with caplog.at_level(logging.WARNING):
        job.train((8, send(signal.SIGKILL, last_node)), max_restarts=1)
    assert messages(caplog) == ["job train: node-1 was lost; restart 1 of 1"]
    cluster = job.provider.find("life")
    assert cluster is not None
    assert [node.node_id == old.node_id for node, old in zip(cluster.nodes, job.cluster.nodes, strict=True)] == [
        True,
        False,
    ]
    assert job.metrics() == unbroken


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_restarts_after_five_kills(
    life: Callable[..., Life], unbroken: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    job = life()
    with caplog.at_level(logging.WARNING):
        job.train(*[(step, send(signal.SIGKILL, rank_1)) for step in (6, 12, 18, 24, 40)], max_restarts=5)
    assert len(messages(caplog)) == 5
    assert all("rank 1 on node-0 was ended by SIGKILL" in message for message in messages(caplog))
    assert job.metrics() == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"pp": 2}])
def test_a_rank_that_is_stopped_is_named(life: Callable[..., Life], parallel: dict[str, int]) -> None:
    """SIGSTOP, as a rank in uninterruptible sleep; also where gloo has no timeout that can be shortened."""
    job = life(parallel=parallel, training={"steps": 5000})
    with pytest.raises(Stalled, match="rank 1 on node-0 is stuck and has given no sign of life") as caught:
        job.train((8, send(signal.SIGSTOP, rank_1)))
    assert "Timed out waiting 5" in str(caught.value)


@pytest.mark.slow
def test_a_signal_to_torchrun(life: Callable[..., Life]) -> None:
    job = life(training={"steps": 5000})
    with pytest.raises(Preempted) as caught:
        job.train((8, send(signal.SIGTERM, torchrun)))
    assert caught.value.step == job.newest() == job.metrics()[-1]["step"]
    assert caught.value.restartable


@pytest.mark.slow
@pytest.mark.parametrize("who", [rank_1, torchrun, everyone])
@pytest.mark.parametrize(
    ("fault", "phase"), [("sleep_in_the_first_step", "training"), ("sleep_in_validation", "validation")]
)
def test_a_signal_where_nothing_returns(
    life: Callable[..., Life], fault: str, phase: str, who: Callable[[Life], list[int]]
) -> None:
    job = life(fault, training={"steps": 5000})
    with pytest.raises(Preempted, match="before its ranks had saved"):
        job.train((phase, send(signal.SIGTERM, who)))
    if phase == "validation":
        assert job.newest() == 5
        assert job.metrics()[-1]["step"] == 6


@pytest.mark.slow
def test_a_second_signal_ends_at_once(life: Callable[..., Life]) -> None:
    """With 100 s to stop in, of which it takes none."""

    def twice(life: Life) -> None:
        send(signal.SIGTERM, rank_1)(life)
        time.sleep(SAME_REQUEST_SECONDS + 0.5)
        send(signal.SIGTERM, rank_1)(life)

    job = life("sleep_in_validation", cluster={"stop_seconds": 300, "collective_timeout_seconds": 300})
    with pytest.raises(Preempted, match="before its ranks had saved"):
        job.train(("validation", twice))
    (log,) = job.logs.glob("generation-0/node-0/ranks/*/attempt_0/1/stderr.log")
    assert "the rank was asked to stop again: it leaves at once" in log.read_text()
    assert "life_worker.py" in log.read_text()  # where it was


# case C10
@pytest.mark.slow
def test_a_required_resume_never_starts_at_step_0(life: Callable[..., Life]) -> None:
    job = life(training={"resume": "required"})
    with pytest.raises(WorkerFailed, match="a checkpoint is required to resume from, and none was ever completed"):
        job.train(max_restarts=2)
    assert not (job.run / "metrics/train.jsonl").exists()
