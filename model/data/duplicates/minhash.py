"""MinHash: texts with similar sets of n-grams share a band key and so become candidates for near duplicates.

A text's sketch has one value for every bin. In each round of hashing every n-gram falls into one bin, and the bin keeps
the least hash of the first round that reached it. Two texts agree in a bin with the probability that is the Jaccard
similarity of their sets, however short they are, and a long text needs one round instead of one for every bin.

Source: Dahlgaard, Knudsen, Thorup 2017, "Fast Similarity Sketching", arXiv:1704.04370, section 2.
"""

import numpy as np
from numpy.typing import NDArray

from model.data.config import CANDIDATE_PROBABILITY, DeduplicationConfig
from model.data.words import Hashes, ngram_hashes

_EMPTY = np.uint64(2**64 - 1)
_ROUND_BITS = 11
"""Bits of a bin's value that hold the round: there are at most 2 * 1024 of them."""
_ROUNDS_BEFORE_SETS = 8
"""By then most texts of a hundred distinct n-grams or more are done: the rest is short, or repeats itself."""


def lsh_shape(min_jaccard: float, num_hashes: int) -> tuple[int, int]:
    """Returns (bands, rows): the most rows with which a pair at min_jaccard is a candidate often enough.

    A pair agrees in a band of r rows with the probability s ** r, and is a candidate when it agrees in any of the b
    bands: 1 - (1 - s ** r) ** b, which must be at least CANDIDATE_PROBABILITY. More rows spare false candidates.

    Source: Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4.2.

    Raises:
        ValueError: num_hashes is too small for any number of rows.
    """
    for rows in range(num_hashes, 0, -1):
        bands = num_hashes // rows
        if 1 - (1 - min_jaccard**rows) ** bands >= CANDIDATE_PROBABILITY:
            return bands, rows
    raise ValueError(
        f"num_hashes ({num_hashes}) is too small to find pairs at min_jaccard ({min_jaccard}) "
        f"with a probability of {CANDIDATE_PROBABILITY}"
    )


def band_keys(hashes: Hashes, starts: NDArray[np.int64], config: DeduplicationConfig) -> NDArray[np.uint64]:
    """Returns the key of each text in each band, (bands, texts); 0 for texts of fewer words than an n-gram.

    Args:
        hashes: The hash of each word, as word_hashes gives them.
        starts: Where each text starts in hashes, and the end, (texts + 1,).
    """
    bands, rows = lsh_shape(config.min_jaccard, config.num_hashes)
    grams, _ = ngram_hashes(hashes, starts, config.ngram_words)
    counts = np.maximum(0, np.diff(starts) - (config.ngram_words - 1))
    texts = np.repeat(np.arange(len(counts)), counts)
    values = _sketches(grams, texts, len(counts), bands * rows).reshape(len(counts), bands, rows)
    keys = np.zeros((len(counts), bands), np.uint64)
    for row in range(rows):
        keys = mix(keys + values[:, :, row])
    keys[keys == 0] = 1
    keys[counts == 0] = 0
    return np.ascontiguousarray(keys.T)


def _sketches(grams: Hashes, texts: NDArray[np.int64], count: int, bins: int) -> NDArray[np.uint64]:
    """The value of each bin of each text, (count, bins); `texts` says whose each n-gram is."""
    sketches = np.full((count, bins), _EMPTY)
    flat = sketches.reshape(-1)
    unfinished = np.unique(texts)
    multipliers = mix(np.arange(2 * bins, dtype=np.uint64)) | np.uint64(1)
    for number, multiplier in enumerate(multipliers):
        if not len(grams):
            break
        if number == _ROUNDS_BEFORE_SETS:
            grams, texts = _sets(grams, texts)
        values = grams * multiplier
        if number < bins:
            places = (values >> np.uint64(32)) * np.uint64(bins) >> np.uint64(32)
        else:  # every n-gram in one bin after the other, so that no bin stays empty
            places = np.full(len(values), number - bins, np.uint64)
        values >>= np.uint64(_ROUND_BITS)
        values |= np.uint64(number << (64 - _ROUND_BITS))
        np.minimum.at(flat, texts * bins + places.view(np.int64), values)
        if number < 4 or number % 8 == 7:  # further rounds change nothing in a text that has finished
            unfinished = unfinished[(sketches[unfinished] == _EMPTY).any(axis=1)]
            waits = np.zeros(count, np.bool)
            waits[unfinished] = True
            grams, texts = grams[waits[texts]], texts[waits[texts]]
    return sketches


def _sets(grams: Hashes, texts: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """Every distinct n-gram of each text once."""
    order = np.lexsort((grams, texts))
    grams, texts = grams[order], texts[order]
    new = np.ones(len(grams), np.bool)
    new[1:] = (grams[1:] != grams[:-1]) | (texts[1:] != texts[:-1])
    return grams[new], texts[new]


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns other, well spread values, one for each.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 16 (mix64).
    """
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
