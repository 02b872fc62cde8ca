"""Saves and loads a state on two ranks with torch.distributed.checkpoint, plain or by way of a peer, and times it.

    checkpoint_driver.py BACKEND URI MEGABYTES STORE RANK

Rank 0 prints {"bytes", "save": [{"seconds", "cpu_seconds", "memory_bytes", "blocked_seconds"}, ...], "load": {...}}:
seconds of the slowest rank, CPU seconds of both, memory of both beyond what they held before. A save counts until its
last byte is stored.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, torch.Tensor]
WORLD_SIZE = 2
D_MODEL, VOCAB_SIZE = 768, 32_768


class Dcp:
    """DCP with a writer and a reader: one save that blocks all the time, and one in the background."""

    def __init__(self, backend: str, uri: str) -> None:
        self.backend, self.uri = backend, uri
        self.group = dist.new_group(backend="gloo")

    def writer(self) -> dcp.StorageWriter:
        if self.backend == "s3fs":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            return FsspecWriter(self.uri, sync_files=False)
        if self.backend == "s3torchconnector":
            from s3torchconnector.dcp import S3StorageWriter

            return S3StorageWriter(os.environ["AWS_DEFAULT_REGION"], self.uri, s3client_config=_client_config())
        return dcp.FileSystemWriter(self.uri)

    def reader(self) -> dcp.StorageReader:
        if self.backend == "s3fs":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            return FsspecReader(self.uri)
        if self.backend == "s3torchconnector":
            from s3torchconnector.dcp import S3StorageReader

            return S3StorageReader(os.environ["AWS_DEFAULT_REGION"], self.uri, s3client_config=_client_config())
        return dcp.FileSystemReader(self.uri)

    def saves(self) -> list[Callable[[State], Callable[[], object]]]:
        """Each begins a save, and returns what waits for its end."""

        def save(state: State) -> Callable[[], object]:
            dcp.save(state, storage_writer=self.writer(), process_group=self.group)
            return lambda: None

        def save_asynchronously(state: State) -> Callable[[], object]:
            future = dcp.async_save(state, storage_writer=self.writer(), process_group=self.group)
            return future.result  # type: ignore[union-attr]

        return [save, save_asynchronously]

    def load(self, state: State) -> None:
        dcp.load(state, storage_reader=self.reader(), process_group=self.group)


def _client_config() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


def measure(side: Any, megabytes: int) -> dict[str, Any]:
    """The figures of a side, which has `saves` and `load` as Dcp does; the same on every rank."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    state = make_state(mesh, megabytes)
    figures: dict[str, Any] = {"save": [], "bytes": sum(tensor.nbytes for tensor in state.values())}
    for begin in side.saves():
        with _timed() as figure:
            started = time.perf_counter()
            wait = begin(state)
            blocked = time.perf_counter() - started
            wait()
        figures["save"].append(figure | {"blocked_seconds": _over_ranks(blocked, max)})
        del begin, wait
    side.end() if hasattr(side, "end") else None
    for tensor in state.values():
        _local(tensor).zero_()
    if "://" not in side.uri:
        _forget(Path(side.uri))
    with _timed() as figures["load"]:
        side.load(state)
    for name, tensor in make_state(mesh, megabytes).items():
        if not torch.equal(_local(tensor), _local(state[name])):
            raise AssertionError(f"{name} was not loaded as it was saved")
    return figures


def make_state(mesh: DeviceMesh, megabytes: int) -> State:
    """Random parameters of a GPT-2 with two moments each, sharded by rows."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    layer = {"qkv": (3 * D_MODEL, D_MODEL), "out": (D_MODEL, D_MODEL), "up": (4 * D_MODEL, D_MODEL)}
    layer |= {"down": (D_MODEL, 4 * D_MODEL)} | dict.fromkeys(("norm1", "norm2", "bias"), (D_MODEL,))
    shapes, left, number = {"embedding": (VOCAB_SIZE * megabytes // 1000 // 8 * 8, D_MODEL)}, megabytes * 1e6, 0
    left -= 12 * shapes["embedding"][0] * D_MODEL
    while left > 0:
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        left, number = left - 12 * 12 * D_MODEL**2, number + 1
    state: State = {"guard.count": torch.tensor(7)}
    for name, shape in shapes.items():
        for kind in ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"):
            local = torch.randn(shape[0] // WORLD_SIZE, *shape[1:], generator=generator)
            state[kind.format(name)] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def _forget(folder: Path) -> None:
    """Take the files out of the page cache, as after a restart of the machine."""
    dist.barrier()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """The seconds from when all ranks are there until all are done, and the memory used meanwhile."""
    figure: dict[str, float] = {}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no longer held
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, cpu = _memory("VmRSS"), time.process_time()
    dist.barrier()
    started = time.perf_counter()
    yield figure
    dist.barrier()
    figure["seconds"] = _over_ranks(time.perf_counter() - started, max)
    figure["cpu_seconds"] = _over_ranks(time.process_time() - cpu, sum)
    figure["memory_bytes"] = _over_ranks(_memory("VmHWM") - before, sum)


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def _over_ranks(value: float, reduce: Callable[[list[float]], float]) -> float:
    values: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return reduce(values)


@contextmanager
def ranks(store: str, rank: str) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=WORLD_SIZE, timeout=timedelta(minutes=10)
    )
    yield
    dist.destroy_process_group()


def main(make: Callable[[str, str], Any]) -> None:
    backend, uri, megabytes, store, rank = sys.argv[1:]
    with ranks(store, rank):
        figures = measure(make(backend, uri), int(megabytes))
        if dist.get_rank() == 0:
            print(json.dumps(figures))


if __name__ == "__main__":
    main(Dcp)
