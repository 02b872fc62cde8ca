"""Counts the chunks that a vocabulary is made of: words, and groups of words that occur together more than by chance.

A unigram model trained on whole lines finds multi-word pieces too, at more than ten times the cost: it has to consider
every substring of every line. Here numpy finds the phrases first, and the model is trained on each distinct chunk once.
"""

import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Pairs = NDArray[np.int64]  # two ids in one integer, the left one in the upper half

_SLICE_IDS = 1 << 22
_MERGE_PASSES = 4


def count_chunks(texts: Iterable[str], max_words: int, min_count: int, max_chars: int) -> dict[str, int]:
    """Returns every chunk of the texts with its count, the most frequent first.

    A chunk is a word with the space before it, a digit, a run of punctuation or of white space, or a phrase: up to
    max_words words and max_chars characters that stand together at least min_count times and have a normalised
    pointwise mutual information (NPMI) of at least 0.

    Source: NPMI: Bouma 2009, "Normalized (pointwise) mutual information in collocation extraction"; repeated merging
    of bigrams: Mikolov et al. 2013, arXiv:1310.4546, section 4.
    """
    slices, chunks = _chunk_ids(texts)
    lexicon = _Lexicon(chunks, max_words, max_chars)
    for _ in range((max_words - 1).bit_length()):  # the longest phrase doubles each round
        pairs, ranks = _phrases(slices, lexicon, min_count)
        if not len(pairs):
            break
        slices = [_merged(ids, lexicon, pairs, ranks) for ids in slices]
        lexicon.add(pairs)
    counts = _counts(slices, lexicon)
    order = np.argsort(-counts, kind="stable")
    return {lexicon.chunks[i]: int(counts[i]) for i in order.tolist() if counts[i]}


class _Lexicon:
    """The chunk of each id, and which of them may stand in a phrase."""

    def __init__(self, chunks: list[str], max_words: int, max_chars: int) -> None:
        word = re.compile(rf" ?{_word_pattern()}")
        self.chunks = chunks
        self._max_words = max_words
        self._max_chars = max_chars
        # 0 for what is no word.
        self._n_words = np.fromiter((word.fullmatch(chunk) is not None for chunk in chunks), np.int8, len(chunks))
        self._n_chars = np.fromiter(map(len, chunks), np.int32, len(chunks))
        self._spaced = np.fromiter((chunk.startswith(" ") for chunk in chunks), np.bool, len(chunks))

    def joinable(self, ids: Ids) -> NDArray[np.bool]:
        """Returns for each position but the last whether its chunk and the next may become one phrase."""
        left, right = ids[:-1], ids[1:]
        return (
            (self._n_words[left] > 0)
            & (self._n_words[right] > 0)
            & self._spaced[right]
            & (self._n_words[left] + self._n_words[right] <= self._max_words)
            & (self._n_chars[left] + self._n_chars[right] <= self._max_chars)
        )

    def add(self, pairs: Pairs) -> None:
        """Gives the next ids to the phrases that the pairs make."""
        left, right = _left(pairs), _right(pairs)
        self.chunks += [self.chunks[a] + self.chunks[b] for a, b in zip(left.tolist(), right.tolist(), strict=True)]
        self._n_words = np.append(self._n_words, self._n_words[left] + self._n_words[right])
        self._n_chars = np.append(self._n_chars, self._n_chars[left] + self._n_chars[right])
        self._spaced = np.append(self._spaced, self._spaced[left])


@cache
def _word_pattern() -> str:
    """Letters with the combining marks among them, and an ending like 's. Python's \\w lacks the marks, without which
    words of Hindi or Arabic would fall apart. A longer run, like a line of Chinese, is cut: no piece is that long, and
    the trainer drops chunks above 4,192 bytes."""
    marks = "".join(char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char).startswith("M"))
    letter = r"[^\W\d_]"
    return rf"{letter}{{1,64}}(?:[{marks}]{{1,4}}{letter}{{0,16}}){{0,16}}(?:['’]{letter}{{1,8}})?"


def _chunk_ids(texts: Iterable[str]) -> tuple[list[Ids], list[str]]:
    """Returns the texts as chunk ids, in slices of whole texts between newlines, and the chunk of each id."""
    # White space but for its last character, which goes with the next word, is a chunk of its own.
    chunk = re.compile(rf" ?{_word_pattern()}| ?\d| ?[^\w\s]{{1,64}}|_{{1,64}}|[^\S\n]{{1,64}}(?!\S)|\s")
    id_of: defaultdict[str, int] = defaultdict()
    id_of.default_factory = id_of.__len__
    newline = id_of["\n"]
    slices: list[Ids] = []
    ids = array("i", [newline])
    for text in texts:
        ids.extend(map(id_of.__getitem__, chunk.findall(text)))
        ids.append(newline)
        if len(ids) >= _SLICE_IDS:
            slices.append(np.array(ids, np.int32))
            ids = array("i", [newline])
    slices.append(np.array(ids, np.int32))
    return slices, list(id_of)


def _pairs(ids: Ids) -> Pairs:
    return ids[:-1].astype(np.int64) << 32 | ids[1:]


def _left(pairs: Pairs) -> Pairs:
    return pairs >> 32


def _right(pairs: Pairs) -> Pairs:
    return pairs & 0xFFFF_FFFF


def _counts(slices: list[Ids], lexicon: _Lexicon) -> NDArray[np.int64]:
    counts = np.zeros(len(lexicon.chunks), np.int64)
    for ids in slices:
        counts += np.bincount(ids, minlength=len(counts))
    return counts


def _phrases(slices: list[Ids], lexicon: _Lexicon, min_count: int) -> tuple[Pairs, NDArray[np.int64]]:
    """Returns the pairs that are phrases, ascending, and the rank of each; 1 is the weakest."""
    found = [np.unique(_pairs(ids)[lexicon.joinable(ids)], return_counts=True) for ids in slices]
    pairs, place = np.unique(np.concatenate([pairs for pairs, _ in found]), return_inverse=True)
    counts = np.zeros(len(pairs), np.int64)
    np.add.at(counts, place, np.concatenate([counts for _, counts in found]))

    pairs, counts = pairs[counts >= min_count], counts[counts >= min_count]
    chunk_counts = _counts(slices, lexicon)
    total = chunk_counts.sum()
    by_chance = chunk_counts[_left(pairs)] / total * chunk_counts[_right(pairs)]
    npmi = np.log(counts / by_chance) / -np.log(counts / total)
    pairs, scores = pairs[npmi >= 0], (counts * npmi)[npmi >= 0]
    ranks = np.empty(len(pairs), np.int64)
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(pairs) + 1)
    return pairs, ranks


def _merged(ids: Ids, lexicon: _Lexicon, pairs: Pairs, ranks: NDArray[np.int64]) -> Ids:
    """Returns ids with the phrases merged; where two overlap, the one of the higher rank."""
    here = _pairs(ids)
    phrase = np.minimum(np.searchsorted(pairs, here), len(pairs) - 1)
    rank = np.where(lexicon.joinable(ids) & (pairs[phrase] == here), ranks[phrase], 0)
    taken = np.zeros(len(rank), np.bool)
    # Each pass takes what outranks both neighbours. Only repetitions ("ha ha ha ha ha") would need more passes.
    for _ in range(_MERGE_PASSES):
        best = (rank > np.append(0, rank[:-1])) & (rank >= np.append(rank[1:], 0))
        taken |= best
        rank[best] = 0
        rank[1:][best[:-1]] = 0
        rank[:-1][best[1:]] = 0
    merged = ids.copy()
    merged[:-1][taken] = len(lexicon.chunks) + phrase[taken]
    return merged[~np.append(False, taken)]
