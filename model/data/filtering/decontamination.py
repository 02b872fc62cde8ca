"""Cuts what the evaluation files hold out of documents, whatever its case, punctuation and line breaks there.

Source: Brown et al. 2020, arXiv:2005.14165, appendix C: overlaps of n-grams of words, and a window around each. Unlike
there, n-grams that many documents have are cut too.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from model.data.config import DecontaminationConfig
from model.data.duplicates.addresses import load, save, starts_of_groups
from model.data.filtering.ngram_index import Hits, NgramIndex, save_ngrams
from model.data.words import UNSPACED, Hashes

_UNSPACED = UNSPACED.pattern.removeprefix("[").removesuffix("]")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_EXCERPT_CHARS = 120


@dataclass(frozen=True)
class Example:
    """What is not to be learned of one line of an evaluation file, such as a question with each of its answers."""

    file: str
    line: int
    texts: tuple[str, ...]


class ExampleHits(TypedDict):
    """The documents that held some of an example, and what the first of them held."""

    documents: int
    excerpt: str


class FileHits(TypedDict):
    """What was found of an evaluation file.

    Attributes:
        examples: How many it has.
        too_short: How many of them are not looked for.
        documents: Those that held some of it.
        found: By line number.
    """

    examples: int
    too_short: int
    documents: int
    found: dict[str, ExampleHits]


def save_evaluation_texts(examples: Sequence[Example], config: DecontaminationConfig, out: Path) -> None:
    """Writes what a Decontaminator looks for into an empty folder; see save_ngrams for its memory."""
    texts = [text for example in examples for text in example.texts]
    owners = [number for number, example in enumerate(examples) for _ in example.texts]
    words = save_ngrams(out, texts, owners, config.ngram_words, config.min_words)
    longest = np.zeros(len(examples), np.int64)
    np.maximum.at(longest, owners, words)
    files: dict[str, FileHits] = {}
    for example, most_words in zip(examples, longest.tolist(), strict=True):
        hits = files.setdefault(example.file, FileHits(examples=0, too_short=0, documents=0, found={}))
        hits["examples"] += 1
        hits["too_short"] += most_words < config.min_words
    numbers = {file: number for number, file in enumerate(files)}
    save(
        out,
        file=np.array([numbers[example.file] for example in examples], np.int64),
        line=np.array([example.line for example in examples], np.int64),
    )
    (out / "files.json").write_text(json.dumps(files))


def merge_hits(one: FileHits | None, other: FileHits) -> FileHits:
    """What was found of a file in two sets of documents."""
    if one is None:
        return other
    found = dict(one["found"])
    for line, hits in other["found"].items():
        before = found.get(line, ExampleHits(documents=0, excerpt=hits["excerpt"]))
        found[line] = ExampleHits(documents=before["documents"] + hits["documents"], excerpt=before["excerpt"])
    documents = one["documents"] + other["documents"]
    return FileHits(examples=one["examples"], too_short=one["too_short"], documents=documents, found=found)


class Decontaminator:
    """Cuts documents, and counts what was found in them.

    Args:
        evaluation: The folder that save_evaluation_texts wrote with the same config.
        config: What an overlap is, and what is cut.
    """

    def __init__(self, evaluation: Path, config: DecontaminationConfig) -> None:
        self._config = config
        self._index = NgramIndex(evaluation, config.ngram_words, config.min_words)
        self._file, self._line = load(evaluation, "file"), load(evaluation, "line")
        self._hits: dict[str, FileHits] = json.loads((evaluation / "files.json").read_text())
        self._names = list(self._hits)

    def cut(self, texts: Sequence[str], hashes: Hashes, starts: NDArray[np.int64]) -> list[tuple[str, ...] | None]:
        """Returns for each text what is left of it: None where nothing was found, none where it is dropped whole.

        An overlap and window_chars before and after it are cut, up to whole words; so the text is split there. Rests
        of less than window_chars are dropped, and texts with more than max_cuts overlaps.

        Args:
            texts: A batch of documents.
            hashes: The hash of each of their words.
            starts: Where each text starts in hashes, and the end: as word_hashes gives both.
        """
        rests: list[tuple[str, ...] | None] = [None] * len(texts)
        hits = self._index.find(hashes, starts)
        text_of = np.searchsorted(starts, hits.first, side="right") - 1
        order = np.lexsort((hits.ends, hits.first))
        for places in np.split(order, starts_of_groups(text_of[order])[1:-1]) if len(order) else ():
            number = int(text_of[places[0]])
            offset = starts[number]
            words = _word_offsets(texts[number])
            assert len(words) == starts[number + 1] - offset, "words are found here as split_words finds them"
            own = Hits(hits.first[places] - offset, hits.ends[places] - offset, hits.owners[places])
            self._count(texts[number], words, own)
            rests[number] = self._rests(texts[number], words, own)
        return rests

    def report(self) -> dict[str, FileHits]:
        """What was found so far, by evaluation file."""
        return self._hits

    def _count(self, text: str, words: NDArray[np.int64], hits: Hits) -> None:
        owners, first_hit = np.unique(hits.owners, return_index=True)
        for owner, hit in zip(owners, first_hit, strict=True):
            found = self._hits[self._names[self._file[owner]]]["found"]
            excerpt = text[words[hits.first[hit], 0] : words[hits.ends[hit] - 1, 1]]
            before = found.setdefault(
                str(self._line[owner]),
                ExampleHits(documents=0, excerpt=" ".join(excerpt.split())[:_EXCERPT_CHARS]),
            )
            before["documents"] += 1
        for file in np.unique(self._file[owners]):
            self._hits[self._names[file]]["documents"] += 1

    def _rests(self, text: str, words: NDArray[np.int64], hits: Hits) -> tuple[str, ...]:
        overlaps = _merged(hits)
        if len(overlaps) > self._config.max_cuts:
            return ()
        window = self._config.window_chars
        rests, start = [], 0
        for first, end in overlaps:
            # Words that end before the window, and those that start after it, are whole.
            before = int(np.searchsorted(words[:, 1], words[first, 0] - window, side="right"))
            after = int(np.searchsorted(words[:, 0], words[end - 1, 1] + window))
            rests.append(text[start : words[before - 1, 1] if before else 0])
            start = words[after, 0] if after < len(words) else len(text)
        rests.append(text[start:])
        stripped = (rest.strip() for rest in rests)
        return tuple(rest for rest in stripped if len(rest) >= max(1, window))


def _merged(hits: Hits) -> list[tuple[int, int]]:
    """The hits, which are sorted, as spans of words that do not touch."""
    spans: list[tuple[int, int]] = []
    for first, end in zip(hits.first.tolist(), hits.ends.tolist(), strict=True):
        if spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((first, end))
    return spans


def _word_offsets(text: str) -> NDArray[np.int64]:
    """Where each word starts and ends in the text, (words, 2); words without a letter or digit are left out."""
    spans = [match.span() for match in _WORD.finditer(text) if _LETTER_OR_DIGIT.search(match[0].lower())]
    return np.array(spans, np.int64).reshape(-1, 2)
