"""Text columns of Parquet and Arrow files."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model.data.readers.blocks import BLOCK_BYTES, BlockReader, read_blocks
from model.data.readers.records import FIELD_SEPARATOR, DamagedFile, Dropped, decoded, dropped

_MAX_ROWS = 1024
_BATCH_BYTES = 4 << 20
_ARROW_MAGIC = b"ARROW1"

_BYTES_OF_TEXT = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def parquet_texts(stream: BinaryIO, fields: Sequence[str], max_bytes: int) -> Iterator[str | Dropped]:
    """Yields the text of each row, from columns of any string type, or of bytes that are UTF-8.

    Raises:
        DamagedFile: After the rows before the damage.
    """
    with _open_parquet(stream) as file:
        names = file.schema_arrow.names
        wanted = [name for name in fields if name in names or name.split(".")[0] in names]
        if not wanted:
            sample = f"columns: {', '.join(names)}"
            yield from (dropped("no_text_field", sample) for _ in range(file.metadata.num_rows))
            return
        for batch in file.iter_batches(_batch_rows(file.metadata), columns=wanted):
            yield from _batch_texts(batch, fields, max_bytes)


def parquet_columns(stream: BinaryIO) -> list[str]:
    """Returns the names of the columns, a.b for field b of column a.

    Raises:
        DamagedFile: They cannot be read.
    """
    with _open_parquet(stream) as file:
        return _leaf_names(file.schema_arrow)


def arrow_texts(stream: BinaryIO, fields: Sequence[str], max_bytes: int) -> Iterator[str | Dropped]:
    """Yields the text of each row, as parquet_texts does, of an Arrow IPC file or stream; holds one of its batches.

    A file is read as the stream that it contains, so that it needs no random access and may be cut.

    Raises:
        DamagedFile: After the batches before the damage.
    """
    reader, is_file = _arrow_reader(stream)
    if reader is None:
        return
    with _damage(), pa.ipc.open_stream(pa.PythonFile(reader, mode="r")) as batches:
        for batch in batches:
            for start in range(0, batch.num_rows, _MAX_ROWS):
                yield from _batch_texts(batch.slice(start, _MAX_ROWS), fields, max_bytes)
    end = b""
    while is_file and (block := reader.read(BLOCK_BYTES)):
        end = (end + block)[-len(_ARROW_MAGIC) :]
    if is_file and end != _ARROW_MAGIC:
        raise DamagedFile("it ends before its footer")


def arrow_columns(stream: BinaryIO) -> list[str]:
    """Returns the names of the columns, as parquet_columns does.

    Raises:
        DamagedFile: They cannot be read.
    """
    reader, _ = _arrow_reader(stream)
    if reader is None:
        return []
    with _damage(), pa.ipc.open_stream(pa.PythonFile(reader, mode="r")) as batches:
        return _leaf_names(batches.schema)


@contextmanager
def _open_parquet(stream: BinaryIO) -> Iterator[pq.ParquetFile]:
    with (
        _damage(),
        _seekable(stream) as seekable,
        pq.ParquetFile(seekable, buffer_size=BLOCK_BYTES, pre_buffer=False) as file,
    ):
        yield file


def _arrow_reader(stream: BinaryIO) -> tuple[BlockReader | None, bool]:
    """Returns what reads the stream of batches, if there is one, and whether it is in a file."""
    reader = BlockReader(read_blocks(stream))
    head = reader.read(8)  # a file's magic is padded to this
    if not head or head.startswith(_ARROW_MAGIC):
        return (reader if head else None), bool(head)
    return BlockReader(chain((head,), iter(partial(reader.read, BLOCK_BYTES), b""))), False


def _leaf_names(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    names: list[str] = []
    for field in fields:
        name = prefix + field.name
        is_struct = pa.types.is_struct(field.type) and field.type.num_fields
        names += _leaf_names(field.type, f"{name}.") if is_struct else [name]
    return names


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, SystemError) as error:  # of a name, of a negative size
        raise DamagedFile(str(error)) from error
    except OSError as error:
        if error.errno is not None:  # the disk or the network, not the file
            raise
        raise DamagedFile(str(error)) from error


@contextmanager
def _seekable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Gives stream itself when it can seek, and a copy on disk otherwise."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield copy


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Returns how many rows to hold at once, from the row group whose rows are the longest."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    return max(1, min(_MAX_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _batch_texts(batch: pa.RecordBatch, fields: Sequence[str], max_bytes: int) -> Iterator[str | Dropped]:
    found = [column for name in fields if (column := _column(batch, name)) is not None]
    if not found:
        sample = f"columns: {', '.join(batch.schema.names)}"
        yield from (dropped("no_text_field", sample) for _ in range(batch.num_rows))
        return
    for row in zip(*map(_values, found), strict=True):
        values = [value for value in row if value is not None]
        if not values:
            yield Dropped("no_text_field")
        elif wrong := next((value for value in values if isinstance(value, Dropped)), None):
            yield wrong
        elif sum(map(len, values)) > max_bytes:
            yield dropped("too_long", values[0])
        else:
            yield FIELD_SEPARATOR.join(map(decoded, filter(None, values)))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """Returns the column of that name; else, for a.b, the field b of column a; null where any of them is."""
    names = batch.schema.names
    first, *path = [name] if name in names else name.split(".")
    if names.count(first) > 1:
        raise DamagedFile(f"{names.count(first)} columns are named {first!r}")
    column = _plain(batch.column(first)) if first in names else None
    for part in path:
        index = column.type.get_field_index(part) if column is not None and pa.types.is_struct(column.type) else -1
        if index < 0:
            return None
        column = _plain(pc.struct_field(column, [index]))
    return column


def _plain(column: pa.Array) -> pa.Array:
    """Returns the column without extension and dictionary.

    Raises:
        pa.ArrowException: Its offsets or indices lead out of its buffers. Unchecked, they would crash the process.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        return _plain(column.dictionary).take(column.indices)
    if column.type in _BYTES_OF_TEXT:
        # Careless writers leave invalid UTF-8 in text, which is no damage.
        column.view(_BYTES_OF_TEXT[column.type]).validate(full=True)
    else:
        column.validate(full=column.type in _BYTES_OF_TEXT.values())
    return column


def _values(column: pa.Array) -> Iterable[bytes | Dropped | None]:
    """Returns the text of each row in UTF-8."""
    if column.type in _BYTES_OF_TEXT:
        return column.view(_BYTES_OF_TEXT[column.type]).to_pylist()
    if column.type in _BYTES_OF_TEXT.values():
        return map(_checked, column.to_pylist())
    wrong = dropped("not_text", f"a column of type {column.type}")
    return (wrong if is_there else None for is_there in column.is_valid().to_pylist())


def _checked(value: bytes | None) -> bytes | Dropped | None:
    """Returns bytes that nobody said are text, if they are."""
    if value is not None:
        try:
            value.decode()
        except UnicodeDecodeError:
            return dropped("not_text", value)
    return value
