"""Every layout of the ranks trains the model that one process trains."""

import os
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import MODEL, TRAINING, Layout, batches, digest, full_digests, local_digests, make_learner
from ranks import run

from model import parallel
from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.optim import Schedule
from model.parallel import AXES

ISOLATED = MODEL.model_copy(update={"n_layer": 5, "isolate_documents": True})
"""Layers that no pipeline has evenly, and documents that a pipeline has to know in every stage."""

slow = pytest.mark.slow

CASES = [
    pytest.param(model, layout, id=name, marks=marks)
    for name, model, layout, *marks in [
        ("dp2", MODEL, Layout(2)),
        ("tp2", MODEL, Layout(2, {"tp": 2}, micro_batch_size=4)),
        ("pp2", ISOLATED, Layout(2, {"pp": 2})),
        ("interleaved", ISOLATED, Layout(2, {"pp": 2, "stages_per_rank": 2})),
        ("hsdp 2x2", MODEL, Layout(4, {"replicas": 2}, micro_batch_size=1)),
        ("dp2 tp2 pp2", MODEL, Layout(8, {"tp": 2, "pp": 2})),
        ("dp3", MODEL, Layout(3), slow),
        ("ddp", MODEL, Layout(2, {"replicas": 2}), slow),
        ("tp2, isolated", ISOLATED, Layout(2, {"tp": 2}, micro_batch_size=3), slow),
        ("pp2, even layers", MODEL, Layout(2, {"pp": 2}), slow),
        ("pp5", ISOLATED, Layout(5, {"pp": 5}, micro_batch_size=1), slow),
        ("dp2 tp2", ISOLATED, Layout(4, {"tp": 2}), slow),
        ("dp2 pp2", ISOLATED, Layout(4, {"pp": 2}), slow),
        ("tp2 pp2", ISOLATED, Layout(4, {"tp": 2, "pp": 2}), slow),
        ("dp2 interleaved", ISOLATED, Layout(4, {"pp": 2, "stages_per_rank": 2}), slow),
        ("tp2 interleaved", ISOLATED, Layout(4, {"tp": 2, "pp": 2, "stages_per_rank": 2}), slow),
        ("hsdp 2x2 pp2", ISOLATED, Layout(8, {"replicas": 2, "pp": 2}, micro_batch_size=1), slow),
        ("hsdp 2x2 tp2", ISOLATED, Layout(8, {"replicas": 2, "tp": 2}, micro_batch_size=1), slow),
        ("dp2 tp2 interleaved", ISOLATED, Layout(8, {"tp": 2, "pp": 2, "stages_per_rank": 2}), slow),
        ("selective", ISOLATED, Layout(1, {"checkpointing": "selective"}), slow),
        ("full, dp2 tp2", ISOLATED, Layout(4, {"tp": 2, "checkpointing": "full"}), slow),
        ("selective, tp2 pp2", ISOLATED, Layout(4, {"tp": 2, "pp": 2, "checkpointing": "selective"}), slow),
    ]
]
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-5}
MEASURES = ("loss", "gradient_norm", "validation_loss")


# These run on ranks.


def take_steps(model: ModelConfig, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """20 steps whose batches grow from 1 sequence, which fills no pipeline, to 8; validation of a number that nothing
    divides."""
    torch.set_default_dtype(dtype)
    learner = make_learner(layout, model)
    schedule = Schedule(TRAINING, MODEL.seq_len)
    results, first = [], 0
    for step in range(20):
        count = min(8, 1 + step // 2)
        results.append(learner.step(step, batches(learner, layout, first, count), schedule.learning_rate(step)))
        first += count
    place = learner.mesh.get_coordinate()
    assert place is not None
    return {
        "loss": [result.loss for result in results],
        "gradient_norm": [result.gradient_norm for result in results],
        "validation_loss": [learner.mean_loss(batches(learner, layout, 0, 7))],
        "place": dict(zip(AXES, place, strict=True)),
        "parameters": local_digests(learner, "model."),
    }


def take_steps_in_each(model: ModelConfig, layout: Layout) -> dict[torch.dtype, dict[str, Any]]:
    return {dtype: take_steps(model, layout, dtype) for dtype in BOUNDS}


def initial_digests(model: ModelConfig, vocab_size: int, layouts: list[Layout]) -> list[dict[str, str]]:
    return [full_digests(make_learner(layout, model, vocab_size=vocab_size), "model.") for layout in layouts]


def steps_with_dropout(layout: Layout) -> list[tuple[float, float]]:
    """Which differ in their masks alone: one batch, and nothing is learned."""
    learner = make_learner(layout, ISOLATED.model_copy(update={"dropout": 0.2}))
    results = [learner.step(step, batches(learner, layout, 0, 8), 0.0) for step in range(4)]
    return [(result.loss, result.gradient_norm) for result in results]


def steps_with_each_checkpointing(layout: Layout) -> list[list[tuple[float, float]]]:
    kinds = [Layout(layout.world_size, layout.settings | {"checkpointing": kind}) for kind in ("full", "selective")]
    return [steps_with_dropout(each) for each in (layout, *kinds)]


def first_losses(cache: Path, layout: Layout) -> list[float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / f"rank-{dist.get_rank()}")
    learner = make_learner(layout)
    losses = [learner.step(step, batches(learner, layout, 8 * step, 8), 0.01).loss for step in range(5)]
    return [*losses, learner.mean_loss(batches(learner, layout, 0, 7))]


# The tests.


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[torch.dtype, dict[str, Any]]]:
    return {repr(model): run(take_steps_in_each, 1, model, Layout())[0] for model in (MODEL, ISOLATED)}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_layout_takes_the_same_steps(model: ModelConfig, layout: Layout, alone: dict[str, Any]) -> None:
    found = run(take_steps_in_each, layout.world_size, model, layout)
    for dtype, bound in BOUNDS.items():
        expected, measured = alone[repr(model)][dtype], [rank[dtype] for rank in found]
        assert min(expected["gradient_norm"]) > TRAINING.clip_norm  # clipping is active
        assert expected["loss"][-1] < expected["loss"][0] - 0.5
        for name in MEASURES:
            assert all(rank[name] == measured[0][name] for rank in measured), f"{name} differs between ranks"
            assert np.abs(np.subtract(measured[0][name], expected[name])).max() < bound, (name, dtype)
        assert_copies_are_equal(measured, layout.settings)


def assert_copies_are_equal(found: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """What several ranks have of one parameter is the same to the bit: cases R5 and R6."""
    compared = set()
    for one, other in combinations(found, 2):
        axes = {axis for axis in AXES if one["place"][axis] != other["place"][axis]}
        for name in one["parameters"].keys() & other["parameters"].keys():
            replicated = name.endswith(("norm.weight", "norm.bias", "output.bias"))
            if axes <= ({"pp", "replicas", "tp"} if replicated else {"pp", "replicas"}):
                assert one["parameters"][name] == other["parameters"][name], (name, one["place"], other["place"])
                compared |= {(name, axis) for axis in axes}
    if "tp" in settings:
        names = ("model.layers.0.mlp.output.bias", "model.layers.1.mlp_norm.weight", "model.norm.bias")
        assert {(name, "tp") for name in names} <= compared
    if "pp" in settings:
        assert ("model.token_embedding.weight", "pp") in compared
    if "replicas" in settings:
        assert ("model.layers.0.mlp.expand.weight", "replicas") in compared


# Matrices with more rows than are initialized together, some cut where no block of rows ends.
WIDE = ModelConfig(n_layer=4, n_head=24, d_model=264, seq_len=24)
OF_8 = [
    {"replicas": 4},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"tp": 4, "pp": 2, "stages_per_rank": 2},
]


@pytest.mark.parametrize(
    ("world_size", "vocab_size", "settings"), [(8, 2600, OF_8), (3, 2600, [{}]), (3, 2601, [{"tp": 3}, {"pp": 3}])]
)
def test_every_layout_starts_from_the_same_values(
    world_size: int, vocab_size: int, settings: list[dict[str, Any]]
) -> None:
    model = GPT(WIDE, vocab_size)
    initialize(model, 3)
    expected = {f"model.{name}": digest(parameter) for name, parameter in model.named_parameters()}
    layouts = [Layout(world_size, some, micro_batch_size=1) for some in settings]
    found = run(initial_digests, world_size, WIDE, vocab_size, layouts)
    for number in range(len(layouts)):
        for rank in found:
            assert rank[number].items() <= expected.items()
        assert set().union(*(rank[number] for rank in found)) == expected.keys()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=marks)
        for name, layout, *marks in [
            ("dp1", Layout()),
            ("interleaved", Layout(2, {"pp": 2, "stages_per_rank": 2})),
            ("dp2", Layout(2), slow),
            ("tp2", Layout(2, {"tp": 2}), slow),
            ("pp2", Layout(2, {"pp": 2}), slow),
            ("hsdp 2x2", Layout(4, {"replicas": 2}), slow),
            ("dp2 tp2 pp2", Layout(8, {"tp": 2, "pp": 2}), slow),
        ]
    ],
)
def test_activations_that_are_computed_again_change_no_bit(layout: Layout) -> None:
    """With dropout, whose masks have to be the same again, and others in every step."""
    for plain, full, selective in run(steps_with_each_checkpointing, layout.world_size, layout):
        assert full == plain
        assert selective == plain
        assert len({loss for loss, _ in plain}) == 4


@torch.library.custom_op("jumbo_tests::attend", mutates_args=())
def attend(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of which nothing is left but its dropout, within one operation as on GPUs."""
    mask = torch.rand_like(value)
    return value * mask, mask


attend.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.mask,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "mask", output[1]),
)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_masks_after_an_attention_with_dropout_are_the_same_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, key, value, **options: attend(value)[0])
    monkeypatch.setattr(parallel, "_ATTENTION", [torch.ops.jumbo_tests.attend.default])
    gradients = []
    for checkpointing in ("none", kind):
        model = GPT(MODEL.model_copy(update={"dropout": 0.2}), 40)
        initialize(model, 0)
        parallel.checkpoint_activations(model, checkpointing)
        torch.manual_seed(0)
        model(torch.arange(8).unsqueeze(0)).square().sum().backward()
        gradients.append(
            {name: digest(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    assert gradients[0] == gradients[1]


@slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(2, {"tp": 2}), Layout(2, {"pp": 2}), Layout(2, {"checkpointing": "selective"})],
    ids=["alone", "tp2", "pp2", "selective, dp2"],
)
def test_compiled_blocks_take_the_same_steps(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "DEADLINE_SECONDS", 800)
    compiled = Layout(layout.world_size, layout.settings | {"compile": True})
    (expected, *_) = run(first_losses, layout.world_size, tmp_path, layout)
    for losses in run(first_losses, layout.world_size, tmp_path, compiled):
        assert losses == pytest.approx(expected, abs=1e-6)
