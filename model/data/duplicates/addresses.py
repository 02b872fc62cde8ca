"""Documents that are spread over many folders, one a read shard, each far larger together than memory.

A document's address is its shard's place among the folders in the upper, and its row in the lower 32 bits. Columns are
.npy files of a row a document; those of one shard are small, and are memory-mapped one shard at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

_TEXTS_AT_ONCE = 32
_ROW_BITS = np.uint64(32)


@dataclass(frozen=True)
class Partition:
    """An equal share of the range of 64-bit hashes."""

    number: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.number:05}-of-{self.count:05}"

    @property
    def first(self) -> int:
        return -(-(self.number << 64) // self.count)

    @property
    def last(self) -> int:
        return -(-((self.number + 1) << 64) // self.count) - 1

    def holds(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool]:
        return (hashes >= np.uint64(self.first)) & (hashes <= np.uint64(self.last))


def partitions(rows: int, bytes_per_row: int, memory_bytes: int) -> list[Partition]:
    """As many as keep the rows of each within the memory."""
    count = max(1, -(-rows * bytes_per_row // memory_bytes))
    return [Partition(number, count) for number in range(count)]


def load(folder: Path, name: str) -> NDArray[Any]:
    """The column, memory-mapped."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))


def save(folder: Path, **columns: NDArray[Any]) -> None:
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)


def shard_addresses(shard: int, rows: NDArray[np.integer] | int) -> Addresses:
    """The addresses of some rows of a shard, or of its first rows if it is their number."""
    of_rows = np.arange(rows) if isinstance(rows, int) else rows
    return of_rows.astype(np.uint64) | np.uint64(shard) << _ROW_BITS


def shard_slice(addresses: Addresses, shard: int) -> slice:
    """Where a shard's addresses are among ascending ones."""
    bounds = np.array([shard, shard + 1], np.uint64) << _ROW_BITS
    return slice(*(int(place) for place in np.searchsorted(addresses, bounds)))


def rows_of(addresses: Addresses) -> NDArray[np.int64]:
    return addresses.astype(np.uint32).astype(np.int64)


def by_shard(addresses: Addresses) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields each shard that the addresses are in, ascending, and where they stand."""
    order = np.argsort(addresses, kind="stable")
    shards, first = np.unique(addresses[order] >> _ROW_BITS, return_index=True)
    yield from zip(map(int, shards), np.split(order, first[1:]) if len(order) else (), strict=True)


def gather(folders: Sequence[Path], name: str, addresses: Addresses) -> NDArray[Any]:
    """Returns the documents' rows of a column, in the order of the addresses."""
    column = load(folders[0], name)
    gathered = np.empty((len(addresses), *column.shape[1:]), column.dtype)
    for shard, places in by_shard(addresses):
        gathered[places] = load(folders[shard], name)[rows_of(addresses[places])]
    return gathered


def iter_texts(path: Path, rows: NDArray[np.int64]) -> Iterator[list[str]]:
    """Yields the texts of ascending rows of a Parquet file, some at a time; row groups without any are not read."""
    with pq.ParquetFile(path) as file:
        ends = np.cumsum([0] + [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
        for group in np.unique(np.searchsorted(ends, rows, side="right") - 1):
            first = int(ends[group])
            for batch in file.iter_batches(_TEXTS_AT_ONCE, row_groups=[int(group)], columns=["text"]):
                wanted = rows[slice(*np.searchsorted(rows, [first, first + batch.num_rows]))] - first
                if len(wanted):
                    yield batch.column("text").take(wanted).to_pylist()
                first += batch.num_rows


def starts_of_groups(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Where equal neighbours start, with columns that are sorted together; the last is the end."""
    rows = len(columns[0])
    new = np.ones(rows + 1, np.bool)
    if rows:
        new[1:-1] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.nonzero(new)[0]


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns starts[0], starts[0] + 1, … of the first length, then those of the second range, and so on."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
