"""The words of a batch of texts as numbers: what filters, near duplicates and decontamination count."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Scripts written without spaces: Thai, Lao, Myanmar, Khmer, kana, Bopomofo, Han with its punctuation, full-width forms.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u2e80-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff00-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
_UNSPACED_CHARS = UNSPACED.pattern.removeprefix("[").removesuffix("]")
_WORD = re.compile(rf"[{_UNSPACED_CHARS}]|[^\s{_UNSPACED_CHARS}]+")
_MARKS_BEYOND_ASCII = re.compile(r"[^\w\x00-\x7f]+")
_IN_RUN = np.array([byte >= 0x80 or chr(byte).isalnum() for byte in range(256)])
"""Which bytes of UTF-8 are of a letter or digit, where there is none of _MARKS_BEYOND_ASCII."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Runs:
    """Runs of letters and digits within words: what is left of these without case, punctuation and other marks.

    Attributes:
        data: All runs one after the other, in UTF-8.
        offsets: Where each run starts in data, and the end, (runs + 1,).
        starts: The first run of each word, and the number of runs, (words + 1,).
    """

    data: bytes
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class Words:
    """Every word of a batch of texts, in order. White space separates words; scripts without it give a character each.

    Attributes:
        vocabulary: The distinct words, as they are written.
        codes: The place of each word in the vocabulary, (words,) int32.
        starts: Where each text's words start in codes, and their end, (texts + 1,) int64.
        lines: The line of each word, ascending over all texts, (words,) int32.
    """

    vocabulary: list[str]
    codes: NDArray[np.int32]
    starts: NDArray[np.int64]
    lines: NDArray[np.int32]

    @property
    def texts(self) -> NDArray[np.int64]:
        """The text of each word, (words,)."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @cached_property
    def runs(self) -> "Runs":
        """The runs of letters and digits of each word of the vocabulary, without case."""
        return _split_runs(pa.array(self.vocabulary, pa.large_string()))

    def of_texts(self, texts: NDArray[np.int64]) -> Self:
        """The words of some of the texts, with the same vocabulary."""
        lengths = np.diff(self.starts)[texts]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.starts[texts] - (ends - lengths), lengths)
        starts = np.concatenate([[0], ends])
        return replace(self, codes=self.codes[places], starts=starts, lines=self.lines[places])


def split_words(texts: Sequence[str]) -> Words:
    spaced = [
        UNSPACED.sub(r" \g<0> ", text) if not text.isascii() and UNSPACED.search(text) else text for text in texts
    ]
    # A last text that is none of these: Arrow looks at what stands behind white space, behind that of the last one too.
    lines = pc.split_pattern(pa.array([*spaced, "."], pa.large_string()), "\n")
    lists = pc.utf8_split_whitespace(lines.flatten())
    encoded = lists.flatten().dictionary_encode()
    codes = encoded.indices.to_numpy()
    vocabulary = encoded.dictionary.to_pylist()
    line_starts = lists.offsets.to_numpy().astype(np.int64)
    line_of_word = np.repeat(np.arange(len(lists), dtype=np.int32), np.diff(line_starts))
    # An empty line, and white space at the ends of a line, give empty words.
    real = np.fromiter(map(bool, vocabulary), np.bool, len(vocabulary))[codes]
    before = np.concatenate([[0], np.cumsum(real)])
    starts = before[line_starts[lines.offsets.to_numpy()[:-1]]]
    return Words(vocabulary, codes[real][: starts[-1]], starts, line_of_word[real][: starts[-1]])


def word_offsets(text: str) -> NDArray[np.int64]:
    """Where each word that split_words gives starts and ends in the text, (words, 2)."""
    return np.array([match.span() for match in _WORD.finditer(text)], np.int64).reshape(-1, 2)


def word_hashes(words: Words) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns the hash of each word without case and punctuation, (n,), and where each text starts in it, (texts + 1,).

    Words of punctuation alone are left out: n may be smaller than the number of words.
    """
    data, bounds = words.runs.data, words.runs.offsets[words.runs.starts]
    spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    distinct = np.fromiter(
        (xxhash.xxh3_64_intdigest(data[start:end]) or 1 if start < end else 0 for start, end in spans),
        np.uint64,
        len(bounds) - 1,
    )
    hashes = distinct[words.codes]
    real = hashes != 0
    before = np.concatenate([[0], np.cumsum(real)])
    return hashes[real], before[words.starts]


def ngram_hashes(hashes: Hashes, starts: NDArray[np.int64], n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns the hash of every n-gram that lies within a text, (m,), and where it starts in hashes, (m,) ascending."""
    count = max(0, len(hashes) - n + 1)
    rolled = np.zeros(count, np.uint64)
    for k in range(n):
        rolled *= _MULTIPLIER
        rolled += hashes[k : k + count]
    rolled ^= rolled >> np.uint64(31)
    rolled *= np.uint64(0xBF58476D1CE4E5B9)
    rolled ^= rolled >> np.uint64(29)
    text = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    (places,) = np.nonzero(text[:count] == text[n - 1 :])
    return rolled[places], places


def _split_runs(words: pa.Array) -> Runs:
    beyond_ascii = pc.invert(pc.string_is_ascii(words))
    others = [
        _MARKS_BEYOND_ASCII.sub(" ", normalize("NFKC", word).casefold())
        for word in words.filter(beyond_ascii).to_pylist()
    ]
    plain = pc.replace_with_mask(pc.utf8_lower(words), beyond_ascii, pa.array(others, pa.large_string()))
    _, offset_buffer, buffer = plain.buffers()
    bounds = np.frombuffer(offset_buffer, np.int64)[: len(plain) + 1]
    data = np.frombuffer(buffer or b"", np.uint8)[: bounds[-1]]
    in_run = _IN_RUN[data]
    starts_run = in_run.copy()
    starts_run[1:] &= ~in_run[:-1]
    begins = bounds[:-1][bounds[:-1] < bounds[1:]]
    starts_run[begins] = in_run[begins]
    before = np.concatenate([[0], np.cumsum(in_run)])
    (places,) = np.nonzero(starts_run)
    offsets = np.append(before[places], before[-1])
    return Runs(data[in_run].tobytes(), offsets, np.searchsorted(places, bounds))
