"""The scores that the filters judge, by set of rules, with the thresholds that are set: they are chosen by looking."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from model.data.config import FilterConfig
from model.data.filtering.filters import RULES, Histograms, Rule
from model.data.filtering.scores import DUPLICATE_NGRAMS, SCORES, TOP_NGRAMS
from model.evaluation.plots import ACCENT, SECOND, short

_PANEL_INCHES = (2.9, 1.55)
_MARGINS = (0.15, 0.27, 0.82, 0.6)  # left, bottom, width and height of the axes, as shares of the panel
_DECADES = 1000  # scores that reach beyond stand on a log scale
_ZERO = 0.4  # width of what lies below 1 on a log scale, in decades
_BREAKS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}

# Rule set -> what it measures.
_SETS = {
    "Length": "How long a document is, after cleaning.",
    "Language": "How certain fastText is of the document's language; asked where data.filters.languages names some.",
    "Gopher: quality": "Whether a text consists of words and sentences as people write them.",
    "Gopher: repetition": "How much of a text repeats itself: lines, paragraphs, and n-grams of words.",
    "C4": "Whether a page is prose: sentences, no lorem ipsum, no source code. C4 also removes lines, first.",
    "FineWeb": "Whether a page is a list or a menu: lines that are short, repeated or end without punctuation.",
}

# Rule that judges no score -> rule set.
_UNSCORED = {"languages": "Language", "c4.bad_words": "C4"}

# Score -> unit of its axis.
_UNITS = {
    "chars": "characters",
    "words": "words",
    "language_score": "probability",
    "mean_word_chars": "characters a word",
    "symbols_per_word": "symbols a word",
    "bullet_lines": "share of lines",
    "ellipsis_lines": "share of lines",
    "alphabetic_words": "share of words",
    "stop_words": "stop words, of 8",
    "duplicate_lines": "share of lines",
    "duplicate_line_chars": "share of characters",
    "duplicate_paragraphs": "share of paragraphs",
    "duplicate_paragraph_chars": "share of characters",
    **{f"top_{n}gram_chars": "share of characters" for n in TOP_NGRAMS},
    **{f"duplicate_{n}gram_chars": "share of characters" for n in DUPLICATE_NGRAMS},
    "sentences": "sentences",
    "lorem_ipsum": "occurrences",
    "curly_brackets": "brackets",
    "punctuated_lines": "share of lines",
    "short_lines": "share of lines",
    "newlines_per_word": "line ends a word",
}


@dataclass(frozen=True)
class Threshold:
    """One bound on a score.

    Attributes:
        field: Its path in data.filters.
        said: Which scores break it: below 50.
        documents: How many documents break it, to within a bin of the histogram.
        share: Of all documents.
    """

    rule: Rule
    field: str
    bound: float
    said: str
    documents: int
    share: float


@dataclass(frozen=True)
class Panel:
    """The histogram of one score with the thresholds of one rule set.

    Attributes:
        counts: Documents in each of the score's bins; the outermost hold what lies beyond them, (bins,).
        drops: Whether the thresholds are obeyed.
    """

    score: str
    definition: str
    counts: NDArray[np.int64]
    thresholds: tuple[Threshold, ...]
    drops: bool


@dataclass(frozen=True)
class RuleSet:
    """Rules that are switched on together.

    Attributes:
        about: What they measure.
        enabled: Whether they are switched on.
        first: Documents that break one of these rules first; of those that are switched on.
        least: The share of documents that would break the strictest rule.
    """

    name: str
    about: str
    enabled: bool
    first: int
    least: float
    panels: tuple[Panel, ...]


def rule_sets(histograms: Histograms, filters: FilterConfig, broken_first: Mapping[str, int]) -> list[RuleSet]:
    """What there is to draw of each rule set.

    Args:
        broken_first: Rule -> documents that break it before any other, as the funnel counts them.
    """
    sets = []
    for name, about in _SETS.items():
        rules = [rule for rule in RULES if _set_of(rule) == name]
        enabled = any(rule.enabled(filters) for rule in rules)
        scores = dict.fromkeys(rule.score for rule in rules)
        drops = enabled and not filters.score_only
        bounds = {rule: bound for rule in rules if (bound := rule.bound(filters)) is not None}
        panels = tuple(_panel(score, bounds, histograms, broken_first.get("max_chars", 0), drops) for score in scores)
        # Stop words are asked of English alone, but counted in all languages.
        shares = [t.share for panel in panels if panel.score != "stop_words" for t in panel.thresholds]
        names = {rule.name for rule in rules} | {rule for rule, group in _UNSCORED.items() if group == name}
        first = sum(count for rule, count in broken_first.items() if rule in names)
        sets.append(RuleSet(name, about, enabled, first, max(shares, default=0.0), panels))
    return sets


def _set_of(rule: Rule) -> str:
    group, _, _ = rule.name.rpartition(".")
    if group == "gopher":
        repeats = rule.score.startswith(("duplicate_", "top_"))
        return "Gopher: repetition" if repeats else "Gopher: quality"
    if group:
        return {"c4": "C4", "fineweb": "FineWeb"}[group]
    return "Language" if rule.score == "language_score" else "Length"


def _panel(score: str, bounds: Mapping[Rule, float], histograms: Histograms, too_long: int, drops: bool) -> Panel:
    """`too_long`: documents over max_chars, which are not scored, and so in no histogram."""
    counts = histograms.counts[score]
    inside = counts[1:-1].copy()
    inside[0] += counts[0]
    inside[-1] += counts[-1]
    scored = int(counts.sum()) + histograms.missing[score]
    thresholds = []
    for rule, bound in bounds.items():
        if rule.score == score:
            broken = round(histograms.share_beyond(rule, bound) * scored)
            broken += too_long if rule.name == "max_chars" else 0
            said = f"{_BREAKS[rule.comparison(bound)]}\u00a0{_number(bound)}"
            share = broken / max(1, scored + too_long)
            thresholds.append(Threshold(rule, rule.field or rule.name, bound, said, broken, share))
    return Panel(score, SCORES[score].definition, inside, tuple(thresholds), drops)


def draw_panel(panel: Panel) -> Figure:
    """Documents by score; those beyond a threshold in another colour, thresholds as lines with their values."""
    figure = Figure(figsize=_PANEL_INCHES)
    axes = figure.add_axes(_MARGINS)
    edges = np.array(SCORES[panel.score].edges)
    starts, ends = edges[:-1], edges[1:]
    beyond = np.zeros(len(starts), np.bool)
    for threshold in panel.thresholds:
        rule, bound = threshold.rule, threshold.bound
        if rule.is_lower_bound:
            beyond |= ends <= bound
        else:
            beyond |= starts > bound if rule.comparison(bound) == ">" else starts >= bound
    for chosen, colour in ((~beyond, ACCENT), (beyond, SECOND)):
        axes.stairs(np.where(chosen, panel.counts, 0), edges, fill=True, color=colour, alpha=0.65, linewidth=0)
    for threshold in panel.thresholds:
        axes.axvline(threshold.bound, color=SECOND, linewidth=1.4, linestyle="-" if panel.drops else (0, (3, 2)))
        axes.annotate(
            _number(threshold.bound),
            (threshold.bound, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=SECOND,
            annotation_clip=False,
        )
    _scales(axes, panel, edges)
    return figure


def _scales(axes: Axes, panel: Panel, edges: NDArray[np.float64]) -> None:
    """Both axes end where documents and thresholds do; documents stand on a log scale, scores that span decades too."""
    axes.tick_params(length=0, labelsize=8)
    axes.grid(visible=False, axis="x")
    top = max(1, int(panel.counts.max()))
    axes.set_yscale("symlog", linthresh=1, linscale=_ZERO)
    axes.set_ylim(0, 2 * top)
    axes.set_ylabel("documents (log)", fontsize=8)
    axes.yaxis.set_major_locator(FixedLocator([10**power for power in range(0, len(str(top)), 1 + len(str(top)) // 5)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    (filled,) = np.nonzero(panel.counts)
    bounds = [threshold.bound for threshold in panel.thresholds]
    ends = [*edges[filled], *edges[filled + 1]] if len(filled) else [edges[0], edges[-1]]
    low, high = min(*ends, *bounds), max(*ends, *bounds)
    if edges[-1] > _DECADES:
        axes.set_xscale("symlog", linthresh=1, linscale=_ZERO)
        ticks = [0.0, *(10.0**power for power in range(9))]
        axes.xaxis.set_major_locator(FixedLocator([x for x in ticks if low <= x <= high]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(low, high * 1.3)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    axes.set_xlabel(_UNITS[panel.score] + (" (log)" if edges[-1] > _DECADES else ""), fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _number(x)))


def _number(value: float) -> str:
    return short(value) if value >= 1000 else f"{value:g}"
