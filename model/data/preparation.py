"""From source files to documents: read and filter, decontaminate, deduplicate, split by content, write Parquet shards.

Every step is made of pieces (model/data/pieces.py): pure functions from files to files that any engine runs, in any
order, and that a killed run does not do again. What has to be brought together, the duplicates, goes through
hash-partitioned files.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.data.config import DataConfig
from model.data.document_shards import SPLITS
from model.data.duplicates.deduplication import EXACT_DUPLICATE, NEAR_DUPLICATE, deduplicate
from model.data.duplicates.paragraphs import find_repeated_paragraphs
from model.data.filtering.bad_words import BadWords
from model.data.filtering.decontamination import (
    Example,
    decontaminate,
    merge_hits,
    read_files,
    save_evaluation_texts,
)
from model.data.filtering.filters import Histograms
from model.data.funnel import Funnel, Samples, SourceCounts, SplitCounts
from model.data.pieces import Engine, Piece
from model.data.readers.documents import SourceFile
from model.data.reading import read_shard
from model.data.writing import Share, sample_duplicates, split_by_hash, splits_of, write_part

PREPARATION_VERSION = 2  # of what follows from files and a configuration; with another one it is done anew

_DROPPED = "dropped.jsonl"


@dataclass(frozen=True)
class _Shard:
    """A folder of documents of one source, and what deduplication says of them."""

    source: str
    documents: Path
    survivors: Path
    paragraphs: Path | None
    samples: Path


def prepare_documents(
    files: Sequence[SourceFile],
    config: DataConfig,
    examples: Sequence[Example],
    work: Path,
    out: Path,
    engine: Engine,
    memory_bytes: int,
    bad_words: BadWords = (),
) -> Funnel:
    """Writes out/{train,validation,test}/SOURCE-*.parquet and a sample of what was dropped (dropped.jsonl); returns the
    counts. Equal input gives equal bytes, whatever the engine.

    Args:
        files: The files of all sources, in order.
        config: What is kept.
        examples: The texts of the evaluation, which are cut out of the documents.
        work: A folder of this input's own. What an earlier run finished in it is not done again.
        out: An empty local folder.
        engine: What runs the pieces.
        memory_bytes: For what one piece brings together at once.
        bad_words: What C4's rule of that name looks for.

    Raises:
        ValueError: A source kept nothing, or one with a weight nothing to train on, or a split is empty.
    """
    evaluation = _save_examples(examples, config, work, engine)
    read = _read(files, config, evaluation, bad_words, work, engine)
    if evaluation:
        rests = decontaminate(
            [folder for _, folder in read], evaluation, config, work / "decontamination", engine, memory_bytes
        )
        read += [(source, rest) for (source, _), rest in zip(read, rests, strict=True) if rest]
    folders = [folder for _, folder in read]
    survivors = deduplicate(folders, config.deduplication, work / "duplicates", engine, memory_bytes)
    paragraphs: Sequence[Path | None] = [None] * len(folders)
    if config.deduplication.repeated_paragraphs:
        paragraphs = find_repeated_paragraphs(
            folders, survivors, config.deduplication, work / "paragraphs", engine, memory_bytes
        )
    shards = [
        _Shard(source, folder, survivor, paragraph, work / "samples" / f"{number:05}")
        for number, ((source, folder), survivor, paragraph) in enumerate(zip(read, survivors, paragraphs, strict=True))
    ]
    engine.finish("samples", [Piece(s.samples, partial(sample_duplicates, s.documents, s.survivors)) for s in shards])
    parts = _write(shards, config, work / "parts", engine)
    funnel = _funnel(shards, parts, evaluation)
    _require_documents(funnel, config, {file.source_name: file.source.weight for file in files})
    _collect(shards, parts, out)
    return funnel


def _save_examples(examples: Sequence[Example], config: DataConfig, work: Path, engine: Engine) -> Path | None:
    if not (config.decontamination.enabled and examples):
        return None
    texts = Piece(work / "evaluation", partial(save_evaluation_texts, examples, config.decontamination))
    engine.finish("evaluation texts", [texts])
    return texts.folder


def _read(
    files: Sequence[SourceFile],
    config: DataConfig,
    evaluation: Path | None,
    bad_words: BadWords,
    work: Path,
    engine: Engine,
) -> list[tuple[str, Path]]:
    """Returns for each share of the files its source and the folder that it was read into."""
    shares = list(_shares(files, config.shard_bytes))
    folders = [work / "read" / f"{number:05}" for number in range(len(shares))]
    engine.finish(
        "reading",
        [
            Piece(folder, partial(read_shard, share, config, evaluation, bad_words))
            for folder, share in zip(folders, shares, strict=True)
        ],
    )
    return [(share[0].source_name, folder) for folder, share in zip(folders, shares, strict=True)]


def _shares(files: Sequence[SourceFile], shard_bytes: int) -> Iterator[tuple[SourceFile, ...]]:
    """Yields the files in shares of one source and about shard_bytes: a large file alone, small ones together."""
    share: list[SourceFile] = []
    size = 0
    for file in files:
        if share and (file.source != share[0].source or size + file.size_bytes > shard_bytes):
            yield tuple(share)
            share, size = [], 0
        share.append(file)
        size += file.size_bytes
    if share:
        yield tuple(share)


def _write(shards: Sequence[_Shard], config: DataConfig, work: Path, engine: Engine) -> dict[str, Path]:
    """Returns the folder of every part by the name that it will have."""
    pieces = {}
    names = _file_names(list(dict.fromkeys(shard.source for shard in shards)))
    for number, split in enumerate(SPLITS):
        for source, name in names.items():
            of_source = [shard for shard in shards if shard.source == source]
            for part, shares in sorted(_plan(of_source, number, config).items()):
                path = f"{split}/{name}-{part:05}"
                pieces[path] = Piece(work / path, partial(write_part, shares, number, config))
    engine.finish("writing", list(pieces.values()))
    return {name: piece.folder for name, piece in pieces.items()}


def _plan(shards: Sequence[_Shard], split: int, config: DataConfig) -> dict[int, list[Share]]:
    """Returns which rows are in each part: those whose text starts within its share of the split's bytes.

    These are counted over all documents that were read, duplicates too: if a new source takes the place of a document,
    the others stay in the parts that they were in.
    """
    plan: dict[int, list[Share]] = {}
    offset = 0
    for shard in shards:
        rows = np.flatnonzero(splits_of(shard.survivors, config) == split)
        sizes = np.load(shard.documents / "size.npy").astype(np.int64)
        ends = offset + np.cumsum(np.where(_planned_splits(shard, config) == split, sizes, 0))
        starts = np.concatenate([[offset], ends[:-1]]) if len(ends) else ends
        parts = starts[rows] // config.shard_bytes
        for part in np.unique(parts).tolist():
            of_part = rows[parts == part]
            share = Share(shard.documents, shard.survivors, shard.paragraphs, int(of_part[0]), int(of_part[-1]) + 1)
            plan.setdefault(part, []).append(share)
        offset = int(ends[-1]) if len(ends) else offset
    return plan


def _planned_splits(shard: _Shard, config: DataConfig) -> NDArray[np.uint8]:
    """The split of every document of a shard, of duplicates too.

    Without near duplicates, what stays is in the split of its own content, so that no other document matters.
    """
    alone = config.deduplication.near_duplicates == "remove"
    content = shard.documents / "content.npy" if alone else shard.survivors / "group.npy"
    return split_by_hash(np.load(content, mmap_mode="r"), config)


def _file_names(sources: Sequence[str]) -> dict[str, str]:
    """Returns a name for the files of each source that every file system can hold."""
    names: dict[str, str] = {}
    for source in sources:
        plain = re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-")[:40] or "source"
        taken = set(names.values())
        choices = (plain if number == 1 else f"{plain}_{number}" for number in range(1, len(sources) + 1))
        names[source] = next(name for name in choices if name not in taken)
    return names


def _funnel(shards: Sequence[_Shard], parts: dict[str, Path], evaluation: Path | None) -> Funnel:
    funnel = Funnel({}, {split: SplitCounts() for split in SPLITS})
    funnel.contamination |= read_files(evaluation) if evaluation else {}
    histograms = Histograms()
    for shard in shards:
        counts = funnel.sources.setdefault(shard.source, SourceCounts())
        found = _json(shard.documents / "counts.json")
        counts.add(SourceCounts(**found["counts"]))
        histograms.merge(Histograms.from_dict(found["histograms"]))
        for file, hits in found["contamination"].items():
            funnel.contamination[file] = merge_hits(funnel.contamination[file], hits)
        reasons = np.load(shard.survivors / "reason.npy")
        for reason, name in ((EXACT_DUPLICATE, "duplicate"), (NEAR_DUPLICATE, "near_duplicate")):
            if dropped := int((reasons == reason).sum()):
                counts.dropped[name] = counts.dropped.get(name, 0) + dropped
    names = _file_names(list(funnel.sources))
    for path, folder in parts.items():
        split, _, file = path.partition("/")
        source = next(source for source, name in names.items() if name == file.rpartition("-")[0])
        written = _json(folder / "counts.json")
        counts = funnel.sources[source]
        counts.kept += written["documents"]
        counts.kept_bytes += written["bytes"]
        for language, documents in written["languages"].items():
            counts.languages[language] = counts.languages.get(language, 0) + documents
        funnel.splits[split].documents += written["documents"]
        funnel.splits[split].bytes += written["bytes"]
        funnel.parts[f"{path}.parquet"] = {"source": source, **written}
    funnel.histograms = histograms.to_dict()
    return funnel


def _require_documents(funnel: Funnel, config: DataConfig, weights: Mapping[str, float | None]) -> None:
    train = Counter(part["source"] for name, part in funnel.parts.items() if name.startswith("train/"))
    for name, counts in funnel.sources.items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped.items())) or "nothing"
        # A source whose every document another one has too is no mistake.
        if not counts.kept and not counts.dropped.keys() & {"duplicate", "near_duplicate"}:
            damaged = f"; damaged: {'; '.join(counts.damaged)}" if counts.damaged else ""
            raise ValueError(
                f"data.sources: {name!r} kept no document of {counts.read} read (dropped: {reasons}{damaged})"
            )
        # Unless it is to be a share of what training reads.
        if weights[name] is not None and not train[name]:
            held_out = f"{counts.kept} kept and held out" if counts.kept else "none kept"
            raise ValueError(
                f"data.sources: {name!r} has weight {weights[name]:g}, but nothing to train on: of {counts.read} "
                f"documents read, {held_out} (dropped: {reasons}; of duplicates another one is kept, most likely of "
                "another source); take it out of data.sources, or take the weights away"
            )
    for split, split_counts in funnel.splits.items():
        if not split_counts.documents:
            kept = sum(counts.kept for counts in funnel.sources.values())
            raise ValueError(
                f"data: the {split} split is empty: of {kept} documents kept, validation_fraction "
                f"({config.validation_fraction}) and test_fraction ({config.test_fraction}) left none for it; "
                "add text or change the fractions"
            )


def _collect(shards: Sequence[_Shard], parts: dict[str, Path], out: Path) -> None:
    """Brings together in out what the pieces hold."""
    for split in SPLITS:
        (out / split).mkdir(parents=True)
    for path, folder in parts.items():
        (out / f"{path}.parquet").hardlink_to(folder / "part.parquet")
    with (out / _DROPPED).open("w", encoding="utf-8") as file:
        for source in dict.fromkeys(shard.source for shard in shards):
            samples = Samples()
            of_source = [shard for shard in shards if shard.source == source]
            for shard in of_source:
                samples.merge(_json(shard.documents / "counts.json")["samples"])
                samples.merge(_json(shard.samples / "samples.json"))
            for row in samples.rows():
                line = {"source": source} | {name: value for name, value in row.items() if name != "order"}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
