"""A run that is killed at random points goes on, bit for bit, in every layout."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from layouts import MODEL, TRAINING, Layout, local_digests, make_trainer
from ranks import Job, run

DROPPING = MODEL.model_copy(update={"n_layer": 4, "dropout": 0.2})
RUN = TRAINING.model_copy(
    update={
        "steps": 12,
        "ramp_tokens": 200,
        "warmup_tokens": 100,
        "checkpoint_every_steps": 3,
        "validate_every_steps": 4,
        "validation_sequences": 7,
    }
)
SAME = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "batch_size", "validation_loss", "skipped_steps")


# These run on ranks.


def train(root: Path, layout: Layout) -> dict[str, str]:
    """This rank's part of the state at the end."""
    trainer = make_trainer(root, layout, DROPPING, RUN)
    trainer.run()
    return local_digests(trainer.learner)


def train_until_killed(root: Path, layout: Layout, rank: int, step: int, delay_seconds: float) -> None:
    """SIGKILL on a rank some time after the end of a step: in the next one, a save or a validation."""

    def heartbeat(status: dict[str, Any]) -> None:
        if dist.get_rank() == rank and status["step"] == step:
            timer = threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    make_trainer(root, layout, DROPPING, RUN, heartbeat).run()


# The tests.


def lines(root: Path) -> list[dict[str, Any]]:
    parsed = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SAME if name in line} for line in parsed]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        pytest.param(layout, kills, id=name, marks=marks)
        for name, layout, kills, *marks in [
            ("interleaved", Layout(2, {"pp": 2, "stages_per_rank": 2}), 2),
            ("tp2", Layout(2, {"tp": 2}), 6, pytest.mark.slow),
            ("pp2", Layout(2, {"pp": 2}), 6, pytest.mark.slow),
            ("interleaved, often", Layout(2, {"pp": 2, "stages_per_rank": 2}), 6, pytest.mark.slow),
            ("hsdp 2x2", Layout(4, {"replicas": 2}), 6, pytest.mark.slow),
            ("dp2 tp2 pp2", Layout(8, {"tp": 2, "pp": 2}), 6, pytest.mark.slow),
            ("selective, dp2 pp2", Layout(4, {"pp": 2, "checkpointing": "selective"}), 6, pytest.mark.slow),
        ]
    ],
)
def test_after_kills_at_random_points_every_bit_is_that_of_the_unbroken_run(
    tmp_path: Path, layout: Layout, kills: int
) -> None:
    expected = run(train, layout.world_size, tmp_path / "unbroken", layout)
    chance = np.random.default_rng(kills)
    killed = False
    for step in sorted(chance.integers(1, RUN.steps, size=kills).tolist()):
        rank, delay_seconds = int(chance.integers(layout.world_size)), float(chance.uniform(0, 0.3))
        job = Job(train_until_killed, layout.world_size, tmp_path / "killed", layout, rank, step, delay_seconds)
        job.wait_for_a_death()
        killed |= job.processes[rank].exitcode == -signal.SIGKILL  # not where the run was over before
        job.kill()
    assert killed
    assert run(train, layout.world_size, tmp_path / "killed", layout) == expected
    assert lines(tmp_path / "killed") == lines(tmp_path / "unbroken")
    assert len(lines(tmp_path / "unbroken")) == RUN.steps
