"""The language of texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.filtering.language import identify_languages

# Article 1 of the Universal Declaration of Human Rights.
ARTICLES = {
    "en": "All human beings are born free and equal in dignity and rights. They have reason.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "ar": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
}


def test_languages_are_told_apart() -> None:
    languages, scores = identify_languages(list(ARTICLES.values()))
    assert languages == list(ARTICLES)
    assert scores.dtype == np.float32
    assert scores.min() > 0.65


@pytest.mark.parametrize("text", ["", " \n", "12345 67.8 % — 9", "!?…", "😀😀"])
def test_a_text_without_letters_has_no_language(text: str) -> None:
    languages, [score] = identify_languages([text])
    assert languages == ["und"]
    assert score == 0


def test_a_long_text_is_judged_by_its_middle() -> None:
    german, english = ARTICLES["de"] + "\n", ARTICLES["en"] + "\n"
    assert identify_languages([english * 20 + german * 100 + english * 20])[0] == ["de"]
    assert identify_languages([english * 10 + "1234 5678\n" * 2000])[0] == ["en"]  # its middle has no letters


@settings(deadline=None)
@given(st.lists(st.text(), max_size=4))
def test_any_text_has_one_answer(texts: list[str]) -> None:
    languages, scores = identify_languages(texts)
    assert len(languages) == len(scores) == len(texts)
    assert all(language.isascii() and 2 <= len(language) <= 3 for language in languages)
    assert all(0 <= score <= 1 for score in scores)
    for text, language, score in zip(texts, languages, scores, strict=True):
        assert identify_languages([text]) == ([language], np.float32(score))
