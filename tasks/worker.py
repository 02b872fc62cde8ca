"""torchrun's entry: where torch meets storage. Every rank runs one job of the pipeline and reports through the run
directory; it imports no Prefect."""

import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record

from infra.bootstrap import die_with_parent
from infra.errors import StorageUnavailable
from infra.rank_files import write_preemption
from infra.storage import FileStorage, Storage, open_storage
from model.checkpoint import Checkpointer, CheckpointUnavailable
from model.config import Section
from model.data.document_shards import iter_documents
from model.data.tokenization.tokenizer import Tokenizer
from model.evaluation.benchmark import assemble, baselines, score_share, write_samples
from model.gpt import GPT, initialize
from model.metrics import ATTEMPTS, MetricsLog, parse_lines
from model.parallel import build_mesh
from model.parallel_plan import plan_parallelism
from model.planning.probe import measure
from model.planning.scaling import gate
from model.trainer import TrainData, Trainer
from tasks.choices import load_choices
from tasks.config import PipelineConfig
from tasks.dataset import open_dataset, training_order
from tasks.heartbeat import HeartbeatWriter
from tasks.manifest import Manifest, digest, read_manifest
from tasks.sources import source_weights
from tasks.startup import Startup
from tasks.watchdog import Watchdog

logger = logging.getLogger(__name__)

METRICS = "metrics/train.jsonl"


class WorkerJob(Section):
    """What the ranks are to do: the worker's only argument, as JSON."""

    kind: Literal["validate-scaling", "train", "evaluate"]
    config: PipelineConfig
    result: str
    """Name in the run directory that rank 0 stores the result under."""
    step: int | None = None
    """The checkpoint to evaluate; None for the newest."""


class Preempted(Exception):
    """The ranks were asked to stop, and have; the newest complete checkpoint is that of `saved_step`."""

    def __init__(self, saved_step: int | None) -> None:
        super().__init__(saved_step)
        self.saved_step = saved_step


class Rank:
    """One rank of a job: its place, its device, and the run directory."""

    def __init__(self, job: WorkerJob, scratch: Path, watchdog: Watchdog, startup: Startup) -> None:
        self.job, self.config, self.scratch = job, job.config, scratch
        self.watchdog, self.startup = watchdog, startup
        self.storage: Storage = open_storage(job.config.run_uri)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokens: Manifest = read_manifest(job.config.run_uri, "tokens")
        self.tokenizer = Tokenizer(self._tokenizer_path())
        # Of the ranks and the pieces that there are, which may be others than the configuration expects.
        self.plan = plan_parallelism(
            self.config.parallel,
            self.world_size,
            self.config.model,
            self.config.training,
            vocab_size=self.tokenizer.vocab_size,
            ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        )
        self.mesh: DeviceMesh = build_mesh(self.plan, device_type)
        self.heartbeat = HeartbeatWriter(self.storage)
        self.checkpoint_group: dist.ProcessGroup | None = None
        self.beat("start", 0, 0)

    def beat(self, phase: str, step: int, steps: int) -> None:
        self.watchdog.beat(phase, step)
        if self.rank == 0:
            self.heartbeat({"phase": phase, "step": step, "steps": steps})

    def checkpointer(self, directory: str = "checkpoints") -> Checkpointer:
        storage = open_storage(f"{self.config.run_uri}/{directory}")
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.cluster.stall_timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self.checkpoint_group = group
        training = self.config.training
        return Checkpointer(storage, training.keep_checkpoints, group, training.max_failed_saves)

    def end_first_step(self) -> None:
        """From now on there is something to save, and who waits for another rank does not wait for long."""
        self.watchdog.can_save = True
        self.watchdog.wait_seconds = self.config.cluster.collective_timeout_seconds
        for group in dist.distributed_c10d._pg_map:
            if group is not self.checkpoint_group:  # a save takes the time that it needs
                group.set_timeout(timedelta(seconds=self.config.cluster.collective_timeout_seconds))

    def _tokenizer_path(self) -> Path:
        return read_manifest(self.config.run_uri, "tokenizer").local_files(".model")[0]


def validate_scaling(rank: Rank) -> dict[str, Any]:
    """Measure the cluster and judge it."""
    config = rank.config
    measurement = measure(
        model_config=config.model,
        training_config=config.training,
        scaling_config=config.scaling,
        vocab_size=rank.tokenizer.vocab_size,
        seed=config.seed,
        data=open_dataset(config, rank.tokens, "train"),
        order=training_order(config, rank.tokens.counts),
        plan=rank.plan,
        mesh=rank.mesh,
        checkpointer=rank.checkpointer("scaling/checkpoints"),
    )
    if rank.rank == 0:
        rank.storage.delete("scaling/checkpoints")
    checks = [asdict(check) for check in gate(measurement, config.scaling)]
    return asdict(measurement) | {"efficiency": measurement.efficiency, "checks": checks}


def train(rank: Rank) -> dict[str, Any]:
    """Train to the last step, from the newest complete checkpoint on."""
    config = rank.config
    with _metrics_log(rank) as (metrics, store):

        def heartbeat(sign: dict[str, Any]) -> None:
            rank.beat(sign["phase"], sign["step"], sign["steps"])
            _follow_startup(rank, sign["phase"], metrics)
            # The trainer beats after a step's line and before its checkpoint: no checkpoint is ahead of the metrics.
            store(sign["step"] % config.training.checkpoint_every_steps == 0)

        checkpointer = rank.checkpointer()
        trainer = Trainer(
            model_config=config.model,
            training_config=config.training,
            vocab_size=rank.tokenizer.vocab_size,
            seed=config.seed,
            data=TrainData(
                train=open_dataset(config, rank.tokens, "train"),
                order=training_order(config, rank.tokens.counts),
                validation=open_dataset(config, rank.tokens, "validation"),
            ),
            plan=rank.plan,
            mesh=rank.mesh,
            identity={"tokens": rank.tokens.fingerprint, "weights": source_weights(config.data)},
            checkpointer=checkpointer,
            metrics=metrics,
            heartbeat=heartbeat,
            stop_asked=rank.watchdog.stop_asked,
        )
        rank.startup.end("model_build")
        outcome = trainer.run()
    if outcome.preempted:
        raise Preempted(checkpointer.newest_step())
    return asdict(outcome) | {"startup_seconds": rank.startup.seconds}


def _follow_startup(rank: Rank, phase: str, metrics: MetricsLog) -> None:
    """Watch for the end of the first step. The trainer says that it is `training` before it, and after each step, but
    for a validation that comes first."""
    seconds = rank.startup.seconds
    if phase not in ("training", "validation") or "first_batch" in seconds:
        return
    if "checkpoint_load" not in seconds:
        rank.startup.end("checkpoint_load")
    elif "first_step" not in seconds:
        rank.startup.end("first_step")
        rank.end_first_step()
    if phase == "training" and "first_step" in seconds and rank.rank == 0:
        (*_, line) = parse_lines(metrics.path.read_bytes(), METRICS)
        seconds["first_batch"] = line["loader_seconds"]
        seconds["first_step"] -= line["loader_seconds"]
        logger.info("%s", rank.startup)


@contextmanager
def _metrics_log(rank: Rank) -> Iterator[tuple[MetricsLog, Callable[[bool], None]]]:
    """The metrics log, and a function that stores it where the run directory is remote: appended locally, sent at most
    every few seconds."""
    tensorboard = rank.config.training.tensorboard
    if isinstance(rank.storage, FileStorage):
        with closing(MetricsLog(rank.storage.root / METRICS, tensorboard)) as metrics:
            yield metrics, lambda now: None
        return
    sent = time.monotonic()
    for name in (METRICS, f"metrics/{ATTEMPTS}"):
        if rank.rank == 0 and rank.storage.list(name):
            rank.storage.download(name, rank.scratch / name)

    def store(now: bool) -> None:
        nonlocal sent
        if rank.rank == 0 and (now or time.monotonic() - sent > 10):
            sent = time.monotonic()
            try:
                for path in (rank.scratch / METRICS).parent.rglob("*"):
                    if path.is_file():
                        rank.storage.upload(path, path.relative_to(rank.scratch).as_posix())
            except OSError as error:
                if now:
                    raise
                logger.warning("the metrics could not be stored, for now: %s", error)

    try:
        with closing(MetricsLog(rank.scratch / METRICS, tensorboard)) as metrics:
            yield metrics, store
    finally:
        store(True)


def evaluate(rank: Rank) -> dict[str, Any] | None:
    """Score a checkpoint on held-out text and multiple choice, beside the baselines; rank 0 alone has the report."""
    config, vocab_size = rank.config, rank.tokenizer.vocab_size
    trained, untrained = GPT(config.model, vocab_size), GPT(config.model, vocab_size)
    for model in (trained, untrained):
        initialize(model, config.seed)
        model.to(rank.mesh.device_type)
        model.register_forward_hook(lambda *_: rank.beat("score", 0, 0))  # scoring has no other sign of life
    # Every rank holds the whole model here: ranks score different documents, so they cannot share a sharded one.
    state = {f"model.{name}": parameter.detach() for name, parameter in trained.named_parameters()}
    identity = {**config.model.model_dump(), "vocab_size": vocab_size, "tokens": rank.tokens.fingerprint}
    step = rank.checkpointer().load_latest(state, identity, required=True, at_step=rank.job.step)
    texts = _test_texts(rank)
    share = score_share(
        trained,
        untrained,
        rank.tokenizer,
        texts,
        load_choices(config.evaluation),
        seq_len=config.model.seq_len,
        batch_size=config.evaluation.batch_size,
        rank=rank.rank,
        world_size=rank.world_size,
        device=rank.mesh.device_type,
    )
    shares: list[Any] = [None] * rank.world_size
    dist.all_gather_object(shares, share)
    if rank.rank != 0:
        return None
    rank.beat("baselines", 0, 0)
    counts = sum(np.load(path) for path in rank.tokens.local_files("unigram.npy", "train/"))
    samples = write_samples(
        trained,
        rank.tokenizer,
        config.evaluation,
        seq_len=config.model.seq_len,
        seed=config.seed,
        device=rank.mesh.device_type,
    )
    return {"step": step} | assemble(shares, baselines(rank.tokenizer, texts, counts), samples)


def _test_texts(rank: Rank) -> list[str]:
    """The first test documents, whole, up to the configured size; at least one."""
    texts: list[str] = []
    size = 0
    documents = read_manifest(rank.config.run_uri, "documents").local_files(".parquet", "test/")
    for document in iter_documents(documents):
        size += len(document.text.encode())
        if texts and size > rank.config.evaluation.max_test_bytes:
            break
        texts.append(document.text)
    return texts


def _scratch(run_uri: str) -> Path:
    """This rank's own empty directory, on the run's disk where it has one; the same after a kill, so none piles up."""
    storage = open_storage(run_uri)
    run = digest(storage.uri)[:16]
    base = (
        storage.root / ".scratch" if isinstance(storage, FileStorage) else Path(tempfile.gettempdir()) / f"jumbo-{run}"
    )
    path = base / f"rank-{dist.get_rank()}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


@record
def main() -> int:
    """Returns the exit code."""
    startup = Startup()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    job = WorkerJob.model_validate_json(sys.argv[1])
    watchdog = Watchdog(job.config.cluster.stop_seconds, job.config.cluster.stall_timeout_seconds)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=job.config.cluster.stall_timeout_seconds)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    startup.end("process_group")
    scratch = _scratch(job.config.run_uri)
    try:
        rank = Rank(job, scratch, watchdog, startup)
        jobs: dict[str, Callable[[Rank], Any]] = {
            "validate-scaling": validate_scaling,
            "train": train,
            "evaluate": evaluate,
        }
        result = jobs[job.kind](rank)
        if rank.rank == 0:
            rank.storage.write(job.result, json.dumps(result, indent=1).encode())
        code = 0
    except CheckpointUnavailable as away:
        raise StorageUnavailable(str(away)) from away  # which the launcher knows
    except Preempted as preempted:
        # torchrun makes a 1 of every exit code, so the launcher finds this.
        write_preemption(preempted.saved_step)
        code = os.EX_TEMPFAIL
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # the other ranks' are there
            scratch.parent.rmdir()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    try:
        code = main() or 0
    except Exception:  # noqa: BLE001 - the last frame of the process: printed, and the exit code says it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: a normal exit would wait for a save in flight, and that for ranks that wait for this one; and a signal in
    # the middle of it would change the code.
    os._exit(code)
