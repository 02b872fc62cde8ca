"""Reads raw documents out of source files of any common format, streamed in bounded memory."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from model.data.config import SourceConfig
from model.data.readers.blocks import joined_blocks, read_blocks
from model.data.readers.charsets import as_utf8
from model.data.readers.decompression import COMPRESSIONS, decompressed
from model.data.readers.objects import Record, csv_objects, find_delimiter, json_objects, leaf_names
from model.data.readers.records import DamagedFile, Dropped, decoded, joined_fields, replace_surrogates
from model.data.readers.splitting import CsvRows, JsonValues, Lines, split_records
from model.data.readers.tables import arrow_columns, arrow_texts, parquet_columns, parquet_texts
from model.data.readers.web import html_texts, warc_texts

__all__ = [
    "DamagedFile",
    "Dropped",
    "SourceFile",
    "document_format",
    "field_names",
    "read_documents",
    "replace_surrogates",
]

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
_COLUMNS = {"parquet": parquet_columns, "arrow": arrow_columns}
_RECORDS_WITH_NAMES = 10_000


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
        f"{', '.join(COMPRESSIONS)}; of a folder with other files too, name those that are meant by a pattern"
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


def field_names(file: SourceFile, max_document_bytes: int) -> list[str] | None:
    """Returns the names of the columns, or of fields in the first ten thousand records; None where nothing has a name.

    A name a.b is that of field b of the object or column a.

    Raises:
        DamagedFile: A table is damaged; of a damaged file of records, what lies before the damage is looked at.
    """
    file_format, compression = document_format(file.name)
    if file_format in ("txt", "html", "warc"):
        return None
    with file.open() as stream:
        if file_format in _COLUMNS:
            return _COLUMNS[file_format](stream)
        blocks = decompressed(file.open, stream, compression) if compression else read_blocks(stream)
        records = _records(file_format, as_utf8(blocks, file.source.encoding, _ignore), file.source, max_document_bytes)
        names: dict[str, None] = {}  # in order
        with suppress(DamagedFile):
            for record in islice(records, _RECORDS_WITH_NAMES):
                if not isinstance(record, Dropped):
                    names.update(dict.fromkeys(leaf_names(record[0])))
        return list(names)


def _stream_texts(
    file_format: str, blocks: Iterator[bytes], source: SourceConfig, max_bytes: int, on_encoding: Callable[[str], None]
) -> Iterator[str | Dropped]:
    if file_format == "warc":
        return warc_texts(blocks, source.encoding, max_bytes, on_encoding)
    if file_format == "html":
        return html_texts(blocks, source.encoding, max_bytes, on_encoding)
    blocks = as_utf8(blocks, source.encoding, on_encoding)
    if file_format != "txt":
        return _field_texts(_records(file_format, blocks, source, max_bytes), source.text_fields)
    if source.txt_document == "file":
        return map(_text, (joined_blocks(blocks, max_bytes),))
    return map(_text, _filled(split_records(blocks, Lines(), max_bytes)))


def _records(
    file_format: str, blocks: Iterable[bytes], source: SourceConfig, max_bytes: int
) -> Iterator[Record | Dropped]:
    """Yields the records of a format that has fields, out of blocks of UTF-8."""
    if file_format == "jsonl":
        return json_objects(_filled(split_records(blocks, Lines(), max_bytes)))
    if file_format == "json":
        return json_objects(split_records(blocks, JsonValues(), max_bytes))
    delimiter, blocks = ("\t", blocks) if file_format == "tsv" else find_delimiter(blocks)
    rows = _filled(split_records(blocks, CsvRows(delimiter), max_bytes))
    return csv_objects(rows, delimiter, source.text_fields)


def _filled(lines: Iterable[bytes | Dropped]) -> Iterator[bytes | Dropped]:
    """Yields the lines that are not blank."""
    return (line for line in lines if line and (isinstance(line, Dropped) or not line.isspace()))


def _text(record: bytes | Dropped) -> str | Dropped:
    return record if isinstance(record, Dropped) else decoded(record)


def _field_texts(records: Iterable[Record | Dropped], fields: tuple[str, ...]) -> Iterator[str | Dropped]:
    for record in records:
        if isinstance(record, Dropped):
            yield record
            continue
        text = joined_fields(*record, fields)
        # Only an escape makes a surrogate.
        yield replace_surrogates(text) if isinstance(text, str) and b"\\u" in record[1] else text
