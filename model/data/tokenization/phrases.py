"""Mines what a vocabulary may be made of: words, and groups of words and punctuation that stand together often.

A unigram model that is trained on whole lines finds multi-word pieces too, at more than ten times the cost: it has to
consider every substring of every line. Here every chunk of the text becomes a number, and numpy counts groups of them.

What is counted is hash-partitioned: a shard's counts are merged one partition at a time, so that memory does not grow
with the text. A shard needs some 60 bytes for each of its chunks, a partition some 60 for each distinct group in it,
and the result at most MAX_WORDS words and MAX_GROUPS groups of each length.

Source: groups of n are only counted where both groups of n - 1 in them are frequent: Agrawal and Srikant 1994, "Fast
algorithms for mining association rules", section 2.1.
"""

import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from model.data.pieces import Engine, Piece
from model.data.tokenization.text_sample import Blocks

MAX_WORDS = 1 << 20
MAX_GROUPS = 1 << 21

_PARTITION_BYTES = 1 << 25  # of text, for one partition of what is counted in it
# Kana and Han, written without spaces: each is a chunk, and words are groups of them.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MAX_PUNCTUATION = 3  # longer runs are rules and boxes, not what stands between words

Ids = NDArray[np.int32]
Keys = NDArray[np.int64]  # of a group: the number of the group before its last chunk, then that chunk


@dataclass(frozen=True)
class Candidates:
    """What may become a piece, with its count; each list begins with the most frequent, equal ones by their text.

    Attributes:
        words: Chunks: a word with the space before it, a digit, a run of punctuation or of white space.
        groups: Two or more chunks.
    """

    words: list[tuple[str, int]]
    groups: list[tuple[str, int]]


def mine_candidates(
    parts: Sequence[Blocks],
    sample_bytes: int,
    max_chunks: int,
    min_count: int,
    max_chars: int,
    work: Path,
    engine: Engine,
) -> Candidates:
    """Returns the chunks of the text, and the groups of up to max_chunks words and runs of punctuation, and up to
    max_chars characters, that occur at least min_count times."""
    n_partitions = -(-sample_bytes // _PARTITION_BYTES) or 1
    split = [
        Piece(work / "chunks" / f"{number:05}", partial(_save_chunks, part, n_partitions))
        for number, part in enumerate(parts)
    ]
    engine.finish("counting words", split)
    merged = [
        Piece(
            work / "words" / f"{number:05}",
            partial(_merge_chunks, [piece.folder for piece in split], number, MAX_WORDS // n_partitions),
        )
        for number in range(n_partitions)
    ]
    engine.finish("merging words", merged)
    words = _ordered([pq.read_table(piece.folder / "chunks.parquet") for piece in merged], MAX_WORDS)
    chunks, counts = words["chunk"].to_pylist(), words["count"].to_pylist()

    lexicon = [chunk for chunk, count in zip(chunks, counts, strict=True) if count >= min_count and joins(chunk)]
    numbered = [
        Piece(work / "numbers" / piece.folder.name, partial(_save_numbers, piece.folder, lexicon)) for piece in split
    ]
    groups: list[tuple[str, int]] = []
    if max_chunks > 1 and lexicon:
        engine.finish("numbering words", numbered)
        groups = _mine_groups(numbered, lexicon, n_partitions, max_chunks, min_count, max_chars, work, engine)
    return Candidates(list(zip(chunks, counts, strict=True)), groups)


def _mine_groups(
    numbered: Sequence[Piece],
    lexicon: list[str],
    n_partitions: int,
    max_chunks: int,
    min_count: int,
    max_chars: int,
    work: Path,
    engine: Engine,
) -> list[tuple[str, int]]:
    shorter, texts = numbered, lexicon
    table: Keys | None = None  # of the groups of one chunk less
    groups: list[tuple[str, int]] = []
    for size in range(2, max_chunks + 1):
        counted = [
            Piece(
                work / f"groups-{size}" / ids.folder.name,
                partial(_save_groups, ids.folder, before.folder, size, table, n_partitions),
            )
            for ids, before in zip(numbered, shorter, strict=True)
        ]
        engine.finish(f"counting groups of {size}", counted)
        merged = [
            Piece(
                work / f"merged-{size}" / f"{number:05}",
                partial(
                    _merge_groups, [piece.folder for piece in counted], number, min_count, MAX_GROUPS // n_partitions
                ),
            )
            for number in range(n_partitions)
        ]
        engine.finish(f"merging groups of {size}", merged)
        keys = np.concatenate([np.load(piece.folder / "keys.npy") for piece in merged])
        counts = np.concatenate([np.load(piece.folder / "counts.npy") for piece in merged])
        order = np.argsort(keys)
        longer = [texts[key >> 32] + lexicon[key & 0xFFFF_FFFF] for key in keys[order].tolist()]
        fits = np.fromiter((len(text) <= max_chars for text in longer), np.bool, len(longer))
        table, texts = keys[order][fits], [text for text, short in zip(longer, fits, strict=True) if short]
        groups += zip(texts, counts[order][fits].tolist(), strict=True)
        shorter = counted
        if not texts:
            break
    return sorted(groups, key=lambda group: (-group[1], group[0]))


# --- chunks


@cache
def _word() -> str:
    """Letters with the combining marks among them, and an ending like 's. Python's \\w lacks the marks, without which
    words of Hindi or Arabic would fall apart. A longer run, like a line of Thai, is cut: no piece is that long, and the
    trainer drops chunks above 4,192 bytes."""
    marks = "".join(char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char).startswith("M"))
    letter = rf"[^\W\d_{_CHARACTERS}]"
    return rf"{letter}{{1,64}}(?:[{marks}]{{1,4}}{letter}{{0,16}}){{0,16}}(?:['’]{letter}{{1,8}})?"


@cache
def _chunk() -> re.Pattern[str]:
    # White space but for its last character, which goes with the next word, is a chunk of its own.
    return re.compile(rf" ?{_word()}| ?[{_CHARACTERS}]| ?\d| ?[^\w\s]{{1,64}}|_{{1,64}}|[^\S\n]{{1,64}}(?!\S)|\s")


@cache
def _joining() -> re.Pattern[str]:
    return re.compile(rf" ?(?:{_word()}|[{_CHARACTERS}]|[^\w\s]{{1,{_MAX_PUNCTUATION}}}|_)")


def joins(chunk: str) -> bool:
    """Whether the chunk may stand in a group: words and short punctuation do; digits and white space do not."""
    return _joining().fullmatch(chunk) is not None


def split_chunks(text: str) -> list[str]:
    """Returns the chunks that make up the text."""
    return _chunk().findall(text)


def _save_chunks(blocks: Iterable[str], n_partitions: int, out: Path) -> None:
    """Writes the chunk of every place, as a number of this shard, and each partition's chunks with their counts."""
    number_of: defaultdict[str, int] = defaultdict()
    number_of.default_factory = number_of.__len__
    newline = number_of["\n"]
    numbers = array("i")
    for block in blocks:
        numbers.extend(map(number_of.__getitem__, split_chunks(block)))
        numbers.append(newline)
    ids = np.array(numbers, np.int32)
    counts = np.bincount(ids, minlength=len(number_of)) if len(ids) else np.zeros(len(number_of), np.int64)
    np.save(out / "ids.npy", ids)
    chunks = list(number_of)
    partition = np.fromiter(
        (xxhash.xxh3_64_intdigest(chunk.encode()) % n_partitions for chunk in chunks), np.int64, len(chunks)
    )
    table = pa.table({"chunk": pa.array(chunks, pa.large_string()), "count": counts})
    pq.write_table(table.select(["chunk"]), out / "chunks.parquet")
    for number in range(n_partitions):
        pq.write_table(table.filter(pa.array(partition == number)), out / f"{number:05}.parquet")


def _merge_chunks(shards: Sequence[Path], partition: int, max_words: int, out: Path) -> None:
    tables = [pq.read_table(shard / f"{partition:05}.parquet") for shard in shards]
    pq.write_table(_ordered(tables, max_words), out / "chunks.parquet")


def _ordered(tables: Sequence[pa.Table], max_words: int) -> pa.Table:
    """Returns the most frequent chunks of all tables with their counts, the most frequent first."""
    if not tables:
        return pa.table({"chunk": pa.array([], pa.large_string()), "count": pa.array([], pa.int64())})
    merged = pa.concat_tables(tables).group_by("chunk").aggregate([("count", "sum")])
    merged = merged.rename_columns({"count_sum": "count"}).sort_by([("count", "descending"), ("chunk", "ascending")])
    return merged.filter(pc.greater(merged["count"], 0)).slice(0, max_words)


def _save_numbers(shard: Path, lexicon: list[str], out: Path) -> None:
    """Writes the chunk of every place as its number in the lexicon; -1 where it is not there."""
    chunks = pq.read_table(shard / "chunks.parquet")["chunk"].combine_chunks()
    places = pc.fill_null(pc.index_in(chunks, pa.array(lexicon, pa.large_string())), -1)
    np.save(out / "groups.npy", places.to_numpy()[np.load(shard / "ids.npy")])


# --- groups


def _save_groups(ids_of: Path, before: Path, size: int, table: Keys | None, n_partitions: int, out: Path) -> None:
    """Counts the groups of `size` chunks; writes, for every place, the number of the group of one less in `table`."""
    ids: Ids = np.load(ids_of / "groups.npy")
    groups: Ids = np.load(before / "groups.npy")
    if table is not None:
        groups = _numbers(_keys(groups, ids, size - 1), table)
        np.save(out / "groups.npy", groups)
    else:
        (out / "groups.npy").hardlink_to(before / "groups.npy")
    keys = _keys(groups, ids, size)
    keys, counts = np.unique(keys[keys >= 0], return_counts=True)
    partition = _mixed(keys) % np.uint64(n_partitions)
    for number in range(n_partitions):
        np.save(out / f"keys-{number:05}.npy", keys[partition == number])
        np.save(out / f"counts-{number:05}.npy", counts[partition == number])


def _keys(groups: Ids, ids: Ids, size: int) -> Keys:
    """Returns the key of the group of `size` chunks at each place; -1 where a shorter group in it is not frequent.

    Args:
        groups: The number of the group of one less at each place.
        ids: The number of the chunk at each place.
    """
    count = max(0, len(ids) - size + 1)
    first, second, last = groups[:count], groups[1 : count + 1], ids[size - 1 :]
    return np.where((first >= 0) & (second >= 0) & (last >= 0), first.astype(np.int64) << 32 | last, -1)


def _numbers(keys: Keys, table: Keys) -> Ids:
    places = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[places] == keys, places, -1).astype(np.int32)


def _mixed(keys: Keys) -> NDArray[np.uint64]:
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ mixed >> np.uint64(32)


def _merge_groups(shards: Sequence[Path], partition: int, min_count: int, max_groups: int, out: Path) -> None:
    """Writes the most frequent groups of a partition and their counts."""
    loaded = [np.load(shard / f"keys-{partition:05}.npy") for shard in shards]
    keys, places = np.unique(np.concatenate(loaded), return_inverse=True)
    counts = np.zeros(len(keys), np.int64)
    starts = np.cumsum([0, *map(len, loaded)])
    for number, shard in enumerate(shards):
        # The keys of one shard are distinct.
        counts[places[starts[number] : starts[number + 1]]] += np.load(shard / f"counts-{partition:05}.npy")
    kept = np.flatnonzero(counts >= min_count)
    kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:max_groups]])
    np.save(out / "keys.npy", keys[kept])
    np.save(out / "counts.npy", counts[kept])
