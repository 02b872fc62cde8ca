import copy
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from model.evaluation import plots
from model.evaluation.report import (
    count,
    duration,
    figures,
    measure,
    moment,
    render,
    short,
    size,
    summary_markdown,
    training_figures,
    verdict,
)

HOSTILE = (
    "<script>alert(1)</script> \"' & $x^2$ ${7*7} {{7*7}} | ![x](http://evil/x.png) ]]> </svg> 憲法 😀 \udcff\x00\n"
)


def facts() -> dict[str, Any]:
    """A whole run, small."""
    return {
        "run": {
            "uri": "file:///runs/demo",
            "preset": "laptop",
            "created": "2026-11-30T12:39:52+01:00",
            "seconds": 192.4,
            "cost_usd": 1.5,
            "parameters": 5_300_000,
            "commit": "3f2a91c",
        },
        "configuration": {"seed": 0, "training": {"steps": 40, "schedule": {"warmup": None}}, "model": {"n_head": 4}},
        "stages": [
            {"name": "preprocess", "outcome": "completed", "seconds": 6.2, "cost_usd": 0.5},
            {"name": "train", "outcome": "cached"},
        ],
        "funnel": {
            "sources": {
                "sotu": {
                    "files": 249,
                    "read": 369,
                    "read_bytes": 12_214_000,
                    "kept": 337,
                    "kept_bytes": 12_100_000,
                    "dropped": {"min_chars": 22, "duplicate": 10},
                    "damaged": ["part-3.jsonl.gz"],
                }
            },
            "splits": {"train": {"documents": 330, "bytes": 11_900_000}, "test": {"documents": 7, "bytes": 200_000}},
        },
        "tokenizer": {
            "vocab_size": 8192,
            "tokens_per_byte": 0.2,
            "encoded_mb_per_second": 9.5,
            "multi_word_pieces": 2104,
            "multi_word_piece_share": 0.257,
            "multi_word_token_share": 0.163,
            "examples": ["United States", "▁of▁the"],
        },
        "tokens": {
            "train": {"documents": 330, "tokens": 2_630_000, "bytes": 11_900_000},
            "test": {"documents": 13, "tokens": 45_000, "bytes": 200_000},
        },
        "scaling": {
            "checks": [
                {"name": "throughput", "measured": 14210, "bound": 1000, "unit": "tokens/s", "passed": True},
                {
                    "name": "efficiency",
                    "measured": 0.91,
                    "relation": "≥",
                    "bound": 0.5,
                    "unit": "",
                    "passed": True,
                    "explanation": "why",
                },
            ],
            "all_reduce": [{"mib": 1, "gb_per_second": 1.1}, {"mib": 16, "gb_per_second": 1.83}],
            "tokens_per_second_one_copy": 7790,
            "tokens_per_second_all_ranks": 14210,
            "ranks": 2,
            "copies": 2,
            "efficiency": 0.91,
        },
        "training": [
            {
                "step": step,
                "loss": 9 - step / 10,
                "learning_rate": 1e-3,
                "tokens": 4096 * step,
                "tokens_per_second": 14_000,
                "gradient_norm": 1 + 1 / step,
                "batch_size": 16,
                "mfu": 0.35 + (step - 20.5) / 1000,
                "step_seconds": 0.9,
                "loader_seconds": 0.05,
                "checkpoint_blocked_seconds": 0.1,
                "skipped_steps": step // 20,
                **({"slow_ranks": [3, 11]} if step > 38 else {}),
                **({"validation_loss": 9.1 - step / 10} if step % 10 == 0 else {}),
            }
            for step in range(1, 41)
        ],
        "goodput": {"useful_seconds": 34.0, "wall_seconds": 85.0, "restarts": 3, "lost_steps": 17},
        "evaluation": {
            "documents": {
                "test": {
                    "bits_per_byte": 1.312,
                    "log_probability_per_byte": -0.909,
                    "tokens": 40_000,
                    "bytes": 200_000,
                    "documents": 7,
                    "baselines": {"untrained": 2.79, "unigram": 2.24, "xz": 2.35},
                }
            },
            "multiple_choice": {
                "presidents": {
                    "normalization": "per_token",
                    "accuracy": 0.7,
                    "standard_error": 0.1025,
                    "chance": 0.275,
                    "rows": 20,
                    "candidates": 74,
                    "unaligned": 9,
                    "accuracies": {"raw": 0.65, "per_token": 0.7, "per_character": 0.7, "per_word": 0.6},
                }
            },
            "samples": [{"prompt": "Fellow-Citizens", "text": " of the Senate"}],
        },
    }


@pytest.fixture(scope="module")
def html() -> str:
    return render(facts())


class Page(HTMLParser):
    """What a browser would make of a page."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words += data


SECTIONS = ["data", "tokenizer", "scaling", "training", "evaluation", "stages", "configuration"]


def test_a_whole_run_has_every_section(html: str) -> None:
    page = Page(html)
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert not page.open
    assert page.tags.count("svg") == 9
    for words in (
        "2026-11-30 11:39 UTC",
        "The model predicts unseen text better than every baseline.",
        "1.312\u00a0bits per byte on 7 of 13 documents",
        "7 of 13 held-out documents (test; evaluation.max_test_bytes",
        "41.4\u00a0% fewer than the best baseline, unigram of pieces (2.240)",
        "5.3\u00a0million",
        "time in stages",
        "3\u00a0min 12\u00a0s",
        "$1.50",
        "part-3.jsonl.gz",
        "22 min chars",
        "2,630,000",
        "United␣States",
        "of␣the",
        "≥\u00a00.5",
        "✓ pass",
        "MFU, median step35.0\u00a0%",
        "goodput40.0\u00a0%",  # 34 of 85 s
        "restarts3",
        "steps taken again17",
        "steps skipped2",
        "waiting for data5.0\u00a0%",  # 0.05 of 1 s a step
        "blocked by checkpoints10.0\u00a0%",
        "slow ranks3, 11",
        "training 5.",
        "validation 5.10",
        "9 of 74 completions start inside a token",
        "schedule.warmup",
    ):
        assert words in page.words, words


def test_the_page_is_self_contained(html: str) -> None:
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert (value or "").startswith("#")
    assert not re.search(r"https?:|@import|url\((?!#)", html)
    assert len(html) < 300_000


def test_figures_share_no_ids_and_refer_to_what_is_there(html: str) -> None:
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    for name, value in page.attributes:
        if name in ("href", "xlink:href"):
            assert (value or "")[1:] in page.ids
        for reference in re.findall(r"url\(#([^)]*)\)", value or ""):
            assert reference in page.ids


def test_colours_follow_the_page(html: str) -> None:
    drawing = plots.svg("loss", plots.loss_curve, facts()["training"])
    assert "var(--plot-accent, #" in drawing
    assert not re.findall(r"(?<!, )#[0-9a-f]{6}\b", drawing)
    for role in plots.PALETTE:
        assert f"--plot-{role}:" in html


def poison(value: Any) -> Any:
    """The same facts with every text replaced by a hostile one."""
    if isinstance(value, dict):
        return {key: poison(of) for key, of in value.items()}
    if isinstance(value, list):
        return [poison(of) for of in value]
    return HOSTILE if isinstance(value, str) else value


def hostile() -> dict[str, Any]:
    whole = poison(facts())
    whole["funnel"]["sources"] = {HOSTILE: whole["funnel"]["sources"]["sotu"] | {"dropped": {HOSTILE: 3}}}
    whole["funnel"]["splits"] = {HOSTILE: {"documents": 3, "bytes": 9}}
    whole["tokens"] = {HOSTILE: {"documents": 3, "bytes": 9, "tokens": 4}}
    whole["evaluation"]["documents"]["test"]["baselines"] = {HOSTILE: 2.0}
    choice = facts()["evaluation"]["multiple_choice"]["presidents"]
    whole["evaluation"]["multiple_choice"] = {HOSTILE: choice}
    whole["configuration"] = {HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE]}, "plain": HOSTILE}
    return whole


def test_hostile_texts_stay_texts(html: str) -> None:
    poisoned = render(hostile())
    page, clean = Page(poisoned), Page(html)
    assert not page.open
    assert set(page.tags) == set(clean.tags)
    assert {name for name, _ in page.attributes} == {name for name, _ in clean.attributes}
    assert page.words.count("<script>alert(1)</script>") > 15
    assert "${7*7} {{7*7}}" in page.words
    poisoned.encode()
    figures(hostile())


def test_hostile_texts_stay_texts_in_markdown() -> None:
    summary = summary_markdown(hostile())
    assert not re.search(r"(?<!\\)<|(?<!\\)!\[|(?<!\\)\]\(", summary)
    rows = [line for line in summary.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {3, 4, 5, 6}
    assert "\\<script\\>" in summary
    assert "\0" not in summary
    summary.encode()


@pytest.mark.parametrize("missing", ["run", *facts().keys()])
def test_a_missing_part_is_left_out(missing: str) -> None:
    partial = facts()
    del partial[missing]
    section = {"funnel": "data"}.get(missing, missing)
    page = Page(render(partial))
    assert section not in page.ids
    assert f"#{section}" not in [value for name, value in page.attributes if name == "href"]
    summary_markdown(partial)


def test_scoring_alone_and_nothing_at_all() -> None:
    page = Page(render({"run": {"uri": "s3://b/x"}, "evaluation": facts()["evaluation"]}))
    assert [name for name in page.ids if name in SECTIONS] == ["evaluation"]
    assert "The run has no evaluation yet." in Page(render({})).words
    assert summary_markdown({}) == "## The run has no evaluation yet.\n"
    assert figures({}) == {}


def test_a_prepared_run_says_what_is_there() -> None:
    sections = ("run", "stages", "funnel", "tokenizer", "tokens")
    prepared = {name: value for name, value in facts().items() if name in sections}
    assert "2,675,000 tokens are ready to train on." in Page(render(prepared)).words  # 2,630,000 and 45,000
    del prepared["tokenizer"], prepared["tokens"]
    assert "Documents are ready to be looked at." in Page(render(prepared)).words


def test_what_needs_a_word_gets_one_and_only_then(html: str) -> None:
    other = facts()
    other["scaling"]["efficiency"] = 1.07
    other["tokens"]["test"]["documents"] = 7
    other["run"]["created"] = None
    words = Page(render(other)).words
    assert "107.0\u00a0% of 2\u00a0× the throughput of one; more than 100\u00a0% is measurement noise." in words
    assert "noise" not in Page(html).words
    assert "7 held-out documents (test)," in words
    assert "Jumbo · file:///runs/demo · laptop\n" in words


def test_a_single_spike_leaves_the_bold_line_as_it_is() -> None:
    values = np.linspace(2, 1, 300)
    spiked = values.copy()
    spiked[100] = 100
    assert np.allclose(plots._smooth(values), values, atol=0.02)
    assert np.allclose(plots._smooth(spiked), values, atol=0.02)


def test_the_verdict_follows_the_numbers() -> None:
    assert verdict(facts()).tone == "good"

    worse = facts()
    worse["evaluation"]["documents"]["test"]["bits_per_byte"] = 2.3
    assert verdict(worse).headline == "The model does not beat every baseline."
    assert "unigram of pieces (2.240)" in verdict(worse).detail
    assert "xz" not in verdict(worse).detail

    stopped = facts()
    stopped["scaling"]["checks"][1] |= {"measured": 0.31, "passed": False}
    assert verdict(stopped) == (
        "bad",
        "The scaling gate stopped the run: 1 of 2 checks failed.",
        "efficiency 0.31, bound ≥\u00a00.5",
    )

    failed = facts()
    failed["stages"][1]["outcome"] = "Failed"
    assert verdict(failed).headline == "The run ended in the stage “train”."

    del failed["stages"], failed["evaluation"]
    assert verdict(failed).headline == "The cluster passed the scaling gate."


def test_lines_of_an_older_run_are_shown_as_far_as_they_go() -> None:
    older = facts()
    del older["goodput"]
    new = ("mfu", "step_seconds", "loader_seconds", "checkpoint_blocked_seconds", "skipped_steps", "slow_ranks")
    older["training"] = [{k: v for k, v in line.items() if k not in new} for line in older["training"]]
    assert training_figures(older) == [("MFU, median step", "unknown"), ("goodput", "unknown")]
    older["goodput"] = {"useful_seconds": 0.0, "wall_seconds": 0.0, "restarts": 0, "lost_steps": 0}
    older["training"][-1] |= {"step_seconds": 2.0, "checkpoint_blocked_seconds": 0.5, "loader_seconds": None}
    assert dict(training_figures(older)) == {
        "MFU, median step": "unknown",
        "goodput": "unknown",
        "restarts": "0",
        "steps taken again": "0",
        "blocked by checkpoints": "20.0\u00a0%",
    }
    assert "goodputunknown" in Page(render(older)).words


@pytest.mark.parametrize("losses", [[None] * 3, [2.0, None, 1.9], [None, 2.0, 1.0]])
def test_skipped_steps_leave_a_gap(losses: list[float | None]) -> None:
    lines = [{"step": i, "loss": loss, "gradient_norm": loss, "tokens": 9} for i, loss in enumerate(losses, start=1)]
    skipping = facts() | {"training": lines}
    page = Page(render(skipping))
    assert "training" in page.ids
    summary_markdown(skipping)
    figures(skipping)


def test_numbers_that_are_none_or_not_finite_are_no_trouble() -> None:
    odd = facts()
    odd["training"] = [
        {"step": 1, "loss": math.nan, "gradient_norm": 0.0, "tokens_per_second": None, "learning_rate": 0.0},
        {"step": 2, "loss": math.inf, "gradient_norm": math.nan, "validation_loss": None},
        {"step": 3, "loss": 2.0, "gradient_norm": math.inf},
    ]
    odd["scaling"]["checks"][0]["measured"] = math.nan
    odd["stages"][0]["seconds"] = None
    odd["run"] |= {"cost_usd": None, "parameters": None}
    assert "nan" not in Page(render(odd)).words.lower()


@pytest.mark.parametrize("steps", [1, 2, 3, 5000])
def test_any_number_of_steps(steps: int) -> None:
    some = {"training": [copy.deepcopy(facts()["training"][i % 40]) | {"step": i + 1} for i in range(steps)]}
    assert len(render(some)) < 250_000


def test_figures_are_png() -> None:
    made = figures(facts())
    assert set(made) == {"loss", "baselines", "scaling"}
    for data in made.values():
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert 5_000 < len(data) < 200_000


def test_the_same_facts_give_the_same_page(html: str) -> None:
    assert render(facts()) == html


def test_numbers_as_people_read_them() -> None:
    assert [short(n) for n in (12, 8192, 1_234_567, 177_900_000_000)] == [
        "12",
        "8,192",
        "1.23\u00a0million",
        "178\u00a0billion",
    ]
    assert [size(n) for n in (0, 999, 12_345_678, None)] == ["0\u00a0B", "999\u00a0B", "12.3\u00a0MB", "–"]
    assert [moment(t) for t in ("2026-11-30T11:39:52", "2026-11-30T00:09Z", "then", "")] == [
        "2026-11-30 11:39 UTC", "2026-11-30 00:09 UTC", "then", "",
    ]  # fmt: skip
    assert [duration(n) for n in (0, 6.24, 60, 192.4, 7325, 90_000, None)] == [
        "0.0\u00a0s", "6.2\u00a0s", "1\u00a0min", "3\u00a0min 12\u00a0s", "2\u00a0h 2\u00a0min", "1\u00a0d 1\u00a0h",
        "–",
    ]  # fmt: skip
    assert [measure(n) for n in (0.87124, 12.351, 18340.2, 0)] == ["0.8712", "12.35", "18,340", "0"]
    assert count(1234567) == "1,234,567"
    assert [plots.short(n) for n in (0, 7.5, 7790, 14_210, 5.3e6)] == ["0", "7.5", "7.79k", "14.2k", "5.3M"]
