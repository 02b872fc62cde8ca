"""An index of the n-grams of some texts, on disk, which worker processes share by mapping it into memory.

Nearly no n-gram of a corpus is in it. So the first words of each, its seed, are looked up in a sparse table first: one
memory access for each word of the corpus. What passes is then compared in full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data.duplicates.addresses import load, ranges, save, starts_of_groups
from model.data.words import Hashes, ngram_hashes, split_words, word_hashes

_TEXTS_AT_ONCE = 10_000
_SLOTS_PER_SEED = 16
_MAX_OWNERS = 16
"""Boilerplate is in all texts of a file; for each n-gram only so many are named."""


@dataclass(frozen=True)
class Hits:
    """Where n-grams of the index are among words; one that several owners have is there for each.

    Attributes:
        first: Their first words, (hits,).
        ends: The words after their last, (hits,).
        owners: Whose they are, (hits,).
    """

    first: NDArray[np.int64]
    ends: NDArray[np.int64]
    owners: NDArray[np.int64]


@dataclass(frozen=True)
class _Ngrams:
    """N-grams of one length: hashes, the hashes of their seeds, and owners, (n,) each."""

    hashes: Hashes
    seeds: Hashes
    owners: NDArray[np.int64]


def save_ngrams(
    out: Path, texts: Sequence[str], owners: Sequence[int], ngram_words: int, min_words: int
) -> NDArray[np.int64]:
    """Writes the index and returns the number of words of each text, (texts,).

    Takes 100 bytes of memory for each word. A text of fewer words than an n-gram is in the index whole.

    Args:
        out: Where seen.npy, the table of seeds, and for each length N the files hashes-N.npy, ascending, and
            owners-N.npy are written.
        texts: What is looked for.
        owners: A number for each text; may repeat.
        ngram_words: Words in an n-gram.
        min_words: Texts of fewer words are not looked for.
    """
    parts: dict[int, list[_Ngrams]] = {}
    counts = [np.empty(0, np.int64)]
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = slice(start, start + _TEXTS_AT_ONCE)
        hashes, starts = word_hashes(split_words(texts[batch]))
        counts.append(np.diff(starts))
        for n, ngrams in _ngrams(hashes, starts, np.array(owners[batch], np.int64), ngram_words, min_words):
            parts.setdefault(n, []).append(ngrams)
    seeds = [np.empty(0, np.uint64)]
    for n, batches in parts.items():
        seeds += [ngrams.seeds for ngrams in batches]
        hashes = np.concatenate([ngrams.hashes for ngrams in batches])
        of_hash = np.concatenate([ngrams.owners for ngrams in batches])
        order = np.lexsort((of_hash, hashes))
        hashes, of_hash = hashes[order], of_hash[order]
        once = starts_of_groups(hashes, of_hash)[:-1]
        hashes, of_hash = hashes[once], of_hash[once]
        starts = starts_of_groups(hashes)
        named = ranges(starts[:-1], np.minimum(np.diff(starts), _MAX_OWNERS))
        save(out, **{f"hashes-{n}": hashes[named], f"owners-{n}": of_hash[named]})
    save(out, seen=_seed_table(np.unique(np.concatenate(seeds))))
    return np.concatenate(counts)


class NgramIndex:
    """What save_ngrams wrote into a folder; ngram_words and min_words must be the same."""

    def __init__(self, folder: Path, ngram_words: int, min_words: int) -> None:
        self._seed_words = min(ngram_words, min_words)
        self._seen = load(folder, "seen")
        lengths = [n for n in range(1, ngram_words + 1) if (folder / f"hashes-{n}.npy").exists()]
        self._hashes = {n: load(folder, f"hashes-{n}") for n in lengths}
        self._owners = {n: load(folder, f"owners-{n}") for n in lengths}

    def find(self, hashes: Hashes, starts: NDArray[np.int64]) -> Hits:
        """Finds every n-gram of the index that lies within a text.

        Args:
            hashes: The hash of each word of all texts, as word_hashes gives them.
            starts: Where each text starts in hashes, and the end, (texts + 1,).
        """
        seeds, places = ngram_hashes(hashes, starts, self._seed_words)
        places = places[self._seen[_slots(seeds, len(self._seen))]]
        ends_of_text = starts[np.searchsorted(starts, places, side="right")]
        found = [np.empty((3, 0), np.int64)]
        for n, known in self._hashes.items():
            first = places[places + n <= ends_of_text]
            windows = hashes[first[:, None] + np.arange(n)]
            grams, _ = ngram_hashes(windows.ravel(), np.arange(len(first) + 1) * n, n)
            low = np.searchsorted(known, grams)
            count = np.searchsorted(known, grams, side="right") - low
            owners = self._owners[n][ranges(low, count)]
            first = np.repeat(first, count)
            found.append(np.stack([first, first + n, owners]))
        return Hits(*np.concatenate(found, axis=1))


def _ngrams(
    hashes: Hashes, starts: NDArray[np.int64], owners: NDArray[np.int64], ngram_words: int, min_words: int
) -> Iterator[tuple[int, _Ngrams]]:
    """Yields what the index has of a batch of texts, by length."""
    seeds_at = np.zeros(len(hashes), np.uint64)
    seeds, places = ngram_hashes(hashes, starts, min(ngram_words, min_words))
    seeds_at[places] = seeds
    counts = np.diff(starts)
    for n in range(min(ngram_words, min_words), ngram_words + 1):
        wanted = (counts >= max(n, min_words)) if n == ngram_words else (counts == n)
        grams, places = ngram_hashes(hashes, starts, n)
        text = np.searchsorted(starts, places, side="right") - 1
        mine = wanted[text]
        if mine.any():
            yield n, _Ngrams(grams[mine], seeds_at[places[mine]], owners[text[mine]])


def _seed_table(seeds: Hashes) -> NDArray[np.bool]:
    """Whether a seed has each slot; so many slots that few others' do."""
    table = np.zeros(1 << (max(1, _SLOTS_PER_SEED * len(seeds)) - 1).bit_length(), np.bool)
    table[_slots(seeds, len(table))] = True
    return table


def _slots(seeds: Hashes, slots: int) -> NDArray[np.int64]:
    """The slot of each seed in a table whose length is a power of two."""
    return (seeds & np.uint64(slots - 1)).view(np.int64)
