"""What the rules of Gopher, C4 and FineWeb judge: quantities of documents, for a batch of texts at once.

A quantity that a document does not have, such as a share of its lines where it has none, is not a number, and no rule
holds it against the document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unicodedata import category

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from model.data.words import UNSPACED, Words

Scores = dict[str, NDArray[np.float32]]

# The full stops, exclamation and question marks of all scripts that have their own.
_STOPS = ".!?…。！？｡．।॥۔؟։።፧။។"
_QUOTES = "\"'”’»›」』"
TERMINAL_PUNCTUATION = _STOPS + _QUOTES
_SENTENCE_END = tuple(_STOPS)
_CLOSING = _QUOTES + ")]}）】"
_ELLIPSIS_END = "(?:…|\\.\\.\\.)$"
_BULLET = "^(?:[•‣⁃∙◦●○■□▪▫]|[-*][ \t])"
_SHORT_LINE_CHARS = 30
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")

TOP_NGRAMS = range(2, 5)
DUPLICATE_NGRAMS = range(5, 11)


@dataclass(frozen=True)
class Score:
    """One quantity.

    Attributes:
        definition: What it measures, to the letter.
        edges: Where the bins of its histogram start, and where the last one ends; each bin holds its start.
    """

    definition: str
    edges: tuple[float, ...]


# Between whole numbers, ten bins for each power of ten, so that the bounds 50, 200 and 100,000 part two bins.
_COUNT = (-0.5, *(edge - 0.5 for edge in sorted({round(10 ** (step / 10)) for step in range(81)})))
# Hundredths, and a bin of its own for "all".
_SHARE = tuple(step / 100 for step in range(102))

SCORES: Mapping[str, Score] = {
    "chars": Score("Characters.", _COUNT),
    "words": Score("Words: what white space separates, and each character of scripts written without it.", _COUNT),
    "language_score": Score("Certainty of the most probable language.", _SHARE),
    "mean_word_chars": Score(
        "Mean characters of the words, those of scripts written without spaces aside; not of texts that are mostly in "
        "such scripts.",
        tuple(step / 4 for step in range(81)),
    ),
    "symbols_per_word": Score("The more of '#' and of ellipses ('...' or '…'), per word.", _SHARE),
    "bullet_lines": Score("Share of lines that start with a bullet, or with '-' or '*' and a blank.", _SHARE),
    "ellipsis_lines": Score("Share of lines that end with an ellipsis.", _SHARE),
    "alphabetic_words": Score(
        "Share of words with at least one alphabetic character. In scripts without spaces, where each character is a "
        "word, vowel and tone marks are alphabetic, and punctuation is no word.",
        _SHARE,
    ),
    "stop_words": Score(
        f"How many of {', '.join(STOP_WORDS)} occur; not of texts that are mostly in scripts without spaces.",
        tuple(step - 0.5 for step in range(10)),
    ),
    "duplicate_lines": Score("Share of lines that repeat an earlier line. Blank lines are none.", _SHARE),
    "duplicate_line_chars": Score("Share of the lines' characters in lines that repeat an earlier line.", _SHARE),
    "duplicate_paragraphs": Score(
        "Share of paragraphs that repeat an earlier one. Blank lines separate paragraphs.", _SHARE
    ),
    "duplicate_paragraph_chars": Score(
        "Share of the paragraphs' characters in paragraphs that repeat an earlier one.", _SHARE
    ),
    **{
        f"top_{n}gram_chars": Score(
            f"Characters of the most frequent {n}-gram of words, times its occurrences, over the words' characters, at "
            "most 1; of several as frequent the longest; 0 where none occurs twice.",
            _SHARE,
        )
        for n in TOP_NGRAMS
    },
    **{
        f"duplicate_{n}gram_chars": Score(
            f"Share of the words' characters that lie in a {n}-gram of words that occurs more than once, its first "
            "occurrence too; each character counts once.",
            _SHARE,
        )
        for n in DUPLICATE_NGRAMS
    },
    "sentences": Score(
        "Sentences: words that end with a full stop, exclamation or question mark, closing quotes and brackets aside.",
        _COUNT,
    ),
    "lorem_ipsum": Score("How often 'lorem ipsum' occurs, in any case.", _COUNT),
    "curly_brackets": Score("Curly brackets, opening and closing.", _COUNT),
    "punctuated_lines": Score("Share of lines that end with terminal punctuation or a closing quote.", _SHARE),
    "short_lines": Score(f"Share of lines shorter than {_SHORT_LINE_CHARS} characters.", _SHARE),
    "newlines_per_word": Score("Line ends, those of blank lines too, per word.", _SHARE),
}


def score_documents(texts: Sequence[str], words: Words) -> Scores:
    """Returns what SCORES defines, but for the language's, one number a text, (texts,).

    Args:
        texts: Clean texts.
        words: Their words.

    Source: Rae et al. 2021, arXiv:2112.11446, appendix A.1; Raffel et al. 2020, JMLR 21(140), section 2.2;
        Penedo et al. 2024, arXiv:2406.17557, section 3.6.
    """
    array = pa.array(texts, pa.large_string())
    lines = _split(array, "\n")
    scores = (
        _text_scores(texts, array, words)
        | _word_scores(words)
        | _line_scores(lines)
        | _repeated_parts("line", lines)
        | _repeated_parts("paragraph", _split(array, "\n\n"))
        | _ngram_scores(words)
    )
    return {name: scores[name].astype(np.float32) for name in SCORES if name in scores}


def _share(part: NDArray, whole: NDArray) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _sums(values: NDArray, starts: NDArray[np.int64]) -> NDArray:
    """The sum of the values of each text, (texts,)."""
    before = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return before[starts[1:]] - before[starts[:-1]]


def _number(keys: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Numbers the distinct keys as they appear; returns the number of each, (n,), and where each number is first."""
    numbers = pa.array(keys).dictionary_encode().indices.to_numpy()
    return numbers, np.flatnonzero(np.diff(np.maximum.accumulate(numbers), prepend=-1))


# --- characters and words -----------------------------------------------------------------------------------------


def _text_scores(texts: Sequence[str], array: pa.Array, words: Words) -> dict[str, NDArray]:
    def occurrences(part: str) -> NDArray[np.int64]:
        return np.fromiter((text.count(part) for text in texts), np.int64, len(texts))

    n_words = np.diff(words.starts)
    return {
        "chars": np.fromiter(map(len, texts), np.int64, len(texts)),
        "words": n_words,
        "symbols_per_word": _share(np.maximum(occurrences("#"), occurrences("...") + occurrences("…")), n_words),
        "lorem_ipsum": pc.count_substring(array, "lorem ipsum", ignore_case=True).to_numpy(),
        "curly_brackets": occurrences("{") + occurrences("}"),
        "newlines_per_word": _share(occurrences("\n"), n_words),
    }


def _word_scores(words: Words) -> dict[str, NDArray]:
    """Every distinct word is looked at once."""
    vocabulary, codes, starts = words.vocabulary, words.codes, words.starts
    n_words = np.diff(starts)
    chars = np.fromiter(map(len, vocabulary), np.int64, len(vocabulary))
    spaced = np.fromiter((word.isascii() or not UNSPACED.match(word) for word in vocabulary), np.bool, len(vocabulary))
    alphabetic = np.fromiter(map(_is_alphabetic, vocabulary), np.bool, len(vocabulary))
    pairs = zip(vocabulary, spaced, strict=True)
    punctuation = np.array([not has_spaces and category(word)[0] == "P" for word, has_spaces in pairs], np.bool)
    ending = np.fromiter(map(_ends_sentence, vocabulary), np.bool, len(vocabulary))
    places = {word: place for place, word in enumerate(STOP_WORDS)}
    stop = np.fromiter((places.get(word.lower(), -1) for word in vocabulary), np.int8, len(vocabulary))[codes]
    present = np.zeros((len(n_words), len(STOP_WORDS)), np.bool)
    present[words.texts[stop >= 0], stop[stop >= 0]] = True
    n_spaced = _sums(spaced[codes], starts)
    mostly_spaced = (n_spaced > 0) & (2 * n_spaced >= n_words)
    return {
        "mean_word_chars": _share(_sums((chars * spaced)[codes], starts), n_spaced * mostly_spaced),
        "alphabetic_words": _share(_sums(alphabetic[codes], starts), n_words - _sums(punctuation[codes], starts)),
        "stop_words": np.where(mostly_spaced, present.sum(axis=1), np.nan),
        "sentences": _sums(ending[codes], starts),
    }


def _is_alphabetic(word: str) -> bool:
    return word.isalpha() or any(map(str.isalpha, word)) or (len(word) == 1 and category(word)[0] == "M")


def _ends_sentence(word: str) -> bool:
    return not word[-1:].isalnum() and word.rstrip(_CLOSING).endswith(_SENTENCE_END)


# --- lines and paragraphs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """The lines or paragraphs of a batch, blank ones left out and white space around them removed.

    Attributes:
        distinct: The different ones, a pyarrow array of strings.
        codes: The place of each part in them, (parts,).
        starts: Where the parts of each text start, and the end, (texts + 1,).
    """

    distinct: pa.Array
    codes: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def chars(self) -> NDArray[np.int64]:
        """Characters of each part, (parts,)."""
        return pc.utf8_length(self.distinct).to_numpy()[self.codes].astype(np.int64)


def _split(texts: pa.Array, separator: str) -> _Parts:
    lists = pc.split_pattern(texts, separator)
    encoded = pc.utf8_trim_whitespace(lists.flatten()).dictionary_encode()
    codes = encoded.indices.to_numpy()
    real = (pc.binary_length(encoded.dictionary).to_numpy() > 0)[codes]
    before = np.concatenate([[0], np.cumsum(real)])
    return _Parts(encoded.dictionary, codes[real], before[lists.offsets.to_numpy()])


def _line_scores(lines: _Parts) -> dict[str, NDArray]:
    n_lines = np.diff(lines.starts)

    def share(matching: NDArray) -> NDArray[np.float64]:
        return _share(_sums(matching, lines.starts), n_lines)

    def like(pattern: str) -> NDArray:
        matching = pc.match_substring_regex(lines.distinct, pattern)
        return share(matching.to_numpy(zero_copy_only=False)[lines.codes])

    return {
        "bullet_lines": like(_BULLET),
        "ellipsis_lines": like(_ELLIPSIS_END),
        "punctuated_lines": like(f"[{TERMINAL_PUNCTUATION}]$"),
        "short_lines": share(lines.chars < _SHORT_LINE_CHARS),
    }


def _repeated_parts(what: str, parts: _Parts) -> dict[str, NDArray]:
    texts = np.repeat(np.arange(len(parts.starts) - 1), np.diff(parts.starts))
    _, firsts = _number(texts * len(parts.distinct) + parts.codes)
    repeats = np.ones(len(texts), np.bool)
    repeats[firsts] = False
    chars = parts.chars
    return {
        f"duplicate_{what}s": _share(_sums(repeats, parts.starts), np.diff(parts.starts)),
        f"duplicate_{what}_chars": _share(_sums(chars * repeats, parts.starts), _sums(chars, parts.starts)),
    }


# --- n-grams ------------------------------------------------------------------------------------------------------


def _ngram_scores(words: Words) -> dict[str, NDArray]:
    """An (n+1)-gram can occur twice only where the n-grams at its first and at its second word do: few are left soon.

    Those two n-grams number it, exactly and without its text. Words are numbered by text, so that what would reach
    from one text into the next occurs once, and is never counted.
    """
    chars = np.fromiter(map(len, words.vocabulary), np.int64, len(words.vocabulary))[words.codes]
    before = np.concatenate([[0], np.cumsum(chars)])
    texts, total = words.texts, before[words.starts[1:]] - before[words.starts[:-1]]
    scores = {}
    places = np.arange(len(texts))
    numbers, firsts = _number(texts * len(words.vocabulary) + words.codes)
    for n in range(2, DUPLICATE_NGRAMS.stop):
        repeated = np.bincount(numbers)[numbers] > 1
        (kept,) = np.nonzero(repeated[:-1] & repeated[1:] & (np.diff(places) == 1))
        places = places[kept]
        numbers, firsts = _number(numbers[kept].astype(np.int64) * len(firsts) + numbers[kept + 1])
        counts = np.bincount(numbers)
        if n in TOP_NGRAMS:
            first = places[firsts]
            top = _top_chars(counts, before[first + n] - before[first], texts[first], len(total))
            scores[f"top_{n}gram_chars"] = np.minimum(1, _share(top, total))
        else:
            starts = places[counts[numbers] > 1]
            # Characters that the n-gram before already holds do not count again.
            new = np.maximum(starts, np.concatenate([[0], starts[:-1] + n]))
            held = np.bincount(texts[starts], before[starts + n] - before[new], len(total))
            scores[f"duplicate_{n}gram_chars"] = _share(held, total)
    return scores


def _top_chars(
    counts: NDArray[np.int64], chars: NDArray[np.int64], texts: NDArray[np.int64], n_texts: int
) -> NDArray[np.int64]:
    """Characters in all occurrences of each text's most frequent n-gram, 0 where none occurs twice, (texts,).

    Args:
        counts: How often each n-gram occurs, (n,).
        chars: Its characters, (n,).
        texts: Its text, (n,).
    """
    repeated = counts > 1
    best = np.zeros(n_texts, np.int64)
    np.maximum.at(best, texts[repeated], counts[repeated] << 32 | chars[repeated])
    return (best >> 32) * (best & 0xFFFFFFFF)
