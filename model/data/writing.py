"""The last pass: the documents that deduplication left become the Parquet shards of a split."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from model.data.config import DataConfig
from model.data.document_shards import SCHEMA, SPLITS, open_writer
from model.data.duplicates.deduplication import EXACT_DUPLICATE, NEAR_DUPLICATE
from model.data.duplicates.paragraphs import read_repeated_paragraphs, remove_paragraphs
from model.data.funnel import SAMPLES, Samples
from model.data.hashed_documents import read_rows

_TEXT = SCHEMA.get_field_index("text")


@dataclass(frozen=True)
class Share:
    """Some rows of a read shard.

    Attributes:
        documents: The folder that DocumentWriter wrote.
        survivors: What deduplication wrote about it.
        paragraphs: What repeats in it; None where repeated paragraphs are kept.
        first, end: The rows, end excluded.
    """

    documents: Path
    survivors: Path
    paragraphs: Path | None
    first: int
    end: int


def splits_of(survivors: Path, config: DataConfig) -> NDArray[np.uint8]:
    """Returns the split (a place in SPLITS) of every document of a read shard, and len(SPLITS) for what is dropped.

    The hash of its group chooses, so that near duplicates that are kept are never in two splits.
    """
    split = split_by_hash(np.load(survivors / "group.npy", mmap_mode="r"), config)
    split[~np.load(survivors / "survives.npy")] = len(SPLITS)
    return split


def split_by_hash(content: NDArray[np.uint64], config: DataConfig) -> NDArray[np.uint8]:
    """Returns the split that each content hash chooses, (documents, 2) -> (documents,)."""
    place = content[:, 0] / 2.0**64
    held_out = config.validation_fraction + config.test_fraction
    return np.where(place < config.validation_fraction, 1, np.where(place < held_out, 2, 0)).astype(np.uint8)


def write_part(shares: Sequence[Share], split: int, config: DataConfig, out: Path) -> None:
    """Writes the documents of one split among the shares to out/part.parquet, and what they are to out/counts.json."""
    documents = n_bytes = 0
    languages: Counter[str] = Counter()
    with open_writer(out / "part.parquet") as writer:
        for share in shares:
            repeated = read_repeated_paragraphs(share.paragraphs) if share.paragraphs else {}
            for rows, table in _tables(share, split, config):
                if repeated:
                    table = _without_repeated_paragraphs(table, rows, repeated, config)
                writer.write_table(table)
                documents += len(table)
                n_bytes += pc.sum(pc.binary_length(table.column(_TEXT))).as_py()
                languages.update(table.column("language").to_pylist())
    counts = {
        "documents": documents,
        "bytes": n_bytes,
        "languages": dict(sorted(languages.items())),
    }
    (out / "counts.json").write_text(json.dumps(counts))


def sample_duplicates(documents: Path, survivors: Path, out: Path) -> None:
    """Writes out/samples.json: a few documents of a read shard that were dropped because another is like them."""
    reasons = np.load(survivors / "reason.npy")
    content = np.load(documents / "content.npy", mmap_mode="r")
    samples = Samples()
    for reason, name in ((EXACT_DUPLICATE, "duplicate"), (NEAR_DUPLICATE, "near_duplicate")):
        rows = np.flatnonzero(reasons == reason)
        for row in rows[np.argsort(content[rows, 0], kind="stable")[:SAMPLES]].tolist():
            for _, table in read_rows(documents, row, row + 1, ["origin", "text"]):
                samples.add(name, *(table.column(column)[0].as_py() for column in ("origin", "text")))
    (out / "samples.json").write_text(json.dumps(samples.rows()))


def _tables(share: Share, split: int, config: DataConfig) -> Iterator[tuple[NDArray[np.int64], pa.Table]]:
    """Yields the documents of the split, with the rows that they are in the read shard."""
    splits = splits_of(share.survivors, config)
    for first, table in read_rows(share.documents, share.first, share.end):
        chosen = np.flatnonzero(splits[first : first + len(table)] == split)
        if len(chosen):
            yield first + chosen, table.take(chosen)


def _without_repeated_paragraphs(
    table: pa.Table, rows: NDArray[np.int64], repeated: dict[int, list[int]], config: DataConfig
) -> pa.Table:
    """Returns the table without what repeats.

    A document that would be too short then stays whole: it may hold the one occurrence that stays of a paragraph.
    """
    texts = []
    for text, row in zip(table.column(_TEXT).to_pylist(), rows.tolist(), strict=True):
        rest = remove_paragraphs(text, repeated[row]) if row in repeated else text
        texts.append(rest if len(rest) >= config.filters.min_chars else text)
    return table.set_column(_TEXT, SCHEMA.field("text"), pa.array(texts, pa.string()))
