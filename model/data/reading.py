"""The first pass over a share of the source files: read, clean, score, filter, hash, and look for evaluation texts.

It writes the documents that the filters left as model/data/hashed_documents.py says, with those that hold an evaluation
text set aside in the folder `overlapping`, and

counts.json   what became of the records, samples of those dropped, histograms of the scores
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from model.data.config import DataConfig
from model.data.document_shards import SCHEMA
from model.data.filtering.bad_words import BadWords, hold_bad_words
from model.data.filtering.cleaning import clean, remove_c4_lines
from model.data.filtering.decontamination import OverlapWriter
from model.data.filtering.filters import Histograms, failed_rules
from model.data.filtering.language import identify_languages
from model.data.filtering.scores import score_documents
from model.data.funnel import Samples, SourceCounts
from model.data.hashed_documents import DocumentWriter
from model.data.readers.documents import DamagedFile, Dropped, SourceFile, read_documents
from model.data.words import split_words

_BATCH_BYTES = 256 << 10  # scoring needs fifty times that
_BATCH_DOCUMENTS = 2000


def read_shard(
    files: Sequence[SourceFile], config: DataConfig, evaluation: Path | None, bad_words: BadWords, out: Path
) -> None:
    """Reads files of one source and writes what the module's docstring lists into out.

    Args:
        files: Files of one source.
        config: What to keep.
        evaluation: The folder of the evaluation's texts; None where there are none.
        bad_words: What no document may hold.
        out: An empty folder.
    """
    number = config.sources.index(files[0].source)
    with ExitStack() as stack:
        documents = stack.enter_context(DocumentWriter(out, number, config.deduplication))
        overlaps = None
        if evaluation:
            overlaps = stack.enter_context(OverlapWriter(out, number, config.deduplication, evaluation))
        reader = _Reader(files[0].source_name, config, bad_words, documents, overlaps)
        for file in files:
            reader.read(file)
        reader.finish_batch()
    (out / "counts.json").write_text(json.dumps(reader.found(), ensure_ascii=True))


class _Reader:
    def __init__(
        self,
        source: str,
        config: DataConfig,
        bad_words: BadWords,
        documents: DocumentWriter,
        overlaps: OverlapWriter | None,
    ) -> None:
        self._source = source
        self._config = config
        self._bad_words = bad_words
        self._documents = documents
        self._overlaps = overlaps
        self._counts = SourceCounts()
        self._samples = Samples()
        self._histograms = Histograms()
        self._texts: list[str] = []
        self._judged: list[str] = []  # the texts as the rules judge them, without the lines that C4's rules remove
        self._origins: list[str] = []
        self._batch_bytes = 0

    def found(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "counts": asdict(self._counts),
            "samples": self._samples.rows(),
            "histograms": self._histograms.to_dict(),
            "contamination": {},  # what is set aside is looked at once all is read
        }

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
        filters = self._config.filters
        text = clean(record, self._config.cleaning)
        judged = remove_c4_lines(text, filters.c4) if filters.c4.enabled else text
        if len(judged) > filters.max_chars:  # before the work of scoring it, also when only scores are asked
            self._drop("max_chars", origin, judged)
            return
        self._texts.append(text if filters.score_only else judged)
        self._judged.append(judged)
        self._origins.append(origin)
        self._batch_bytes += len(text)
        if self._batch_bytes >= _BATCH_BYTES or len(self._texts) >= _BATCH_DOCUMENTS:
            self.finish_batch()

    def _drop(self, reason: str, origin: str, text: str) -> None:
        self._counts.drop(reason)
        self._samples.add(reason, origin, text)

    def finish_batch(self) -> None:
        if not self._texts:
            return
        texts, judged, origins = self._texts, self._judged, self._origins
        self._texts, self._judged, self._origins, self._batch_bytes = [], [], [], 0
        words = split_words(judged)
        scores = score_documents(judged, words)
        languages, certainties = identify_languages(judged)
        self._histograms.add(scores | {"language_score": certainties})
        bad_words = hold_bad_words(judged, self._bad_words) if self._bad_words else None
        rules = failed_rules(scores, languages, certainties, self._config.filters, bad_words)
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
        if texts != judged:  # where only scores are asked, the texts stay whole
            words = split_words(texts)
        places = np.array(kept, np.int64)
        table, words = table.take(places), words.of_texts(places)
        if self._overlaps:
            clean_rows = self._overlaps.set_aside(table, words)
            if len(clean_rows) < len(table):
                table, words = table.take(clean_rows), words.of_texts(clean_rows)
        self._documents.add(table, words)
