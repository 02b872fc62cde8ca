"""What filters judge: each score against a plain definition of it, one text and one word at a time."""

import time
from collections import Counter
from unicodedata import category

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_text import make_documents

from model.data.config import CleaningConfig
from model.data.filtering.cleaning import clean
from model.data.filtering.scores import SCORES, STOP_WORDS, Scores, score_documents
from model.data.words import UNSPACED, split_words

# Few words, so that they repeat, and what the rules look for.
PIECES = ["the", "and", "With", "we", "19", "#", "...", "…", "-", "•", "{x}", "Lorem", "ipsum", "end.", "no!”"]
REPETITIVE = st.lists(st.sampled_from([*PIECES, "\n", "\n", "\n\n", "中", "国。", "é"]), max_size=60).map(" ".join)
TEXTS = st.one_of(st.text(), REPETITIVE).map(lambda text: clean(text, CleaningConfig()))


def score(*texts: str) -> Scores:
    return score_documents(texts, split_words(texts))


def share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def repeated(parts: list[str]) -> tuple[float, float]:
    """The share of parts that repeat an earlier one, and that of their characters."""
    repeats = [part for place, part in enumerate(parts) if part in parts[:place]]
    return share(len(repeats), len(parts)), share(sum(map(len, repeats)), sum(map(len, parts)))


def top_ngram(words: list[str], n: int) -> float:
    counts = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    times, chars = max(((times, sum(map(len, ngram))) for ngram, times in counts.items()), default=(0, 0))
    return min(share(times * chars if times > 1 else 0, sum(map(len, words))), 1)


def duplicate_ngrams(words: list[str], n: int) -> float:
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    held = {place + k for place, ngram in enumerate(ngrams) if ngrams.count(ngram) > 1 for k in range(n)}
    return share(sum(len(words[place]) for place in held), sum(map(len, words)))


def plain_scores(text: str) -> dict[str, float]:
    words = UNSPACED.sub(r" \g<0> ", text).split()
    spaced = [word for word in words if not UNSPACED.fullmatch(word)]
    mostly_spaced = 2 * len(spaced) >= len(words) > 0
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    stops = tuple(".!?…。！？｡．।॥۔؟։።፧။។")
    lower = {word.lower() for word in words}
    return {
        "chars": len(text),
        "words": len(words),
        "mean_word_chars": share(sum(map(len, spaced)), len(spaced) * mostly_spaced),
        "symbols_per_word": share(max(text.count("#"), text.count("...") + text.count("…")), len(words)),
        "bullet_lines": share(
            sum(line[0] in "•‣⁃∙◦●○■□▪▫" or line[:2] in ("- ", "* ", "-\t", "*\t") for line in lines), len(lines)
        ),
        "ellipsis_lines": share(sum(line.endswith(("...", "…")) for line in lines), len(lines)),
        "alphabetic_words": share(
            sum(
                any(char.isalpha() for char in word) or (len(word) == 1 and category(word)[0] == "M") for word in words
            ),
            sum(not UNSPACED.fullmatch(word) or category(word)[0] != "P" for word in words),
        ),
        "stop_words": sum(word in lower for word in STOP_WORDS) if mostly_spaced else float("nan"),
        **dict(zip(("duplicate_lines", "duplicate_line_chars"), repeated(lines), strict=True)),
        **dict(zip(("duplicate_paragraphs", "duplicate_paragraph_chars"), repeated(paragraphs), strict=True)),
        **{f"top_{n}gram_chars": top_ngram(words, n) for n in (2, 3, 4)},
        **{f"duplicate_{n}gram_chars": duplicate_ngrams(words, n) for n in (5, 6, 7, 8, 9, 10)},
        "sentences": sum(word.rstrip("\"'”’»›」』)]}）】").endswith(stops) for word in words),
        "lorem_ipsum": text.lower().count("lorem ipsum"),
        "curly_brackets": text.count("{") + text.count("}"),
        "punctuated_lines": share(sum(line.endswith((*stops, *"\"'”’»›」』")) for line in lines), len(lines)),
        "short_lines": share(sum(len(line) < 30 for line in lines), len(lines)),
        "newlines_per_word": share(text.count("\n"), len(words)),
    }


def assert_plain(texts: list[str]) -> None:
    scores = score(*texts)
    for place, text in enumerate(texts):
        for name, value in plain_scores(text).items():
            np.testing.assert_array_equal(scores[name][place], np.float32(value), f"{name} of {text!r}")


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=4))
def test_scores_are_their_plain_definitions(texts: list[str]) -> None:
    assert_plain(texts)


def test_scores_of_prose_are_their_plain_definitions() -> None:
    assert_plain(make_documents(3, sentences=40))


@settings(deadline=None)
@given(st.lists(st.one_of(st.text(), REPETITIVE), min_size=1, max_size=4))
def test_scores_of_a_text_do_not_depend_on_its_batch(texts: list[str]) -> None:
    together = score(*texts)
    for place, text in enumerate(texts):
        for name, alone in score(text).items():
            np.testing.assert_array_equal(together[name][place], alone[0], name)


def test_every_score_is_defined() -> None:
    scores = score("One text.", "Two texts.")
    assert list(scores) == [name for name in SCORES if name != "language_score"]
    assert {(values.dtype, values.shape) for values in scores.values()} == {(np.dtype(np.float32), (2,))}
    assert all(score.definition.endswith(".") and np.all(np.diff(score.edges) > 0) for score in SCORES.values())


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("one two three", "mean_word_chars", 11 / 3),
        ("中国 abc abcde", "mean_word_chars", 4),
        ("中国, abc 中国", "mean_word_chars", float("nan")),
        ("", "mean_word_chars", float("nan")),
        ("中国 abc", "words", 3),
        ("# # a...b … c", "symbols_per_word", 2 / 5),  # Gopher bounds each symbol on its own; the greater counts
        ("one\n• two\n- three\n-4\n*five\n* six", "bullet_lines", 3 / 6),
        ("one...\ntwo…\nthree..\nfour", "ellipsis_lines", 2 / 4),
        ("a1 1990 &c ½ -", "alphabetic_words", 2 / 5),
        ("国。5 ดี", "alphabetic_words", 3 / 4),  # a full stop is no word, the vowel mark of ดี one with a letter
        ("The THE the of", "stop_words", 2),
        ("the 中国", "stop_words", float("nan")),
        ("one\n\ntwo\none\n\none", "duplicate_lines", 2 / 4),
        ("one\n\nthree\none\n\none", "duplicate_line_chars", 6 / 14),
        ("a\nb\n\na\n\nb\n\na\nb", "duplicate_paragraphs", 1 / 4),
        ("a\nb\n\na\n\nb\n\na\nb", "duplicate_paragraph_chars", 3 / 8),
        ("to be or not to be", "top_2gram_chars", 8 / 13),
        ("one two three four", "top_2gram_chars", 0),  # none occurs twice
        ("ab cd ab cd x yyy zzz x yyy zzz", "top_2gram_chars", 12 / 22),  # of those that occur twice the longest
        ("no no no no no", "top_2gram_chars", 1),  # 4 times 4 characters, of 10
        ("a b c d e - a b c d e", "duplicate_5gram_chars", 10 / 11),
        ("a b c d e - a b c d e", "duplicate_6gram_chars", 0),
        ("a a a a a a a", "duplicate_5gram_chars", 1),  # three occurrences that overlap: each character counts once
        ("a b c d e\n\na b c d e", "duplicate_5gram_chars", 1),
        ("a b c", "duplicate_5gram_chars", 0),
        ('He said: "Go!" I went. Why? 3.5 of it.', "sentences", 4),
        ("今天很好。明天也好！", "sentences", 2),
        ("no end", "sentences", 0),
        ("Lorem\nlorem ipsum LOREM IPSUM", "lorem_ipsum", 2),
        ("if (x) { y(); }", "curly_brackets", 2),
        ("one.\ntwo\nthree”\n(four)\nfünf!", "punctuated_lines", 3 / 5),
        ("x" * 29 + "\n" + "x" * 30 + "\n\n" + "x" * 31, "short_lines", 1 / 3),
        ("one\n\ntwo three\nfour", "newlines_per_word", 3 / 4),
    ],
)
def test_score(text: str, name: str, value: float) -> None:
    np.testing.assert_array_equal(score(text)[name], np.float32([value]))


def test_ngrams_do_not_reach_into_the_next_text() -> None:
    text = "one two three four five six seven"
    scores = score(text, "eight", text, "eight", "", text)
    for name in ("top_2gram_chars", "top_4gram_chars", "duplicate_5gram_chars", "duplicate_10gram_chars"):
        assert np.nanmax(scores[name]) == 0


def test_paragraphs_between_blank_lines_are_no_repetition() -> None:  # case D9
    text = "\n\n".join(f"This is the paragraph about the letter {letter}." for letter in "abcdefghij")
    scores = score(text)
    for what in ("lines", "line_chars", "paragraphs", "paragraph_chars"):
        assert scores[f"duplicate_{what}"] == 0


@pytest.mark.parametrize("text", ["word " * 200_000, "x" * 2_000_000, "a\n" * 300_000, "中" * 300_000])
def test_scoring_is_linear(text: str) -> None:
    started = time.process_time()
    score(text)
    assert time.process_time() - started < 10  # quadratic would take hours
