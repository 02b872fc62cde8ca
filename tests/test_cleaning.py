"""Cleaning text, and the rules that documents must meet."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import FilterConfig
from model.data.cleaning import clean, failed_rule

# Any Unicode string, lone surrogates too.
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))

PROSE = "The quick brown fox jumps over the lazy dog, again and again.\nThen it sleeps until the next morning comes."


def rules(**changes: float) -> FilterConfig:
    return FilterConfig.model_validate({"min_chars": 1, **changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("a\r\r\nb", "a\n\nb"),
        ("page\x0cnext\x0bthird\x85fourth", "page\nnext\nthird\nfourth"),
        ("a\x00b\x07c\x1bd\x7fe\x9ff", "abcdef"),
        ("a\tb", "a\tb"),
        ("a \t\nb\u00a0\n\u3000\nc", "a\nb\n\nc"),
        ("a\n\n\n\nb\n\nc\n \n\t\nd", "a\n\nb\n\nc\n\nd"),
        ("\n\n  a  \n\n", "a"),
        ("a\ud83db", "a\ufffdb"),
        ("😀 ﬁ ½ e\u0301 \u200d", "😀 ﬁ ½ e\u0301 \u200d"),
        ("a\u2028b", "a\u2028b"),
        ("\x00 \r\n", ""),
        ("", ""),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert clean(text) == expected


@given(ANY_TEXT)
def test_clean_text_is_clean(text: str) -> None:
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    assert "\n\n\n" not in cleaned
    assert all(char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160) for char in cleaned)
    cleaned.encode()  # no lone surrogate is left


@pytest.mark.parametrize("text", [" " * 2_000_000 + "x", "\r" * 2_000_000 + "x", "x" + "\n \t" * 700_000 + "x"])
def test_cleaning_is_linear(text: str) -> None:
    started = time.process_time()
    clean(text)
    assert time.process_time() - started < 5  # quadratic would take hours


@pytest.mark.parametrize(
    ("text", "changes", "rule"),
    [
        (PROSE, {}, None),
        ("", {}, "min_chars"),
        (PROSE, {"min_chars": len(PROSE)}, None),
        (PROSE, {"min_chars": len(PROSE) + 1}, "min_chars"),
        (PROSE, {"max_chars": len(PROSE)}, None),
        (PROSE, {"max_chars": len(PROSE) - 1}, "max_chars"),
        ("ab cd ef", {}, "min_mean_word_chars"),
        ("abc def", {}, None),  # a mean of exactly 3
        ("abcdefghij abcdefghij", {}, None),  # exactly 10
        ("abcdefghij abcdefghijk", {}, "max_mean_word_chars"),
        ("word word word word 1234", {}, None),  # 4 of 5 words have a letter
        ("word word word 1234 1234", {}, "min_alphabetic_words"),
        ("#1 " + 9 * "words ", {}, None),  # 1 of 10
        ("#1 " + 8 * "words ", {}, "max_symbols_per_word"),
        ("And... " + 8 * "words ", {}, "max_symbols_per_word"),
        ("And… " + 8 * "words ", {}, "max_symbols_per_word"),
        ("#1 and... " + 8 * "words ", {}, None),  # Gopher bounds each symbol on its own
        ("\n".join([*"abcdefg", "a", "b", "c"]), {"min_mean_word_chars": 0}, None),  # 3 of 10 lines
        ("\n".join([*"abcdef", "a", "b", "c"]), {"min_mean_word_chars": 0}, "max_duplicate_lines"),
        ("\n".join(["same line of words"] * 2), {}, "max_duplicate_lines"),
    ],
)
def test_first_failed_rule(text: str, changes: dict[str, float], rule: str | None) -> None:
    assert failed_rule(text, rules(**changes)) == rule


def test_paragraphs_between_blank_lines_are_no_repetition() -> None:  # case D9
    text = "\n\n".join(f"This is the paragraph about the letter {letter}." for letter in "abcdefghij")
    assert failed_rule(text, rules()) is None


@pytest.mark.parametrize(
    "text",
    [
        "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。……",
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
        "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
        "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
        "Все люди рождаются свободными и равными в своем достоинстве и правах.",
        "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    ],
)
def test_prose_of_any_language_passes(text: str) -> None:  # article 1 of the Universal Declaration of Human Rights
    assert failed_rule(text, rules()) is None


def test_symbols_count_in_unspaced_scripts_too() -> None:
    assert failed_rule("我们#生活#很好#", rules()) == "max_symbols_per_word"


@given(ANY_TEXT)
def test_any_text_gets_a_verdict(text: str) -> None:
    assert failed_rule(clean(text), FilterConfig()) in {None, *FilterConfig.model_fields}
