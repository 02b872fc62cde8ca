"""Cuts what the evaluation files hold out of documents, whatever its case, punctuation and line breaks there.

While reading, documents with an overlap are set aside (OverlapWriter). Once all are read, the n-grams that many of them
have are told from the others, and what is left of each document goes the way of all others: it is deduplicated, split
and written (decontaminate).

Source: Brown et al. 2020, arXiv:2005.14165, appendix C: overlaps of n-grams of words, and a window around each. As
there, n-grams that more than 10 documents have stay in, being common phrases and boilerplate; counted are documents
that deduplication leaves, as was done there before. But an example that a document holds whole is what the paper calls
a specific overlap with a test set: it is cut however many have it, since good test questions are copied often.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from model.data.config import DataConfig, DecontaminationConfig, DeduplicationConfig
from model.data.document_shards import SCHEMA
from model.data.duplicates.addresses import load, save
from model.data.duplicates.deduplication import deduplicate
from model.data.filtering.filters import Histograms
from model.data.filtering.ngram_index import Hits, NgramIndex, save_ngrams
from model.data.funnel import Samples, SourceCounts
from model.data.hashed_documents import DocumentWriter, read_rows, read_source
from model.data.pieces import Engine, Piece
from model.data.words import Words, split_words, word_offsets

_SET_ASIDE = "overlapping"
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
        documents: Those that something was cut out of.
        found: What was cut, by line number.
        common: What was left in because many documents have it, by line number.
    """

    examples: int
    too_short: int
    documents: int
    found: dict[str, ExampleHits]
    common: dict[str, ExampleHits]


def save_evaluation_texts(examples: Sequence[Example], config: DecontaminationConfig, out: Path) -> None:
    """Writes what is looked for into an empty folder; see save_ngrams for its memory."""
    texts = [text for example in examples for text in example.texts]
    owners = [number for number, example in enumerate(examples) for _ in example.texts]
    words = save_ngrams(out, texts, owners, config.ngram_words, config.min_words)
    longest = np.zeros(len(examples), np.int64)
    np.maximum.at(longest, owners, words)
    files: dict[str, FileHits] = {}
    for example, most_words in zip(examples, longest.tolist(), strict=True):
        hits = files.setdefault(example.file, FileHits(examples=0, too_short=0, documents=0, found={}, common={}))
        hits["examples"] += 1
        hits["too_short"] += most_words < config.min_words
    numbers = {file: number for number, file in enumerate(files)}
    save(
        out,
        file=np.array([numbers[example.file] for example in examples], np.int64),
        line=np.array([example.line for example in examples], np.int64),
    )
    (out / "files.json").write_text(json.dumps(files))


def read_files(evaluation: Path) -> dict[str, FileHits]:
    """What there is to be found, by evaluation file; nothing of it found yet."""
    files: dict[str, FileHits] = json.loads((evaluation / "files.json").read_text())
    return files


def merge_hits(one: FileHits, other: FileHits) -> FileHits:
    """What was found of a file in two sets of documents."""
    documents = one["documents"] + other["documents"]
    found, common = _added(one["found"], other["found"]), _added(one["common"], other["common"])
    return FileHits(
        examples=one["examples"], too_short=one["too_short"], documents=documents, found=found, common=common
    )


class OverlapWriter:
    """Sets the documents aside that hold an n-gram of an evaluation text, in a folder below out if there are any.

    That has them as DocumentWriter writes them, and a column for each of: row, the document of each overlap, ascending;
    first and end, its words; ngram, its number in the index.

    Args:
        out: The folder of the documents that are read.
        source: As DocumentWriter has it.
        config: As DocumentWriter has it.
        evaluation: The folder that save_evaluation_texts wrote.
    """

    def __init__(self, out: Path, source: int, config: DeduplicationConfig, evaluation: Path) -> None:
        self._folder = out / _SET_ASIDE
        self._source, self._config = source, config
        self._index = NgramIndex(evaluation)
        self._documents: DocumentWriter | None = None
        self._overlaps = [np.empty((4, 0), np.int64)]
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._documents:
            self._documents.__exit__(*error)
            row, first, end, ngram = np.concatenate(self._overlaps, axis=1)
            save(self._folder, row=row, first=first, end=end, ngram=ngram)

    def set_aside(self, table: pa.Table, words: Words) -> NDArray[np.int64]:
        """Returns the rows of the table without any overlap, having set the others aside.

        Args:
            table: Documents, of SCHEMA.
            words: Of their texts.
        """
        hits = self._index.find(words)
        of_hit = np.searchsorted(words.starts, hits.first, side="right") - 1
        rows = np.unique(of_hit)
        if len(rows):
            if not self._documents:
                self._folder.mkdir()
                self._documents = DocumentWriter(self._folder, self._source, self._config)
            self._documents.add(table.take(rows), words.of_texts(rows))
            start = words.starts[of_hit]
            row = self._rows + np.searchsorted(rows, of_hit)
            overlaps = np.stack([row, hits.first - start, hits.ends - start, hits.ngrams])
            self._overlaps.append(overlaps[:, np.lexsort(overlaps[::-1])])
            self._rows += len(rows)
        return np.setdiff1d(np.arange(len(table)), rows)


def decontaminate(
    read: Sequence[Path], evaluation: Path, config: DataConfig, work: Path, engine: Engine, memory_bytes: int
) -> list[Path | None]:
    """Returns for each read folder the folder of what is left of the documents that were set aside there, as
    DocumentWriter and write_rests write it; None where there are none.

    Args:
        read: What read_shard wrote.
        evaluation: The folder that save_evaluation_texts wrote.
        config: What is cut.
        work: Where the pieces are; a call that was killed goes on there, with the same arguments.
        engine: Makes the pieces.
        memory_bytes: Of one piece.
    """
    aside = [folder / _SET_ASIDE for folder in read]
    overlapping = [folder for folder in aside if folder.exists()]
    if not overlapping:
        return [None] * len(read)
    verdicts = deduplicate(overlapping, config.deduplication, work / "overlapping", engine, memory_bytes)
    most = config.decontamination.max_documents
    common = Piece(work / "common", partial(write_common, overlapping, verdicts, evaluation, most))
    engine.finish("common n-grams", [common])
    rests = {
        folder: Piece(
            work / "rests" / folder.parent.name, partial(write_rests, folder, evaluation, common.folder, config)
        )
        for folder in overlapping
    }
    engine.finish("cutting", list(rests.values()))
    return [rests[folder].folder if folder in rests else None for folder in aside]


def write_common(
    overlapping: Sequence[Path], verdicts: Sequence[Path], evaluation: Path, max_documents: int, out: Path
) -> None:
    """Writes common.npy: which n-grams of the index stay in. Takes 16 bytes of memory for each n-gram of the index, and
    100 for each overlap of one folder.

    Args:
        overlapping: What OverlapWriter wrote.
        verdicts: What deduplicate says of each: only documents that survive count.
        evaluation: The folder that save_evaluation_texts wrote.
        max_documents: N-grams that more have are common, whole texts aside.
        out: An empty folder.
    """
    is_whole = NgramIndex(evaluation).is_whole
    documents = np.zeros(len(is_whole), np.int64)
    for folder, verdict in zip(overlapping, verdicts, strict=True):
        row, ngram = load(folder, "row"), load(folder, "ngram")
        survives = load(verdict, "survives")[row]
        _, of_document = np.unique(np.stack([row[survives], ngram[survives]]), axis=1)
        documents += np.bincount(of_document, minlength=len(documents))
    save(out, common=(documents > max_documents) & ~is_whole)


def write_rests(overlapping: Path, evaluation: Path, common: Path, config: DataConfig, out: Path) -> None:
    """Writes what is left of the documents that were set aside, and counts.json, as read_shard does, with what was
    found by evaluation file under `contamination`.

    An overlap and window_chars before and after it are cut, up to whole words; so the text is split there, and each
    part has the scores of the whole. Parts that are shorter than the window or min_chars are dropped, and documents
    with more than max_cuts overlaps.
    """
    is_common = load(common, "common")
    report = _Report(evaluation)
    counts, samples = SourceCounts(), Samples()
    row, first, end, ngram = (load(overlapping, name) for name in ("row", "first", "end", "ngram"))
    with DocumentWriter(out, read_source(overlapping), config.deduplication) as writer:
        for start, table in read_rows(overlapping, 0, int(row[-1]) + 1):
            rows, rests = [], []
            for number, text in enumerate(table.column("text").to_pylist()):
                own = slice(*np.searchsorted(row, [start + number, start + number + 1]))
                hits = Hits(first[own], end[own], ngram[own])
                parts = _rests(text, hits, is_common[hits.ngrams], report, config)
                if not parts:
                    counts.drop("contaminated")
                    samples.add("contaminated", table.column("origin")[number].as_py(), text)
                else:
                    counts.cut_off += len(parts) - 1
                rows += [number] * len(parts)
                rests += parts
            left = table.take(np.array(rows, np.int64))
            writer.add(left.set_column(0, SCHEMA.field("text"), pa.array(rests, pa.string())), split_words(rests))
    found = {
        "counts": asdict(counts),
        "samples": samples.rows(),
        "histograms": Histograms().to_dict(),
        "contamination": report.files,
    }
    (out / "counts.json").write_text(json.dumps(found, ensure_ascii=True))


class _Report:
    """Counts what is found of each example.

    Attributes:
        files: By evaluation file.
    """

    def __init__(self, evaluation: Path) -> None:
        self.files = read_files(evaluation)
        self._index = NgramIndex(evaluation)
        self._file, self._line = load(evaluation, "file"), load(evaluation, "line")
        self._names = list(self.files)

    def add(self, where: Literal["found", "common"], text: str, offsets: NDArray[np.int64], hits: Hits) -> None:
        """Counts a document with these overlaps; offsets as word_offsets gives them."""
        owners, hit_of_owner = self._index.owners(hits.ngrams)
        examples, place = np.unique(owners, return_index=True)
        for example, hit in zip(examples, hit_of_owner[place], strict=True):
            found = self.files[self._names[self._file[example]]][where]
            excerpt = text[offsets[hits.first[hit], 0] : offsets[hits.ends[hit] - 1, 1]]
            before = found.setdefault(
                str(self._line[example]),
                ExampleHits(documents=0, excerpt=" ".join(excerpt.split())[:_EXCERPT_CHARS]),
            )
            before["documents"] += 1
        if where == "found":
            for file in np.unique(self._file[examples]):
                self.files[self._names[file]]["documents"] += 1


def _rests(text: str, hits: Hits, is_common: NDArray[np.bool], report: _Report, config: DataConfig) -> list[str]:
    """What is left of a document with these overlaps, of which common ones stay in."""
    offsets = word_offsets(text)
    if is_common.any():
        report.add("common", text, offsets, hits.chosen(is_common))
    if is_common.all():
        return [text]
    hits = hits.chosen(~is_common)
    report.add("found", text, offsets, hits)
    overlaps = _merged(hits)
    if len(overlaps) > config.decontamination.max_cuts:
        return []
    window = config.decontamination.window_chars
    rests, start = [], 0
    for first, end in overlaps:
        # Words that end before the window, and those that start after it, are whole.
        before = int(np.searchsorted(offsets[:, 1], offsets[first, 0] - window, side="right"))
        after = int(np.searchsorted(offsets[:, 0], offsets[end - 1, 1] + window))
        rests.append(text[start : offsets[before - 1, 1] if before else 0].strip())
        start = offsets[after, 0] if after < len(offsets) else len(text)
    rests.append(text[start:].strip())
    shortest = max(1, window, 0 if config.filters.score_only else config.filters.min_chars)
    return [rest for rest in rests if len(rest) >= shortest]


def _merged(hits: Hits) -> list[tuple[int, int]]:
    """The hits, which are sorted, as spans of words that do not touch."""
    spans: list[tuple[int, int]] = []
    for first, end in zip(hits.first.tolist(), hits.ends.tolist(), strict=True):
        if spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((first, end))
    return spans


def _added(one: dict[str, ExampleHits], other: dict[str, ExampleHits]) -> dict[str, ExampleHits]:
    added = dict(one)
    for line, hits in other.items():
        before = added.get(line, ExampleHits(documents=0, excerpt=hits["excerpt"]))
        added[line] = ExampleHits(documents=before["documents"] + hits["documents"], excerpt=before["excerpt"])
    return added
