"""A sample of the text in document shards, chosen by a seeded hash of its blocks: whatever the number and order of the
shards, and however the work is divided, equal documents give an equal sample.

The sample is copied out of the shards once. It is read in parts of PART_BYTES, so that memory depends neither on the
shards nor on the sample; to make it takes as much as the largest row group of the shards.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from model.data.pieces import Engine, Piece
from model.data.readers.documents import replace_surrogates

PART_BYTES = 8 << 20

_BLOCK_CHARS = 1 << 14
_MIN_BLOCKS = 16
_READ_ROWS = 64
_GROUP_BYTES = 1 << 20  # of a row group in the copy
_KEYS_AT_ONCE = 1 << 16
_KEY = np.dtype([("key", np.uint64), ("bytes", np.uint32)])
_KEY_BITS = 64
_DIGIT_BITS = 16
_SCHEMA = pa.schema({"key": pa.uint64(), "text": pa.large_string()})


@dataclass(frozen=True)
class Blocks:
    """Some row groups of the copy: what is in them of a sample that ends with the key `last`."""

    groups: tuple[tuple[Path, int], ...]
    last: int

    def __iter__(self) -> Iterator[str]:
        for path, group in self.groups:
            with pq.ParquetFile(path) as file:
                table = file.read_row_group(group)
            for key, text in zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True):
                if key <= self.last:
                    yield text


@dataclass(frozen=True)
class TextSample:
    """Text of all shards.

    Attributes:
        bytes: Its size.
        keys: What `_save_keys` wrote of each shard.
        copies: What `_save_copy` wrote of each shard.
    """

    bytes: int
    keys: tuple[Path, ...]
    copies: tuple[Path, ...]

    def parts(self, max_bytes: int) -> list[Blocks]:
        """Returns at most max_bytes of the sample, in parts of some PART_BYTES."""
        last, _ = _cut(self.keys, min(max_bytes, self.bytes))
        parts: list[Blocks] = []
        groups: list[tuple[Path, int]] = []
        n_bytes = 0
        for copy in self.copies:
            for group, size in enumerate(np.load(copy / "sizes.npy").tolist()):
                if groups and n_bytes + size > PART_BYTES:
                    parts.append(Blocks(tuple(groups), last))
                    groups, n_bytes = [], 0
                groups.append((copy / "blocks.parquet", group))
                n_bytes += size
        return [*parts, Blocks(tuple(groups), last)] if groups else parts


def sample_text(shards: Sequence[Path], sample_bytes: int, seed: int, work: Path, engine: Engine) -> TextSample:
    """Returns at most sample_bytes of the shards' text, in blocks cut after a newline where there is one."""
    block_chars = max(1, min(_BLOCK_CHARS, sample_bytes // _MIN_BLOCKS))
    hashed = [
        Piece(work / "keys" / f"{number:05}", partial(_save_keys, shard, block_chars, seed))
        for number, shard in enumerate(shards)
    ]
    engine.finish("sampling", hashed)
    keys = tuple(piece.folder for piece in hashed)
    last, n_bytes = _cut(keys, sample_bytes)
    copied = [
        Piece(work / "blocks" / f"{number:05}", partial(_save_copy, shard, block_chars, seed, last))
        for number, shard in enumerate(shards)
    ]
    engine.finish("copying the sample", copied)
    return TextSample(n_bytes, keys, tuple(piece.folder for piece in copied))


def _save_keys(shard: Path, block_chars: int, seed: int, out: Path) -> None:
    """Writes the key and the size of every block."""
    blocks = ((key, len(block)) for key, block in _keyed(shard, block_chars, seed))
    with (out / "keys.bin").open("wb") as file:
        while some := list(islice(blocks, _KEYS_AT_ONCE)):
            np.array(some, _KEY).tofile(file)


def _cut(keys: Sequence[Path], max_bytes: int) -> tuple[int, int]:
    """Returns the last key of the largest sample of at most max_bytes, -1 where it is empty, and its bytes.

    A sample is all blocks up to a key: equal blocks, which have one key, are all in it or none. The key is found digit
    by digit, which takes no sorting of all blocks.
    """
    first, n_bytes = 0, 0  # the blocks before this key, which have so many bytes, are in the sample
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        sizes = np.zeros(1 << _DIGIT_BITS)
        for blocks in _read_keys(keys):
            # The keys before the first one wrap around and are out too.
            digits = blocks["key"] - np.uint64(first) >> np.uint64(shift)
            inside = digits < 1 << _DIGIT_BITS
            sizes += np.bincount(digits[inside].astype(np.int64), blocks["bytes"][inside], 1 << _DIGIT_BITS)
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64) + n_bytes
        digit = int(np.searchsorted(ends, max_bytes, side="right")) - 1  # the first that does not fit as a whole
        first, n_bytes = first + (digit << shift), int(ends[digit])
        if digit == 1 << _DIGIT_BITS:
            break  # all of them are in
    return first - 1, n_bytes


def _read_keys(folders: Sequence[Path]) -> Iterator[NDArray[np.void]]:
    for folder in folders:
        with (folder / "keys.bin").open("rb") as file:
            while len(blocks := np.fromfile(file, _KEY, _KEYS_AT_ONCE)):
                yield blocks


def _save_copy(shard: Path, block_chars: int, seed: int, last: int, out: Path) -> None:
    """Writes the blocks up to the last key, and the bytes of each row group of them."""
    sizes = []
    with pq.ParquetWriter(out / "blocks.parquet", _SCHEMA, compression="zstd", use_dictionary=False) as writer:
        for group in _groups(block for block in _keyed(shard, block_chars, seed) if block[0] <= last):
            keys, blocks = zip(*group, strict=True)
            texts = pa.array(blocks, pa.large_binary()).cast(pa.large_string())
            table = pa.Table.from_arrays([pa.array(keys, pa.uint64()), texts], schema=_SCHEMA)
            writer.write_table(table, row_group_size=len(group))
            sizes.append(sum(map(len, blocks)))
    np.save(out / "sizes.npy", np.array(sizes, np.int64))


def _groups(blocks: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    group, n_bytes = [], 0
    for key, block in blocks:
        group.append((key, block))
        n_bytes += len(block)
        if n_bytes >= _GROUP_BYTES:
            yield group
            group, n_bytes = [], 0
    if group:
        yield group


def _keyed(shard: Path, block_chars: int, seed: int) -> Iterator[tuple[int, bytes]]:
    with pq.ParquetFile(shard) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_READ_ROWS, row_groups=[group], columns=["text"]):
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
