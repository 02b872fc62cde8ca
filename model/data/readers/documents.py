"""Reads raw documents out of source files of any common format, streamed in bounded memory."""

import csv
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from model.data.config import SourceConfig
from model.data.readers.blocks import joined_blocks, read_blocks
from model.data.readers.charsets import as_utf8
from model.data.readers.decompression import COMPRESSIONS, decompressed
from model.data.readers.records import DamagedFile, Dropped, decoded, dropped, joined_fields, replace_surrogates
from model.data.readers.splitting import CsvRows, JsonValues, Lines, split_records
from model.data.readers.tables import arrow_texts, parquet_texts
from model.data.readers.web import html_texts, warc_texts

__all__ = ["DamagedFile", "Dropped", "SourceFile", "document_format", "read_documents", "replace_surrogates"]

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".html": "html",
    ".htm": "html",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".warc": "warc",
    ".wet": "warc",
}
# They compress inside and are read by column, so they are never wrapped in a stream.
_COLUMNAR = {"parquet": parquet_texts, "arrow": arrow_texts}
_DELIMITERS = {"csv": ",", "tsv": "\t"}

# Rows are bounded before they are parsed; the default refuses fields above 128 KiB.
csv.field_size_limit(sys.maxsize)


@dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        source: The source it belongs to.
        source_name: The source's name in reports.
        name: File name; its suffixes decide the format.
        open: Opens it for reading from the start; called again where a compressed file is damaged.
        size_bytes: Its size as it is stored.
    """

    source: SourceConfig
    source_name: str
    name: str
    open: Callable[[], BinaryIO]
    size_bytes: int


def document_format(name: str) -> tuple[str, str | None]:
    """Returns a file's format (a value of FORMATS) and its compression (a value of COMPRESSIONS) from its suffixes.

    Raises:
        ValueError: The suffixes are not known.
    """
    stem, compression = name.lower(), None
    for suffix, value in COMPRESSIONS.items():
        if stem.endswith(suffix):
            stem, compression = stem.removesuffix(suffix), value
            break
    for suffix, value in FORMATS.items():
        if stem.endswith(suffix) and not (value in _COLUMNAR and compression):
            return value, compression
    columnar = [suffix for suffix, value in FORMATS.items() if value in _COLUMNAR]
    raise ValueError(
        f"{name}: the suffix is none of {', '.join(FORMATS)}; all but {', '.join(columnar)} may be followed by "
        f"{', '.join(COMPRESSIONS)}"
    )


def _ignore(encoding: str) -> None:
    pass


def read_documents(
    file: SourceFile, max_document_bytes: int, on_encoding: Callable[[str], None] = _ignore
) -> Generator[str | Dropped, None, None]:
    """Yields each record's text in file order, or why it has none. Blank lines are not records.

    What the file's encoding cannot decode and lone surrogates become U+FFFD; a byte order mark is dropped. A record of
    more than max_document_bytes is skipped without being held in memory.

    In a compressed file that is cut or damaged, what follows the last newline is never a record, even if it parses. An
    uncompressed file that is cut cannot be told from one without a last newline: its last line is a record.

    Args:
        file: The file.
        max_document_bytes: Longest record, in bytes of UTF-8; of stored bytes in HTML and WARC.
        on_encoding: Called with the name of the character encoding: once for a text file that holds anything, for each
            page of HTML and WARC, and not for Parquet and Arrow.

    Raises:
        DamagedFile: After the last whole record before the damage.
        ValueError: The file's format is not known.
    """
    file_format, compression = document_format(file.name)
    with file.open() as stream:
        try:
            if file_format in _COLUMNAR:
                yield from _COLUMNAR[file_format](stream, file.source.text_fields, max_document_bytes)
            else:
                blocks = decompressed(file.open, stream, compression) if compression else read_blocks(stream)
                yield from _stream_texts(file_format, blocks, file.source, max_document_bytes, on_encoding)
        except DamagedFile as damage:
            raise DamagedFile(f"{file.name}: {damage}") from damage


def _stream_texts(
    file_format: str, blocks: Iterator[bytes], source: SourceConfig, max_bytes: int, on_encoding: Callable[[str], None]
) -> Iterator[str | Dropped]:
    if file_format == "warc":
        return warc_texts(blocks, source.encoding, max_bytes, on_encoding)
    if file_format == "html":
        return html_texts(blocks, source.encoding, max_bytes, on_encoding)
    blocks = as_utf8(blocks, source.encoding, on_encoding)
    if file_format == "jsonl":
        return _json_texts(_filled(split_records(blocks, Lines(), max_bytes)), source.text_fields)
    if file_format == "json":
        return _json_texts(split_records(blocks, JsonValues(), max_bytes), source.text_fields)
    if file_format == "txt":
        if source.txt_document == "file":
            return map(_text, (joined_blocks(blocks, max_bytes),))
        return map(_text, _filled(split_records(blocks, Lines(), max_bytes)))
    delimiter = _DELIMITERS[file_format]
    return _csv_texts(_filled(split_records(blocks, CsvRows(delimiter), max_bytes)), delimiter, source.text_fields)


def _filled(lines: Iterable[bytes | Dropped]) -> Iterator[bytes | Dropped]:
    """Yields the lines that are not blank."""
    return (line for line in lines if line and (isinstance(line, Dropped) or not line.isspace()))


def _text(record: bytes | Dropped) -> str | Dropped:
    return record if isinstance(record, Dropped) else decoded(record)


def _json_texts(records: Iterable[bytes | Dropped], fields: tuple[str, ...]) -> Iterator[str | Dropped]:
    for raw in records:
        if isinstance(raw, Dropped):
            yield raw
            continue
        try:
            record = json.loads(decoded(raw))
        except (ValueError, RecursionError):
            yield dropped("invalid_json", raw)
            continue
        if not isinstance(record, dict):
            yield dropped("not_an_object", raw)
            continue
        text = joined_fields(record, fields, raw)
        # Only an escape makes a surrogate.
        yield replace_surrogates(text) if isinstance(text, str) and b"\\u" in raw else text


def _csv_texts(rows: Iterable[bytes | Dropped], delimiter: str, fields: tuple[str, ...]) -> Iterator[str | Dropped]:
    header: list[str] | None = None
    for raw in rows:
        if isinstance(raw, Dropped):
            yield raw
            continue
        try:
            (row,) = csv.reader((decoded(raw),), delimiter=delimiter)
        except csv.Error:
            yield dropped("invalid_csv", raw)
            continue
        if header is None:
            header = row
            if twice := next((name for name in fields if header.count(name) > 1), None):
                raise DamagedFile(f"{header.count(twice)} columns are named {twice!r}")
        elif len(row) == len(header):
            yield joined_fields(dict(zip(header, row, strict=True)), fields, raw)
        else:
            yield dropped("uneven_row", raw)
