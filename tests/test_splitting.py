"""Records of JSON, CSV and TSV files: where they begin and end, whatever blocks they come in."""

import csv
import io
import itertools
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import COMPRESS, csv_rows, json_array, json_lines, read, read_until_damage, source_file

from model.data.readers.documents import Dropped, read_documents


@pytest.mark.parametrize("read_bytes", [1, 2, 7, None])
@pytest.mark.parametrize(
    "data",
    [
        '[{"text": "a ]}\\" \\\\"}, {"text": "b"}]',
        '[\n{"text": "a ]}\\" \\\\"}\n,\n{"text": "b"}\n]\n',
        '{"text": "a ]}\\" \\\\"}{"text": "b"}',
        '{"text": "a ]}\\" \\\\"}\r\n{"text": "b"}\r\n',
        '[{"text": "a ]}\\" \\\\"}]\n[]\n[{"text": "b"}]',
        '\ufeff{\n  "x": [{"text": "c"}, []],\n  "text": "a ]}\\" \\\\"\n}\n{"text": "b"}',
        '{"text": "a ]}\\" \\\\"}, {"text": "b"},',
    ],
)
def test_arrays_objects_and_objects_in_a_row(data: str, read_bytes: int | None) -> None:
    assert read("x.json", data.encode(), read_bytes=read_bytes) == ['a ]}" \\', "b"]


@pytest.mark.parametrize("data", ["", " \n", "[]", "[\n]", "[][]"])
def test_json_without_a_value(data: str) -> None:
    assert read("x.json", data.encode()) == []


@pytest.mark.parametrize("read_bytes", [1, None])
def test_json_values_that_give_no_text(read_bytes: int | None) -> None:
    data = (
        '[null, NaN, 12, "text", [{"text": "a"}], {"text": 1}, {}, {"text": null}, {"text": "raw \t tab"}, {"a": tru}, '
        '{"text": "x", "text": "twice"}, ' + "[" * 5000 + "]" * 5000 + ', x"y", {"text": "\\ud83d"}]'
    )
    assert read("x.json", data.encode(), read_bytes=read_bytes) == [
        *(5 * [Dropped("not_an_object")]),
        *(Dropped(reason) for reason in ("not_text", "no_text_field", "no_text_field", "invalid_json", "invalid_json")),
        "twice",
        *(Dropped(reason) for reason in ("too_deep", "invalid_json", "not_an_object")),
        "\ufffd",
    ]


@pytest.mark.parametrize(
    ("data", "records", "message"),
    [
        ('[{"text": "a"}, {"te', ["a"], "it ends inside a value"),
        ('[{"text": "a"}, {"text": "b', ["a"], "it ends inside a value"),
        ('[{"text": "a"}, {"text": "b\\', ["a"], "it ends inside a value"),
        ('[{"text": "a"},', ["a"], "it ends inside an array"),
        ('[{"text": "a"}', ["a"], "it ends inside an array"),
        ('{"text": "a"}\n{"text": "b"', ["a"], "it ends inside a value"),
    ],
)
def test_cut_json(data: str, records: list[str], message: str) -> None:
    assert read_until_damage("x.json", data.encode()) == (records, f"x.json: {message}")
    whole_before_garbage = COMPRESS[".xz"](data.encode()) + b"garbage"
    assert read_until_damage("x.json.xz", whole_before_garbage)[0] == records


def test_stray_brackets_do_not_end_a_file() -> None:
    assert read("x.json", b'] } {"text": "a"}]') == [
        Dropped("invalid_json"),
        Dropped("invalid_json"),
        "a",
        Dropped("invalid_json"),
    ]


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_json_is_found_after_what_is_none(garbage: bytes, read_bytes: int) -> None:
    text = "".join(char for char in garbage.decode("latin-1") if char not in '"{[]}')
    *_, last = read("x.json", text.encode() + b'\n{"text": "found"}', read_bytes=read_bytes)
    assert last == "found"


def test_fields_of_csv_are_quoted_as_needed() -> None:
    data = b'id,text,x\r\n1,"a, ""quoted""\r\nand\n\nmore",\r\n2,5" pipe,"z"\r\n\r\n3,"",\r\n4,"ab"c,"d"\r\n5,last,e'
    for read_bytes in (1, 2, 5, None):
        assert read("x.csv", data, read_bytes=read_bytes) == [
            'a, "quoted"\r\nand\n\nmore', '5" pipe', "", "abc", "last",
        ]  # fmt: skip
    assert read("x.tsv", data.replace(b",", b"\t"))[1:] == ['5" pipe', "", "abc", "last"]


def test_csv_rows_that_give_no_text() -> None:
    data = b"id,text\n1\n1,a,b\n1,b\n1,a\rb\n"
    assert read("x.csv", data) == [Dropped("uneven_row"), Dropped("uneven_row"), "b", Dropped("invalid_csv")]
    assert read("x.csv", data, text_fields="body")[2] == Dropped("no_text_field")
    samples = [record.sample for record in read("x.csv", data) if isinstance(record, Dropped)]
    assert samples == ["1", "1,a,b", "1,a\rb"]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"id,text", b"id,text\n", b"\xef\xbb\xbfid,text\r\n\r\n"])
def test_csv_without_rows(data: bytes) -> None:
    assert read("x.csv", data) == []


def test_a_mark_is_no_part_of_the_header() -> None:
    assert read("x.csv", b'\xef\xbb\xbf"text",n\na,1\n') == ["a"]


def test_two_columns_of_one_name_are_ambiguous() -> None:
    assert read_until_damage("x.csv", b"text,text\na,b\n") == ([], "x.csv: 2 columns are named 'text'")
    assert read("x.csv", b"n,n,text\na,b,c\n") == ["c"]


def test_csv_that_ends_in_a_quoted_field_was_cut() -> None:
    records, message = read_until_damage("x.csv", b'text\na\n"b\nc')
    assert (records, message) == (["a"], "x.csv: it ends inside a quoted field")
    assert read("x.csv", b'text\na\n"b\nc"') == ["a", "b\nc"]


def test_rows_that_only_carriage_returns_end_are_one_row() -> None:
    assert read("x.csv", b"text\ra\rb\r") == [Dropped("invalid_csv")]


def test_fields_above_the_csv_module_s_limit() -> None:
    text = 200_000 * "x"
    assert read("x.csv", csv_rows([text, text])) == [text, text]


@pytest.mark.parametrize("read_bytes", [100, None])
def test_long_records_are_skipped_and_counted(read_bytes: int | None) -> None:  # case D2
    texts = ["a", 'quoted, ""\n' + 500 * 'x" \n,', "b" * 1000, 3000 * "y", "c"]
    expected = ["a", Dropped("too_long"), "b" * 1000, Dropped("too_long"), "c"]
    for name, data in {
        "x.jsonl": json_lines(*texts),
        "x.json": json_array(*texts),
        "y.json": json_lines(*texts),
        "x.csv": csv_rows(texts),
        "x.tsv": csv_rows(texts, "\t"),
    }.items():
        assert read(name, data, limit=1100, read_bytes=read_bytes) == expected, name
        assert all(0 < len(record.sample) <= 200 for record in read(name, data, 1100) if isinstance(record, Dropped))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_long_record_is_never_held(name: str) -> None:
    starts = {"x.jsonl": b'{"text": "', "x.json": b'[{"text": "', "x.csv": b'text\n"'}
    ends = {"x.jsonl": b'"}\n{"text": "b"}', "x.json": b'"}, {"text": "b"}]', "x.csv": b'"\nb\n'}
    blocks = itertools.chain([starts[name]], itertools.repeat(bytes([120]) * (1 << 16), 500), [ends[name]])

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return next(blocks, b"")

    file = source_file(name, b"")
    object.__setattr__(file, "open", Stream)
    tracemalloc.start()
    records = list(read_documents(file, 1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == [Dropped("too_long"), "b"]
    assert peak < 12 << 20  # of 32 MiB; detection holds one and joins it


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from('",\n\r\tx é'), max_size=8), max_size=8), st.integers(1, 9), st.booleans())
def test_quoted_rows_are_split_as_the_csv_module_does(texts: list[str], read_bytes: int, quotes_all: bool) -> None:
    data = csv_rows(texts, quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL)
    assert read("x.csv", data, read_bytes=read_bytes, encoding="utf-8") == texts


@settings(deadline=None)
@given(st.recursive(st.none() | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_json_is_one_value(value: object) -> None:
    data = json.dumps([{"text": "a", "value": value}, {"text": "b"}], ensure_ascii=False, indent=1)
    data = data.encode("utf-8", "replace").decode()
    assert read("x.json", data.encode(), read_bytes=3, encoding="utf-8") == ["a", "b"]
