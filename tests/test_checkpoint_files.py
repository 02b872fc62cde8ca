"""Every kind of tensor on every layout comes back bit for bit, by this project's reader and by PyTorch's own."""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import FaultyStorage, caught, make, on_rank_0
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from model import checkpoint_files

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()

SAVED = {
    "rows": ROWS,
    "columns": COLUMNS,
    "uneven": ROWS,
    "fewer rows than ranks": ROWS,
    "replicated": WHOLE,
    "bf16": ROWS,
    "fp64": COLUMNS,
    "three axes": Shard(2),
    "no element": ROWS,
}
LOADED = {
    "rows": COLUMNS,
    "columns": ROWS,
    "uneven": WHOLE,
    "fewer rows than ranks": COLUMNS,
    "replicated": ROWS,
    "bf16": COLUMNS,
    "fp64": WHOLE,
    "three axes": Shard(1),
    "no element": WHOLE,
}
PLAIN = {"scalar": torch.tensor(7), "flag": torch.tensor(3, dtype=torch.int8), "ring": torch.arange(6.0).view(2, 3)}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "rows": some(8, 5),
        "columns": some(6, 9),
        "uneven": some(7, 3),
        "fewer rows than ranks": some(1, 4),
        "replicated": some(4, 4),
        "bf16": some(6, 10).bfloat16(),
        "fp64": some(3, 6).double(),
        "three axes": some(2, 4, 6),
        "no element": some(0, 4),
    }


def sharded(placements: dict[str, Placement], values: dict[str, Tensor]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(values[name], mesh, [place]) for name, place in placements.items()}


def replicated_and_sharded(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """As HSDP has it: two replicas, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return {name: distribute_tensor(tensor, mesh, [WHOLE, ROWS]) for name, tensor in values.items()}


def save_all(root: Path) -> None:
    checkpoint_files.MIN_FILE_BYTES = 1  # so that a rank has several files
    checkpointer = make(root)
    for step in (1, 2):  # the second with the first one's buffers
        values = {name: tensor * step for name, tensor in (tensors() | PLAIN).items()}
        checkpointer.save(step, sharded(SAVED, values) | {name: values[name] for name in PLAIN}, {})
        checkpointer.wait()


def load_all(root: Path) -> list[str]:
    """The names of what is not as it was."""
    values = tensors()
    empty = {name: torch.full_like(tensor, 1) for name, tensor in values.items()}
    loaded = sharded(LOADED, empty) | {name: torch.ones_like(tensor) for name, tensor in PLAIN.items()}
    assert make(root).load_latest(loaded, {}, at_step=1) == 1
    expected = sharded(LOADED, values)
    wrong = [name for name, tensor in expected.items() if not torch.equal(loaded[name].to_local(), tensor.to_local())]
    return wrong + [name for name, tensor in PLAIN.items() if not torch.equal(loaded[name], tensor)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_is_the_same_on_any_layout(tmp_path: Path, world_size: int) -> None:
    run(save_all, 2, tmp_path)
    assert len(list((tmp_path / "checkpoints" / "step-00000001").glob("__0_*.distcp"))) > 2
    assert run(load_all, world_size, tmp_path) == [[]] * world_size


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_the_files_too(tmp_path: Path) -> None:
    """An independent reader: what it finds is what was saved."""
    run(save_all, 2, tmp_path)
    expected = tensors() | PLAIN
    loaded = {name: torch.full_like(tensor, 1) for name, tensor in expected.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoints/step-00000002"), no_dist=True)
    assert [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor * 2)] == []


def save_replicas(root: Path) -> tuple[int, int]:
    """The bytes of the staged copy, and of this rank's shards."""
    state = replicated_and_sharded({f"weight.{i}": torch.randn(1024, 8) for i in range(4)})
    checkpointer = make(root)
    checkpointer.save(1, state, {})
    checkpointer.wait()
    assert checkpointer._staged is not None
    files = [content for name, content in checkpointer._staged._files.items() if name.endswith(".distcp")]
    return sum(map(len, files)), sum(tensor.to_local().nbytes for tensor in state.values())


def test_a_replica_copies_and_stores_only_its_share(tmp_path: Path) -> None:
    """Four shards of 16 KiB in two copies: each rank has all four and stores two, and what DCP has around them."""
    for copied, held in run(save_replicas, 4, tmp_path):
        assert held == 4 * 16_384
        assert 2 * 16_384 < copied < 3 * 16_384


def save_and_load_one_scalar(root: Path) -> int:
    """Of which a single rank has anything to store."""
    checkpointer, loaded = make(root), torch.tensor(0)
    checkpointer.save(1, {"count": torch.tensor(7)}, {})
    assert checkpointer.load_latest({"count": loaded}, {}) == 1
    return int(loaded)


def test_a_rank_may_have_nothing_to_store(tmp_path: Path) -> None:
    assert run(save_and_load_one_scalar, 2, tmp_path) == [7, 7]
    assert len(list((tmp_path / "checkpoints/step-00000001").glob("*.distcp"))) == 1


def load_in_part(root: Path) -> list[str]:
    """The files that are read for two of the tensors, of which one is not in them."""
    save_all(root)
    read: list[str] = []

    class Watched(FaultyStorage):
        def stream(self, name: str) -> io.RawIOBase:
            read.append(name.rpartition("/")[2])
            return super().stream(name)

    storage = Watched(root / "checkpoints", "none", "before", lambda: None)
    loaded = sharded({"rows": ROWS}, tensors())
    assert make(root, storage=storage).load_latest(loaded, {}) == 2
    on_rank_0(lambda: None)
    missing = caught(lambda: make(root).load_latest({"unknown": torch.zeros(2)}, {}))
    assert "unknown" in missing
    return sorted(read)


def test_only_files_that_are_needed_are_read(tmp_path: Path) -> None:
    for rank, files in enumerate(run(load_in_part, 2, tmp_path)):
        assert files == [".metadata", f"__{rank}_0.distcp"]
