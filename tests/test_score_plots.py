"""The report's scores and thresholds: what is drawn of each rule set, and what it would drop."""

import re
from typing import Any

import numpy as np
import pytest

from model.data.config import FilterConfig
from model.data.filtering.filters import RULES, Histograms
from model.data.filtering.scores import SCORES
from model.evaluation.plots import svg
from model.evaluation.report import render
from model.evaluation.score_plots import Panel, RuleSet, draw_panel, rule_sets

# Ten documents: three are under 50 words, two have no sentence, four end 5 % of their lines with punctuation.
SCORED = {
    "words": [10, 20, 30, *[100] * 7],
    "chars": [60, 120, 180, *[600] * 7],
    "sentences": [0, 0, *[9] * 8],
    "punctuated_lines": [0.05] * 4 + [0.95] * 6,
    "duplicate_line_chars": [0.15, *[0.0] * 9],
    "stop_words": [0.0] * 9 + [8.0],
}


def histograms(scores: dict[str, list[float]] = SCORED) -> Histograms:
    counted = Histograms()
    counted.add({name: np.array(values, np.float32) for name, values in scores.items()})
    return counted


def by_name(filters: FilterConfig, broken_first: dict[str, int] | None = None) -> dict[str, RuleSet]:
    return {rules.name: rules for rules in rule_sets(histograms(), filters, broken_first or {})}


def panel(rules: RuleSet, score: str) -> Panel:
    return next(panel for panel in rules.panels if panel.score == score)


def said(rules: RuleSet, score: str) -> list[tuple[str, str, int]]:
    return [(t.field, t.said.replace("\u00a0", " "), t.documents) for t in panel(rules, score).thresholds]


def test_every_rule_is_in_one_set_and_every_score_is_drawn() -> None:
    sets = by_name(FilterConfig())
    drawn = [t.rule for rules in sets.values() for panel in rules.panels for t in panel.thresholds]
    assert sorted(drawn, key=RULES.index) == list(RULES)
    assert {panel.score for rules in sets.values() for panel in rules.panels} == set(SCORES)


def test_what_each_threshold_drops() -> None:
    sets = by_name(FilterConfig())
    assert said(sets["Gopher: quality"], "words") == [
        ("gopher.min_words", "below 50", 3),
        ("gopher.max_words", "above 100k", 0),
    ]
    assert said(sets["FineWeb"], "punctuated_lines") == [("fineweb.min_punctuated_lines", "at most 0.12", 4)]
    assert said(sets["FineWeb"], "duplicate_line_chars") == [("fineweb.max_duplicate_line_chars", "at least 0.1", 1)]
    assert said(sets["Gopher: repetition"], "duplicate_line_chars") == [
        ("gopher.max_duplicate_line_chars", "above 0.2", 0)
    ]
    assert said(sets["C4"], "sentences") == [("c4.min_sentences", "below 3", 2)]
    assert (
        said(by_name(FilterConfig.model_validate({"c4": {"forbid_curly_brackets": False}}))["C4"], "curly_brackets")
        == []
    )


def test_what_is_off_says_the_least_that_it_would_drop() -> None:
    sets = by_name(FilterConfig())
    assert [name for name, rules in sets.items() if not rules.enabled] == ["Language", "C4", "FineWeb"]
    assert sets["FineWeb"].least == 4 / 10
    assert sets["C4"].least == 2 / 10
    assert sets["Gopher: quality"].least == 3 / 10  # not nine: stop words are asked of English alone
    assert by_name(FilterConfig.model_validate({"languages": ["en"]}))["Language"].enabled


def test_a_document_counts_in_the_set_whose_rule_it_breaks_first() -> None:
    counts = {"min_chars": 3, "max_chars": 2, "languages": 5, "gopher.min_words": 7, "gopher.max_duplicate_lines": 11}
    sets = by_name(FilterConfig(), counts)
    assert {name: rules.first for name, rules in sets.items()} == {
        "Length": 5,
        "Language": 5,
        "Gopher: quality": 7,
        "Gopher: repetition": 11,
        "C4": 0,
        "FineWeb": 0,
    }
    # Two documents too long to be scored, of twelve.
    (longest,) = [t for t in panel(sets["Length"], "chars").thresholds if t.field == "max_chars"]
    assert (longest.documents, longest.share) == (2, 2 / 12)


@pytest.mark.parametrize(("score_only", "style"), [(False, "-"), (True, "--")])
def test_a_threshold_is_a_line_with_its_value(score_only: bool, style: str) -> None:
    sets = by_name(FilterConfig(score_only=score_only))
    (axes,) = draw_panel(panel(sets["Gopher: quality"], "words")).axes
    assert [line.get_xdata()[0] for line in axes.lines] == [50, 100_000]
    assert [text.get_text() for text in axes.texts] == ["50", "100k"]
    assert {line.get_linestyle() for line in axes.lines} == {style}
    assert axes.get_xlabel() == "words (log)"
    assert axes.get_xscale() == "symlog"
    within, beyond = ([round(v) for v in patch.get_data().values if v] for patch in axes.patches)
    assert (sum(within), sum(beyond)) == (7, 3)
    (axes,) = draw_panel(panel(sets["FineWeb"], "punctuated_lines")).axes
    assert (axes.get_xlabel(), axes.get_xscale()) == ("share of lines", "linear")


@pytest.mark.parametrize("scores", [{}, {"words": [0.0]}, {"words": [1e9] * 3, "lorem_ipsum": [0.0]}])
def test_any_scores_are_drawn(scores: dict[str, list[float]]) -> None:
    for rules in rule_sets(histograms(scores), FilterConfig(), {}):
        for panel in rules.panels:
            assert svg(panel.score, draw_panel, panel).startswith("<svg")


def page(**filters: Any) -> str:
    config = FilterConfig.model_validate(filters)
    dropped = {"min_chars": 1, "gopher.min_words": 3, "duplicate": 2}
    source = {"read": 10, "kept": 4, "would_drop": {"gopher.min_words": 3}, "dropped": dropped}
    return render(
        {
            "configuration": {"data": {"filters": config.model_dump(mode="json")}},
            "funnel": {"sources": {"web": source}, "histograms": histograms().to_dict()},
        }
    )


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html.replace("\u00a0", " ")).split())


def test_the_page_shows_sets_thresholds_and_shares() -> None:
    html = page()
    text = words(html)
    assert "text read kept text kept" in text
    assert "3 gopher.min words, 2 duplicate, 1 min chars" in text  # the most frequent first
    assert "Gopher: quality drops 3" in text
    assert "gopher.min_words below 50: drops 3 (30.0 %)" in text
    assert "gopher.max_words above 100k: drops none" in text
    assert "FineWeb off: would drop at least 40.0 %" in text
    assert "fineweb.min_punctuated_lines at most 0.12: would drop 4 (40.0 %)" in text
    assert html.count('<details class="rules" open>') == 3  # length and the two of Gopher
    assert '<details class="scores">' in html
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert len(html) < 600_000


def test_where_only_scores_are_asked_nothing_drops() -> None:
    html = page(score_only=True)
    assert '<details class="scores" open>' in html
    assert "gopher.min_words below 50: would drop 3 (30.0 %)" in words(html)
    assert "score_only is on" in html
