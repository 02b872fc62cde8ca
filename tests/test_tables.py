"""Text columns of Parquet and Arrow files."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_files import LIMIT, read, read_until_damage, source_file

from model.data.readers.documents import DamagedFile, Dropped, read_documents
from model.data.readers.fields import check_fields

TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
    pa.binary(),
    pa.large_binary(),
]
ARROW_NAMES = ["x.arrow", "x.feather", "x.ipc"]


def parquet(column: pa.Array, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"number": pa.array(range(len(column))), "text": column}), sink, **options)
    return sink.getvalue()


def arrow(column: pa.Array, is_file: bool = True, batch_rows: int = 100, compression: str | None = None) -> bytes:
    table = pa.table({"number": pa.array(range(len(column))), "text": column})
    sink = io.BytesIO()
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue()


@pytest.mark.parametrize("column_type", TEXT_TYPES, ids=str)
def test_every_type_of_text(column_type: pa.DataType) -> None:
    column = pa.array(["a", "é\r\n", None, "", "x" * 2000, *map(str, range(100))], pa.string()).cast(column_type)
    expected = ["a", "é\r\n", Dropped("no_text_field"), "", Dropped("too_long"), *map(str, range(100))]
    assert read("x.PARQUET", parquet(column, row_group_size=7), limit=1024) == expected
    for is_file in (True, False):
        assert read("x.arrow", arrow(column, is_file), limit=1024) == expected


@pytest.mark.parametrize("name", ARROW_NAMES)
@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_files_and_streams(name: str, is_file: bool, compression: str | None) -> None:
    texts = [f"text {i}" for i in range(2500)]
    for read_bytes in (None, 3):
        data = arrow(pa.array(texts), is_file, 2000, compression)
        assert read(name, data, read_bytes=read_bytes) == texts


def test_columns_without_text() -> None:
    for name, made in (("x.parquet", parquet), ("x.arrow", arrow)):
        data = made(pa.array([1, None, 2]))
        assert read(name, data) == [Dropped("not_text"), Dropped("no_text_field"), Dropped("not_text")]
        missing = read(name, data, text_fields="body")
        assert missing == 3 * [Dropped("no_text_field")]
        assert missing[0].sample == "columns: number, text"  # type: ignore[union-attr]
        assert read(name, made(pa.nulls(2))) == 2 * [Dropped("no_text_field")]
        assert read(name, made(pa.array([["a"]]))) == [Dropped("not_text")]


def test_nested_fields() -> None:
    column = pa.array([{"text": "a", "deep": {"er": "b"}}, None, {"text": None, "deep": None}])
    for name, made in (("x.parquet", parquet), ("x.arrow", arrow)):
        data = made(column)
        missing = Dropped("no_text_field")
        assert read(name, data) == [Dropped("not_text"), missing, Dropped("not_text")]
        assert read(name, data, text_fields="text.text") == ["a", missing, missing]
        assert read(name, data, text_fields=("text.text", "text.deep.er", "x")) == ["a\n\nb", missing, missing]
        assert read(name, data, text_fields="text.none") == read(name, data, text_fields="text.text.x") == 3 * [missing]


@pytest.mark.parametrize(("name", "is_file"), [("x.parquet", True), ("x.arrow", True), ("x.arrow", False)])
def test_a_column_that_is_not_there_is_named_with_those_that_are(name: str, is_file: bool) -> None:
    column = pa.array([{"body": "a", "deep": {"er": "b"}}])
    data = parquet(column) if name == "x.parquet" else arrow(column, is_file)
    with pytest.raises(ValueError, match=f"^'body' is no field of {name}, which has number, text.body, text.deep.er$"):
        check_fields([source_file(name, data, text_fields=("text.body", "body"))], LIMIT)
    check_fields([source_file(name, data, text_fields=("text.body", "text.deep", "text", "number"))], LIMIT)
    with pytest.raises(DamagedFile):
        check_fields([source_file(name, data[:20])], LIMIT)


def test_a_literal_name_wins_over_a_nested_field() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a.b": ["literal"], "a": [{"b": "nested"}]}), sink)
    assert read("x.parquet", sink.getvalue(), text_fields="a.b") == ["literal"]


def test_two_text_columns() -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["text", "text", "n"])
    sink = io.BytesIO()
    pq.write_table(table, sink)
    records, message = read_until_damage("x.parquet", sink.getvalue())
    assert (records, message) == ([], "x.parquet: 2 columns are named 'text'")
    assert read("x.parquet", sink.getvalue(), text_fields="n") == [Dropped("not_text")]


def test_invalid_utf8() -> None:
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    buffers = [None, offsets, pa.py_buffer(b"\xff\xfeab")]
    for name, made in (("x.parquet", parquet), ("x.arrow", arrow)):
        # Said to be text, it is text with faults; nobody said that of bytes.
        assert read(name, made(pa.Array.from_buffers(pa.string(), 2, buffers))) == ["\ufffd\ufffd", "ab"]
        assert read(name, made(pa.Array.from_buffers(pa.binary(), 2, buffers))) == [Dropped("not_text"), "ab"]


def test_parquet_from_a_stream_that_cannot_seek() -> None:
    class Stream(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: int) -> int:
            raise io.UnsupportedOperation

    file = source_file("x.parquet", b"")
    data = parquet(pa.array(["a", "b"]))
    object.__setattr__(file, "open", lambda: Stream(data))
    assert list(read_documents(file, LIMIT)) == ["a", "b"]


def test_damaged_parquet() -> None:
    data = bytearray(parquet(pa.array([f"text {i}" for i in range(5000)]), row_group_size=1000, use_dictionary=False))
    assert read_until_damage("x.parquet", bytes(data[:-20]))[0] == []
    data[len(data) // 2] ^= 0xFF
    records, message = read_until_damage("x.parquet", bytes(data))
    assert records[:1000] == [f"text {i}" for i in range(1000)]
    assert message.startswith("x.parquet: ")


def test_a_cut_arrow_file_gives_its_whole_batches() -> None:
    texts = [f"text {i}" for i in range(1000)]
    data = arrow(pa.array(texts))
    for cut in (len(data) // 2, len(data) - 100, len(data) - 1):
        records, message = read_until_damage("x.arrow", data[:cut])
        assert records == texts[: len(records)]
        assert len(records) % 100 == 0
        assert message.startswith("x.arrow: ")
    assert len(records) == 1000
    assert 0 < len(read_until_damage("x.arrow", data[: len(data) // 2])[0]) < 1000


def test_offsets_that_lead_out_of_the_file_are_damage() -> None:
    data = arrow(pa.array(["a" * 100, "b" * 100]), is_file=False)
    offsets = b"\0\0\0\0\x64\0\0\0\xc8\0\0\0"
    assert data.count(offsets) == 1
    damaged = data.replace(offsets, b"\0\0\0\0\x64\0\0\0\xff\xff\xff\x7f")
    assert read_until_damage("x.arrow", damaged)[0] == []
    dictionary = arrow(pa.array(["a", "b", "a"]).dictionary_encode(), is_file=False)
    indices = b"\0\0\0\0\1\0\0\0\0\0\0\0"
    assert dictionary.count(indices) >= 1
    damaged = dictionary.replace(indices, b"\0\0\0\0\xff\xff\xff\x0f\0\0\0\0")
    assert read_until_damage("x.arrow", damaged)[0] == []


def test_what_is_no_table_is_damaged() -> None:
    for name in ("x.parquet", *ARROW_NAMES):
        assert read_until_damage(name, b"not a table, whatever the name says")[0] == []
    assert read("x.arrow", b"") == []
    assert read_until_damage("x.parquet", b"")[0] == []
