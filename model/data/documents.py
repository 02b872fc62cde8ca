"""Reads raw documents out of source files: JSON lines, text and Parquet, streamed in bounded memory."""

import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from model.config import SourceConfig

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

_BLOCK_BYTES = 1 << 16
# A decoder has no bound on what it returns: zstd makes 128 KiB out of 4 bytes, so 2 KiB at a time stay below 64 MiB.
_FEED_BYTES = 1 << 11
_PARQUET_ROWS = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF16_BLANK = b"".join(_UTF16_MARKS) + b"\0 \t\r\x0b\x0c"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class DamagedFile(Exception):
    """A source file cannot be read to its end: it was cut, is corrupt or is ambiguous.

    The whole records before the damage have been yielded.
    """


@dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        source: The source it belongs to.
        source_name: The source's name in reports.
        name: File name; its suffixes decide the format.
        open: Opens it for reading from the start; called again where a compressed file is damaged.
    """

    source: SourceConfig
    source_name: str
    name: str
    open: Callable[[], BinaryIO]


@dataclass(frozen=True)
class Dropped:
    """A record that gives no document, and why."""

    reason: str


def document_format(name: str) -> tuple[str, str | None]:
    """Returns a file's format (a value of FORMATS) and its compression (a value of COMPRESSIONS) from its suffixes.

    Raises:
        ValueError: The suffixes are not known.
    """
    stem, compression = name.lower(), None
    for suffix, value in COMPRESSIONS.items():
        if stem.endswith(suffix):
            stem, compression = stem.removesuffix(suffix), value
    for suffix, value in FORMATS.items():
        # Parquet compresses inside and is read at random, so it is never wrapped in a stream.
        if stem.endswith(suffix) and not (value == "parquet" and compression):
            return value, compression
    raise ValueError(
        f"{name}: the suffix is none of {', '.join(FORMATS)}; all but .parquet may be followed by "
        f"{' or '.join(COMPRESSIONS)}"
    )


def read_documents(file: SourceFile, max_document_bytes: int) -> Generator[str | Dropped, None, None]:
    """Yields each record's text in file order, or why it has none. Blank lines are not records.

    Invalid UTF-8 and lone surrogates become U+FFFD; a byte order mark is dropped. The records of a file that starts
    with a UTF-16 mark are dropped. A record of more than max_document_bytes is skipped without being held in memory.

    In a compressed file that is cut or damaged, what follows the last newline is never a record, even if it parses. An
    uncompressed file that is cut cannot be told from one without a last newline: its last line is a record.

    Raises:
        DamagedFile: After the last whole record before the damage.
        ValueError: The file's format is not known.
    """
    file_format, compression = document_format(file.name)
    with file.open() as stream:
        try:
            if file_format == "parquet":
                yield from _parquet_texts(stream, file.source.text_field, max_document_bytes)
                return
            blocks = _decompressed(file, stream, compression) if compression else _blocks(stream)
            is_utf16, blocks = _utf16_checked(blocks)
            if file_format == "txt" and file.source.txt_document == "file":
                text = _whole_text(blocks, max_document_bytes)
                yield Dropped("not_utf8") if is_utf16 else text
                return
            for line in _lines(blocks, max_document_bytes):
                if isinstance(line, Dropped):
                    yield line
                elif is_utf16:
                    if line.strip(_UTF16_BLANK):
                        yield Dropped("not_utf8")
                elif line.strip():
                    yield _json_text(line, file.source.text_field) if file_format == "jsonl" else _decoded(line)
        except (EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException) as error:
            raise DamagedFile(f"{file.name}: {error}") from error
        except OSError as error:
            if error.errno is not None:  # the disk or the network, not the file
                raise
            raise DamagedFile(f"{file.name}: {error}") from error


def replace_surrogates(text: str) -> str:
    """Returns text with U+FFFD in place of each lone surrogate, which no encoding can write."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    while block := stream.read(_BLOCK_BYTES):
        yield block


def _utf16_checked(blocks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Returns whether the blocks start with a UTF-16 mark, and all of them."""
    head = b""
    for block in blocks:
        head += block
        # Not a byte more: a whole record may be two bytes, and the next block may raise.
        if len(head) >= 2:
            break
    return head.startswith(_UTF16_MARKS), chain((head,), blocks)


def _decompressed(file: SourceFile, stream: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yields what every gzip member or zstd frame holds; what lies before a cut or damage has been yielded on raising.

    "Before" is as fine as the decoder: a symbol of gzip, a block of zstd (at most 128 KiB). It trips where the data
    makes no sense or, at the end of the member or frame, misses its checksum: what a changed byte turned into other
    valid data has been yielded by then.
    """
    fed = yielded = 0

    def feeds() -> Iterator[bytes]:
        nonlocal fed
        for data in _feeds(stream):
            yield data
            fed += len(data)

    try:
        for data in _decoder_output(feeds(), compression):
            yielded += len(data)
            yield data
        return
    except (zlib.error, zstandard.ZstdError):
        pass  # raised again below
    # The decoder kept to itself what it made of the feed that it tripped over: read up to there, then byte by byte.
    with file.open() as again:
        for data in _decoder_output(_feeds(again, fine_from=fed), compression):
            fresh = data[yielded:]
            yielded -= len(data) - len(fresh)
            yield fresh


def _feeds(stream: BinaryIO, fine_from: int | None = None) -> Iterator[bytes]:
    """Yields the stream in pieces that are safe to decode; those within a feed after byte fine_from as single bytes."""
    position = 0
    for block in _blocks(stream):
        for start in range(0, len(block), _FEED_BYTES):
            data = block[start : start + _FEED_BYTES]
            if fine_from is not None and position - _FEED_BYTES < fine_from < position + len(data):
                yield from (data[i : i + 1] for i in range(len(data)))
            else:
                yield data
            position += len(data)


def _decoder_output(feeds: Iterable[bytes], compression: str) -> Iterator[bytes]:
    decoder = None
    for data in feeds:
        while data:
            if decoder is None or decoder.eof:
                # gzip allows zeros between and after members.
                data = data.lstrip(b"\0") if compression == "gzip" and decoder else data
                if not data:
                    break
                decoder = _new_decoder(compression)
            yield decoder.decompress(data)
            data = decoder.unused_data
    if decoder and not decoder.eof:
        raise EOFError(f"the {compression} stream ends before its end mark")


def _new_decoder(compression: str) -> "zlib._Decompress | zstandard.ZstdDecompressionObj":
    if compression == "gzip":
        return zlib.decompressobj(wbits=31)
    # Archives made with `zstd --long=31` need a window above the library's default limit.
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _lines(blocks: Iterable[bytes], max_bytes: int) -> Iterator[bytes | Dropped]:
    """Yields the lines that `\\n` ends, and the last one, without their line ends (one `\\r` belongs to the end)."""

    def line(last: bytes) -> bytes | Dropped:
        return b"".join((*held, last)).removesuffix(b"\r") if size <= max_bytes else Dropped("too_long")

    held: list[bytes] = []
    size = 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            yield line(piece)
            held.clear()
            size = 0
        size += len(rest)
        if size <= max_bytes:
            held.append(rest)
        else:
            held.clear()
    if size:
        yield line(b"")


def _whole_text(blocks: Iterable[bytes], max_bytes: int) -> str | Dropped:
    held: list[bytes] = []
    size = 0
    for block in blocks:
        size += len(block)
        if size > max_bytes:
            return Dropped("too_long")
        held.append(block)
    return _decoded(b"".join(held))


def _json_text(line: bytes, text_field: str) -> str | Dropped:
    try:
        record = json.loads(_decoded(line))
    except (ValueError, RecursionError):
        return Dropped("invalid_json")
    if not isinstance(record, dict):
        return Dropped("not_an_object")
    if text_field not in record:
        return Dropped("no_text_field")
    text = record[text_field]
    return replace_surrogates(text) if isinstance(text, str) else Dropped("not_text")


def _parquet_texts(stream: BinaryIO, text_field: str, max_bytes: int) -> Iterator[str | Dropped]:
    with _seekable(stream) as seekable, pq.ParquetFile(seekable, buffer_size=_BLOCK_BYTES, pre_buffer=False) as file:
        columns = file.schema_arrow.names.count(text_field)
        if columns > 1:
            raise pa.ArrowInvalid(f"{columns} columns are named {text_field!r}")
        if not columns:
            yield from (Dropped("no_text_field") for _ in range(file.metadata.num_rows))
            return
        for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_field]):
            column = batch.column(text_field)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if not _is_text(column.type):
                yield from (Dropped("not_text") for _ in range(len(column)))
                continue
            # As bytes, because a text column of a careless writer holds invalid UTF-8.
            for value in column.cast(pa.large_binary()).to_pylist():
                if value is None:
                    yield Dropped("not_text")
                else:
                    yield _decoded(value) if len(value) <= max_bytes else Dropped("too_long")


def _is_text(column_type: pa.DataType) -> bool:
    return (
        pa.types.is_string(column_type) or pa.types.is_large_string(column_type) or pa.types.is_string_view(column_type)
    )


def _seekable(stream: BinaryIO) -> BinaryIO:
    """Returns stream itself when it can seek, and a copy on disk otherwise."""
    if stream.seekable():
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    shutil.copyfileobj(stream, copy)
    copy.seek(0)
    return copy


def _decoded(data: bytes) -> str:
    return data.removeprefix(_BYTE_ORDER_MARK).decode("utf-8", errors="replace")
