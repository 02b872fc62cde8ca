"""Learners in any layout of the ranks of `ranks.py`, and what they learn from."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from infra.storage import FileStorage
from model.checkpoint import Checkpointer
from model.config import ModelConfig, TrainingConfig
from model.data.tokens.batches import TokenDataset, rank_batches
from model.data.tokens.mixture import Mixture, Source
from model.learner import Learner
from model.metrics import MetricsLog
from model.parallel import build_mesh
from model.parallel_plan import ParallelConfig, ParallelPlan, plan_parallelism
from model.pipeline import Batches
from model.trainer import TrainData, Trainer

VOCAB_SIZE = 40
MODEL = ModelConfig(n_layer=2, n_head=2, d_model=16, seq_len=8)
TRAINING = TrainingConfig(
    steps=20, global_batch_size=8, micro_batch_size=2, ramp_start_batch_size=1, learning_rate=0.01, clip_norm=0.25
)


@dataclass(frozen=True)
class Layout:
    """So many ranks, and what they do in which order."""

    world_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 2

    def plan(self, model: ModelConfig, training: TrainingConfig, vocab_size: int = VOCAB_SIZE) -> ParallelPlan:
        return plan_parallelism(
            ParallelConfig(**self.settings),
            self.world_size,
            model,
            training.model_copy(update={"micro_batch_size": self.micro_batch_size}),
            vocab_size=vocab_size,
            ranks_per_node=self.world_size,
        )


# These run on ranks.


def make_learner(
    layout: Layout,
    model: ModelConfig = MODEL,
    training: TrainingConfig = TRAINING,
    seed: int = 3,
    vocab_size: int = VOCAB_SIZE,
) -> Learner:
    assert dist.get_world_size() == layout.world_size
    plan = layout.plan(model, training, vocab_size)
    return Learner(model, training, vocab_size, seed, plan, build_mesh(plan, "cpu"))


def make_trainer(
    root: Path,
    layout: Layout,
    model: ModelConfig,
    training: TrainingConfig,
    heartbeat: Callable[[dict[str, Any]], None] = lambda status: None,
) -> Trainer:
    """A run in `root` over numbers that count up."""
    assert dist.get_world_size() == layout.world_size
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    plan, data = layout.plan(model, training), dataset()
    return Trainer(
        model_config=model,
        training_config=training.model_copy(update={"micro_batch_size": layout.micro_batch_size}),
        vocab_size=VOCAB_SIZE,
        seed=3,
        data=TrainData(data, Mixture([Source("", len(data))], 3), data),
        plan=plan,
        mesh=build_mesh(plan, "cpu"),
        identity={},
        checkpointer=Checkpointer(FileStorage(root / "checkpoints"), 2, group),
        metrics=MetricsLog(root / "train.jsonl"),
        heartbeat=heartbeat,
    )


def dataset() -> TokenDataset:
    """Numbers that count up from 0 to a random one, again and again."""
    chance = np.random.default_rng(0)
    counts = [np.arange(length) for length in chance.integers(3, 20, size=300)]
    return TokenDataset([[np.concatenate(counts).astype(np.uint32)]], MODEL.seq_len)


def batches(learner: Learner, layout: Layout, first: int, count: int) -> Batches:
    """The rank's micro-batches of `count` sequences, from the first on."""
    data, ids = dataset(), np.arange(first, first + count)
    return [data.batch(some) for some in rank_batches(ids, learner.data_rank, learner.plan.dp, layout.micro_batch_size)]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def local_digests(learner: Learner, prefix: str | tuple[str, ...] = "") -> dict[str, str]:
    """Of this rank's part of every tensor of the state whose name begins so."""
    state = {name: tensor for name, tensor in learner.state().items() if name.startswith(prefix)}
    return {name: digest(t.to_local() if isinstance(t, DTensor) else t) for name, t in state.items()}


def full_digests(learner: Learner, prefix: str = "") -> dict[str, str]:
    """Of the whole of every tensor of the state that this rank has a part in and whose name begins so."""
    state = {name: tensor for name, tensor in learner.state().items() if name.startswith(prefix)}
    return {name: digest(t.full_tensor() if isinstance(t, DTensor) else t) for name, t in state.items()}
