"""What there is to see of the documents that a run dropped. Imports no Prefect."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import yaml
from pydantic import ValidationError

from infra.storage import open_storage
from model.data.config import FilterConfig
from model.data.filtering.filters import RULES
from model.data.filtering.language import identify_languages
from model.data.filtering.scores import score_documents
from model.data.funnel import SAMPLE_CHARS, SourceCounts
from model.data.words import split_words
from tasks.inspection_target import what_there_is
from tasks.manifest import Manifest, inside

DROPPED = "dropped.jsonl"
ALL_REASONS = "all"


@dataclass(frozen=True)
class DroppedDocument:
    """A document that is in no split.

    Attributes:
        reason: Why, as the funnel counts it.
        alike: How many documents of its source were dropped for that reason.
        rule: What the rule that it broke asks, with the document's score; empty where no rule dropped it.
    """

    reason: str
    source: str
    origin: str
    excerpt: str
    alike: int
    rule: str


def see_dropped(
    manifest: Manifest, sources: Mapping[str, SourceCounts], reason: str, source: str, number: int
) -> list[DroppedDocument]:
    """Looks at the samples that the run kept of what it dropped, the most frequent reason first.

    Args:
        manifest: Of the documents.
        sources: What became of each source's records.
        reason: Such as min_chars; a rule set, such as gopher; or all.
        source: Of this source alone, if it is given.
        number: Most documents of a reason and source.

    Raises:
        ValueError: nothing was dropped for that reason.
    """
    if source and source not in sources:
        raise ValueError(f"source ({source}) is none of {manifest.run_uri}; there are {what_there_is(source, sources)}")
    of = {name: counts for name, counts in sources.items() if source in ("", name)}
    total = sum((Counter(counts.dropped) for counts in of.values()), Counter[str]())
    reasons = [name for name, _ in total.most_common() if reason in (ALL_REASONS, name, name.partition(".")[0])]
    if not reasons:
        there = what_there_is(reason, (name for name, _ in total.most_common()))
        what = f"; there are {there}" if total else "; nothing was dropped at all"
        raise ValueError(f"dropped ({reason}): no document of {source or manifest.run_uri} was dropped for that{what}")
    storage = open_storage(manifest.run_uri)
    filters = _filters(manifest.run_uri)
    seen, left = [], {(name, of_reason): number for name in of for of_reason in reasons}
    for line in storage.read(inside(manifest.directory, DROPPED)).decode().splitlines():
        row = json.loads(line)
        place = (row["source"], row["reason"])
        if left.get(place, 0) > 0:
            left[place] -= 1
            alike = of[row["source"]].dropped[row["reason"]]
            rule = _broken_rule(row["reason"], row["excerpt"], filters) if filters else ""
            seen.append(DroppedDocument(**row, alike=alike, rule=rule))
    return sorted(seen, key=lambda document: reasons.index(document.reason))


def _filters(run_uri: str) -> FilterConfig | None:
    """The rules that the run was last configured with."""
    try:
        config = yaml.safe_load(open_storage(run_uri).read("config.yaml"))
        return FilterConfig.model_validate(config["data"]["filters"])
    except (FileNotFoundError, ValidationError, yaml.YAMLError, KeyError, TypeError):
        return None


def _broken_rule(reason: str, excerpt: str, filters: FilterConfig) -> str:
    """What the rule asks, and the score if the whole document is there to be scored."""
    whole = len(excerpt) < SAMPLE_CHARS
    if reason == "languages":
        (language,), (certainty,) = identify_languages([excerpt])
        found = f": it is {language} with certainty {shown(certainty)}" if whole else ""
        return f"language is none of {', '.join(filters.languages)}{found}"
    rule = next((rule for rule in RULES if rule.name == reason), None)
    if rule is None or (bound := rule.bound(filters)) is None:
        return ""
    asked = f"{rule.score} {rule.comparison(bound)} {shown(bound)}"
    if not whole:
        return asked
    if rule.score == "language_score":
        score = identify_languages([excerpt])[1][0]
    else:
        score = score_documents([excerpt], split_words([excerpt]))[rule.score][0]
    return f"{asked}: it has {shown(score)}"


def shown(score: float) -> str:
    """A score in as many digits as a person compares."""
    return f"{score:,.0f}" if score >= 100 else f"{score:.3g}"
