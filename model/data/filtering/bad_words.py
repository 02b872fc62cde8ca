"""C4's rule on bad words. The list is brought by whoever asks for the rule."""

from collections.abc import Sequence
from itertools import pairwise
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from model.data.words import split_words

BadWords = tuple[tuple[str, ...], ...]
"""Words and phrases, each as the words and punctuation marks that it is made of."""

_PUNCTUATION = r"[^\pL\pN\pM_\s]"  # a mark on a letter is part of it


def parse_bad_words(text: str) -> BadWords:
    """Returns what a list holds, one word or phrase a line.

    Raises:
        ValueError: There is none.
    """
    words = split_words(_separated(text.splitlines()))
    entries = (words.codes[start:end].tolist() for start, end in pairwise(words.starts))
    listed = tuple(dict.fromkeys(tuple(words.vocabulary[code] for code in codes) for codes in entries if codes))
    if not listed:
        raise ValueError("the list is empty")
    return listed


def hold_bad_words(texts: Sequence[str], listed: BadWords) -> NDArray[np.bool]:
    """Returns which texts hold a listed word or phrase, (texts,): in any case, between any blanks and line ends, and
    whole; in scripts that are written without spaces each character is a word.

    Source: Raffel et al. 2020, JMLR 21(140), section 2.2; whole words: c4_utils.py of TensorFlow Datasets.
    """
    words = split_words(_separated(texts))
    codes = {word: code for code, word in enumerate(words.vocabulary)}
    # Padded, so that no phrase reaches over the end.
    padded = np.concatenate([words.codes, np.full(max(map(len, listed)), -1, words.codes.dtype)])
    held = np.zeros(len(texts), np.bool)
    for entry in listed:
        if not all(word in codes for word in entry):
            continue
        (places,) = np.nonzero(words.codes == codes[entry[0]])
        for offset, word in enumerate(entry[1:], start=1):
            places = places[padded[places + offset] == codes[word]]
        ends = words.starts[words.texts[places] + 1]
        held[words.texts[places[places + len(entry) <= ends]]] = True
    return held


def _separated(texts: Sequence[str]) -> list[str]:
    """Returns the texts without case, with blanks around every character that is not part of a word, or is one."""
    folded = [text.lower() if text.isascii() else normalize("NFKC", text).casefold() for text in texts]
    return pc.replace_substring_regex(pa.array(folded, pa.large_string()), _PUNCTUATION, r" \0 ").to_pylist()
