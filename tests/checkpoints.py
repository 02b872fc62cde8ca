"""A small state in a checkpoint of its own, saved, damaged and loaded on the ranks of `ranks.py`."""

import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infra.storage import FileStorage, Storage
from model.checkpoint import Checkpointer, CheckpointError

IDENTITY = {"n_layer": 2, "tokens": "abc"}

Loaded = tuple[int | None, list[float], list[str]]
"""The step that was loaded, the values, and the warnings."""


class FaultyStorage(FileStorage):
    """Calls `fault` before or after the writing of any name that ends in `suffix`."""

    def __init__(self, root: Path, suffix: str, moment: str, fault: Callable[[], None]) -> None:
        super().__init__(root)
        self.suffix, self.moment, self.fault = suffix, moment, fault

    def write(self, name: str, data: bytes | memoryview) -> None:
        hit = name.endswith(self.suffix)
        if hit and self.moment == "before":
            self.fault()
        super().write(name, data)
        if hit and self.moment == "after":
            self.fault()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make(root: Path, keep: int = 2, storage: Storage | None = None, max_failed_saves: int = 0) -> Checkpointer:
    storage = storage or FileStorage(root / "checkpoints")
    return Checkpointer(storage, keep, dist.new_group(backend="gloo"), max_failed_saves)


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


class Warnings(logging.Handler):
    """What the checkpointer warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("model.checkpoint").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def save(root: Path, steps: list[int], keep: int = 2) -> None:
    checkpointer = make(root, keep)
    for step in steps:
        checkpointer.save(step, state(step), IDENTITY)
    checkpointer.wait()


def load(
    root: Path,
    identity: dict[str, Any] = IDENTITY,
    required: bool = False,
    at_step: int | None = None,
    storage: Storage | None = None,
) -> Loaded:
    warnings = Warnings()
    target = state(-1)
    step = make(root, storage=storage).load_latest(target, identity, required, at_step)
    logging.getLogger("model.checkpoint").removeHandler(warnings)
    return step, full(target), warnings.messages


def on_rank_0(work: Callable[[], Any]) -> None:
    """While the others wait."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def stored(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def copy(root: Path, name: str) -> Path:
    """A copy of all that is in `root/checkpoints`, to be damaged. Collective."""
    on_rank_0(lambda: shutil.copytree(root / "checkpoints", root / name / "checkpoints"))
    return root / name
