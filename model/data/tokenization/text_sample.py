"""A sample of the text in document shards, chosen by a seeded hash of its blocks: whatever the number and order of the
shards, and however the work is divided, equal documents give an equal sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from model.data.pieces import Engine, Piece
from model.data.readers.documents import replace_surrogates

_BLOCK_CHARS = 1 << 14
_MIN_BLOCKS = 16
_READ_ROWS = 64


@dataclass(frozen=True)
class Blocks:
    """The sampled blocks of one shard: those whose key is at most `last`."""

    shard: Path
    block_chars: int
    seed: int
    last: int

    def __iter__(self) -> Iterator[str]:
        for key, block in _keyed(self.shard, self.block_chars, self.seed):
            if key <= self.last:
                yield block.decode()


@dataclass(frozen=True)
class TextSample:
    """Text of all shards.

    Attributes:
        keys: Of the sampled blocks, ascending, (blocks,) uint64.
        ends: Their bytes up to each block, itself included, (blocks,) int64.
    """

    shards: tuple[Path, ...]
    block_chars: int
    seed: int
    keys: NDArray[np.uint64]
    ends: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def parts(self, max_bytes: int) -> list[Blocks]:
        """Returns at most max_bytes of the sample, as a part for every shard."""
        count = _fitting(self.keys, self.ends, max_bytes)
        last = int(self.keys[count - 1]) if count else -1
        return [Blocks(shard, self.block_chars, self.seed, last) for shard in self.shards]


def sample_text(shards: Sequence[Path], sample_bytes: int, seed: int, work: Path, engine: Engine) -> TextSample:
    """Returns at most sample_bytes of the shards' text, in blocks cut after a newline where there is one."""
    block_chars = max(1, min(_BLOCK_CHARS, sample_bytes // _MIN_BLOCKS))
    pieces = [
        Piece(work / f"{number:05}", partial(_save_keys, shard, block_chars, seed, sample_bytes))
        for number, shard in enumerate(shards)
    ]
    engine.finish("sampling", pieces)
    empty = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))]
    found = [(np.load(piece.folder / "keys.npy"), np.load(piece.folder / "sizes.npy")) for piece in pieces] or empty
    keys, sizes = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    keys, ends = _smallest(keys, sizes, sample_bytes)
    return TextSample(tuple(shards), block_chars, seed, keys, ends)


def _save_keys(shard: Path, block_chars: int, seed: int, sample_bytes: int, out: Path) -> None:
    """Writes the keys and sizes of the blocks that could be in the sample: larger keys cannot."""
    found = [(key, len(block)) for key, block in _keyed(shard, block_chars, seed)]
    keys = np.fromiter((key for key, _ in found), np.uint64, len(found))
    sizes = np.fromiter((size for _, size in found), np.int64, len(found))
    keys, ends = _smallest(keys, sizes, sample_bytes)
    np.save(out / "keys.npy", keys)
    np.save(out / "sizes.npy", np.diff(ends, prepend=0))


def _smallest(
    keys: NDArray[np.uint64], sizes: NDArray[np.int64], max_bytes: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    order = np.argsort(keys, kind="stable")
    keys, ends = keys[order], np.cumsum(sizes[order])
    count = _fitting(keys, ends, max_bytes)
    return keys[:count], ends[:count]


def _fitting(keys: NDArray[np.uint64], ends: NDArray[np.int64], max_bytes: int) -> int:
    """Returns how many of the blocks are in a sample of max_bytes: equal blocks, which have one key, are all in it or
    none."""
    count = int(np.searchsorted(ends, max_bytes, side="right"))
    if count < len(keys):
        count = int(np.searchsorted(keys, keys[count], side="left"))
    return count


def _keyed(shard: Path, block_chars: int, seed: int) -> Iterator[tuple[int, bytes]]:
    with pq.ParquetFile(shard) as file:
        for batch in file.iter_batches(_READ_ROWS, columns=["text"]):
            for text in batch.column("text").to_pylist():
                for block in _blocks(text, block_chars):
                    yield xxhash.xxh3_64_intdigest(block, seed), block


def _blocks(text: str, max_chars: int) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield replace_surrogates(text[start:end]).encode()
        start = end
