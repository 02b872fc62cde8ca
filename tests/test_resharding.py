"""A checkpoint is of no layout: what any saved, any other goes on from. Case C11."""

from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from layouts import MODEL, Layout, batches, full_digests, local_digests, make_learner
from ranks import run

from infra.storage import FileStorage
from model.checkpoint import Checkpointer
from model.config import ModelConfig
from model.learner import Learner

DEEP = MODEL.model_copy(update={"n_layer": 4})  # for four stages
STEPS = 1  # before what is saved

LAYOUTS = {
    "alone": Layout(),
    "dp2": Layout(2),
    "tp2": Layout(2, {"tp": 2}),
    "pp2": Layout(2, {"pp": 2}),
    "interleaved": Layout(2, {"pp": 2, "stages_per_rank": 2}),
    "dp2 tp2": Layout(4, {"tp": 2}),
    "dp2 pp2": Layout(4, {"pp": 2}),
    "tp2 pp2": Layout(4, {"tp": 2, "pp": 2}),
    "hsdp 2x2": Layout(4, {"replicas": 2}),
    "dp2 tp2 pp2": Layout(8, {"tp": 2, "pp": 2}),
}


# These run on ranks.


def checkpointer(root: Path, name: str) -> Checkpointer:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Checkpointer(FileStorage(root / name), 2, group)


def next_loss(learner: Learner, layout: Layout) -> float:
    return learner.step(STEPS, batches(learner, layout, 8 * STEPS, 8), 0.01).loss


def save_from_each(root: Path, model: ModelConfig, names: list[str]) -> list[tuple[dict[str, str], float]]:
    """What each layout had after its steps, and the loss of its next one."""
    found = []
    for name in names:
        learner = make_learner(LAYOUTS[name], model)
        for step in range(STEPS):
            learner.step(step, batches(learner, LAYOUTS[name], 8 * step, 8), 0.01)
        saving = checkpointer(root, name)
        saving.save(STEPS, learner.state(), {})
        saving.wait()
        found.append((full_digests(learner), next_loss(learner, LAYOUTS[name])))
    return found


def load_in_each(root: Path, model: ModelConfig, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """What each second layout has of the first one's checkpoint, and the loss of its next step."""
    found = []
    for source, target in pairs:
        learner = make_learner(LAYOUTS[target], model, seed=4)
        assert checkpointer(root, source).load_latest(learner.state(), {}) == STEPS
        embedding = local_digests(learner, "model.token_embedding.")
        place = learner.mesh.get_coordinate()
        assert place is not None
        found.append(
            {
                "state": full_digests(learner),
                "embedding": embedding,
                "place": place[1:],  # in its stage of the pipeline
                "loss": next_loss(learner, LAYOUTS[target]),
            }
        )
    return found


# The tests.

State = dict[str, str]


def by_world_size(names: list[str]) -> list[tuple[int, list[str]]]:
    return [(size, list(some)) for size, some in groupby(names, key=lambda name: LAYOUTS[name].world_size)]


def saved(root: Path, model: ModelConfig, names: list[str]) -> dict[str, tuple[State, float]]:
    """Of each layout, which has saved a checkpoint: the digests of its whole state, and the next loss."""
    found: dict[str, tuple[State, float]] = {}
    for world_size, some in by_world_size(names):
        found_on = run(save_from_each, world_size, root, model, some)
        for name, *of_ranks in zip(some, *found_on, strict=True):
            state: State = {}
            for digests, loss in of_ranks:
                assert all(state.setdefault(key, value) == value for key, value in digests.items())
                found[name] = state, loss
    first, loss = found["alone"]
    assert {"model.token_embedding.weight", "optimizer.layers.1.mlp.output.bias.exp_avg", "guard.count"} <= first.keys()
    for state, other_loss in found.values():
        assert state.keys() == first.keys()
        assert other_loss == pytest.approx(loss, abs=1e-5)
    return found


def assert_each_loads(root: Path, model: ModelConfig, names: list[str], pairs: list[tuple[str, str]]) -> None:
    expected = saved(root, model, names)
    for world_size, targets in by_world_size(names):
        some = [(source, target) for source, target in pairs if target in targets]
        found_on = run(load_in_each, world_size, root, model, some)
        for pair, *of_ranks in zip(some, *found_on, strict=True):
            state, loss = expected[pair[0]]
            embeddings: dict[Any, str] = {}
            for loaded in of_ranks:
                assert loaded["state"].items() <= state.items(), pair
                assert loaded["loss"] == pytest.approx(loss, abs=1e-5), pair
                # Case R6: both copies of the tied embedding are equal.
                for name, value in loaded["embedding"].items():
                    assert embeddings.setdefault((name, *loaded["place"]), value) == value, pair
            assert set().union(*(loaded["state"] for loaded in of_ranks)) == state.keys(), pair


def test_what_a_layout_saved_another_goes_on_from(tmp_path: Path) -> None:
    names = ["alone", "tp2", "pp2", "hsdp 2x2"]
    pairs = [*zip(names, [*names[1:], names[0]], strict=True), ("pp2", "tp2"), ("hsdp 2x2", "pp2")]
    assert_each_loads(tmp_path, MODEL, names, pairs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_any_layout_saved_every_layout_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "DEADLINE_SECONDS", 800)
    names = list(LAYOUTS)
    assert_each_loads(tmp_path, DEEP, names, list(product(names, names)))
