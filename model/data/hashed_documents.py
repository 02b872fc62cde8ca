"""Documents in a folder, with all that deduplication looks at: rows in the order in which they were added.

documents.parquet   the documents with their scores
content.npy         128-bit hash of the normalised text, (documents, 2) uint64
raw.npy             the source's place in the configuration and a hash of the text as it is, (documents,) uint64
size.npy            UTF-8 bytes of the text, (documents,) uint64
bands.npy           MinHash band keys, (bands, documents) uint64
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from model.data.config import DeduplicationConfig
from model.data.document_shards import SCHEMA, open_writer
from model.data.duplicates.addresses import save
from model.data.duplicates.minhash import band_keys, lsh_shape
from model.data.words import Words, word_hashes

_ROW_GROUP_BYTES = 1 << 20
_SOURCE_BITS = np.uint64(16)


class DocumentWriter:
    """Writes such a folder; on leaving its context.

    Args:
        out: An existing folder.
        source: The place of the documents' source in the configuration: of equal documents in several sources, that of
            the first source stays.
        config: The MinHash bands.
    """

    def __init__(self, out: Path, source: int, config: DeduplicationConfig) -> None:
        self._out = out
        self._source_bits = np.uint64(source) << (np.uint64(64) - _SOURCE_BITS)
        self._config = config
        self._writer = open_writer(out / "documents.parquet")
        self._tables: list[pa.Table] = []
        self._tables_bytes = 0
        bands, _ = lsh_shape(config.min_jaccard, config.num_hashes)
        self._content = [np.empty((0, 2), np.uint64)]
        self._raw = [np.empty(0, np.uint64)]
        self._sizes = [np.empty(0, np.uint64)]
        self._bands = [np.empty((bands, 0), np.uint64)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._write_tables()
        self._writer.close()
        if error[0] is None:
            save(
                self._out,
                content=np.concatenate(self._content),
                raw=np.concatenate(self._raw),
                size=np.concatenate(self._sizes),
                bands=np.concatenate(self._bands, axis=1),
            )

    def add(self, table: pa.Table, words: Words) -> None:
        """Adds documents, of SCHEMA but for their ids, and the words of their texts."""
        if not len(table):
            return
        texts = table.column("text").to_pylist()
        content = [xxhash.xxh3_128_digest(" ".join(text.lower().split()).encode()) for text in texts]
        ids = pa.array([digest.hex() for digest in content])
        self._tables.append(table.set_column(2, SCHEMA.field("document_id"), ids))
        self._content.append(np.frombuffer(b"".join(content), ">u8").astype(np.uint64).reshape(-1, 2))
        encoded = [text.encode() for text in texts]
        raw = np.array([xxhash.xxh3_64_intdigest(text) for text in encoded], np.uint64)
        self._raw.append(self._source_bits | raw >> _SOURCE_BITS)
        self._sizes.append(np.array([len(text) for text in encoded], np.uint64))
        self._bands.append(band_keys(*word_hashes(words), self._config))
        self._tables_bytes += int(self._sizes[-1].sum())
        if self._tables_bytes >= _ROW_GROUP_BYTES:
            self._write_tables()

    def _write_tables(self) -> None:
        """Writes what was held back, so that a row group is worth its overhead."""
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables).combine_chunks())
            self._tables, self._tables_bytes = [], 0


def read_source(folder: Path) -> int:
    """The place in the configuration of the source of a folder that has documents."""
    return int(np.load(folder / "raw.npy", mmap_mode="r")[0] >> (np.uint64(64) - _SOURCE_BITS))


def read_rows(folder: Path, first: int, end: int, columns: list[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
    """Yields the rows from first to end of the folder, a row group at a time, each with the number of its first."""
    with pq.ParquetFile(folder / "documents.parquet", buffer_size=1 << 16) as file:
        start = 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            if start < end and first < stop:
                low, high = max(first, start), min(end, stop)
                yield low, file.read_row_group(group, columns).slice(low - start, high - low)
            start = stop
