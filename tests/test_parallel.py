"""Every layout of the ranks trains the model that one process trains."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run

from model.config import ModelConfig, TrainingConfig
from model.data.tokens.batches import rank_batches
from model.learner import Learner
from model.optim import Schedule
from model.parallel import build_mesh
from model.parallel_plan import ParallelConfig, plan_parallelism

VOCAB_SIZE = 40
MODEL = ModelConfig(n_layer=4, n_head=2, d_model=16, seq_len=8)
TRAINING = TrainingConfig(
    steps=20, global_batch_size=8, micro_batch_size=2, ramp_start_batch_size=8, learning_rate=0.01, clip_norm=0.5
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "stages_per_rank": 2}),
    "hsdp 2x2": (4, {"replicas": 2}),
    "dp2 tp2 pp2": (8, {"tp": 2, "pp": 2}),
    "selective": (1, {"checkpointing": "selective"}),
    "full, dp2 tp2": (4, {"tp": 2, "checkpointing": "full"}),
}


# These run on ranks.


def learner(layout: dict[str, Any], model: ModelConfig = MODEL) -> Learner:
    plan = plan_parallelism(ParallelConfig(**layout), dist.get_world_size(), model, TRAINING)
    return Learner(model, TRAINING, VOCAB_SIZE, 3, plan, build_mesh(plan, "cpu"))


def batches(of: Learner, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (8, MODEL.seq_len + 1), generator=chance)
    ids = rank_batches(np.arange(8), of.data_rank, of.plan.dp, TRAINING.micro_batch_size)
    return [(tokens[some, :-1], tokens[some, 1:]) for some in ids]


def take_steps(layout: dict[str, Any], dtype: torch.dtype) -> dict[str, list[float]]:
    torch.set_default_dtype(dtype)
    schedule = Schedule(TRAINING, MODEL.seq_len)
    trained = learner(layout)
    results = [trained.step(step, batches(trained, step), schedule.learning_rate(step)) for step in range(20)]
    return {
        "loss": [result.loss for result in results],
        "gradient_norm": [result.gradient_norm for result in results],
        "validation_loss": [trained.mean_loss(batches(trained, 99))],
    }


# The tests.


@pytest.fixture(scope="module")
def alone() -> dict[torch.dtype, dict[str, list[float]]]:
    return {dtype: run(take_steps, 1, {}, dtype)[0] for dtype in (torch.float64, torch.float32)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_the_same_steps(layout: str, alone: dict[torch.dtype, dict[str, list[float]]]) -> None:
    world_size, settings = LAYOUTS[layout]
    expected = alone[torch.float64]
    assert expected["loss"][-1] < expected["loss"][0]
    assert max(expected["gradient_norm"]) > 2 * TRAINING.clip_norm  # clipping is active
    for measured in run(take_steps, world_size, settings, torch.float64):
        for name, values in measured.items():
            assert np.abs(np.subtract(values, expected[name])).max() < 1e-12, name
