"""Exact verification of candidates: the Jaccard similarity of two documents' sets of word n-grams.

A set is held as ascending hashes of 32 bits. Two sets of k n-grams each then seem to share k * k / 2 ** 32 too many:
0.02 for ten thousand words, less than one part in a thousand of a set for the longest documents.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data.duplicates.addresses import (
    Addresses,
    Partition,
    by_shard,
    iter_texts,
    load,
    ranges,
    rows_of,
    save,
    shard_slice,
    starts_of_groups,
)
from model.data.duplicates.candidates import pair_hashes
from model.data.words import ngram_hashes, split_words, word_hashes

PAIRS_AT_ONCE = 1 << 20
"""Candidates of one piece, repeated ones included; with the n-grams below, 70 MB of memory."""
_NGRAMS_AT_ONCE = 1 << 19
"""N-grams of the pairs that are compared at once: 24 bytes of memory for each."""


def write_sets(out: Path, folder: Path, candidates: Sequence[Path], shard: int, ngram_words: int) -> None:
    """Writes the n-gram sets of the shard's documents that are in a pair.

    The files: rows.npy (sets,) uint32 ascending; starts.npy (sets + 1,) int64 into values.npy uint32.
    """
    found = [load(pairs, "addresses") for pairs in candidates]
    rows = rows_of(np.unique(np.concatenate([addresses[shard_slice(addresses, shard)] for addresses in found])))
    values, lengths = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
    for texts in iter_texts(folder / "documents.parquet", rows):
        of_batch, batch_lengths = ngram_sets(texts, ngram_words)
        values.append(of_batch)
        lengths.append(batch_lengths)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    save(out, rows=rows.astype(np.uint32), starts=starts, values=np.concatenate(values))


def ngram_sets(texts: Sequence[str], n: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Returns the texts' sets one after the other, and how many n-grams each has."""
    hashes, starts = word_hashes(split_words(texts))
    grams, _ = ngram_hashes(hashes, starts, n)
    counts = np.maximum(0, np.diff(starts) - (n - 1))
    text = np.repeat(np.arange(len(texts), dtype=np.uint64), counts)
    distinct = np.unique(text << np.uint64(32) | grams >> np.uint64(32))
    return distinct.astype(np.uint32), np.bincount((distinct >> np.uint64(32)).view(np.int64), minlength=len(texts))


def verify(
    out: Path, candidates: Sequence[Path], sets: Sequence[Path], min_jaccard: float, partition: Partition
) -> None:
    """Writes pairs.npy, (pairs, 2) addresses in ascending order: the candidates that are similar enough.

    Args:
        out: The piece's folder.
        candidates: Folders that find_pairs wrote; those of their pairs that the partition holds are verified.
        sets: Folders that write_sets wrote, one a shard.
        min_jaccard: Least similarity.
        partition: By pair_hashes.
    """
    pairs = _distinct_pairs(candidates, partition)
    addresses, flat = np.unique(pairs, return_inverse=True)
    places = flat.reshape(pairs.shape)
    begins, lengths = _find_sets(sets, addresses)
    sizes = lengths[places]
    # The smaller set can be no more than all of what both share.
    (possible,) = np.nonzero(sizes.min(axis=1, initial=2**62) >= min_jaccard * sizes.max(axis=1, initial=0))
    similar = np.zeros(len(pairs), np.bool)
    for chosen in _chunks(possible, sizes):
        needed, flat = np.unique(places[chosen], return_inverse=True)
        values = _read_sets(sets, addresses[needed], begins[needed], lengths[needed])
        similar[chosen] = jaccard(values, lengths[needed], flat.reshape(-1, 2)) >= min_jaccard
    save(out, pairs=pairs[similar])


def jaccard(values: NDArray[np.uint32], lengths: NDArray[np.int64], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the similarity of each pair of sets, (pairs,).

    Args:
        values: The sets, one after the other, each ascending.
        lengths: Of each set.
        pairs: Which two sets, (pairs, 2).
    """
    sizes = lengths[pairs]
    starts = np.cumsum(lengths) - lengths
    elements = values[ranges(starts[pairs.ravel()], sizes.ravel())].astype(np.uint64)
    elements |= np.repeat(np.arange(len(pairs), dtype=np.uint64) << np.uint64(32), sizes.sum(axis=1))
    # A stable sort of numpy merges what is sorted already: the time is linear here.
    elements.sort(kind="stable")
    twice = elements[:-1][elements[1:] == elements[:-1]] >> np.uint64(32)
    shared = np.bincount(twice.view(np.int64), minlength=len(pairs))
    return shared / (sizes.sum(axis=1) - shared)


def _distinct_pairs(candidates: Sequence[Path], partition: Partition) -> NDArray[np.uint64]:
    pairs = np.concatenate([_pairs_in(load(folder, "pairs"), partition) for folder in candidates])
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs[starts_of_groups(pairs[:, 0], pairs[:, 1])[:-1]]


def _pairs_in(pairs: NDArray[np.uint64], partition: Partition) -> NDArray[np.uint64]:
    """Those that the partition holds, of pairs in the order of their hashes."""

    def hash_at(place: int) -> int:
        return int(pair_hashes(pairs[place : place + 1])[0])

    bounds = (partition.first, partition.last + 1)
    low, high = (bisect_left(range(len(pairs)), bound, key=hash_at) for bound in bounds)
    return pairs[low:high]


def _find_sets(sets: Sequence[Path], addresses: Addresses) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where in its shard's values each document's set begins, and its length."""
    begins, lengths = np.zeros(len(addresses), np.int64), np.zeros(len(addresses), np.int64)
    for shard, places in by_shard(addresses):
        starts = load(sets[shard], "starts")
        found = np.searchsorted(load(sets[shard], "rows"), rows_of(addresses[places]))
        begins[places] = starts[found]
        lengths[places] = starts[found + 1] - starts[found]
    assert lengths.all(), "a candidate has an n-gram"
    return begins, lengths


def _read_sets(
    sets: Sequence[Path], addresses: Addresses, begins: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """The sets of ascending addresses, one after the other."""
    return np.concatenate(
        [load(sets[shard], "values")[ranges(begins[places], lengths[places])] for shard, places in by_shard(addresses)]
    )


def _chunks(pairs: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The pairs in parts of so many n-grams; one pair may have more alone."""
    before = np.cumsum(sizes[pairs].sum(axis=1)) // _NGRAMS_AT_ONCE
    yield from np.split(pairs, starts_of_groups(before)[1:-1]) if len(pairs) else ()
