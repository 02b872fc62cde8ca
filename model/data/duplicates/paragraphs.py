"""Removes paragraphs that are in several documents from all but one, in pieces that survive a kill.

It looks at nothing but the documents that deduplication left, so an occurrence that stays is always in a document that
stays. Of equal paragraphs, the one in the document of the least content hash stays, the first there; so the order of
documents and shards does not matter.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data.config import DeduplicationConfig
from model.data.duplicates.addresses import (
    Partition,
    gather,
    iter_texts,
    load,
    partitions,
    rows_of,
    save,
    shard_addresses,
    shard_slice,
    starts_of_groups,
)
from model.data.duplicates.minhash import mix
from model.data.pieces import Engine, Piece
from model.data.words import Hashes, split_words, word_hashes

_BLANK_LINES = re.compile(r"(\n(?:[^\S\n]*\n)+)")
_BYTES_PER_PARAGRAPH = 104
"""Peak memory of find_repeated for each paragraph in its partition."""


def find_repeated_paragraphs(
    folders: Sequence[Path],
    verdicts: Sequence[Path],
    config: DeduplicationConfig,
    work: Path,
    engine: Engine,
    memory_bytes: int,
) -> list[Path]:
    """Returns a folder for each read folder, for read_repeated_paragraphs.

    Args:
        folders: As deduplicate has them.
        verdicts: What deduplicate returned.
        config: min_paragraph_words.
        work: Where the pieces are; a call that was killed goes on there, with the same arguments.
        engine: Makes the pieces.
        memory_bytes: Of one piece.
    """
    hashes = [
        Piece(
            work / "paragraphs" / f"{shard:06}",
            partial(write_paragraphs, folder=folder, verdicts=own, least_words=config.min_paragraph_words),
        )
        for shard, (folder, own) in enumerate(zip(folders, verdicts, strict=True))
    ]
    engine.finish("paragraphs", hashes)
    paragraphs = [piece.folder for piece in hashes]
    count = sum(len(load(folder, "hash")) for folder in paragraphs)
    parts = [
        Piece(
            work / "repeated" / part.name,
            partial(find_repeated, folders=folders, paragraphs=paragraphs, partition=part),
        )
        for part in partitions(count, _BYTES_PER_PARAGRAPH, memory_bytes)
    ]
    engine.finish("repeated paragraphs", parts)
    repeated = [piece.folder for piece in parts]
    results = [
        Piece(work / "removed" / f"{shard:06}", partial(write_removed, repeated=repeated, shard=shard))
        for shard in range(len(folders))
    ]
    engine.finish("paragraphs to remove", results)
    return [piece.folder for piece in results]


def read_repeated_paragraphs(folder: Path) -> dict[int, list[int]]:
    """Returns for each row that has any, ascending, the numbers of the paragraphs to remove from it."""
    removed = load(folder, "removed")
    starts = starts_of_groups(removed[:, 0])
    return {int(removed[start, 0]): removed[start:end, 1].tolist() for start, end in pairwise(starts)}


def split_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs, which blank lines separate."""
    return _BLANK_LINES.split(text)[::2]


def remove_paragraphs(text: str, numbers: Sequence[int]) -> str:
    """Returns the text without these of its paragraphs, each with the blank lines before it."""
    parts = ["", *_BLANK_LINES.split(text)]
    gone = set(numbers)
    kept = [number for number in range(len(parts) // 2) if number not in gone]
    return "".join(parts[2 * number] * (number != kept[0]) + parts[2 * number + 1] for number in kept)


def write_paragraphs(out: Path, folder: Path, verdicts: Path, least_words: int) -> None:
    """Writes the shard's paragraphs that may not repeat, by their hash: hash.npy, row.npy and number.npy."""
    (rows,) = np.nonzero(load(verdicts, "survives"))
    hashes, row, number = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)], [np.empty(0, np.uint32)]
    done = 0
    for texts in iter_texts(folder / "documents.parquet", rows):
        paragraphs = [split_paragraphs(text) for text in texts]
        counts = np.array([len(of_text) for of_text in paragraphs])
        of_batch, words = _paragraph_hashes([paragraph for of_text in paragraphs for paragraph in of_text])
        long = words >= least_words
        hashes.append(of_batch[long])
        row.append(np.repeat(rows[done : done + len(texts)], counts)[long].astype(np.uint32))
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        number.append(numbers[long].astype(np.uint32))
        done += len(texts)
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")
    save(out, hash=joined[order], row=np.concatenate(row)[order], number=np.concatenate(number)[order])


def find_repeated(out: Path, folders: Sequence[Path], paragraphs: Sequence[Path], partition: Partition) -> None:
    """Writes the occurrences that go, by address: addresses.npy, and number.npy of the paragraph in the document."""
    hashes, addresses, numbers = [], [], []
    for shard, folder in enumerate(paragraphs):
        own = load(folder, "hash")
        bounds = np.array([partition.first, partition.last], np.uint64)
        low, high = int(np.searchsorted(own, bounds[0])), int(np.searchsorted(own, bounds[1], side="right"))
        hashes.append(own[low:high])
        addresses.append(shard_addresses(shard, load(folder, "row")[low:high]))
        numbers.append(load(folder, "number")[low:high])
    hash_, address, number = np.concatenate(hashes), np.concatenate(addresses), np.concatenate(numbers)
    order = np.argsort(hash_)
    sizes = np.diff(starts_of_groups(hash_[order]))
    order = order[np.repeat(sizes > 1, sizes)]
    hash_, address, number = hash_[order], address[order], number[order]
    content = gather(folders, "content", address)
    order = np.lexsort((number, content[:, 1], content[:, 0], hash_))
    goes = np.ones(len(order), np.bool)
    goes[starts_of_groups(hash_[order])[:-1]] = False
    order = order[goes]
    order = order[np.lexsort((number[order], address[order]))]
    save(out, addresses=address[order], number=number[order])


def write_removed(out: Path, repeated: Sequence[Path], shard: int) -> None:
    """Writes removed.npy, (paragraphs, 2) uint32: row and number of each that goes, ascending."""
    rows, numbers = [], []
    for folder in repeated:
        addresses = load(folder, "addresses")
        own = shard_slice(addresses, shard)
        rows.append(rows_of(addresses[own]))
        numbers.append(load(folder, "number")[own])
    removed = np.stack([np.concatenate(rows), np.concatenate(numbers)], axis=1).astype(np.uint32)
    save(out, removed=removed[np.lexsort((removed[:, 1], removed[:, 0]))])


def _paragraph_hashes(paragraphs: Sequence[str]) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns the hash of each paragraph's words, 0 where it has none, and how many it has."""
    hashes, starts = word_hashes(split_words(paragraphs))
    counts = np.diff(starts)
    places = np.arange(len(hashes)) - np.repeat(starts[:-1], counts)
    placed = mix(hashes + mix(places.astype(np.uint64)))
    sums = np.zeros(len(paragraphs), np.uint64)
    sums[counts > 0] = np.add.reduceat(placed, starts[:-1][counts > 0]) if len(placed) else 0
    return sums, counts
