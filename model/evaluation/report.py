"""The report of a run: one self-contained HTML page, the figures as PNG, and a summary in Markdown.

All three are made from the same `facts` (see `model.evaluation.facts`); what is missing there is left out.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from model.data.config import FilterConfig
from model.data.filtering.filters import Histograms
from model.data.readers.records import replace_surrogates
from model.evaluation import plots
from model.evaluation.facts import Check, DocumentsResult, Facts, TrainingLine
from model.evaluation.score_plots import RuleSet, draw_panel, rule_sets
from model.goodput import Goodput

GOOD, BAD, NEUTRAL = "good", "bad", "neutral"

# Between a number and its unit, so that no line ends there.
NBSP = "\u00a0"

HITS_SHOWN = 20  # examples of an evaluation file that were found in the text

FAILED_OUTCOMES = ("failed", "crashed", "cancelled", "timedout")


class Verdict(NamedTuple):
    tone: str
    headline: str
    detail: str


def render(facts: Facts) -> str:
    """report.html. Every text in it is escaped: sources, samples and error messages may hold anything."""
    environment = Environment(
        loader=PackageLoader("model.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": count,
        "short": short,
        "size": size,
        "duration": duration,
        "usd": usd,
        "percent": percent,
        "measure": measure,
        "demand": demand,
        "moment": moment,
    }
    page = environment.get_template("report.html.j2").render(
        facts=facts,
        verdict=verdict(facts),
        key_figures=key_figures(facts),
        plots={name: Markup(plots.svg(name, *drawing)) for name, drawing in _drawings(facts)},
        training_figures=training_figures(facts),
        splits=_splits(facts),
        rule_sets=_rule_sets(facts),
        draw_panel=lambda name, panel: Markup(plots.svg(name, draw_panel, panel)),
        scored={name: _scored(facts, name) for name in facts.get("evaluation", {}).get("documents", {})},
        configuration=_sections(facts.get("configuration", {})),
        hits_shown=HITS_SHOWN,
        baseline_names=plots.BASELINE_NAMES,
        failed_outcomes=FAILED_OUTCOMES,
    )
    # File names that are no UTF-8 come as lone surrogates, which could not be written.
    return replace_surrogates(page).replace("\0", "\ufffd")


def figures(facts: Facts) -> dict[str, bytes]:
    """Name -> PNG, for where a page cannot be shown."""
    return {name: plots.png(*drawing) for name, drawing in _drawings(facts) if name in ("loss", "baselines", "scaling")}


def _drawings(facts: Facts) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name -> the plotting function and its argument, for every figure that the facts suffice for."""
    if test := _test(facts):
        yield "baselines", (plots.baseline_bars, test)
    if choices := facts.get("evaluation", {}).get("multiple_choice"):
        yield "choices", (plots.choice_bars, choices)
    if funnel := facts.get("funnel"):
        yield "funnel", (plots.funnel_bars, funnel)
    scaling = facts.get("scaling", {})
    if "tokens_per_second_one_copy" in scaling and scaling["copies"] > 1:
        yield "scaling", (plots.throughput_bars, scaling)
    if scaling.get("all_reduce"):
        yield "all_reduce", (plots.all_reduce_curve, scaling)
    if training := facts.get("training"):
        yield "loss", (plots.loss_curve, training)
        for metric, draw in plots.METRICS.items():
            if any(line.get(metric) is not None for line in training):
                yield metric, (draw, training)


def _test(facts: Facts) -> DocumentsResult | None:
    return facts.get("evaluation", {}).get("documents", {}).get("test")


def verdict(facts: Facts) -> Verdict:
    """What the run came to, in one sentence, and the numbers that say so in another."""
    checks = facts.get("scaling", {}).get("checks", [])
    if failed := [check for check in checks if not check["passed"]]:
        numbers = "; ".join(
            f"{check['name']} {measure(check['measured'])}, bound {demand(check)}{NBSP}{check['unit']}".strip()
            for check in failed
        )
        return Verdict(BAD, f"The scaling gate stopped the run: {len(failed)} of {len(checks)} checks failed.", numbers)
    for stage in facts.get("stages", []):
        if stage["outcome"].lower() in FAILED_OUTCOMES:
            return Verdict(BAD, f"The run ended in the stage “{stage['name']}”.", f"Its outcome: {stage['outcome']}.")
    if test := _test(facts):
        return _verdict_on_text(test, _scored(facts, "test"))
    if checks:
        return Verdict(GOOD, "The cluster passed the scaling gate.", f"{len(checks)} checks, all within their bounds.")
    if splits := facts.get("tokens"):
        tokens = count(sum(split["tokens"] for split in splits.values()))
        return Verdict(NEUTRAL, f"{tokens} tokens are ready to train on.", "Nothing was trained yet.")
    if facts.get("funnel"):
        return Verdict(NEUTRAL, "Documents are ready to be looked at.", "Nothing was trained yet.")
    return Verdict(NEUTRAL, "The run has no evaluation yet.", "")


def _scored(facts: Facts, split: str) -> str:
    """How many documents the evaluation took from a split: 4 of 13."""
    scored = facts["evaluation"]["documents"][split]["documents"]
    there = facts.get("tokens", {}).get(split, {}).get("documents", scored)
    return count(scored) if there == scored else f"{count(scored)} of {count(there)}"


def _verdict_on_text(test: DocumentsResult, scored: str) -> Verdict:
    own, baselines = test["bits_per_byte"], test.get("baselines", {})
    measured = f"{own:.3f}{NBSP}bits per byte on {scored} documents it was not trained on"
    if not baselines:
        return Verdict(NEUTRAL, "The model was scored on held-out text.", measured + ".")
    names = {name: plots.BASELINE_NAMES.get(name, name) for name in baselines}
    best = min(baselines, key=lambda name: baselines[name])
    if own < baselines[best]:
        saved = 1 - own / baselines[best]
        detail = f"{measured}: {percent(saved)} fewer than the best baseline, {names[best]} ({baselines[best]:.3f})."
        return Verdict(GOOD, "The model predicts unseen text better than every baseline.", detail)
    ahead = ", ".join(f"{names[name]} ({value:.3f})" for name, value in baselines.items() if value <= own)
    return Verdict(BAD, "The model does not beat every baseline.", f"{measured}; not above {ahead}.")


def key_figures(facts: Facts) -> list[tuple[str, str]]:
    """(What, value) of the numbers that everyone asks for first."""
    run, training, test = facts.get("run", {}), facts.get("training", []), _test(facts)
    last = training[-1] if training else None
    candidates = [
        ("bits per byte", f"{test['bits_per_byte']:.3f}" if test else None),
        ("parameters", short(run["parameters"]) if run.get("parameters") else None),
        ("training steps", count(last["step"]) if last else None),
        ("training tokens", short(last["tokens"]) if last and "tokens" in last else None),
        ("time in stages", duration(run.get("seconds")) if "seconds" in run else None),
        ("cost", usd(run.get("cost_usd")) if "cost_usd" in run else None),
    ]
    return [(name, value) for name, value in candidates if value is not None]


def training_figures(facts: Facts) -> list[tuple[str, str]]:
    """(What, value) of how well the machines were used; what the lines of an older run do not tell is left out."""
    lines = facts.get("training", [])
    mfu = [line["mfu"] for line in lines if line.get("mfu") is not None]
    goodput = Goodput(**given) if (given := facts.get("goodput")) else None
    skipped = [line["skipped_steps"] for line in lines if line.get("skipped_steps") is not None]
    slow = sorted({rank for line in lines for rank in line.get("slow_ranks", ())})
    known = "unknown" if goodput is None or goodput.share is None else percent(goodput.share)
    candidates = [
        ("MFU, median step", percent(median(mfu)) if mfu else "unknown"),
        ("goodput", known),
        ("restarts", count(goodput.restarts) if goodput else None),
        ("steps taken again", count(goodput.lost_steps) if goodput else None),
        ("steps skipped", count(skipped[-1]) if skipped else None),
        ("waiting for data", _share(lines, "loader_seconds")),
        ("blocked by checkpoints", _share(lines, "checkpoint_blocked_seconds")),
        ("slow ranks", ", ".join(map(str, slow)) or None),
    ]
    return [(name, value) for name, value in candidates if value is not None]


def _share(lines: Sequence[TrainingLine], part: Literal["loader_seconds", "checkpoint_blocked_seconds"]) -> str | None:
    """Of the time of steps and of what blocks between them, by the lines that tell."""
    known = [line for line in lines if line.get(part) is not None and line.get("step_seconds")]
    if not known:
        return None
    between = [line.get("checkpoint_blocked_seconds") or 0.0 for line in known]
    return percent(sum(line[part] for line in known) / (sum(line["step_seconds"] for line in known) + sum(between)))


def _splits(facts: Facts) -> dict[str, dict[str, object]]:
    """Split -> its documents, bytes and, once there are token shards, tokens."""
    documents = facts.get("funnel", {}).get("splits", {})
    tokens = facts.get("tokens", {})
    return {name: {**dict(documents.get(name, {})), **dict(tokens.get(name, {}))} for name in {**documents, **tokens}}


def _rule_sets(facts: Facts) -> list[RuleSet]:
    """The scores of the documents beside the filters' thresholds; empty where there are no scores."""
    funnel, filters = facts.get("funnel", {}), facts.get("configuration", {}).get("data", {}).get("filters")
    if not filters or not funnel.get("histograms"):
        return []
    broken_first = Counter[str]()
    for source in funnel.get("sources", {}).values():
        broken_first.update(source.get("would_drop", {}))
        # Too long to be scored, and so in no histogram.
        broken_first["max_chars"] += source.get("dropped", {}).get("max_chars", 0)
    histograms = Histograms.from_dict(funnel["histograms"])
    return rule_sets(histograms, FilterConfig.model_validate(filters), broken_first)


def _sections(configuration: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(Section, [(dotted field, value)]); the fields outside of any section come first, under an empty name."""
    plain = [(name, _value(value)) for name, value in configuration.items() if not isinstance(value, Mapping)]
    nested = [(name, list(_fields(value))) for name, value in configuration.items() if isinstance(value, Mapping)]
    return [section for section in [("", plain), *nested] if section[1]]


def _fields(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, _value(value)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def summary_markdown(facts: Facts) -> str:
    """The verdict, the key figures, the evaluation and the stages, for an artifact in Prefect."""
    tone, headline, detail = verdict(facts)
    mark = {GOOD: "✅ ", BAD: "❌ ", NEUTRAL: ""}[tone]
    parts = [f"## {mark}{_escape(headline)}", _escape(detail)]
    if numbers := key_figures(facts):
        parts.append(_table(["", ""], [[name, value] for name, value in numbers]))
    if (test := _test(facts)) and test.get("baselines"):
        rows = [["**this model**", f"**{test['bits_per_byte']:.3f}**"]]
        rows += [[_escape(plots.BASELINE_NAMES.get(name, name)), f"{v:.3f}"] for name, v in test["baselines"].items()]
        parts += ["### Held-out text", _table(["", "bits per byte"], rows)]
    if choices := facts.get("evaluation", {}).get("multiple_choice"):
        rows = [
            [_escape(name), f"{percent(r['accuracy'])} ± {percent(r['standard_error'])}", percent(r["chance"])]
            for name, r in choices.items()
        ]
        parts += ["### Multiple choice", _table(["", "accuracy", "chance"], rows)]
    if checks := facts.get("scaling", {}).get("checks"):
        rows = [
            [
                "✅" if c["passed"] else "❌",
                _escape(c["name"]),
                measure(c["measured"]),
                _escape(demand(c)),
                _escape(c["unit"]),
            ]
            for c in checks
        ]
        parts += ["### Scaling gate", _table(["", "check", "measured", "bound", "unit"], rows)]
    if stages := facts.get("stages"):
        rows = [
            [_escape(s["name"]), _escape(s["outcome"]), duration(s.get("seconds")), usd(s.get("cost_usd"))]
            for s in stages
        ]
        parts += ["### Stages", _table(["stage", "outcome", "time", "cost"], rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line, and that any database takes."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in " ".join(text.split()))
    return re.sub(r"([\\`*_{}\[\]()#!|<>~&$])", r"\\\1", printable)


# --- numbers as people read them ----------------------------------------------------------------------------------


def count(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def short(number: float) -> str:
    """1234567 -> 1.23 million."""
    for bound, unit in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= bound:
            return f"{number / bound:.3g}{NBSP}{unit}"
    return f"{number:,.0f}"


def size(number: float | None) -> str:
    """12345678 -> 12.3 MB, decimal."""
    if number is None:
        return "–"
    for bound, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= bound:
            return f"{number / bound:.3g}{NBSP}{unit}"
    return f"{number:.0f}{NBSP}B"


def duration(seconds: float | None) -> str:
    """192.4 -> 3 min 12 s."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((place for place, (amount, _) in enumerate(units) if amount), 3)
    return " ".join(f"{amount}{NBSP}{unit}" for amount, unit in units[first : first + 2] if amount)


def usd(amount: float | None) -> str:
    return "–" if amount is None else f"${amount:,.2f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}{NBSP}%"


def measure(number: float | None) -> str:
    """Four digits: 0.8712, 12.35, 18,340."""
    if number is None or not math.isfinite(number):
        return "–"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def demand(check: Check) -> str:
    """What the check demands: ≥ 0.02."""
    return f"{check.get('relation', '')}{NBSP}{measure(check['bound'])}".strip()


def moment(text: str) -> str:
    """2026-11-30T11:39:52+00:00 -> 2026-11-30 11:39 UTC; what is no time in ISO 8601 stays as it is."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
