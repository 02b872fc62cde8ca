"""The files of a checkpoint: what each rank stores of the state, and how each gets back what it needs on any layout.

torch.distributed.checkpoint (DCP) plans both: which rank stores which shard of which tensor, each once, and which parts
of which shards a rank needs. The files are DCP's own, so `dcp.load` reads a fetched checkpoint without this project.
What differs is the way of the bytes. A rank's shards are copied into one buffer that has its files' layout already, so
saving hashes and sends slices of it and copies nothing more; loading hashes a file as it streams by, right into the
tensors. Each rank works on THREADS of its files at once, so that hashing, disk and network go on side by side.
"""

import hashlib
import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod
from mmap import mmap
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data

from model.checkpoint_marker import MARKER, SavedFile

T = TypeVar("T")

METADATA = ".metadata"
FILES = 16  # of a rank, in about equal parts; none is begun for less than MIN_FILE_BYTES
MIN_FILE_BYTES = 8 << 20
THREADS = 8
CHUNK_BYTES = 256 << 10  # read at once; a load needs THREADS of them beyond the state
_ALIGNMENT = 64  # of shards in their file, as torch.save aligns what is in its own
_PAGE_BYTES = 4096  # alignment of files in memory, and of their size: what disks take without a copy
_DATA_OFFSET = "data_offset"  # an attribute beside DCP's own: where the tensor begins in what torch.save wrote


class Storage(Protocol):
    """What the files of a checkpoint need of a storage."""

    def stream(self, name: str) -> io.RawIOBase:
        """The object's bytes, unbuffered. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Store the object whole or not at all, replacing what was there."""


class StagedFiles:
    """A copy in CPU memory of what this rank stores of a state: the bytes of its files, reused by each save.

    Making one is collective. On CUDA the memory is pinned.

    Args:
        state: tensors whose names, shapes and layouts are those of every state to come.
    """

    def __init__(self, state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._names = set(state)
        items, metadata = _plan_writes(state, group)
        places = list(_lay_out(dist.get_rank(group), items))
        sizes: dict[str, int] = {}
        for place in places:
            sizes[place.file] = _align(place.offset + place.frame.size_bytes, _PAGE_BYTES)
        pinned = any(tensor.is_cuda for tensor in state.values())
        buffer = torch.zeros(sum(sizes.values()) + _PAGE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        buffer = buffer[-buffer.data_ptr() % _PAGE_BYTES :][: sum(sizes.values())]
        content = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
        self._files = {name: memoryview(data.numpy()) for name, data in content.items()}
        if metadata:
            self._files[METADATA] = memoryview(metadata)
        self._shards = []
        for item, place in zip(items, places, strict=True):
            shard = place.frame.fill(content[place.file][place.offset :])
            self._shards.append((item.index.fqn, shard))

    def copy(self, state: Mapping[str, Tensor]) -> None:
        """Takes the values of now; on return the state may change."""
        assert state.keys() == self._names, "the state has other tensors than before"
        for name, shard in self._shards:
            tensor = state[name]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert (local.shape, local.dtype) == (shard.shape, shard.dtype), f"{name} is another than before"
            shard.copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def store(self, storage: Storage, directory: str) -> dict[str, SavedFile]:
        def store_file(name: str) -> tuple[str, SavedFile]:
            content = self._files[name]
            saved = SavedFile(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            storage.write(f"{directory}/{name}", content)
            return name, saved

        return dict(_in_threads(store_file, self._files))


def load_files(
    storage: Storage, directory: str, files: Mapping[str, SavedFile], state: dict[str, Tensor], coordinator: bool
) -> None:
    """Fill `state` in place with what this rank needs, and verify every file that it came from.

    Raises:
        ValueError, OSError: something is damaged or missing; the state is then undefined.
    """

    def saved_file(name: str) -> SavedFile:
        if name not in files:
            raise ValueError(f"{MARKER} does not list {name}")
        return files[name]

    content = io.BytesIO()
    _read_verified(storage, f"{directory}/{METADATA}", saved_file(METADATA), lambda _, chunk: content.write(chunk))
    content.seek(0)
    metadata = _MetadataUnpickler(content).load()
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, coordinator)
    parts: dict[str, list[_Part]] = {}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        part = _Part(item, planner.resolve_tensor(item).detach(), metadata)
        if part.start < part.stop:
            parts.setdefault(part.file, []).append(part)

    def load_file(name: str) -> None:
        def take(position: int, chunk: memoryview) -> None:
            for part in parts[name]:
                if part.start < position + len(chunk) and position < part.stop:
                    part.take(position, chunk)

        _read_verified(storage, f"{directory}/{name}", saved_file(name), take)

    _in_threads(load_file, parts)


# Planning and layout


def _plan_writes(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> tuple[Sequence[WriteItem], bytes]:
    """The shards that this rank stores and, on rank 0, the content of METADATA. Collective."""
    planner = dcp.DefaultSavePlanner()
    rank = dist.get_rank(group)
    planner.set_up_planner(dict(state), is_coordinator=rank == 0)
    plans: list[Any] | None = [None] * dist.get_world_size(group) if rank == 0 else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    content = b""
    if plans is not None:
        plans, metadata = planner.create_global_plan(plans)
        metadata.storage_data = {
            item.index: place.storage_info()
            for number, plan in enumerate(plans)
            for item, place in zip(plan.items, _lay_out(number, plan.items), strict=True)
        }
        content = pickle.dumps(metadata)
    mine: list[SavePlan | None] = [None]
    dist.scatter_object_list(mine, plans, group=group, group_src=0)
    assert mine[0] is not None
    return planner.finish_plan(mine[0]).items, content


def _lay_out(rank: int, items: Sequence[WriteItem]) -> Iterator["_Place"]:
    """Where a rank's shards are, in its files that are filled one after another."""
    frames = [_frame_of(item) for item in items]
    full_bytes = max(MIN_FILE_BYTES, sum(frame.size_bytes for frame in frames) // FILES)
    number = offset = 0
    for frame in frames:
        if offset >= full_bytes:
            number, offset = number + 1, 0
        yield _Place(f"__{rank}_{number}.distcp", offset, frame)
        offset = _align(offset + frame.size_bytes, _ALIGNMENT)


def _frame_of(item: WriteItem) -> "_Frame":
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return _frame(item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype)


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to


@dataclass(frozen=True)
class _Frame:
    """What torch.save writes of a tensor before and after its bytes."""

    shape: torch.Size
    dtype: torch.dtype
    before: bytes
    after: bytes

    @property
    def tensor_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return len(self.before) + self.tensor_bytes + len(self.after)

    def fill(self, buffer: Tensor) -> Tensor:
        """Writes it to the start of a buffer of bytes; returns the place between, as a tensor."""
        start, stop = len(self.before), len(self.before) + self.tensor_bytes
        content: Any = memoryview(buffer.numpy())  # type: ignore[arg-type]
        content[:start], content[stop : self.size_bytes] = self.before, self.after
        if start == stop:  # where nothing is, nothing is aligned
            return torch.empty(self.shape, dtype=self.dtype)
        return buffer[start:stop].view(self.dtype).view(self.shape)


class _Place(NamedTuple):
    file: str
    offset: int
    frame: _Frame

    def storage_info(self) -> _StorageInfo:
        info = _StorageInfo(self.file, self.offset, self.frame.size_bytes)
        setattr(info, _DATA_OFFSET, len(self.frame.before))
        return info


@cache
def _frame(shape: torch.Size, dtype: torch.dtype) -> _Frame:
    recorder = _Recorder()
    with skip_data():  # it seeks over the tensor's bytes
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # type: ignore[arg-type]
    return _Frame(shape, dtype, bytes(recorder.before), bytes(recorder.after))


class _Recorder:
    """A file that keeps what was written before and after the one gap."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._current = self.before

    def write(self, data: bytes | memoryview) -> int:
        self._current += data
        return len(data)

    def flush(self) -> None:
        pass

    def seek(self, offset: int, whence: int) -> None:
        assert whence == io.SEEK_CUR
        assert self._current is self.before, "a tensor has one storage"
        self._current = self.after


# Reading


class _Part:
    """What a tensor of this rank needs of one stored shard: some rows, and of them some columns.

    Attributes:
        file: that holds it.
        start, stop: where its rows are in the file.
    """

    def __init__(self, item: ReadItem, target: Tensor, metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        assert metadata.storage_data is not None
        info = metadata.storage_data[item.storage_index]
        self.file: str = info.relative_path
        self._dtype = entry.properties.dtype
        sizes = next(tuple(chunk.sizes) for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
        first, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if not sizes:  # a scalar is a row of one
            sizes, first, lengths, target = (1,), (0,), (1,), target.unsqueeze(0)
        self._shape = (lengths[0], *sizes[1:])
        self._columns = [slice(start, start + length) for start, length in zip(first[1:], lengths[1:], strict=True)]
        row_bytes = prod(sizes[1:]) * self._dtype.itemsize
        self.start = info.offset + getattr(info, _DATA_OFFSET) + first[0] * row_bytes
        self.stop = self.start + lengths[0] * row_bytes
        self._target = target
        fits = target.is_cpu and target.is_contiguous() and target.shape == self._shape and target.dtype == self._dtype
        self._rows = target if fits else None

    def take(self, position: int, chunk: memoryview) -> None:
        """Keeps what it needs of a chunk of the file; chunks come in order."""
        if self._rows is None:
            self._rows = torch.empty(self._shape, dtype=self._dtype)
        rows: Any = memoryview(self._rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        start, stop = max(position, self.start), min(position + len(chunk), self.stop)
        rows[start - self.start : stop - self.start] = chunk[start - position : stop - position]
        if stop == self.stop and self._rows is not self._target:
            self._target.copy_(self._rows[(slice(None), *self._columns)])
            self._rows = None


def _read_verified(storage: Storage, name: str, saved: SavedFile, take: Callable[[int, memoryview], object]) -> None:
    """Streams the file by `take`, chunk by chunk with its position.

    Raises:
        ValueError: it is not what was saved; `take` has seen it by then.
    """
    sha256, position = hashlib.sha256(), 0
    with storage.stream(name) as stream, mmap(-1, CHUNK_BYTES) as pages, memoryview(pages) as buffer:
        while count := stream.readinto(buffer):
            with buffer[:count] as chunk:
                sha256.update(chunk)
                take(position, chunk)
            position += count
    if position != saved.size_bytes:
        raise ValueError(f"{name} has {position} bytes, and {saved.size_bytes} were saved")
    if sha256.hexdigest() != saved.sha256:
        raise ValueError(f"{name} is damaged: its SHA-256 is not what was saved")


def _in_threads(work: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """The results of `work` for each name; the first failure cancels what has not begun."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-files") as pool:
        return list(pool.map(work, names))


class _MetadataUnpickler(pickle.Unpickler):
    """Builds nothing but what DCP puts into its metadata."""

    _ALLOWED = re.compile(
        r"torch\.distributed\.checkpoint\.metadata\.\w+"
        r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
        r"|torch\.serialization\._get_layout"
        r"|torch\.(Size|float64|float32|float16|bfloat16|int64|int32|int16|int8|uint8|bool)"
        r"|collections\.OrderedDict"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not self._ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{METADATA} holds {module}.{name}, which does not belong in a checkpoint")
        return super().find_class(module, name)
