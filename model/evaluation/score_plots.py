"""Histograms of what the filters judge, with the bounds that are set: thresholds are chosen by looking at them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from model.data.config import FilterConfig
from model.data.filtering.filters import RULES, Histograms, Rule
from model.data.filtering.scores import SCORES
from model.evaluation.plots import ACCENT, MUTED, SECOND, short

_COLUMNS = 3
_PANEL_INCHES = (2.8, 1.6)
_WIDE = 1000  # scores that reach beyond stand on a log scale
_SIGNS = {"<": "<", "<=": "≤", ">": ">", ">=": "≥"}


def score_histograms(histograms: Histograms, filters: FilterConfig) -> Figure:
    """A panel for each score: how many documents have it, the bounds of its rules, and the share of the documents
    beyond each. Bounds of rules that are not enabled are dotted."""
    rows = -(-len(SCORES) // _COLUMNS)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(_COLUMNS * width, rows * height + 0.4), layout="constrained")
    documents = int(histograms.counts["chars"].sum())
    figure.suptitle(
        f"documents by score, {documents:,} in all; counts are on a log scale", x=0.01, ha="left", color=MUTED
    )
    panels = figure.subplots(rows, _COLUMNS).flat
    for axes, name in zip(panels, SCORES, strict=False):
        bounds = [(rule, bound) for rule in RULES if rule.score == name and (bound := rule.bound(filters)) is not None]
        _panel(axes, name, histograms, filters, bounds)
    for axes in panels[len(SCORES) :]:
        axes.set_axis_off()
    return figure


def _panel(
    axes: Axes, name: str, histograms: Histograms, filters: FilterConfig, bounds: list[tuple[Rule, float]]
) -> None:
    edges, counts = np.array(SCORES[name].edges), histograms.counts[name]
    # What lies beyond the bins stands in the outermost ones.
    inside = counts[1:-1].copy()
    inside[0] += counts[0]
    inside[-1] += counts[-1]
    axes.stairs(inside, edges, fill=True, color=ACCENT, alpha=0.6)
    captions = []
    for rule, bound in bounds:
        enabled = rule.enabled(filters)
        axes.axvline(bound, color=SECOND if enabled else MUTED, linewidth=1.2, linestyle="-" if enabled else ":")
        share = histograms.share_beyond(rule, bound)
        captions.append(f"{_SIGNS[rule.breaks]}\u00a0{_number(bound)}: {100 * share:.3g}\u00a0%")
    axes.set_title(name.replace("_", " "), loc="left", fontsize=9, pad=13)
    axes.text(0, 1.03, " · ".join(captions), transform=axes.transAxes, fontsize=7.5, color=MUTED)
    axes.tick_params(length=0, labelsize=7.5)
    axes.grid(visible=False, axis="x")
    _scales(axes, edges, inside, [bound for _, bound in bounds])


def _scales(axes: Axes, edges: np.ndarray, counts: np.ndarray, bounds: list[float]) -> None:
    """Both axes end where documents and bounds do; counts of documents are on a log scale, wide scores too."""
    top = max(1, int(counts.max()))
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, 2 * top)
    axes.yaxis.set_major_locator(FixedLocator([10**power for power in range(len(str(top)))]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    (filled,) = np.nonzero(counts)
    seen = [*edges[filled], *edges[filled + 1], *bounds] if len(filled) else edges
    low, high = min(seen), max(seen)
    if edges[-1] > _WIDE:
        axes.set_xscale("symlog", linthresh=1)
        decades = [0.0, *(10.0**power for power in range(9))]
        axes.xaxis.set_major_locator(FixedLocator([x for x in decades if low <= x <= high]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(low, high * 1.3)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _number(x)))


def _number(value: float) -> str:
    return short(value) if value >= 1000 else f"{value:g}"
