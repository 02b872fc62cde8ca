"""Mines what a vocabulary may be made of: words, and groups of words and punctuation that stand together often.

A unigram model that is trained on whole lines finds multi-word pieces too, at more than ten times the cost: it has to
consider every substring of every line. Here every chunk of the text becomes a number, and numpy counts groups of them.

Memory depends neither on the text's size nor on what repeats in it. The text comes in parts of bounded size; what is
counted in them is hash-partitioned, and each partition is merged alone. A process needs at most some 60 bytes for each
of the chunks of a part, or of the groups of a partition, and 250 for each of its distinct words: 0.5 GiB. The process
that asks holds MAX_WORDS words, the groups that are returned, and a table of MAX_GROUPS groups, too: 1 GiB.

Source: groups of n are only counted where both groups of n - 1 in them are frequent: Agrawal and Srikant 1994, "Fast
algorithms for mining association rules", section 2.1.
"""

import heapq
import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from model.data.pieces import Engine, Piece, finish_piece
from model.data.tokenization.text_sample import Blocks

MAX_WORDS = 1 << 20
MAX_GROUPS = 1 << 21

_PARTITION_BYTES = 1 << 24  # of text, for one partition of the words in it
_PARTITION_CHUNKS = 1 << 23  # of text, for one partition of the groups in it
# Kana and Han, written without spaces: each is a chunk, and words are groups of them.
_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MAX_PUNCTUATION = 3  # longer runs are rules and boxes, not what stands between words
_TEXTS_AT_ONCE = 1 << 16

_LAST = 0xFFFF_FFFF  # of a key: the last chunk of the group
_COUNTED = np.dtype([("key", np.int64), ("count", np.int32)])
_GROUP = np.dtype([("key", np.int64), ("count", np.int64), ("chars", np.int32)])

Ids = NDArray[np.int32]
Table = NDArray[np.void]
Keys = NDArray[np.int64]  # of a group: the number of the group before its last chunk, then that chunk


@dataclass(frozen=True)
class Words:
    """The chunks of a text: a word with the space before it, a digit, a run of punctuation or of white space.

    Attributes:
        counts: The most frequent first, equal ones by their text.
        parts: What `_save_chunks` wrote of each part of the text.
    """

    counts: list[tuple[str, int]]
    parts: list[Path]


@dataclass(frozen=True)
class GroupLimits:
    """Which groups are mined.

    Attributes:
        max_chunks: Most chunks in one.
        min_count: Least occurrences.
        max_chars: Longest, in characters.
        max_groups: Most groups, of all sizes together.
    """

    max_chunks: int
    min_count: int
    max_chars: int
    max_groups: int


def mine_words(parts: Sequence[Blocks], sample_bytes: int, work: Path, engine: Engine) -> Words:
    """Returns the chunks of the text, at most MAX_WORDS."""
    n_partitions = -(-sample_bytes // _PARTITION_BYTES) or 1
    split = [
        Piece(work / "chunks" / f"{number:05}", partial(_save_chunks, part, n_partitions))
        for number, part in enumerate(parts)
    ]
    engine.finish("counting words", split)
    folders = [piece.folder for piece in split]
    merged = [
        Piece(work / "words" / f"{number:05}", partial(_merge_chunks, folders, number, MAX_WORDS // n_partitions))
        for number in range(n_partitions)
    ]
    engine.finish("merging words", merged)
    words = _ordered([pq.read_table(piece.folder / "chunks.parquet") for piece in merged], MAX_WORDS)
    return Words(list(zip(words["chunk"].to_pylist(), words["count"].to_pylist(), strict=True)), folders)


def mine_groups(
    words: Words, lexicon: Sequence[str], limits: GroupLimits, work: Path, engine: Engine
) -> list[tuple[str, int]]:
    """Returns the most frequent groups of two or more chunks with their counts, equal ones by their text.

    Args:
        lexicon: The chunks that may stand in a group, each in `words` and `joins`.
    """
    if limits.max_chunks < 2 or not lexicon:
        return []
    table = Piece(work / "lexicon", partial(_save_lexicon, lexicon))
    finish_piece(table)
    numbered = [Piece(work / "numbers" / part.name, partial(_save_numbers, part, table.folder)) for part in words.parts]
    engine.finish("numbering words", numbered)
    n_chunks = sum(len(np.load(piece.folder / "groups.npy", mmap_mode="r")) for piece in numbered)
    n_partitions = -(-n_chunks // _PARTITION_CHUNKS) or 1
    shorter, tables = numbered, [table]
    for size in range(2, limits.max_chunks + 1):
        counted = [
            Piece(
                work / f"groups-{size}" / ids.folder.name,
                partial(_save_groups, ids.folder, before.folder, size, tables[-1].folder, n_partitions),
            )
            for ids, before in zip(numbered, shorter, strict=True)
        ]
        engine.finish(f"counting groups of {size}", counted)
        folders = [piece.folder for piece in counted]
        merged = [
            Piece(
                work / f"merged-{size}" / f"{number:05}",
                partial(_merge_groups, folders, number, table.folder, tables[-1].folder, limits),
            )
            for number in range(n_partitions)
        ]
        engine.finish(f"merging groups of {size}", merged)
        folders = [piece.folder for piece in merged]
        tables.append(Piece(work / f"tables-{size}", partial(_join_tables, folders)))
        finish_piece(tables[-1])
        if not len(np.load(tables[-1].folder / "table.npy", mmap_mode="r")):
            break
        if size > 2:
            shorter = counted
    found = [np.load(piece.folder / "table.npy", mmap_mode="r") for piece in tables[1:]]
    return _with_texts(found, lexicon, limits.max_groups)


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
    """Writes the chunk of every place, as a number of this part, and each partition's chunks with their counts."""
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


def _merge_chunks(parts: Sequence[Path], partition: int, max_words: int, out: Path) -> None:
    tables = [pq.read_table(part / f"{partition:05}.parquet") for part in parts]
    pq.write_table(_ordered(tables, max_words), out / "chunks.parquet")


def _ordered(tables: Sequence[pa.Table], max_words: int) -> pa.Table:
    """Returns the most frequent chunks of all tables with their counts, the most frequent first."""
    if not tables:
        return pa.table({"chunk": pa.array([], pa.large_string()), "count": pa.array([], pa.int64())})
    merged = pa.concat_tables(tables).group_by("chunk").aggregate([("count", "sum")])
    merged = merged.rename_columns({"count_sum": "count"}).sort_by([("count", "descending"), ("chunk", "ascending")])
    return merged.filter(pc.greater(merged["count"], 0)).slice(0, max_words)


def _save_lexicon(lexicon: Sequence[str], out: Path) -> None:
    """Writes the chunks, and what a table of groups of one of them would be but for its keys and counts."""
    pq.write_table(pa.table({"chunk": pa.array(lexicon, pa.large_string())}), out / "chunks.parquet")
    table = np.zeros(len(lexicon), _GROUP)
    table["chars"] = np.fromiter(map(len, lexicon), np.int64, len(lexicon))
    np.save(out / "table.npy", table)


def _save_numbers(part: Path, lexicon: Path, out: Path) -> None:
    """Writes the chunk of every place as its number in the lexicon; -1 where it is not there."""
    chunks, known = (pq.read_table(folder / "chunks.parquet")["chunk"].combine_chunks() for folder in (part, lexicon))
    places = pc.fill_null(pc.index_in(chunks, known), -1)
    np.save(out / "groups.npy", places.to_numpy()[np.load(part / "ids.npy")])


# --- groups


def _save_groups(ids_of: Path, before: Path, size: int, table: Path, n_partitions: int, out: Path) -> None:
    """Counts the groups of `size` chunks and writes them, one partition after the other, and where each ends; for a
    size of more than 2 also, for every place, the number of the group of one less in the table."""
    ids: Ids = np.load(ids_of / "groups.npy")
    groups: Ids = np.load(before / "groups.npy")
    if size > 2:
        groups = _numbers(_keys(groups, ids, size - 1), np.load(table / "table.npy")["key"])
        np.save(out / "groups.npy", groups)
    keys = _keys(groups, ids, size)
    keys, counts = np.unique(keys[keys >= 0], return_counts=True)
    partition = _mixed(keys) % np.uint64(n_partitions)
    order = np.argsort(partition, kind="stable")
    counted = np.empty(len(keys), _COUNTED)
    counted["key"], counted["count"] = keys[order], counts[order]
    np.save(out / "counted.npy", counted)
    np.save(out / "ends.npy", np.searchsorted(partition[order], np.arange(n_partitions), side="right"))


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


def _merge_groups(
    parts: Sequence[Path], partition: int, lexicon: Path, table: Path, limits: GroupLimits, out: Path
) -> None:
    """Writes the table of a partition: its most frequent groups in the order of their keys."""
    counted = np.concatenate([_load_partition(part, partition) for part in parts])
    order = np.argsort(counted["key"], kind="stable")
    keys, counts = counted["key"][order], counted["count"][order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.add.reduceat(counts, firsts, dtype=np.int64)
    frequent = counts >= limits.min_count
    groups = np.empty(np.count_nonzero(frequent), _GROUP)
    groups["key"], groups["count"] = keys[firsts[frequent]], counts[frequent]
    last, before = (np.load(folder / "table.npy")["chars"] for folder in (lexicon, table))
    groups["chars"] = before[groups["key"] >> 32] + last[groups["key"] & _LAST]
    np.save(out / "table.npy", _most_frequent(groups[groups["chars"] <= limits.max_chars]))


def _load_partition(part: Path, partition: int) -> Table:
    first, end = np.concatenate([[0], np.load(part / "ends.npy")])[partition : partition + 2]
    return np.load(part / "counted.npy", mmap_mode="r")[first:end]


def _join_tables(merged: Sequence[Path], out: Path) -> None:
    """Writes the table of all partitions."""
    table = np.empty(0, _GROUP)
    for folder in merged:
        table = _most_frequent(np.concatenate([table, np.load(folder / "table.npy")]))
    np.save(out / "table.npy", table)


def _most_frequent(groups: Table) -> Table:
    """Returns the MAX_GROUPS most frequent groups, of equal ones those with the least keys, in the order of their keys.

    None that is among the most frequent of all sizes is lost by this: the shorter groups in it occur as often.
    """
    if len(groups) > MAX_GROUPS:
        groups = groups[np.lexsort([groups["key"], -groups["count"]])[:MAX_GROUPS]]
    return groups[np.argsort(groups["key"])]


def _with_texts(tables: Sequence[Table], lexicon: Sequence[str], max_groups: int) -> list[tuple[str, int]]:
    """Returns the most frequent groups of all sizes, of equal ones the first by their text.

    Args:
        tables: Of the groups of 2 chunks, 3, and so on.
    """
    counts = np.concatenate([table["count"] for table in tables])
    most = min(max_groups, len(counts))
    least = np.partition(counts, len(counts) - most)[len(counts) - most] if most else 0
    found: list[tuple[str, int]] = []
    for size, table in enumerate(tables, 2):
        places = np.flatnonzero(table["count"] > least)
        found += zip(_texts(tables[: size - 1], places, lexicon), table["count"][places].tolist(), strict=True)
    # There may be very many of this count: their texts are not all held at once.
    equal = chain.from_iterable(
        _texts(tables[: size - 1], np.flatnonzero(table["count"] == least), lexicon)
        for size, table in enumerate(tables, 2)
    )
    found += ((text, int(least)) for text in heapq.nsmallest(most - len(found), equal))
    found.sort(key=itemgetter(0))
    found.sort(key=itemgetter(1), reverse=True)
    return found


def _texts(tables: Sequence[Table], places: NDArray[np.int64], lexicon: Sequence[str]) -> Iterator[str]:
    """Yields the texts of groups by their places in the last of the tables."""
    for start in range(0, len(places), _TEXTS_AT_ONCE):
        groups = places[start : start + _TEXTS_AT_ONCE]
        columns = []
        for table in reversed(tables):
            keys = table["key"][groups]
            columns.append(keys & _LAST)
            groups = keys >> 32
        chunks = ([lexicon[chunk] for chunk in column.tolist()] for column in (groups, *reversed(columns)))
        yield from map("".join, zip(*chunks, strict=True))
