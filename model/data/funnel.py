"""The funnel: what became of every record, by source and by split, with a sample of what was dropped."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

SAMPLES = 5  # of every reason, in every source
SAMPLE_CHARS = 1000


@dataclass(frozen=True, order=True)
class Sample:
    """A dropped record. Those of the smallest hash are kept: a fair choice, the same in whatever order they come."""

    order: int
    origin: str
    excerpt: str


@dataclass
class SourceCounts:
    """What became of one source. Bytes are of UTF-8 text: read before cleaning, kept after it.

    Attributes:
        read: Records; a document that is cut, because it holds an evaluation text, counts once here.
        dropped: Reason -> documents. With filters.score_only, the rules of filters drop nothing and are not here.
        cut_off: Documents more than were read, since what is cut in the middle leaves two.
        would_drop: Rule of the filters -> documents that break it first, dropped or not.
        damaged: Files that could not be read to their end, and why.
        encodings: Character encoding -> files of text.
        languages: Language -> documents kept.
    """

    files: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cut_off: int = 0
    would_drop: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    kept_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    encodings: dict[str, int] = field(default_factory=dict)
    languages: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def add(self, other: "SourceCounts") -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, dict):
                for key, count in value.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, mine + value)


@dataclass
class SplitCounts:
    """The documents of one split and the UTF-8 bytes of their text."""

    documents: int = 0
    bytes: int = 0


class Samples:
    """A few dropped records of every reason."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Sample]] = {}

    def add(self, reason: str, origin: str, text: str) -> None:
        excerpt = text[:SAMPLE_CHARS]
        order = xxhash.xxh3_64_intdigest(f"{origin}\n{excerpt}".encode("utf-8", "surrogatepass"))
        self._insert(reason, Sample(order, origin, excerpt))

    def merge(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._insert(row["reason"], Sample(row["order"], row["origin"], row["excerpt"]))

    def rows(self) -> list[dict[str, Any]]:
        return [{"reason": reason} | asdict(s) for reason, kept in sorted(self._kept.items()) for s in kept]

    def _insert(self, reason: str, sample: Sample) -> None:
        kept = self._kept.setdefault(reason, [])
        if len(kept) < SAMPLES or sample < kept[-1]:
            self._kept[reason] = sorted([*kept, sample])[:SAMPLES]


@dataclass
class Funnel:
    """How many documents were read, dropped and kept.

    Attributes:
        parts: What each file of documents holds: its source, documents, bytes and languages.
        contamination: Evaluation file -> what of it was found in the documents.
        histograms: Score -> how the documents that were read are distributed, those dropped by filters too.
    """

    sources: dict[str, SourceCounts]
    splits: dict[str, SplitCounts]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    contamination: dict[str, Any] = field(default_factory=dict)
    histograms: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
