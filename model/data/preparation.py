"""From source files to documents: read, clean, filter, drop duplicates, split, and write Parquet shards."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model.config import DataConfig
from model.data.cleaning import clean, failed_rule
from model.data.documents import DamagedFile, Dropped, SourceFile, read_documents

SPLITS = ("train", "validation", "test")

_SCHEMA = pa.schema({"text": pa.string(), "source": pa.string(), "document_id": pa.string()})
_ROW_GROUP_BYTES = 4 << 20
_READ_ROWS = 64
_PROGRESS_DOCUMENTS = 1000


@dataclass(frozen=True)
class Document:
    """A prepared document; its id is the hash of its normalised text."""

    text: str
    source: str
    document_id: str


@dataclass
class SourceCounts:
    """What became of one source. Bytes are of UTF-8 text: read before cleaning, kept after it."""

    files: int = 0
    read: int = 0
    read_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    kept_bytes: int = 0
    damaged: list[str] = field(default_factory=list)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


@dataclass
class SplitCounts:
    """The documents of one split and the UTF-8 bytes of their text."""

    documents: int = 0
    bytes: int = 0


@dataclass
class Funnel:
    """How many documents were read, dropped and kept, by source and by split."""

    sources: dict[str, SourceCounts] = field(default_factory=dict)
    splits: dict[str, SplitCounts] = field(default_factory=lambda: {split: SplitCounts() for split in SPLITS})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare_documents(
    files: Iterable[SourceFile], config: DataConfig, out: Path, progress: Callable[[Funnel], None]
) -> Funnel:
    """Writes out/{train,validation,test}/part-*.parquet and returns the counts. What stood there is replaced.

    Of documents with the same text but for case and white space, the first in the order of the files is kept. The same
    hash chooses the split, so that a document is never in two, whatever else is read. Equal input gives equal bytes.

    Args:
        files: The files of all sources, in order.
        config: Filters, fractions and sizes.
        out: A local folder.
        progress: Called with the counts so far, at least after each file.

    Raises:
        ValueError: A source kept nothing, or a split is empty.
    """
    funnel = Funnel()
    seen: set[bytes] = set()
    read_sources = set()
    writers = {split: _DocumentShards(out / split, config.shard_bytes) for split in SPLITS}
    for file in files:
        read_sources.add(file.source)
        counts = funnel.sources.setdefault(file.source_name, SourceCounts())
        counts.files += 1
        for document in _kept_documents(file, config, counts, seen):
            split = _split(document.document_id, config)
            size = len(document.text.encode())
            counts.kept += 1
            counts.kept_bytes += size
            funnel.splits[split].documents += 1
            funnel.splits[split].bytes += size
            writers[split].add(document, size)
            if counts.kept % _PROGRESS_DOCUMENTS == 0:
                progress(funnel)
        progress(funnel)
    for writer in writers.values():
        writer.close()
    for index, source in enumerate(config.sources):
        if source not in read_sources:
            raise ValueError(f"data.sources[{index}] ({source.uri}) has no files")
    _require_documents(funnel, config)
    return funnel


def iter_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yields the documents of Parquet shards in order, holding a few at a time."""
    for path in paths:
        with pq.ParquetFile(path) as shard:
            for batch in shard.iter_batches(_READ_ROWS):
                for row in batch.to_pylist():
                    yield Document(**row)


def _kept_documents(file: SourceFile, config: DataConfig, counts: SourceCounts, seen: set[bytes]) -> Iterator[Document]:
    try:
        for record in read_documents(file, config.max_document_bytes):
            counts.read += 1
            if isinstance(record, Dropped):
                counts.drop(record.reason)
                continue
            counts.read_bytes += len(record.encode())
            text = clean(record)
            if rule := failed_rule(text, config.filters):
                counts.drop(rule)
                continue
            digest = _content_hash(text)
            if digest in seen:
                counts.drop("duplicate")
                continue
            seen.add(digest)
            yield Document(text, file.source_name, digest.hex())
    except DamagedFile as damage:
        counts.damaged.append(str(damage))


def _content_hash(text: str) -> bytes:
    return blake2b(" ".join(text.lower().split()).encode(), digest_size=16).digest()


def _split(document_id: str, config: DataConfig) -> str:
    place = int(document_id, 16) / (1 << 4 * len(document_id))
    if place < config.validation_fraction:
        return "validation"
    return "test" if place < config.validation_fraction + config.test_fraction else "train"


def _require_documents(funnel: Funnel, config: DataConfig) -> None:
    for name, counts in funnel.sources.items():
        if not counts.kept:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped.items())) or "nothing"
            damaged = f"; damaged: {'; '.join(counts.damaged)}" if counts.damaged else ""
            raise ValueError(
                f"data.sources: {name!r} kept no document of {counts.read} read (dropped: {reasons}{damaged})"
            )
    for split, split_counts in funnel.splits.items():
        if not split_counts.documents:
            kept = sum(counts.kept for counts in funnel.sources.values())
            raise ValueError(
                f"data: the {split} split is empty: of {kept} documents kept, validation_fraction "
                f"({config.validation_fraction}) and test_fraction ({config.test_fraction}) left none for it; "
                "add text or change the fractions"
            )


class _DocumentShards:
    """Writes documents to part-00000.parquet and on; a part has its name once it is whole."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._parts = 0
        self._part_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[Document] = []
        self._rows_bytes = 0

    def add(self, document: Document, size: int) -> None:
        if self._part_bytes and self._part_bytes + size > self._shard_bytes:
            self.close()
        self._rows.append(document)
        self._rows_bytes += size
        self._part_bytes += size
        if self._rows_bytes >= _ROW_GROUP_BYTES:
            self._write_rows()

    def close(self) -> None:
        """Ends the part that is being written, if any."""
        if self._rows:
            self._write_rows()
        if self._writer:
            self._writer.close()
            self._partial_path.replace(self._folder / f"part-{self._parts:05}.parquet")
            self._writer = None
            self._parts += 1
        self._part_bytes = 0

    @property
    def _partial_path(self) -> Path:
        return self._folder / f"part-{self._parts:05}.parquet.partial"

    def _write_rows(self) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial_path, _SCHEMA, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist([vars(row) for row in self._rows], _SCHEMA))
        self._rows.clear()
        self._rows_bytes = 0
