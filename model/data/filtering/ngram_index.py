"""An index of the n-grams of some texts, on disk, which worker processes share by mapping it into memory.

Texts are compared by their letters and digits alone, one run of them after the other: what stands between them, white
space too, does not matter, but an n-gram is found only where it starts and ends with a run.

Nearly no n-gram of a corpus is in the index. So its first bytes, a prefix, are looked up in a sparse table first, one
memory access for each run of the corpus; of what passes, more bytes, a seed; what then passes is compared in full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from model.data.duplicates.addresses import load, ranges, save, starts_of_groups
from model.data.words import Hashes, Words, split_words

_TEXTS_AT_ONCE = 10_000
_PREFIX_BYTES, _SEED_BYTES = 16, 32
"""Of a long n-gram; a short one has as many as the power of two that it reaches."""
_BYTES_PER_SEED = 4
_MAX_OWNERS = 16
"""Boilerplate is in all texts of a file; for each n-gram only so many are named."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Hits:
    """Where n-grams of the index are among words.

    Attributes:
        first: Their first words, (hits,).
        ends: The words after their last, (hits,).
        ngrams: Their numbers in the index, (hits,).
    """

    first: NDArray[np.int64]
    ends: NDArray[np.int64]
    ngrams: NDArray[np.int64]

    def chosen(self, which: NDArray[np.bool]) -> Self:
        """Some of them."""
        return type(self)(self.first[which], self.ends[which], self.ngrams[which])


@dataclass(frozen=True)
class _Letters:
    """The letters and digits of a sequence of words.

    Attributes:
        data: UTF-8, and padding for the last seed.
        starts: Where each run starts in data, and the end, (runs + 1,).
        run_starts: The first run of each word, and their number, (words + 1,).
    """

    data: bytes
    starts: NDArray[np.int64]
    run_starts: NDArray[np.int64]

    def prefixes(self, places: NDArray[np.int64], n_bytes: int, salt: int = 0) -> Hashes:
        """A hash of the bytes from each place on, and of the salt."""
        windows = np.ndarray(len(self.data) - 7, np.uint64, self.data, strides=(1,))
        hashes = np.full(len(places), salt, np.uint64)
        for offset in range(0, n_bytes, 8):
            window = windows[places + offset]
            if n_bytes < 8:
                window &= np.uint64((1 << 8 * n_bytes) - 1)
            hashes ^= window
            hashes *= _MULTIPLIER
            hashes ^= hashes >> np.uint64(32)
        return hashes

    def seeds(self, places: NDArray[np.int64], n_bytes: int) -> Hashes:
        """As prefixes, but other ones, so that no prefix of a long n-gram passes for the seed of a short one."""
        return self.prefixes(places, n_bytes, n_bytes)

    def hashes(self, places: NDArray[np.int64], ends: NDArray[np.int64]) -> Hashes:
        """The hash of the bytes from each place to its end."""
        spans = zip(places.tolist(), ends.tolist(), strict=True)
        return np.fromiter((xxhash.xxh3_64_intdigest(self.data[first:end]) for first, end in spans), np.uint64)


class _Spelling:
    """Spells words, of any of their texts."""

    def __init__(self, words: Words) -> None:
        runs = words.runs
        self._codes = words.codes
        self._first, self._counts = runs.starts[:-1], np.diff(runs.starts)
        buffers = [None, pa.py_buffer(runs.offsets), pa.py_buffer(runs.data)]
        self._runs = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(runs.offsets) - 1, buffers)

    def letters(self, chosen: NDArray[np.int64]) -> _Letters:
        """The letters and digits of some of the words."""
        codes = self._codes[chosen]
        taken = self._runs.take(pa.array(ranges(self._first[codes], self._counts[codes])))
        _, offsets, data = taken.buffers()
        return _Letters(
            (data.to_pybytes() if data else b"") + bytes(_SEED_BYTES + 8),
            np.frombuffer(offsets, np.int64)[: len(taken) + 1] if len(taken) else np.zeros(1, np.int64),
            np.concatenate([[0], np.cumsum(self._counts[codes])]),
        )

    def margin_numbers(self, lines: NDArray[np.int32]) -> NDArray[np.bool]:
        """Returns which words are numbers before the first or after the last other word of their line, (words,).

        Such are the numbers of lines, pages, verses and items; and those where a line of text happens to break.
        """
        digits = pc.utf8_is_numeric(self._runs.cast(pa.large_string())).to_numpy(zero_copy_only=False)
        before = np.concatenate([[0], np.cumsum(digits)])
        n_digits = before[self._first + self._counts] - before[self._first]
        (numbers,) = np.nonzero(((n_digits == self._counts) & (n_digits > 0))[self._codes])
        (others,) = np.nonzero((n_digits < self._counts)[self._codes])
        of_other = np.concatenate([[-1], lines[others], [-1]])
        after = np.searchsorted(others, numbers) + 1
        in_margin = np.zeros(len(self._codes), np.bool)
        in_margin[numbers] = (of_other[after - 1] != lines[numbers]) | (of_other[after] != lines[numbers])
        return in_margin


def save_ngrams(
    out: Path, texts: Sequence[str], owners: Sequence[int], ngram_words: int, min_words: int
) -> NDArray[np.int64]:
    """Writes the index and returns the number of words of each text, those of punctuation alone aside, (texts,).

    A text is in the index by its n-grams, and whole. Takes 300 bytes of memory for each word.

    Args:
        out: Where these columns are written. hashes, ascending, and is_whole: of each n-gram. owner_starts and owners:
            whose it is. seeds, ascending, and lengths: bytes of the n-grams that each seed begins. seen: the table of
            prefixes and seeds.
        texts: What is looked for.
        owners: A number for each text; may repeat.
        ngram_words: Words in an n-gram.
        min_words: Texts of fewer words are not looked for.
    """
    counts = [np.empty(0, np.int64)]
    batches = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = slice(start, start + _TEXTS_AT_ONCE)
        words = split_words(texts[batch])
        letters = _Spelling(words).letters(np.arange(len(words.codes)))
        (real,) = np.nonzero(np.diff(letters.run_starts))
        starts = np.searchsorted(real, words.starts)
        counts.append(np.diff(starts))
        first, last, of_text, is_whole = _spans(starts, ngram_words, min_words)
        places = letters.starts[letters.run_starts[real[first]]]
        ends = letters.starts[letters.run_starts[real[last] + 1]]
        prefixes, seeds = np.zeros((2, len(places)), np.uint64)
        for n_bytes, mine in _by_seed_bytes(ends - places):
            prefixes[mine] = letters.prefixes(places[mine], min(n_bytes, _PREFIX_BYTES))
            seeds[mine] = letters.seeds(places[mine], n_bytes)
        of_owner = np.array(owners[batch], np.int64)[of_text]
        batches.append((letters.hashes(places, ends), is_whole, of_owner, prefixes, seeds, ends - places))
    columns = map(np.concatenate, zip(*batches, strict=True)) if batches else _NOTHING
    _save_columns(out, *columns)
    return np.concatenate(counts)


class NgramIndex:
    """What save_ngrams wrote into a folder."""

    def __init__(self, folder: Path) -> None:
        self._hashes, self._seeds, self._lengths, self._seen, self._owner_starts, self._owners, self.is_whole = (
            load(folder, name) for name in ("hashes", "seeds", "lengths", "seen", "owner_starts", "owners", "is_whole")
        )
        self._seed_bytes = [n_bytes for n_bytes, _ in _by_seed_bytes(self._lengths)]

    def find(self, words: Words) -> Hits:
        """Finds every n-gram of the index that lies within a text, with or without the numbers at the ends of lines."""
        everything = np.arange(len(words.codes))
        spelling = _Spelling(words)
        hits = self._find(words, spelling, everything)
        in_margin = spelling.margin_numbers(words.lines)
        numbered = np.zeros(len(words.starts) - 1, np.bool)
        numbered[words.texts[in_margin]] = True
        if numbered.any():
            without = self._find(words, spelling, everything[numbered[words.texts] & ~in_margin])
            hits = np.unique(np.concatenate([hits, without], axis=1), axis=1)
        return Hits(*hits)

    def owners(self, ngrams: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns whose the n-grams are, and which of them each one is; some of several owners."""
        starts = self._owner_starts[ngrams]
        counts = self._owner_starts[ngrams + 1] - starts
        return self._owners[ranges(starts, counts)], np.repeat(np.arange(len(ngrams)), counts)

    def _find(self, words: Words, spelling: _Spelling, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """The hits among some of the words, (3, hits)."""
        letters = spelling.letters(chosen)
        found = [np.empty((3, 0), np.int64)]
        for runs, seeds in self._seeds_in(letters):
            low, high = (np.searchsorted(self._seeds, seeds, side) for side in ("left", "right"))
            places = np.repeat(letters.starts[runs], high - low)
            ends = places + self._lengths[ranges(low, high - low)]
            end_runs = np.searchsorted(letters.starts, ends)
            (possible,) = np.nonzero(letters.starts[np.minimum(end_runs, len(letters.starts) - 1)] == ends)
            hashes = letters.hashes(places[possible], ends[possible])
            ngrams = np.searchsorted(self._hashes, hashes)
            known = self._hashes[np.minimum(ngrams, len(self._hashes) - 1)] == hashes
            first_runs = np.repeat(runs, high - low)[possible][known]
            first, last = (
                chosen[np.searchsorted(letters.run_starts, of_hits, side="right") - 1]
                for of_hits in (first_runs, end_runs[possible][known] - 1)
            )
            found.append(np.stack([first, last + 1, ngrams[known]]))
        hits = np.concatenate(found, axis=1)
        text = np.searchsorted(words.starts, hits[:2] - [[0], [1]], side="right")
        return hits[:, text[0] == text[1]]

    def _seeds_in(self, letters: _Letters) -> Iterator[tuple[NDArray[np.int64], Hashes]]:
        """Yields runs that a seed of the index may start at, and these seeds, by the bytes of a seed."""
        runs_of_prefix: dict[int, NDArray[np.int64]] = {}
        for n_bytes in self._seed_bytes:
            prefix_bytes = min(n_bytes, _PREFIX_BYTES)
            if prefix_bytes not in runs_of_prefix:
                prefixes = letters.prefixes(letters.starts[:-1], prefix_bytes)
                runs_of_prefix[prefix_bytes] = np.flatnonzero(_is_seen(self._seen, prefixes))
            runs = runs_of_prefix[prefix_bytes]
            seeds = letters.seeds(letters.starts[runs], n_bytes)
            seen = _is_seen(self._seen, seeds)
            yield runs[seen], seeds[seen]


def _spans(
    starts: NDArray[np.int64], ngram_words: int, min_words: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool]]:
    """What is looked for of texts whose words start there: first and last words, the text, whether it is all of it."""
    counts = np.diff(starts)
    (long,) = np.nonzero(counts > max(ngram_words, min_words - 1))
    per_text = counts[long] - ngram_words + 1
    first = ranges(starts[long], per_text)
    (whole,) = np.nonzero(counts >= min_words)
    return (
        np.concatenate([first, starts[whole]]),
        np.concatenate([first + ngram_words, starts[whole + 1]]) - 1,
        np.concatenate([np.repeat(long, per_text), whole]),
        np.repeat([False, True], [len(first), len(whole)]),
    )


_NOTHING = tuple(np.empty(0, kind) for kind in (np.uint64, np.bool, np.int64, np.uint64, np.uint64, np.int64))


def _save_columns(
    out: Path,
    hashes: Hashes,
    is_whole: NDArray[np.bool],
    owners: NDArray[np.int64],
    prefixes: Hashes,
    seeds: Hashes,
    lengths: NDArray[np.int64],
) -> None:
    order = np.lexsort((owners, hashes))
    starts = starts_of_groups(hashes[order])
    distinct = starts_of_groups(hashes[order], owners[order])[:-1]
    of_ngram = np.diff(np.searchsorted(distinct, starts))
    named = np.minimum(of_ngram, _MAX_OWNERS)
    places = distinct[ranges(np.searchsorted(distinct, starts[:-1]), named)]
    by_seed = np.lexsort((lengths, seeds))
    begins = by_seed[starts_of_groups(seeds[by_seed], lengths[by_seed])[:-1]]
    save(
        out,
        hashes=hashes[order][starts[:-1]],
        is_whole=np.logical_or.reduceat(is_whole[order], starts[:-1]) if len(order) else is_whole,
        owner_starts=np.concatenate([[0], np.cumsum(named)]),
        owners=owners[order][places],
        seeds=seeds[begins],
        lengths=lengths[begins],
        seen=_seed_table(np.unique(np.concatenate([prefixes, seeds]))),
    )


def _by_seed_bytes(lengths: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """The lengths of seeds that n-grams of so many bytes have, and which of them have each."""
    exponents = np.minimum(np.frexp(lengths)[1] - 1, _SEED_BYTES.bit_length() - 1)
    return [(1 << exponent, np.flatnonzero(exponents == exponent)) for exponent in np.unique(exponents).tolist()]


def _seed_table(seeds: Hashes) -> NDArray[np.uint8]:
    """A bit for each seed, in a table so large that few others have one that is set."""
    table = np.zeros(1 << (max(1, _BYTES_PER_SEED * len(seeds)) - 1).bit_length(), np.uint8)
    slots, bits = _bits(table, seeds)
    np.bitwise_or.at(table, slots, bits)
    return table


def _is_seen(table: NDArray[np.uint8], seeds: Hashes) -> NDArray[np.bool]:
    slots, bits = _bits(table, seeds)
    return (table[slots] & bits) != 0


def _bits(table: NDArray[np.uint8], seeds: Hashes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The byte of each seed in a table whose length is a power of two, and the bit there."""
    slots = (seeds & np.uint64(len(table) - 1)).view(np.int64)
    return slots, np.uint8(1) << (seeds >> np.uint64(61)).astype(np.uint8)
