"""Training: resume, steps, validation, checkpoints.

Everything a step does follows from the configuration, the seed and the step: which sequences, which learning rate,
which dropout masks. So there is no state to restore but tensors, and a resumed run repeats the unbroken one.
"""

import logging
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from model.checkpoint import Checkpointer, CheckpointError
from model.config import ModelConfig, TrainingConfig
from model.data.tokens.batches import IGNORED, Ids, TokenDataset, rank_batches
from model.data.tokens.mixture import Mixture
from model.data.tokens.prefetch import prefetch
from model.gpt import derive_seed
from model.loss import token_loss
from model.metrics import MetricsLog
from model.optim import Schedule, build_optimizer, optimizer_state
from model.parallel import build_model, clip_gradients, reshard

logger = logging.getLogger(__name__)

FREE_FIELDS = {
    "steps",
    "micro_batch_size",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "validate_every_steps",
    "validation_sequences",
    "resume",
}
"""What a run may change when it is resumed; every other training field shapes its steps, so it is in the identity."""

PREFETCH_STEPS = 4  # whose batches are read at once, while the step before them is taken

Batches = list[tuple[Tensor, Tensor]]
"""One rank's micro-batches: inputs (b, T) and targets (b, T); as many on every rank."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient became NaN or infinite; the parameters were not touched."""


@dataclass(frozen=True)
class TrainData:
    """What is trained on, in which order, and what is held out."""

    train: TokenDataset
    order: Mixture
    validation: TokenDataset


@dataclass(frozen=True)
class StepResult:
    """What one step measured, the same on every rank."""

    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class TrainingOutcome:
    """What `Trainer.run` did. The losses are the newest known, of an earlier run where this one had nothing to do."""

    first_step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    seconds: float
    peak_memory_bytes: int


class Learner:
    """The model with its optimizer, on one rank of the mesh: what a step changes and a checkpoint holds."""

    def __init__(
        self, model_config: ModelConfig, training_config: TrainingConfig, vocab_size: int, seed: int, mesh: DeviceMesh
    ) -> None:
        self.config = training_config
        self.seed = seed
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.device = torch.device(mesh.device_type)
        self.model = build_model(model_config, vocab_size, seed, mesh)
        self.optimizer = build_optimizer(self.model, training_config)

    def step(self, step: int, batches: Batches, learning_rate: float) -> StepResult:
        """One optimizer step over the micro-batches of all ranks.

        Raises:
            NonFiniteError: before anything is changed.
        """
        torch.manual_seed(derive_seed(self.seed, "dropout", step, self.rank))
        tokens = self._sum_over_ranks(sum(int((targets != IGNORED).sum()) for _, targets in batches))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.train()
        self.optimizer.zero_grad()
        for inputs, targets in batches:
            summed, _ = token_loss(self.model(inputs.to(self.device)), targets.to(self.device))
            (summed / tokens).backward()
            loss_sum += summed.detach()
        loss = self._sum_over_ranks(loss_sum) / tokens
        gradient_norm = clip_gradients(self.model, self.config.clip_norm)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise NonFiniteError(f"step {step + 1}: the loss is {loss} and the gradient norm {gradient_norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return StepResult(loss, gradient_norm)

    @torch.no_grad()
    def mean_loss(self, batches: Batches) -> float:
        """The loss per token over the micro-batches of all ranks, without dropout."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for inputs, targets in batches:
            sums += torch.stack(token_loss(self.model(inputs.to(self.device)), targets.to(self.device)))
        reshard(self.model)
        dist.all_reduce(sums, group=self.group)
        loss_sum, tokens = sums.tolist()
        return loss_sum / tokens

    def state(self) -> dict[str, Tensor]:
        """The live tensors under names that no layout changes: `model.*` and `optimizer.*`."""
        parameters = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values()), "the model is not sharded"
        return parameters | optimizer_state(self.model, self.optimizer)

    def _sum_over_ranks(self, value: float | Tensor) -> float:
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item()

    def peak_memory_bytes(self) -> int:
        """The most memory that any rank has used: of the GPU, or resident where there is none."""
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated()
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.tensor(used, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        return int(peak)


class Trainer:
    """A run, from wherever its checkpoints say to its last step.

    Every rank of the mesh makes one and calls `run`. The metrics log and the heartbeat are used on rank 0 only.

    Args:
        identity: what the run is made of beyond the configuration, such as the fingerprint of its tokens; a
            checkpoint with another identity is refused.
        heartbeat: called with the phase and progress whenever there is some.
    """

    def __init__(
        self,
        *,
        model_config: ModelConfig,
        training_config: TrainingConfig,
        vocab_size: int,
        seed: int,
        data: TrainData,
        mesh: DeviceMesh,
        identity: dict[str, Any],
        checkpointer: Checkpointer,
        metrics: MetricsLog,
        heartbeat: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config = training_config
        self.seed = seed
        self.data = data
        self.checkpointer = checkpointer
        self.metrics = metrics
        self.heartbeat = heartbeat
        self.schedule = Schedule(training_config, model_config.seq_len)
        self.learner = Learner(model_config, training_config, vocab_size, seed, mesh)
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.identity = {
            **model_config.model_dump(),
            "vocab_size": vocab_size,
            "seed": seed,
            **training_config.model_dump(exclude=FREE_FIELDS),
            **identity,
        }

    def run(self) -> TrainingOutcome:
        """Resume, and train to the last step.

        Raises:
            CheckpointError: nothing could be resumed from although something was there, or what is there is beyond the
                last step, or a save failed.
            NonFiniteError: training diverged.
        """
        started = time.monotonic()
        first_step, line = self._resume()
        steps = range(first_step, self.config.steps)
        with closing(prefetch(self._training_batches, steps, PREFETCH_STEPS)) as batches:
            for step in steps:
                line = self._step(step, batches)
                if self._due(step + 1, self.config.validate_every_steps):
                    self._beat("validation", step + 1)
                    line["validation_loss"] = self.validate()
                if self.rank == 0:
                    self.metrics.write(line)
                self._beat("training", step + 1)
                if self._due(step + 1, self.config.checkpoint_every_steps):
                    self.checkpointer.save(step + 1, self.learner.state(), self.identity)
        self._beat("checkpoint", self.config.steps)
        self.checkpointer.wait()
        return TrainingOutcome(
            first_step=first_step,
            steps=self.config.steps - first_step,
            loss=line.get("loss"),
            validation_loss=line.get("validation_loss"),
            seconds=time.monotonic() - started,
            peak_memory_bytes=self.learner.peak_memory_bytes(),
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
        line = self.metrics.rewind(step) if self.rank == 0 else None
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
        result = self.learner.step(step, next(batches), learning_rate)
        seconds = time.perf_counter() - started
        return {
            "step": step + 1,
            "loss": result.loss,
            "learning_rate": learning_rate,
            "gradient_norm": result.gradient_norm,
            "tokens": self.schedule.tokens(step + 1),
            "batch_size": size,
            "tokens_per_second": size * self.schedule.seq_len / seconds,
            "step_seconds": seconds,
        }

    def _training_batches(self, step: int) -> Batches:
        ids = self.data.order.sequence_ids(self.schedule.first_sample(step), self.schedule.batch_size(step))
        return [self.data.train.batch(micro_batch) for micro_batch in self._micro_batches(ids)]

    def _micro_batches(self, ids: Ids) -> list[Ids]:
        return rank_batches(ids, self.rank, self.world_size, self.config.micro_batch_size)

    def _due(self, step: int, every_steps: int) -> bool:
        return step % every_steps == 0 or step == self.config.steps

    def _beat(self, phase: str, step: int) -> None:
        if self.rank == 0:
            self.heartbeat({"phase": phase, "step": step, "steps": self.config.steps})
