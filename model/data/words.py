"""The words of a batch of texts as numbers: what filters, near duplicates and decontamination count."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
_NO_LETTER_OR_DIGIT = re.compile(r"[\W_]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Words:
    """Every word of a batch of texts, in order. White space separates words; scripts without it give a character each.

    Attributes:
        vocabulary: The distinct words, as they are written.
        codes: The place of each word in the vocabulary, (words,) int32.
        starts: Where each text's words start in codes, and their end, (texts + 1,) int64.
    """

    vocabulary: list[str]
    codes: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def texts(self) -> NDArray[np.int64]:
        """The text of each word, (words,)."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def split_words(texts: Sequence[str]) -> Words:
    spaced = [
        UNSPACED.sub(r" \g<0> ", text) if not text.isascii() and UNSPACED.search(text) else text for text in texts
    ]
    lists = pc.utf8_split_whitespace(pa.array(spaced, pa.large_string()))
    encoded = lists.flatten().dictionary_encode()
    codes = encoded.indices.to_numpy()
    vocabulary = encoded.dictionary.to_pylist()
    starts = lists.offsets.to_numpy().astype(np.int64)
    # White space at the ends of a text gives empty words.
    real = np.fromiter(map(bool, vocabulary), np.bool, len(vocabulary))[codes]
    before = np.concatenate([[0], np.cumsum(real)])
    return Words(vocabulary, codes[real], before[starts - starts[0]])


def word_hashes(words: Words) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns the hash of each word without case and punctuation, (n,), and where each text starts in it, (texts + 1,).

    Words of punctuation alone are left out: n may be smaller than the number of words.
    """
    distinct = np.fromiter(map(_normal_hash, words.vocabulary), np.uint64, len(words.vocabulary))
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


def _normal_hash(word: str) -> int:
    """A hash of the word's letters and digits in lower case; 0 where it has none."""
    normal = _NO_LETTER_OR_DIGIT.sub("", word.lower() if word.isascii() else normalize("NFKC", word).lower())
    return xxhash.xxh3_64_intdigest(normal.encode("utf-8", "surrogatepass")) or 1 if normal else 0
