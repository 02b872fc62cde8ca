"""The rules that documents must meet, and histograms of what the rules judge."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from model.data.config import FilterConfig
from model.data.filtering.language import UNKNOWN
from model.data.filtering.scores import DUPLICATE_NGRAMS, SCORES, TOP_NGRAMS, Scores

_ENGLISH_OR_UNKNOWN = ("en", UNKNOWN)
_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_STRICT = {"<=": "<", ">=": ">"}


@dataclass(frozen=True)
class Rule:
    """A bound on a score.

    Attributes:
        name: What a document that breaks it is counted under: the path of its bound in FilterConfig, such as
            gopher.min_words.
        score: The score that it bounds.
        breaks: How a score that breaks it stands to the bound: <, <=, > or >=. Nothing breaks a bound by being none or
            all of what it is a share of: at 0 and 1, <= is <, and >= is >.
        field: The path of its bound where that differs from the name, for one of several bounds.
        index: Which of several bounds.
    """

    name: str
    score: str
    breaks: str
    field: str = ""
    index: int = 0

    @property
    def is_lower_bound(self) -> bool:
        return self.breaks.startswith("<")

    def enabled(self, filters: FilterConfig) -> bool:
        section, _ = self._section(filters)
        if self.name == "min_language_score":
            return bool(filters.languages)
        return section is filters or section.enabled

    def bound(self, filters: FilterConfig) -> float | None:
        """The bound that is configured, be it enabled or not; None for what is not forbidden."""
        section, field = self._section(filters)
        value = getattr(section, field)
        if isinstance(value, bool):
            return 0.0 if value else None
        return float(value[self.index] if isinstance(value, tuple) else value)

    def comparison(self, bound: float) -> str:
        """How a score that breaks it stands to this bound."""
        return _STRICT.get(self.breaks, self.breaks) if bound in (0, 1) else self.breaks

    def _section(self, filters: FilterConfig) -> tuple[Any, str]:
        group, _, field = (self.field or self.name).rpartition(".")
        return (getattr(filters, group) if group else filters), field


# In the order in which the first broken one is named. Gopher and C4 drop what passes the bound ("more than 90 %",
# "fewer than 3"), FineWeb what reaches it ("≤ 0.12", "≥ 0.1", "≥ 0.67").
RULES = (
    Rule("min_chars", "chars", "<"),
    Rule("max_chars", "chars", ">"),
    Rule("min_language_score", "language_score", "<"),
    Rule("gopher.min_words", "words", "<"),
    Rule("gopher.max_words", "words", ">"),
    Rule("gopher.min_mean_word_chars", "mean_word_chars", "<"),
    Rule("gopher.max_mean_word_chars", "mean_word_chars", ">"),
    Rule("gopher.max_symbols_per_word", "symbols_per_word", ">"),
    Rule("gopher.max_bullet_lines", "bullet_lines", ">"),
    Rule("gopher.max_ellipsis_lines", "ellipsis_lines", ">"),
    Rule("gopher.min_alphabetic_words", "alphabetic_words", "<"),
    Rule("gopher.min_stop_words", "stop_words", "<"),
    Rule("gopher.max_duplicate_lines", "duplicate_lines", ">"),
    Rule("gopher.max_duplicate_line_chars", "duplicate_line_chars", ">"),
    Rule("gopher.max_duplicate_paragraphs", "duplicate_paragraphs", ">"),
    Rule("gopher.max_duplicate_paragraph_chars", "duplicate_paragraph_chars", ">"),
    *(
        Rule(f"gopher.max_top_{n}gram_chars", f"top_{n}gram_chars", ">", "gopher.max_top_ngram_chars", index)
        for index, n in enumerate(TOP_NGRAMS)
    ),
    *(
        Rule(
            f"gopher.max_duplicate_{n}gram_chars",
            f"duplicate_{n}gram_chars",
            ">",
            "gopher.max_duplicate_ngram_chars",
            index,
        )
        for index, n in enumerate(DUPLICATE_NGRAMS)
    ),
    Rule("c4.min_sentences", "sentences", "<"),
    Rule("c4.forbid_lorem_ipsum", "lorem_ipsum", ">"),
    Rule("c4.forbid_curly_brackets", "curly_brackets", ">"),
    Rule("fineweb.min_punctuated_lines", "punctuated_lines", "<="),
    Rule("fineweb.max_short_lines", "short_lines", ">="),
    Rule("fineweb.max_duplicate_line_chars", "duplicate_line_chars", ">="),
    Rule("fineweb.max_newlines_per_word", "newlines_per_word", ">"),
)


def failed_rules(
    scores: Scores,
    languages: Sequence[str],
    language_scores: NDArray[np.float32],
    filters: FilterConfig,
    bad_words: NDArray[np.bool] | None = None,
) -> list[str | None]:
    """Returns the name of the first enabled rule that each document breaks, None for one that meets all, (documents,).

    The names are those of RULES, and 'languages', which comes before all but the bounds on characters, and
    'c4.bad_words', which comes last. What score_only says is the caller's to obey.

    Args:
        scores: What `score_documents` returns.
        languages: The language of each document; stop words are asked of English and of unknown ones alone.
        language_scores: How certain it is, (documents,).
        filters: The rules' bounds.
        bad_words: Which documents hold a bad word, (documents,); None where that is no rule.
    """
    scores = scores | {"language_score": language_scores}
    language = np.array(languages, np.str_)
    broken: dict[str, NDArray[np.bool]] = {}
    for rule in RULES:
        if rule.name == "min_language_score" and filters.languages:
            broken["languages"] = ~np.isin(language, filters.languages)
        bound = rule.bound(filters)
        if bound is None or not rule.enabled(filters):
            continue
        # A score of exactly 0.3 must equal the bound 0.3, so both are rounded alike.
        broken[rule.name] = _COMPARISONS[rule.comparison(bound)](scores[rule.score], np.float32(bound))
        if rule.score == "stop_words":
            broken[rule.name] &= np.isin(language, _ENGLISH_OR_UNKNOWN)
    if bad_words is not None:
        broken["c4.bad_words"] = bad_words
    first: list[str | None] = [None] * len(languages)
    for name, documents in reversed(broken.items()):
        for document in np.flatnonzero(documents):
            first[document] = name
    return first


class Histograms:
    """How many documents have a score in each bin, for each of SCORES; those of shards add up.

    Attributes:
        counts: By score: below the first bin, in each bin, and above the last one, (bins + 2,) int64.
        missing: By score: documents without it.
    """

    def __init__(self) -> None:
        self.counts = {name: np.zeros(len(score.edges) + 1, np.int64) for name, score in SCORES.items()}
        self.missing = dict.fromkeys(SCORES, 0)

    def add(self, scores: Scores) -> None:
        for name, values in scores.items():
            there = values[~np.isnan(values)]
            bins = np.searchsorted(np.array(SCORES[name].edges, np.float32), there, side="right")
            self.counts[name] += np.bincount(bins, minlength=len(self.counts[name]))
            self.missing[name] += len(values) - len(there)

    def merge(self, other: Self) -> None:
        for name in SCORES:
            self.counts[name] += other.counts[name]
            self.missing[name] += other.missing[name]

    def share_beyond(self, rule: Rule, bound: float) -> float:
        """The share of documents that would break the rule with this bound, to within the bin that holds the bound."""
        edges = np.array([-np.inf, *SCORES[rule.score].edges, np.inf])
        counts = self.counts[rule.score]
        if rule.is_lower_bound:
            broken = counts[edges[1:] <= bound]
        else:
            broken = counts[_COMPARISONS[rule.comparison(bound)](edges[:-1], bound)]
        return int(broken.sum()) / max(1, int(counts.sum()) + self.missing[rule.score])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """By score: edges of the bins, count of each bin, and of documents below, above and without the score."""
        return {
            name: {
                "edges": list(SCORES[name].edges),
                "below": int(counts[0]),
                "counts": counts[1:-1].tolist(),
                "above": int(counts[-1]),
                "missing": self.missing[name],
            }
            for name, counts in self.counts.items()
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Mapping[str, Any]]) -> Self:
        histograms = cls()
        for name, score in value.items():
            histograms.counts[name] = np.array([score["below"], *score["counts"], score["above"]], np.int64)
            histograms.missing[name] = score["missing"]
        return histograms
