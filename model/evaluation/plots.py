"""The report's figures, from its facts. A figure becomes SVG whose colours follow the page, or PNG."""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from model.evaluation.facts import ChoiceResult, DocumentsResult, Funnel, Scaling, TrainingLine

# Role -> colour in PNG and, as a fallback, in SVG, where the page's CSS variable --plot-ROLE decides. The colours
# must differ: an SVG knows its roles by them.
PALETTE = {
    "ink": "#1d2229",
    "muted": "#69727d",
    "grid": "#e4e7eb",
    "accent": "#2a5bd7",
    "second": "#c4591b",
    "neutral": "#b6bdc7",
    "paper": "#fefefe",
}
INK, MUTED, GRID, ACCENT, SECOND, NEUTRAL, PAPER = PALETTE.values()

# Two figures stand side by side on a desk and one fills a phone: as narrow as a phone, so that letters stay legible.
WIDTH_INCHES = 5.0

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "figure.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}

# More points than this are averaged in groups: no screen shows them, and the page stays small.
MOST_POINTS = 600


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A label in a script that the bundled font lacks: the browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def svg(name: str, draw: Callable[..., Figure], *arguments: Any) -> str:
    """The figure as an `<svg>` element for a page: no address, no script, text as text, colours by CSS variable.

    Args:
        name: Tells its ids from those of the page's other figures.
    """
    target = io.StringIO()
    with _style(), matplotlib.rc_context({"svg.hashsalt": name}):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw(*arguments).savefig(target, format="svg", transparent=True, metadata=no_metadata)
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = (
        re.sub(r' (?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", text.partition(">")[0])
        + text[text.index(">") :]
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to groups, and two figures would share their ids
    for role, colour in PALETTE.items():
        text = text.replace(colour, f"var(--plot-{role}, {colour})")
    return text


def png(draw: Callable[..., Figure], *arguments: Any) -> bytes:
    target = io.BytesIO()
    with _style():
        draw(*arguments).savefig(target, format="png", dpi=160, facecolor=PAPER)
    return target.getvalue()


def _axes(height_inches: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", color=MUTED)
    axes = figure.add_subplot()
    axes.tick_params(length=0)
    return figure, axes


def short(number: float) -> str:
    """Three digits and a unit prefix: 1234567 -> 1.23M."""
    return EngFormatter(places=None, sep="")(float(f"{number:.3g}")) if number else "0"


def label(text: str, most: int = 24) -> str:
    """A name from outside, as it can stand beside a bar."""
    clean = "".join(character if character.isprintable() else "�" for character in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


# --- training -----------------------------------------------------------------------------------------------------


def _series(lines: Sequence[TrainingLine], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric where it is a finite number, thinned to what a screen can show."""
    points = [
        (line["step"], float(value))
        for line in lines
        if isinstance(value := line.get(key), int | float) and math.isfinite(value)
    ]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    if len(steps) > MOST_POINTS:
        groups = np.array_split(np.arange(len(steps)), MOST_POINTS)
        steps, values = (np.array([of[group].mean() for group in groups]) for of in (steps, values))
    return steps, values


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred running median over a thirtieth of the run; at the ends, over what is there.

    A mean would turn a single spike into a plateau as wide as the window.
    """
    half = len(values) // 60
    padded = np.pad(values, half, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes (y, text, colour) right of the axes, apart from each other where the values are close."""
    low, high = axes.get_ylim()
    to_axes = (lambda y: math.log(y / low) / math.log(high / low)) if axes.get_yscale() == "log" else None
    previous = -1.0
    for y, text, colour in sorted(ends):
        height = to_axes(y) if to_axes else (y - low) / (high - low)
        previous = max(height, previous + 0.1)
        axes.annotate(
            text,
            (1, previous),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray) -> float:
    """The measured values pale, their running median over them; returns where the median ends."""
    smooth = _smooth(values)
    axes.plot(steps, values, color=ACCENT, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth, color=ACCENT, linewidth=1.8)
    return float(smooth[-1])


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    axes.grid(visible=False, axis="x")


def loss_curve(lines: Sequence[TrainingLine]) -> Figure:
    figure, axes = _axes(2.6, "loss, nats per token")
    steps, values = _series(lines, "loss")
    ends = []
    if len(steps):
        end = _curve(axes, steps, values)
        ends.append((end, f"training {end:.2f}", ACCENT))
    steps, values = _series(lines, "validation_loss")
    if len(steps):
        axes.plot(steps, values, color=SECOND, linewidth=1.6, marker="o", markersize=4)
        ends.append((float(values[-1]), f"validation {values[-1]:.2f}", SECOND))
    _step_axis(axes)
    _label_ends(axes, ends)
    return figure


def learning_rate(lines: Sequence[TrainingLine]) -> Figure:
    figure, axes = _axes(2.6, "learning rate")
    axes.plot(*_series(lines, "learning_rate"), color=ACCENT, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}".replace("e-0", "e-")))
    _step_axis(axes)
    return figure


def tokens_per_second(lines: Sequence[TrainingLine]) -> Figure:
    figure, axes = _axes(2.6, "tokens per second, all ranks")
    steps, values = _series(lines, "tokens_per_second")
    if len(steps):
        _curve(axes, steps, values)
        middle = float(np.median(values))
        axes.set_ylim(0, 1.15 * max(values))
        _label_ends(axes, [(middle, f"median {short(middle)}", ACCENT)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    _step_axis(axes)
    return figure


def gradient_norm(lines: Sequence[TrainingLine]) -> Figure:
    figure, axes = _axes(2.6, "gradient norm before clipping (log)")
    steps, values = _series([line for line in lines if (line.get("gradient_norm") or 0) > 0], "gradient_norm")
    if len(steps):
        axes.set_yscale("log")
        _curve(axes, steps, values)
        low, high = min(values), max(values)
        ticks = [t for e in range(-12, 13) for t in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if low / 2 <= t <= 2 * high]
        # Decades of their own have no label at all when the values stay within one.
        axes.yaxis.set_major_locator(FixedLocator(ticks if len(ticks) <= 6 else ticks[:: len(ticks) // 6 + 1]))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    _step_axis(axes)
    return figure


METRICS = {
    "learning_rate": learning_rate,
    "tokens_per_second": tokens_per_second,
    "gradient_norm": gradient_norm,
}


# --- bars ---------------------------------------------------------------------------------------------------------


def _bars(axes: Axes, names: Sequence[str]) -> None:
    """Room for one horizontal bar a name, the first on top; values are written at the bars, so no axis."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _write(axes: Axes, x: float, y: float, text: str, **how: Any) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", annotation_clip=False, **how)


BASELINE_NAMES = {"untrained": "untrained model", "unigram": "unigram of pieces", "xz": "xz -9"}


def baseline_bars(result: DocumentsResult) -> Figure:
    """Bits per byte of the model and of its baselines, best first."""
    rows = [(result["bits_per_byte"], "this model", ACCENT)]
    rows += [
        (value, label(BASELINE_NAMES.get(name, name)), NEUTRAL) for name, value in result.get("baselines", {}).items()
    ]
    rows.sort(key=lambda row: row[0])
    figure, axes = _axes(0.6 + 0.42 * len(rows), "bits per byte on held-out documents, lower is better")
    _bars(axes, [name for _, name, _ in rows])
    for y, (value, _, colour) in enumerate(rows):
        axes.barh(y, value, height=0.62, color=colour)
        _write(axes, value, y, f"{value:.3f}", fontweight="bold" if colour == ACCENT else "normal")
    axes.set_xlim(0, 1.02 * max(value for value, *_ in rows))
    return figure


def funnel_bars(funnel: Funnel) -> Figure:
    """Documents read, what each rule took away, what is left, and how that was split."""
    sources = funnel.get("sources", {}).values()
    dropped: dict[str, int] = {}
    for source in sources:
        for reason, count in source.get("dropped", {}).items():
            dropped[reason] = dropped.get(reason, 0) + count
    read = sum(source.get("read", 0) for source in sources)
    kept = sum(source.get("kept", 0) for source in sources)
    rows = [("read", 0, read, NEUTRAL)]
    left = read
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        left -= count
        rows.append((f"− {label(reason.replace('_', ' '))}", left, count, SECOND))
    rows.append(("kept", 0, kept, ACCENT))
    begin = 0
    for name, split in funnel.get("splits", {}).items():
        rows.append((f"→ {label(name)}", begin, split.get("documents", 0), ACCENT))
        begin += split.get("documents", 0)
    figure, axes = _axes(0.5 + 0.29 * len(rows), "documents")
    _bars(axes, [name for name, *_ in rows])
    for y, (name, start, width, colour) in enumerate(rows):
        axes.barh(y, width, left=start, height=0.62, color=colour, alpha=0.55 if name.startswith("→") else 1)
        _write(axes, start + width, y, f"{width:,}")
    axes.set_xlim(0, 1.02 * max(1, read))
    return figure


def throughput_bars(scaling: Scaling) -> Figure:
    """What the whole cluster does beside what its copies of the model would do without any cost of working together."""
    copies, one = scaling["copies"], scaling["tokens_per_second_one_copy"]
    every = scaling["tokens_per_second_all_ranks"]
    rows = [("1 copy", one, NEUTRAL), (f"{copies} copies", every, ACCENT), (f"{copies} × 1 copy", copies * one, GRID)]
    figure, axes = _axes(2.6, "tokens per second")
    _bars(axes, [name for name, *_ in rows])
    for y, (_, value, colour) in enumerate(rows):
        axes.barh(y, value, height=0.62, color=colour, edgecolor=NEUTRAL if colour == GRID else "none", linewidth=0.8)
        _write(axes, value, y, short(value))
    axes.set_xlim(0, 1.02 * max(1.0, *(value for _, value, _ in rows)))
    return figure


def all_reduce_curve(scaling: Scaling) -> Figure:
    figure, axes = _axes(2.6, "all-reduce bus bandwidth, GB/s")
    points = sorted((point["mib"], point["gb_per_second"]) for point in scaling["all_reduce"])
    sizes, speeds = zip(*points, strict=True)
    axes.set_xscale("log", base=2)
    axes.plot(sizes, speeds, color=ACCENT, linewidth=1.8, marker="o", markersize=5)
    for size, speed in points:
        axes.annotate(f"{speed:.3g}", (size, speed), xytext=(0, 8), textcoords="offset points", ha="center")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("message size, MiB (log)")
    axes.set_ylim(0, 1.25 * max(speeds))
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="x")
    return figure


def choice_bars(results: Mapping[str, ChoiceResult]) -> Figure:
    """Accuracy with one standard error to each side; a stroke marks the level of chance."""
    figure, axes = _axes(0.6 + 0.5 * len(results), "accuracy ± 1 standard error; dashes mark chance")
    _bars(axes, [label(name) for name in results])
    axes.set_xlim(0, 1)
    for y, result in enumerate(results.values()):
        accuracy, error, chance = result["accuracy"], result["standard_error"], result["chance"]
        axes.barh(y, accuracy, height=0.5, color=ACCENT, alpha=0.4)
        axes.errorbar(accuracy, y, xerr=error, color=INK, capsize=3, linewidth=1.2)
        axes.plot([chance, chance], [y - 0.42, y + 0.42], color=SECOND, linewidth=1.6, linestyle=(0, (2.5, 1.5)))
        _write(axes, min(1.0, accuracy + error), y, f"{100 * accuracy:.1f}\u00a0%", fontweight="bold")
    return figure
