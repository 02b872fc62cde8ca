import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Job, run

from infra.storage import FileStorage
from model.checkpoint import Checkpointer, CheckpointError
from model.config import ModelConfig, TrainingConfig
from model.data.tokens.batches import IGNORED, TokenDataset
from model.data.tokens.mixture import Mixture, Source
from model.flops import training_flops_per_token
from model.learner import Learner
from model.loss import token_loss
from model.metrics import MetricsLog
from model.parallel import build_mesh, shard
from model.parallel_plan import ParallelPlan
from model.peaks import Peak
from model.stragglers import Probe
from model.trainer import NonFiniteError, TrainData, Trainer, TrainingOutcome

VOCAB_SIZE = 40
MODEL = ModelConfig(n_layer=2, n_head=2, d_model=16, seq_len=8, dropout=0.1)
WITHOUT_DROPOUT = MODEL.model_copy(update={"dropout": 0.0})
TRAINING = TrainingConfig(
    steps=20,
    global_batch_size=6,
    micro_batch_size=2,
    ramp_start_batch_size=2,
    ramp_tokens=200,
    warmup_tokens=100,
    learning_rate=0.02,
    checkpoint_every_steps=5,
    validate_every_steps=5,
    validation_sequences=9,
)
UNTIMED = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "batch_size", "validation_loss")


def dataset(n_tokens: int) -> TokenDataset:
    """Numbers that count up, which a model can learn."""
    tokens = np.arange(n_tokens, dtype=np.uint32) % VOCAB_SIZE
    return TokenDataset([[tokens]], MODEL.seq_len)


def train_data(seed: int) -> TrainData:
    training = dataset(500)
    return TrainData(training, Mixture([Source("", len(training))], seed), dataset(100))


# These run on ranks.


def ignore(status: dict[str, Any]) -> None:
    pass


def make(
    root: Path, training: TrainingConfig, heartbeat: Callable[[dict[str, Any]], None] = ignore, **other: Any
) -> Trainer:
    group = dist.new_group(backend="gloo")
    arguments = {
        "model_config": MODEL,
        "vocab_size": VOCAB_SIZE,
        "seed": 3,
        "data": train_data(other.get("seed", 3)),
        "identity": {"tokens": "fingerprint"},
        "checkpointer": Checkpointer(FileStorage(root / "checkpoints"), 2, group),
        "metrics": MetricsLog(root / "train.jsonl"),
    }
    plan = ParallelPlan(shards=dist.get_world_size())
    return Trainer(
        training_config=training, plan=plan, mesh=build_mesh(plan, "cpu"), heartbeat=heartbeat, **(arguments | other)
    )


def train(root: Path, training: TrainingConfig = TRAINING, other: dict[str, Any] | None = None) -> TrainingOutcome:
    return make(root, training, **(other or {})).run()


def train_with_each(root: Path, changes: list[dict[str, Any]]) -> list[str]:
    """What the run says to each change of its settings; empty where it has nothing against it."""
    said = []
    for change in changes:
        trainer = make(root, TRAINING.model_copy(update=change))
        before = {name: tensor.full_tensor() for name, tensor in trainer.learner.state().items() if "model." in name}
        try:
            trainer.run()
        except CheckpointError as error:
            said.append(str(error))
            after = trainer.learner.state()
            assert all(torch.equal(tensor, after[name].full_tensor()) for name, tensor in before.items())
        else:
            said.append("")
    return said


def train_in_fp64(root: Path, training: TrainingConfig) -> TrainingOutcome:
    torch.set_default_dtype(torch.float64)
    return train(root, training, {"model_config": WITHOUT_DROPOUT})


def train_until_killed(root: Path, training: TrainingConfig, at: int) -> None:
    """SIGKILL on rank 0 right after step `at`, once what was being saved is stored."""

    def heartbeat(status: dict[str, Any]) -> None:
        if status["phase"] == "training" and status["step"] == at:
            trainer.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make(root, training, heartbeat)
    trainer.run()


def train_and_listen(root: Path) -> list[dict[str, Any]]:
    heard: list[dict[str, Any]] = []
    make(root, TRAINING.model_copy(update={"steps": 4, "validate_every_steps": 2}), heard.append).run()
    return heard


def train_with_a_slow_rank(root: Path, slow_rank: int) -> None:
    if dist.get_rank() == slow_rank:
        working = Probe.work

        def work(probe: Probe) -> None:
            time.sleep(0.04)
            working(probe)

        Probe.work = work  # type: ignore[method-assign]
    train(root, TRAINING.model_copy(update={"steps": 33, "validate_every_steps": 33, "checkpoint_every_steps": 33}))


def train_on_a_device_of(root: Path, tflops: float) -> str:
    """What the run says when every rank's device is taken to have this peak."""
    trainer = make(root, TRAINING.model_copy(update={"steps": 2}))
    trainer.peak = Peak("a made-up device", "fp32", tflops * 1e12)
    try:
        trainer.run()
    except RuntimeError as error:
        return str(error)
    return ""


def train_without_room(root: Path) -> None:
    class FullStorage(FileStorage):
        def write(self, name: str, data: bytes | memoryview) -> None:
            raise OSError("no space left")

    checkpointer = Checkpointer(FullStorage(root), 2, dist.new_group(backend="gloo"))
    train(root, TRAINING.model_copy(update={"steps": 2}), {"checkpointer": checkpointer})


def train_broken(root: Path) -> tuple[str, bool]:
    """The message of a run whose losses are NaN from the third step on, and whether those left the parameters alone."""
    kept: dict[str, torch.Tensor] = {}

    def heartbeat(status: dict[str, Any]) -> None:
        if status["phase"] == "training" and status["step"] == 2:
            with torch.no_grad():
                trainer.learner.stages[0].norm.bias.to_local().fill_(math.nan)
            kept.update({name: p.detach().to_local().clone() for name, p in parameters()})

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        return trainer.learner.stages[0].named_parameters()

    training = TRAINING.model_copy(update={"checkpoint_every_steps": 3, "max_nonfinite_steps": 2})
    trainer = make(root, training, heartbeat)
    with pytest.raises(NonFiniteError) as caught:
        trainer.run()
    now = {name: p.detach().to_local() for name, p in parameters()}
    return str(caught.value), all(torch.equal(kept[name], now[name]) for name in kept if name != "norm.bias")


def each_first_gradients(micro_batch_sizes: list[int], clip_norms: list[float]) -> list[list[dict[str, Any]]]:
    torch.set_default_dtype(torch.float64)
    return [[first_gradients(size, clip_norm) for size in micro_batch_sizes] for clip_norm in clip_norms]


def first_gradients(micro_batch_size: int, clip_norm: float) -> dict[str, Any]:
    """Loss, norm, gradients and validation loss of the first step in fp64, where order of summation hardly matters."""
    training = TRAINING.model_copy(
        update={"micro_batch_size": micro_batch_size, "ramp_start_batch_size": 6, "clip_norm": clip_norm}
    )
    trainer = make(Path("unused"), training, model_config=WITHOUT_DROPOUT)
    result = trainer._step(0, iter([trainer._training_batches(0)]))
    gradients = {name: p.grad.full_tensor().numpy() for name, p in trainer.learner.stages[0].named_parameters()}
    return {"loss": result["loss"], "norm": result["gradient_norm"], "validation": trainer.validate(), **gradients}


class Logits(torch.nn.Embedding):
    """A model whose logits after a token are that token's row."""

    layers: ClassVar[dict[str, torch.nn.Module]] = {}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(super().forward(tokens), torch.eye(2, dtype=torch.float64), targets)


def table_learner(losses: list[float]) -> Learner:
    """A learner whose model gives target 0 after token i exactly the loss `losses[i]`."""
    plan = ParallelPlan(shards=dist.get_world_size())
    mesh = build_mesh(plan, "cpu")
    learner = Learner(MODEL, TRAINING, VOCAB_SIZE, 0, plan, mesh)
    # Of two logits 0 and z, the first costs log(1 + e^z).
    table = torch.tensor([[0.0, math.log(math.expm1(loss))] for loss in losses], dtype=torch.float64)
    model: Any = Logits.from_pretrained(table, freeze=False)
    shard(model, mesh["shards"], plan, None)
    learner.stages = [model]
    learner.optimizer = torch.optim.AdamW(learner.stages[0].parameters())
    return learner


def batch(token: int, counted: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.full((1, 10), IGNORED)
    targets[0, :counted] = 0
    return torch.full((1, 10), token), targets


def step_and_validation_loss(losses: list[float]) -> tuple[float, float]:
    """Over two micro-batches of 1 and 9 tokens: both on one rank, or each on one of two."""
    batches = [batch(0, counted=1), batch(1, counted=9)]
    mine = batches if dist.get_world_size() == 1 else [batches[dist.get_rank()]]
    learner = table_learner(losses)
    validation_loss = learner.mean_loss(mine)
    return learner.step(0, mine, 0.1).loss, validation_loss


# The tests.


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]


def untimed(root: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in UNTIMED if name in line} for line in lines(root)]


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("losses", "mean"),
    [([3.0, 1.0], 1.2), ([2.0, 10.0], 9.2)],  # (1 x 3 + 9 x 1) / 10 and (1 x 2 + 9 x 10) / 10
)
def test_every_token_counts_the_same(world_size: int, losses: list[float], mean: float) -> None:
    for loss, validation_loss in run(step_and_validation_loss, world_size, losses):
        assert loss == pytest.approx(mean, abs=1e-12)
        assert validation_loss == pytest.approx(mean, abs=1e-12)


def test_the_layout_does_not_change_the_gradients() -> None:
    """6 sequences as 1, 2, 3 and 6 micro-batches, and over 1, 2 and 4 ranks, of which 4 do not share them evenly; 9 for
    validation, which no number of ranks but one shares evenly. With clipping and without."""
    clip_norms = [1e9, 0.01]
    references = [results[0] for results in run(each_first_gradients, 1, [6], clip_norms)[0]]
    assert all(reference["norm"] > 0.1 for reference in references)
    for world_size, sizes in [(1, [3, 2, 1]), (2, [3, 1]), (4, [2, 1])]:
        for of_rank in run(each_first_gradients, world_size, sizes, clip_norms):
            for results, reference in zip(of_rank, references, strict=True):
                for size, result in zip(sizes, results, strict=True):
                    assert result.keys() == reference.keys()
                    for name, value in result.items():
                        assert np.abs(value - reference[name]).max() < 1e-12, (name, world_size, size)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unbroken")
    outcome, other = run(train, 2, root)
    assert (outcome.first_step, outcome.steps) == (0, 20)
    assert (outcome.loss, outcome.validation_loss) == (lines(root)[-1]["loss"], lines(root)[-1]["validation_loss"])
    assert (other.loss, other.validation_loss) == (outcome.loss, outcome.validation_loss)
    assert outcome.seconds > 0
    assert outcome.peak_memory_bytes > 2**20
    return root


def test_a_run_learns_and_logs_every_step(unbroken: Path) -> None:
    logged = lines(unbroken)
    assert [line["step"] for line in logged] == list(range(1, 21))
    assert [line["step"] for line in logged if "validation_loss" in line] == [5, 10, 15, 20]
    assert logged[-1]["loss"] < logged[0]["loss"] - 1
    assert logged[-1]["validation_loss"] < logged[4]["validation_loss"]
    # 2 sequences of 8 tokens at first, and one more whenever another 50 of the 200 ramp tokens are consumed
    assert [line["batch_size"] for line in logged[:9]] == [2, 2, 2, 2, 3, 3, 4, 4, 5]
    assert [line["tokens"] for line in logged[:5]] == [16, 32, 48, 64, 88]
    assert logged[0]["learning_rate"] == 0.02 * 16 / 100
    assert logged[-1]["batch_size"] == 6
    for line in logged:
        assert line["tokens_per_second"] == pytest.approx(line["batch_size"] * 8 / line["step_seconds"])
        assert 2**-10 < line["memory_gib"] < 64
        assert line["loader_seconds"] >= 0
        assert line["checkpoint_blocked_seconds"] >= 0
        assert "mfu" not in line  # case R10: a CPU's peak is unknown
    assert logged[5]["checkpoint_blocked_seconds"] > 0
    times = [line["time"] for line in logged]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 3600


def test_the_goodput_of_an_unbroken_run(unbroken: Path) -> None:
    found = MetricsLog(unbroken / "train.jsonl").goodput()
    # The wait is that of the rank that waits longest, the step's time rank 0's.
    useful = sum(max(0.0, line["step_seconds"] - line["loader_seconds"]) for line in lines(unbroken))
    assert found.useful_seconds == pytest.approx(useful)
    assert found.useful_seconds < found.wall_seconds
    assert (found.restarts, found.lost_steps) == (0, 0)


def test_mfu_is_the_share_of_what_all_devices_could_do(tmp_path: Path) -> None:
    assert run(train_on_a_device_of, 2, tmp_path, 5.0) == ["", ""]
    for line in lines(tmp_path):
        flops = training_flops_per_token(MODEL, VOCAB_SIZE) * line["tokens_per_second"]
        assert line["mfu"] == pytest.approx(flops / (2 * 5e12))


def test_mfu_above_one_stops_the_run(tmp_path: Path) -> None:  # case R10
    for said in run(train_on_a_device_of, 2, tmp_path, 1e-9):
        assert said.startswith("MFU is ")
        assert "(model/peaks.py) gives 'a made-up device' 1e-09 in fp32; correct that entry" in said


def test_a_slow_rank_is_in_the_metrics(tmp_path: Path) -> None:
    run(train_with_a_slow_rank, 3, tmp_path, 1)
    assert [line.get("slow_ranks") for line in lines(tmp_path)[30:]] == [None, [1], [1]]


def test_killed_again_and_again_every_step_is_that_of_the_unbroken_run(tmp_path: Path, unbroken: Path) -> None:
    """Killed at the first step, at a save and validation, at the end of the warm-up, and well after a save."""
    for at in (1, 5, 6, 12, 16):
        job = Job(train_until_killed, 2, tmp_path, TRAINING, at)
        job.wait_for_a_death()
        job.kill()
        assert lines(tmp_path)[-1]["step"] == at
    assert [outcome.first_step for outcome in run(train, 2, tmp_path)] == [15, 15]
    assert untimed(tmp_path) == untimed(unbroken)
    goodput = MetricsLog(tmp_path / "train.jsonl").goodput()
    # Gone on with from steps 0, 0, 5, 10 and 15: the kill at step 5 came before its checkpoint.
    assert (goodput.restarts, goodput.lost_steps) == (5, 1 + 5 + 1 + 2 + 1)
    assert 0 < goodput.useful_seconds < goodput.wall_seconds


def test_a_finished_run_is_left_as_it_is(unbroken: Path) -> None:
    before = contents(unbroken)
    outcome = run(train, 2, unbroken)[0]
    assert (outcome.first_step, outcome.steps) == (20, 0)
    assert outcome.loss == lines(unbroken)[-1]["loss"]
    assert contents(unbroken) == before


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """The same sequences at every step, so the same losses but for the order of sums, which hardly shows in fp64."""
    training = TRAINING.model_copy(update={"decay_tokens": 700})
    run(train_in_fp64, 2, tmp_path / "unbroken", training)
    run(train_in_fp64, 2, tmp_path / "resized", training.model_copy(update={"steps": 10}))
    outcomes = run(train_in_fp64, 3, tmp_path / "resized", training)
    assert [outcome.first_step for outcome in outcomes] == [10] * 3
    for line, expected in zip(untimed(tmp_path / "resized"), untimed(tmp_path / "unbroken"), strict=True):
        exact = ("step", "learning_rate", "tokens", "batch_size")
        assert {name: line[name] for name in exact} == {name: expected[name] for name in exact}
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert line["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-10)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"vocab_size": 41}, "its vocab_size is 40, not 41"),
        ({"seed": 4}, "its seed is 3, not 4"),
        ({"identity": {"tokens": "other"}}, "its tokens is 'fingerprint', not 'other'"),
        ({"identity": {"weights": {"web": 2.0, "books": 1.0}}}, "its weights is None, not {'web': 2.0, 'books': 1.0}"),
        ({"model_config": MODEL.model_copy(update={"n_layer": 3})}, "its n_layer is 2, not 3"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(unbroken: Path, other: dict[str, Any], message: str) -> None:
    before = contents(unbroken)
    with pytest.raises(RuntimeError, match=f"CheckpointError: step-00000020 is of another run: {message}"):
        run(train, 1, unbroken, TRAINING, other)
    assert contents(unbroken) == before


SHAPING = {
    "learning_rate": (0.02, 0.03),
    "min_learning_rate_fraction": (0.1, 0.2),
    "warmup_tokens": (100, 101),
    "decay_tokens": (None, 700),
    "weight_decay": (0.1, 0.0),
    "beta1": (0.9, 0.8),
    "beta2": (0.95, 0.99),
    "epsilon": (1e-8, 1e-9),
    "clip_norm": (1.0, 2.0),
    "global_batch_size": (6, 7),
    "ramp_start_batch_size": (2, 3),
    "ramp_tokens": (200, 201),
    "spike_sigmas": (6.0, 7.0),
    "spike_window_steps": (128, 64),
    "max_nonfinite_steps": (5, 6),
    "precision": ("auto", "bf16"),
}
"""Settings, with what the unbroken run has and something else."""

FREE = {
    "micro_batch_size": 3,
    "checkpoint_every_steps": 7,
    "keep_checkpoints": 1,
    "max_failed_saves": 0,
    "validate_every_steps": 9,
    "validation_sequences": 2,
    "resume": "required",
    "tensorboard": True,
}


def test_settings_that_shape_the_steps_cannot_change(unbroken: Path) -> None:
    before = contents(unbroken)
    said = run(train_with_each, 2, unbroken, [{name: new} for name, (_, new) in SHAPING.items()])
    expected = [
        f"step-00000020 is of another run: its {name} is {old!r}, not {new!r}" for name, (old, new) in SHAPING.items()
    ]
    assert said == [expected, expected]
    assert contents(unbroken) == before


def test_other_settings_can_change(unbroken: Path) -> None:
    before = contents(unbroken)
    assert run(train_with_each, 2, unbroken, [{name: new} for name, new in FREE.items()]) == [[""] * len(FREE)] * 2
    assert contents(unbroken) == before


def test_every_setting_either_shapes_the_steps_or_can_change() -> None:
    assert SHAPING.keys() | FREE.keys() | {"steps"} == TrainingConfig.model_fields.keys()


def test_any_settings_are_themselves_after_a_resume(tmp_path: Path) -> None:
    """Floats of 17 digits, the smallest and the largest, and an absent one."""
    awkward = {"learning_rate": 0.1 + 0.2, "beta1": 1 / 3, "epsilon": 5e-324, "clip_norm": 1.7976931348623157e308}
    training = TRAINING.model_copy(update={"steps": 1, "decay_tokens": None, **awkward})
    assert run(train, 1, tmp_path, training)[0].first_step == 0
    assert run(train, 1, tmp_path, training)[0].first_step == 1


def test_a_run_shorter_than_its_checkpoints_is_refused(unbroken: Path) -> None:
    before = contents(unbroken)
    message = (
        "training.steps ({}) is below the newest checkpoint (step 20): score that checkpoint, "
        "or give the shorter run a directory of its own"
    )
    said = run(train_with_each, 2, unbroken, [{"steps": 5}, {"steps": 15}, {"steps": 19}, {"steps": 20}])
    assert said == [[message.format(5), message.format(15), message.format(19), ""]] * 2
    assert contents(unbroken) == before


def test_required_resume_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="none was ever completed"):
        run(train, 1, tmp_path, TRAINING.model_copy(update={"resume": "required"}))


def test_a_failed_last_save_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="step-00000002 was not saved: rank 0: OSError: no space left"):
        run(train_without_room, 1, tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run_untouched(tmp_path: Path) -> None:
    for message, untouched in run(train_broken, 2, tmp_path):
        assert message.startswith("step 5: the loss is nan and the gradient norm nan; 3 steps in a row were not finite")
        assert untouched
    assert [(line["step"], line["skipped_steps"]) for line in lines(tmp_path)] == [(1, 0), (2, 0), (3, 1), (4, 2)]
    assert [line["loss"] for line in lines(tmp_path)][2:] == [None, None]
    assert not (tmp_path / "checkpoints").exists()


def test_the_heartbeat_beats_on_every_rank(tmp_path: Path) -> None:
    heard, other = run(train_and_listen, 2, tmp_path)
    assert heard == other
    assert [(status["phase"], status["step"]) for status in heard] == [
        ("resume", 0),
        ("training", 0),
        ("training", 1),
        ("validation", 2),
        ("training", 2),
        ("training", 3),
        ("validation", 4),
        ("training", 4),
        ("checkpoint", 4),
    ]
    assert {status["steps"] for status in heard} == {4}
