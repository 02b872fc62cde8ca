"""Prepared documents: zstd Parquet shards, a folder for each split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from model.data.filtering.scores import SCORES

SPLITS = ("train", "validation", "test")

# Beside the text and where it is from, the scores that the filters judged it by.
SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "source": pa.string(),
        "document_id": pa.string(),
        "origin": pa.string(),
        "language": pa.string(),
        "language_score": pa.float32(),
    }
    | {name: pa.float32() for name in SCORES}
)

_READ_ROWS = 64
_REPEATING = ["source", "language"]


@dataclass(frozen=True)
class Document:
    """A prepared document.

    Attributes:
        document_id: The hash of its normalised text.
        origin: Its file and the number of its record there.
        language: ISO 639 code, "und" where there is none.
    """

    text: str
    source: str
    document_id: str
    origin: str
    language: str


def open_writer(path: Path) -> pq.ParquetWriter:
    """A writer of tables with SCHEMA."""
    return pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=_REPEATING)


def iter_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yields the documents of Parquet shards in order, holding a few at a time."""
    columns = list(Document.__dataclass_fields__)
    for path in paths:
        with pq.ParquetFile(path) as shard:
            for batch in shard.iter_batches(_READ_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield Document(**row)
