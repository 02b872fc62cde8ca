"""Training: resume, steps, validation, checkpoints.

Everything a step does follows from the configuration, the seed and the step: which sequences, which learning rate,
which dropout masks. So there is no state to restore but tensors, and a resumed run repeats the unbroken one.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from model.checkpoint import Checkpointer, CheckpointError
from model.config import ModelConfig, TrainingConfig
from model.data.tokens.batches import Ids, TokenDataset, rank_batches
from model.data.tokens.mixture import Mixture
from model.data.tokens.prefetch import prefetch
from model.flops import training_flops_per_token
from model.goodput import Goodput
from model.learner import Learner, StepResult, compute_precision
from model.metrics import MetricsLog
from model.optim import Schedule
from model.parallel_plan import ParallelPlan
from model.peaks import model_flops_utilization, peak_of
from model.pipeline import Batches
from model.spikes import NOT_FINITE
from model.stragglers import Exchange

logger = logging.getLogger(__name__)

FREE_FIELDS = {
    "steps",
    "micro_batch_size",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "max_failed_saves",
    "validate_every_steps",
    "validation_sequences",
    "resume",
    "tensorboard",
}
"""What a run may change when it is resumed; every other training field shapes its steps, so it is in the identity."""

PREFETCH_STEPS = 4  # whose batches are read at once, while the step before them is taken


class NonFiniteError(RuntimeError):
    """The loss or the gradient stayed NaN or infinite; the parameters have not been touched since it began."""


@dataclass(frozen=True)
class TrainData:
    """What is trained on, in which order, and what is held out."""

    train: TokenDataset
    order: Mixture
    validation: TokenDataset


@dataclass(frozen=True)
class TrainingOutcome:
    """What `Trainer.run` did. The losses are the newest known, of an earlier run where this one had nothing to do."""

    first_step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    seconds: float
    peak_memory_bytes: int
    skipped_steps: int
    goodput: Goodput | None
    """Of the run until now, all attempts together; on rank 0 only, as the metrics are."""
    preempted: bool
    """Whether it was asked to stop before the last step. The step it was at is saved, unless its loss was no number."""


class Trainer:
    """A run, from wherever its checkpoints say to its last step.

    Every rank of the mesh makes one and calls `run`. The metrics log is used on rank 0 only.

    Args:
        plan: which the mesh is of, by `build_mesh`.
        identity: what the run is made of beyond the configuration, such as the fingerprint of its tokens; a
            checkpoint with another identity is refused.
        heartbeat: called on every rank with the phase and progress whenever there is some.
        stop_asked: whether this rank was asked to stop; where any was, all save the step they are at, and return.
    """

    def __init__(
        self,
        *,
        model_config: ModelConfig,
        training_config: TrainingConfig,
        vocab_size: int,
        seed: int,
        data: TrainData,
        plan: ParallelPlan,
        mesh: DeviceMesh,
        identity: dict[str, Any],
        checkpointer: Checkpointer,
        metrics: MetricsLog,
        heartbeat: Callable[[dict[str, Any]], None],
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = training_config
        self.data = data
        self.plan = plan
        self.checkpointer = checkpointer
        self.metrics = metrics
        self.heartbeat = heartbeat
        self.stop_asked = stop_asked
        self.schedule = Schedule(training_config, model_config.seq_len)
        self.learner = Learner(model_config, training_config, vocab_size, seed, plan, mesh)
        self.rank = dist.get_rank()
        dtype = compute_precision(training_config, mesh.device_type) or torch.float32
        self.exchange = Exchange(self.learner.device, dtype)
        self.flops_per_token = training_flops_per_token(model_config, vocab_size)
        self.peak = peak_of(self.learner.device, dtype)
        self.identity = {
            **model_config.model_dump(),
            "vocab_size": vocab_size,
            "seed": seed,
            **training_config.model_dump(exclude=FREE_FIELDS),
            **identity,
        }
        self._nonfinite = 0  # steps in a row until now
        self._save_owed = False
        self._blocked_seconds = 0.0  # by the save after the step before

    def run(self) -> TrainingOutcome:
        """Resume, and train to the last step.

        Raises:
            CheckpointError: nothing could be resumed from although something was there, or what is there is beyond the
                last step, or saves failed.
            NonFiniteError: training diverged.
        """
        started = time.monotonic()
        first_step, line = self._resume()
        step, preempted = first_step, False
        with closing(prefetch(self._training_batches, range(first_step, self.config.steps), PREFETCH_STEPS)) as batches:
            while step < self.config.steps and not preempted:
                line = self._step(step, batches)
                step += 1
                preempted = self._any_stop_asked(line) and step < self.config.steps
                self._end_step(step, line, preempted)
        self._beat("checkpoint", step)
        self.checkpointer.wait()
        return TrainingOutcome(
            first_step=first_step,
            steps=step - first_step,
            loss=line.get("loss"),
            validation_loss=line.get("validation_loss"),
            seconds=time.monotonic() - started,
            peak_memory_bytes=self.learner.peak_memory_bytes(),
            skipped_steps=self.learner.guard.skipped,
            goodput=self.metrics.goodput() if self.rank == 0 else None,
            preempted=preempted,
        )

    def validate(self) -> float:
        """The loss per token of the first validation sequences, the same ones every time."""
        count = min(self.config.validation_sequences, len(self.data.validation))
        micro_batches = self._micro_batches(np.arange(count))
        return self.learner.mean_loss(list(prefetch(self.data.validation.batch, micro_batches, PREFETCH_STEPS)))

    def _resume(self) -> tuple[int, dict[str, Any]]:
        """The step to go on with, and the last line of the metrics that stand."""
        self._beat("resume", 0)
        newest = self.checkpointer.newest_step()
        if newest is not None and newest > self.config.steps:
            raise CheckpointError(
                f"training.steps ({self.config.steps}) is below the newest checkpoint (step {newest}): "
                "score that checkpoint, or give the shorter run a directory of its own"
            )
        required = self.config.resume == "required"
        step = self.checkpointer.load_latest(self.learner.state(), self.identity, required) or 0
        line = None
        if self.rank == 0:
            line = self.metrics.begin(step) if step < self.config.steps else self.metrics.rewind(step)
        if step and self.rank == 0:
            logger.info("resumed at step %d of %d", step, self.config.steps)
        self._beat("training", step)
        return step, line or {}

    def _step(self, step: int, batches: Iterator[Batches]) -> dict[str, Any]:
        """Take one step on the next batches; its line in the metrics, where steps are counted from 1. Its seconds
        include what it waits for the batches."""
        started = time.perf_counter()
        size = self.schedule.batch_size(step)
        learning_rate = self.schedule.learning_rate(step)
        batch = next(batches)
        loader_seconds = time.perf_counter() - started
        result = self.learner.step(step, batch, learning_rate)
        seconds = time.perf_counter() - started
        self._count_nonfinite(step + 1, result)
        tokens_per_second = size * self.schedule.seq_len / seconds
        return {
            "step": step + 1,
            "time": time.time(),
            "loss": result.loss,
            "learning_rate": learning_rate,
            "gradient_norm": result.gradient_norm,
            "tokens": self.schedule.tokens(step + 1),
            "batch_size": size,
            "tokens_per_second": tokens_per_second,
            **self._utilization(tokens_per_second),
            "step_seconds": seconds,
            "loader_seconds": loader_seconds,
            "checkpoint_blocked_seconds": self._blocked_seconds,
            "skipped_steps": self.learner.guard.skipped,
        } | ({"skipped": result.skipped} if result.skipped else {})

    def _utilization(self, tokens_per_second: float) -> dict[str, float]:
        """Empty where the device's peak is unknown."""
        if not self.peak:
            return {}
        flops_per_second = self.flops_per_token * tokens_per_second
        return {"mfu": model_flops_utilization(flops_per_second, dist.get_world_size(), self.peak)}

    def _end_step(self, step: int, line: dict[str, Any], preempted: bool) -> None:
        """What follows a step: a validation, its line in the metrics, a checkpoint."""
        # Who is asked to stop may not have the time to validate as well as to save.
        if self._due(step, self.config.validate_every_steps) and not preempted:
            self._beat("validation", step)
            line["validation_loss"] = self.validate()
        if self.rank == 0:
            self.metrics.write(line)
        self._beat("training", step)
        started = time.perf_counter()
        self._save_owed |= preempted or self._due(step, self.config.checkpoint_every_steps)
        # Where the loss is no number, the parameters may be none either; such are never kept.
        if self._save_owed and not self._nonfinite:
            self.checkpointer.save(step, self.learner.state(), self.identity)
            self._save_owed = False
        elif self._save_owed and step == self.config.steps:
            raise NonFiniteError(f"step {step}, the last one: the loss is no number, so there is nothing to keep")
        self._blocked_seconds = time.perf_counter() - started

    def _count_nonfinite(self, step: int, result: StepResult) -> None:
        if not result.skipped:
            self._nonfinite = 0
            return
        if self.rank == 0:
            found = f"loss {result.loss:g}, gradient norm {result.gradient_norm:g}"
            logger.warning("step %d was skipped, %s: %s", step, result.skipped, found)
        self._nonfinite = self._nonfinite + 1 if result.skipped == NOT_FINITE else 0
        if self._nonfinite > self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"step {step}: the loss is {result.loss} and the gradient norm {result.gradient_norm}; "
                f"{self._nonfinite} steps in a row were not finite, more than training.max_nonfinite_steps "
                f"({self.config.max_nonfinite_steps})"
            )

    def _any_stop_asked(self, line: dict[str, Any]) -> bool:
        """Of any rank; with it, the line gets what takes all ranks to know."""
        known = self.exchange.step(
            stop_asked=self.stop_asked(),
            loader_seconds=line["loader_seconds"],
            memory_bytes=self.learner.used_memory_bytes(),
        )
        line |= {"loader_seconds": known.loader_seconds, "memory_gib": known.memory_bytes / 2**30}
        if known.slow_ranks:
            line["slow_ranks"] = known.slow_ranks
        return known.any_stop_asked

    def _training_batches(self, step: int) -> Batches:
        ids = self.data.order.sequence_ids(self.schedule.first_sample(step), self.schedule.batch_size(step))
        return [self.data.train.batch(micro_batch) for micro_batch in self._micro_batches(ids)]

    def _micro_batches(self, ids: Ids) -> list[Ids]:
        return rank_batches(ids, self.learner.data_rank, self.plan.dp, self.config.micro_batch_size)

    def _due(self, step: int, every_steps: int) -> bool:
        return step % every_steps == 0 or step == self.config.steps

    def _beat(self, phase: str, step: int) -> None:
        self.heartbeat({"phase": phase, "step": step, "steps": self.config.steps})
