"""The first pass over a share of the source files: read, clean, score, filter, decontaminate, and hash each document.

What it writes, rows in the order of reading, is all that deduplication looks at:

documents.parquet   the documents that the filters left, with their scores
content.npy         128-bit hash of the normalised text, (documents, 2) uint64
raw.npy             the source's place in the configuration and a hash of the text as it is, (documents,) uint64
size.npy            UTF-8 bytes of the text, (documents,) uint64
bands.npy           MinHash band keys, (bands, documents) uint64
counts.json         what became of the records, samples of those dropped, histograms of the scores
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from model.data.config import DataConfig
from model.data.document_shards import SCHEMA, open_writer
from model.data.duplicates.minhash import band_keys, lsh_shape
from model.data.filtering.cleaning import clean, remove_c4_lines
from model.data.filtering.decontamination import Decontaminator
from model.data.filtering.filters import Histograms, failed_rules
from model.data.filtering.language import identify_languages
from model.data.filtering.scores import score_documents
from model.data.funnel import Samples, SourceCounts
from model.data.readers.documents import DamagedFile, Dropped, SourceFile, read_documents
from model.data.words import Hashes, split_words, word_hashes

Starts = NDArray[np.int64]

_BATCH_BYTES = 256 << 10  # scoring needs fifty times that
_BATCH_DOCUMENTS = 2000
_ROW_GROUP_BYTES = 1 << 20
_SOURCE_BITS = np.uint64(16)


def read_shard(files: Sequence[SourceFile], config: DataConfig, evaluation: Path | None, out: Path) -> None:
    """Reads files of one source and writes what the module's docstring lists into out.

    Args:
        files: Files of one source.
        config: What to keep.
        evaluation: The folder of the evaluation's texts; None where there are none.
        out: An empty folder.
    """
    with _Reader(files[0], config, evaluation, out) as reader:
        for file in files:
            reader.read(file)


class _Reader:
    def __init__(self, file: SourceFile, config: DataConfig, evaluation: Path | None, out: Path) -> None:
        self._source = file.source_name
        # Of equal documents in several sources, that of the first source stays.
        self._source_bits = np.uint64(config.sources.index(file.source)) << (np.uint64(64) - _SOURCE_BITS)
        self._config = config
        self._decontaminator = Decontaminator(evaluation, config.decontamination) if evaluation else None
        self._out = out
        self._counts = SourceCounts()
        self._samples = Samples()
        self._histograms = Histograms()
        self._writer = open_writer(out / "documents.parquet")
        self._tables: list[pa.Table] = []
        self._tables_bytes = 0
        self._texts: list[str] = []
        self._origins: list[str] = []
        self._batch_bytes = 0
        bands, _ = lsh_shape(config.deduplication.min_jaccard, config.deduplication.num_hashes)
        self._content = [np.empty((0, 2), np.uint64)]
        self._raw = [np.empty(0, np.uint64)]
        self._sizes = [np.empty(0, np.uint64)]
        self._bands = [np.empty((bands, 0), np.uint64)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish_batch()
            self._write_tables()
        self._writer.close()
        if error[0] is not None:
            return
        for name, arrays, axis in (
            ("content", self._content, 0),
            ("raw", self._raw, 0),
            ("size", self._sizes, 0),
            ("bands", self._bands, 1),
        ):
            np.save(self._out / f"{name}.npy", np.concatenate(arrays, axis))
        found = {
            "source": self._source,
            "counts": asdict(self._counts),
            "samples": self._samples.rows(),
            "histograms": self._histograms.to_dict(),
            "contamination": self._decontaminator.report() if self._decontaminator else {},
        }
        (self._out / "counts.json").write_text(json.dumps(found, ensure_ascii=True))

    def read(self, file: SourceFile) -> None:
        self._counts.files += 1
        encodings = self._counts.encodings

        def on_encoding(encoding: str) -> None:
            encodings[encoding] = encodings.get(encoding, 0) + 1

        try:
            records = read_documents(file, self._config.max_document_bytes, on_encoding)
            name = file.name.encode("utf-8", "backslashreplace").decode()  # a file's name need not be text
            for number, record in enumerate(records, start=1):
                self._add(record, f"{name}#{number}")
        except DamagedFile as damage:
            self._counts.damaged.append(str(damage))

    def _add(self, record: str | Dropped, origin: str) -> None:
        self._counts.read += 1
        if isinstance(record, Dropped):
            self._drop(record.reason, origin, record.sample)
            return
        self._counts.read_bytes += len(record.encode())
        text = clean(record, self._config.cleaning)
        if self._config.filters.c4.enabled:
            text = remove_c4_lines(text, self._config.filters.c4)
        if len(text) > self._config.filters.max_chars:  # before the work of scoring it, also when only scores are asked
            self._drop("max_chars", origin, text)
            return
        self._texts.append(text)
        self._origins.append(origin)
        self._batch_bytes += len(text)
        if self._batch_bytes >= _BATCH_BYTES or len(self._texts) >= _BATCH_DOCUMENTS:
            self._finish_batch()

    def _drop(self, reason: str, origin: str, text: str) -> None:
        self._counts.dropped[reason] = self._counts.dropped.get(reason, 0) + 1
        self._samples.add(reason, origin, text)

    def _finish_batch(self) -> None:
        if not self._texts:
            return
        texts, origins = self._texts, self._origins
        self._texts, self._origins, self._batch_bytes = [], [], 0
        words = split_words(texts)
        scores = score_documents(texts, words)
        languages, certainties = identify_languages(texts)
        self._histograms.add(scores | {"language_score": certainties})
        rules = failed_rules(scores, languages, certainties, self._config.filters)
        kept = []
        for place, rule in enumerate(rules):
            if rule:
                self._counts.would_drop[rule] = self._counts.would_drop.get(rule, 0) + 1
            if rule and not self._config.filters.score_only:
                self._drop(rule, origins[place], texts[place])
            else:
                kept.append(place)
        table = pa.table(
            {
                "text": texts,
                "source": [self._source] * len(texts),
                "document_id": [""] * len(texts),
                "origin": origins,
                "language": languages,
                "language_score": certainties,
                **scores,
            },
            SCHEMA,
        )
        places = np.array(kept, np.int64)
        self._write(*self._decontaminated(table.take(places), *_selected(*word_hashes(words), places)))

    def _decontaminated(self, table: pa.Table, hashes: Hashes, starts: Starts) -> tuple[pa.Table, Hashes, Starts]:
        """Returns the batch without what evaluation files hold; a document that is cut leaves any number of them, with
        the scores of the whole."""
        if self._decontaminator is None:
            return table, hashes, starts
        texts = table.column("text").to_pylist()
        rests = self._decontaminator.cut(texts, hashes, starts)
        if not any(rest is not None for rest in rests):
            return table, hashes, starts
        rows, left = [], []
        for row, (text, rest) in enumerate(zip(texts, rests, strict=True)):
            if rest == ():
                self._drop("contaminated", table.column("origin")[row].as_py(), text)
            elif rest:
                self._counts.cut_off += len(rest) - 1
            for part in (text,) if rest is None else rest:
                rows.append(row)
                left.append(part)
        table = table.take(np.array(rows, np.int64))
        table = table.set_column(0, SCHEMA.field("text"), pa.array(left, pa.string()))
        return table, *word_hashes(split_words(left))

    def _write(self, table: pa.Table, hashes: Hashes, starts: Starts) -> None:
        if not len(table):
            return
        texts = table.column("text").to_pylist()
        content = [xxhash.xxh3_128_digest(" ".join(text.lower().split()).encode()) for text in texts]
        ids = pa.array([digest.hex() for digest in content])
        self._tables.append(table.set_column(2, SCHEMA.field("document_id"), ids))
        self._content.append(np.frombuffer(b"".join(content), ">u8").astype(np.uint64).reshape(-1, 2))
        hashes_of_raw = np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)
        self._raw.append(self._source_bits | hashes_of_raw >> _SOURCE_BITS)
        self._sizes.append(np.array([len(text.encode()) for text in texts], np.uint64))
        self._tables_bytes += int(self._sizes[-1].sum())
        self._bands.append(band_keys(hashes, starts, self._config.deduplication))
        if self._tables_bytes >= _ROW_GROUP_BYTES:
            self._write_tables()

    def _write_tables(self) -> None:
        """Writes what was held back, so that a row group is worth its overhead."""
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables).combine_chunks())
            self._tables, self._tables_bytes = [], 0


def _selected(hashes: Hashes, starts: Starts, texts: NDArray[np.int64]) -> tuple[Hashes, Starts]:
    """Returns the words of some of the texts, and where each starts in them."""
    lengths = np.diff(starts)[texts]
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[texts] - (ends - lengths), lengths)
    return hashes[places], np.concatenate([[0], ends])
