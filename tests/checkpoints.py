"""A small state in a checkpoint of its own, saved and loaded on the ranks of `ranks.py`."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infra.storage import FileStorage
from model.checkpoint import Checkpointer, CheckpointError

IDENTITY = {"n_layer": 2, "tokens": "abc"}


class FaultyStorage(FileStorage):
    """Calls `fault` before or after the upload of any name that ends in `suffix`."""

    def __init__(self, root: Path, suffix: str, moment: str, fault: Callable[[], None]) -> None:
        super().__init__(root)
        self.suffix, self.moment, self.fault = suffix, moment, fault

    def upload(self, path: Path, name: str) -> None:
        hit = name.endswith(self.suffix)
        if hit and self.moment == "before":
            self.fault()
        super().upload(path, name)
        if hit and self.moment == "after":
            self.fault()


def make(root: Path, keep: int = 2, storage: FileStorage | None = None) -> Checkpointer:
    storage = storage or FileStorage(root / "checkpoints")
    return Checkpointer(storage, root / "staging", keep, dist.new_group(backend="gloo"))


def state(value: float) -> dict[str, Tensor]:
    """A tensor split over the ranks and one that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "weight": distribute_tensor(torch.arange(10.0) + value, mesh, [Shard(0)]),
        "count": torch.tensor(value),
    }


def full(state: dict[str, Tensor]) -> list[float]:
    weight = state["weight"]
    assert isinstance(weight, DTensor)
    return [*weight.full_tensor().tolist(), state["count"].item()]


def values(step: int) -> list[float]:
    return [*(i + step for i in range(10)), step]


def caught(work: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        work()
    return str(error.value)


def save(root: Path, steps: list[int], keep: int = 2) -> None:
    checkpointer = make(root, keep)
    for step in steps:
        checkpointer.save(step, state(step), IDENTITY)
    checkpointer.wait()


def load(
    root: Path, identity: dict[str, Any] = IDENTITY, required: bool = False, at_step: int | None = None
) -> tuple[int | None, list, list[str]]:
    """The step that was loaded, the values, and the warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logging.getLogger("model.checkpoint").addHandler(handler)
    target = state(-1)
    step = make(root).load_latest(target, identity, required, at_step)
    return step, full(target), messages
