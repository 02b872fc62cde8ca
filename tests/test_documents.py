"""Reading raw documents: which format a file has, what its records are, and which of them are none."""

import gzip
import io
import json
import pickle
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest
from source_files import COMPRESS, LIMIT, json_lines, read, source_file

from model.data.config import SourceConfig
from model.data.readers.documents import Dropped, SourceFile, document_format, read_documents
from model.data.readers.fields import check_fields


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_only_newlines_end_records(suffix: str) -> None:  # case D1
    texts = ["a\u2028b", "c\x85d", "e\u2029f\x0b\x0c\x1c"]
    data = json_lines(*texts).replace(b"\n", b"\r\n")
    assert read("x.jsonl" + suffix, COMPRESS.get(suffix, bytes)(data)) == texts


def test_one_carriage_return_belongs_to_the_line_end() -> None:
    assert read("x.txt", b"a\r\r\nb\rc\n", txt_document="line") == ["a\r", "b\rc"]


def test_records_that_only_carriage_returns_end_are_one_record() -> None:
    assert read("x.txt", b"a\rb\r", txt_document="line") == ["a\rb"]
    assert read("x.jsonl", json_lines("a", "b").replace(b"\n", b"\r")) == [Dropped("invalid_json")]


def test_last_line_needs_no_newline() -> None:
    assert read("x.ndjson", json_lines("a", "b").rstrip()) == ["a", "b"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_no_records(ending: str) -> None:
    data = ending.join(["", '{"text": "a"}', " \t ", "", '{"text": ""}', ""]).encode()
    assert read("x.jsonl", data) == ["a", ""]
    assert read("x.jsonl", b"\n \r\n\n") == read("x.txt", b"\n \r\n\n", txt_document="line") == []


def test_surrogate_escapes() -> None:  # case D5
    data = rb'{"text": "\ud83d alone, \ud83d\ude00 pair, \uDE00 low, \ud83d\ud83d\ude00"}'
    for name in ("x.jsonl", "x.json"):
        assert read(name, data) == ["\ufffd alone, 😀 pair, \ufffd low, \ufffd😀"]


def test_byte_order_mark_is_dropped() -> None:
    mark = b"\xef\xbb\xbf"
    assert read("x.jsonl", mark + json_lines("a") + mark + json_lines("b")) == ["a", "b"]
    assert read("x.txt", mark + b"a") == ["a"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "invalid_json"),
        ('{"text": "a"} {"text": "b"}', "invalid_json"),
        ('{"text": "raw \t tab"}', "invalid_json"),
        ("[" * 200_000, "invalid_json"),
        ("[" * 600 + "]" * 599, "invalid_json"),
        ("[" * 513 + "]" * 513, "too_deep"),
        ('{"text": "a", "x": ' + '{"y": ' * 5000 + "1" + "}" * 5001, "too_deep"),
        ('["text"]', "not_an_object"),
        ('"text"', "not_an_object"),
        ("null", "not_an_object"),
        ("NaN", "not_an_object"),
        ('{"Text": "a"}', "no_text_field"),
        ("{}", "no_text_field"),
        ('{"text": null}', "no_text_field"),
        ('{"text": 1}', "not_text"),
        ('{"text": ["a"]}', "not_text"),
    ],
)
def test_unreadable_records_are_dropped_with_a_reason_and_a_sample(line: str, reason: str) -> None:
    dropped, following = read("x.jsonl", f'{line}\n{{"text": "next"}}'.encode())
    assert dropped == Dropped(reason)
    assert isinstance(dropped, Dropped)
    assert dropped.sample == line[:200]
    assert following == "next"


def test_odd_but_readable_json() -> None:
    assert read("x.jsonl", b'{"text": "first", "x": NaN, "text": "last", "\\ud800": Infinity}') == ["last"]
    for digits in (4300, 4301, 5000, 100_000):
        long = f'{{"n": {digits * "9"}, "m": [-{digits * "1"}], "text": "a"}}'
        assert read("x.jsonl", long.encode()) == read("x.json", long.encode()) == ["a"]
        assert read("x.jsonl", f'{{"text": {digits * "9"}}}'.encode()) == [Dropped("not_text")]


def test_nesting_is_bounded_by_rule() -> None:
    for levels in (500, 512):
        deep = '{"text": "a", "x": ' + (levels - 1) * "[" + (levels - 1) * "]" + "}"
        assert read("x.jsonl", deep.encode()) == read("x.json", deep.encode()) == ["a"]
    deep = '{"text": "a", "x": ' + 512 * "[" + 512 * "]" + "}"
    assert read("x.jsonl", deep.encode()) == read("x.json", deep.encode()) == [Dropped("too_deep")]


def test_brackets_that_nest_nothing() -> None:
    text = 1000 * '[{ "\\" ' + "\n"
    assert read("x.jsonl", json_lines(text)) == [text]
    wide = {"text": "a", "x": 1000 * [{"y": []}]}
    assert read("x.jsonl", json.dumps(wide).encode()) == ["a"]


def test_the_rule_of_nesting_does_not_depend_on_the_caller() -> None:
    deep = b'{"text": "a", "x": ' + 511 * b"[" + 511 * b"]" + b"}"

    def from_deep(calls: int) -> list[str | Dropped]:
        return from_deep(calls - 1) if calls else read("x.jsonl", deep)

    assert from_deep(1) == from_deep(250) == ["a"]


FIELDS = ("title", "body.text", "tail")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"title": "T", "body": {"text": "B"}, "tail": "E"}, "T\n\nB\n\nE"),
        ({"title": "T", "body": {"text": "nested"}, "body.text": "literal"}, "T\n\nliteral"),
        ({"title": None, "body": {"text": "B"}, "tail": ""}, "B"),
        ({"title": "", "tail": ""}, ""),
        ({"tail": "E"}, "E"),
        ({"body": {"text": "B", "x": 1}, "other": 1}, "B"),
        ({"body": "no object"}, Dropped("no_text_field")),
        ({"body": None}, Dropped("no_text_field")),
        ({"title": None}, Dropped("no_text_field")),
        ({"title": 1, "tail": "E"}, Dropped("not_text")),
        ({"title": "T", "body": {"text": ["B"]}}, Dropped("not_text")),
    ],
)
def test_fields_are_joined(record: dict[str, object], expected: str | Dropped) -> None:
    data = json.dumps(record).encode()
    for name in ("x.jsonl", "x.json"):
        assert read(name, data, text_fields=FIELDS) == [expected]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_columns_of_csv_are_separated_by_what_is_in_the_header(delimiter: str) -> None:
    rows = [["id", '"a;b,c|d"', "text"], ["1", "x", '"one; two, three | four"']]
    data = "".join(delimiter.join(row) + "\r\n" for row in rows).encode()
    assert read("x.csv", data) == ["one; two, three | four"]


def test_one_column_of_csv_has_no_delimiter() -> None:
    assert read("x.csv", b"text\none; two; three\n") == ["one; two; three"]
    assert read("x.csv", b"text") == []


def test_columns_are_joined() -> None:
    data = b"title,body.text,tail\nT,B,E\nT,,E\n,,\n"
    assert read("x.csv", data, text_fields=FIELDS) == ["T\n\nB\n\nE", "T\n\nE", ""]


FILES = {
    "x.csv": b"id,body\n1,a\n",
    "x.tsv": b"id\tbody\n1\ta\n",
    "x.jsonl": b'not json\n{"id": 1}\n{"body": "a", "id": 2}\n',
    "x.json.gz": gzip.compress(b'[{"id": 1, "body": null}]'),
}


@pytest.mark.parametrize("name", FILES)
def test_a_field_that_no_record_has_is_named_with_those_that_are_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"^'text' is no field of {name}, which has id, body$"):
        check_fields([source_file(name, FILES[name])], LIMIT)
    check_fields([source_file(name, FILES[name], text_fields="body")], LIMIT)
    check_fields([source_file("x.json.gz", FILES["x.json.gz"][:-2], text_fields="body")], LIMIT)


def test_fields_of_objects_are_named() -> None:
    data = b'{"meta": {"text": "a", "more": {"n": 1}, "none": {}}, "a.b": 1}\n'
    with pytest.raises(ValueError, match=r"which has meta\.text, meta\.more\.n, meta\.none, a\.b$"):
        check_fields([source_file("x.jsonl", data)], LIMIT)
    for field in ("meta", "meta.text", "meta.more", "meta.more.n", "a.b"):
        check_fields([source_file("x.jsonl", data, text_fields=field)], LIMIT)


def test_names_of_deep_objects() -> None:
    data = '{"a": ' * 511 + "{}" + "}" * 511
    with pytest.raises(ValueError, match=r"which has (a\.){19}a…$"):
        check_fields([source_file("x.jsonl", data.encode())], LIMIT)


def test_many_and_long_names_are_shortened() -> None:
    names = [f"{number:03}{'x' * number}" for number in range(50)]
    with pytest.raises(ValueError, match="is no field") as error:
        check_fields([source_file("x.csv", ",".join(names).encode() + b"\n" + 49 * b",")], LIMIT)
    assert str(error.value).endswith(f"which has {', '.join(names[:20])} and 30 more")
    with pytest.raises(ValueError, match="which has " + 39 * "x" + "…$"):
        check_fields([source_file("x.csv", 41 * b"x" + b"\na\n")], LIMIT)


def test_tables_have_all_columns_and_records_may_lack_some() -> None:
    table, records = b"id,body\n1,a\n", b'{"id": 1, "body": "a"}\n'
    fields = ("title", "body")
    with pytest.raises(ValueError, match=r"^'title' is no field of a\.csv, which has id, body$"):
        check_fields([source_file(name, table, text_fields=fields) for name in ("a.csv", "b.csv")], LIMIT)
    check_fields([source_file("a.csv", table, text_fields=fields), source_file("b.csv", b"title\na\n")], LIMIT)
    check_fields([source_file("a.jsonl", records, text_fields=fields)], LIMIT)
    check_fields([source_file("a.jsonl", b'{"id": 1}\n'), source_file("b.jsonl", b'{"text": "a"}\n')], LIMIT)
    for nothing in (source_file("x.txt", b"a"), source_file("x.csv", b""), source_file("x.jsonl", b"not json")):
        check_fields([nothing], LIMIT)


def test_long_records_are_skipped_and_counted() -> None:  # case D2
    expected = ["a", Dropped("too_long"), "b"]
    data = json_lines("a", "x" * 5000, "b")
    assert read("x.jsonl", data, limit=1024) == expected
    assert read("x.txt", b"a\n" + b"x" * 1025 + b"\n" + b"b", limit=1024, txt_document="line") == expected
    assert read("x.txt", b"x" * 1024, limit=1024) == ["x" * 1024]
    assert read("x.txt", b"x" * 1024 + b"\n", limit=1024, txt_document="line") == ["x" * 1024]
    for long in read("x.txt", b"x" * 1025, limit=1024), read("x.txt", b"x" * 9999, limit=1024, txt_document="line"):
        assert long == [Dropped("too_long")]
        assert isinstance(long[0], Dropped)
        assert long[0].sample == "x" * 200


def test_file_or_line_is_a_text_document() -> None:
    assert read("x.txt", b"a\nb\n") == ["a\nb\n"]
    assert read("x.txt", b"a\nb\n", txt_document="line") == ["a", "b"]


def test_empty_files() -> None:
    for name in ("x.jsonl", "x.json", "x.csv", "x.tsv", "x.arrow", "x.warc"):
        assert read(name, b"") == []
    assert read("x.txt", b"") == [""]


def test_files_are_found_again_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(json_lines("a"))
    file = SourceFile(SourceConfig(uri="x"), "s", "x.jsonl", partial((tmp_path / "x.jsonl").open, "rb"), 14)
    assert list(read_documents(pickle.loads(pickle.dumps(file)), LIMIT)) == ["a"]


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.csv", "x.txt.gz", "x.json.bz2", "x.txt.xz", "x.parquet", "x.arrow", "x.warc"]
)
def test_a_failing_disk_is_no_damaged_file(name: str) -> None:
    class Failing(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

    def opened() -> BinaryIO:
        return Failing(b"x" * 100)

    file = source_file(name, b"")
    object.__setattr__(file, "open", opened)
    with pytest.raises(OSError, match="Input/output error"):
        list(read_documents(file, LIMIT))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A.B.JSONL.Gz", ("jsonl", "gzip")),
        ("snappy.parquet", ("parquet", None)),
        ("x.txt.zst", ("txt", "zstd")),
        ("x.json", ("json", None)),
        ("x.TSV.bz2", ("tsv", "bzip2")),
        ("x.csv.XZ", ("csv", "xz")),
        ("index.htm", ("html", None)),
        ("x.feather", ("arrow", None)),
        ("x.ipc", ("arrow", None)),
        ("CC-MAIN-20240101-00000.warc.gz", ("warc", "gzip")),
        ("CC-MAIN-20240101-00000.warc.wet.gz", ("warc", "gzip")),
        ("x.gz.zst.txt", ("txt", None)),
    ],
)
def test_document_format(name: str, expected: tuple[str, str | None]) -> None:
    assert document_format(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "x.doc",
        "x.gz",
        "jsonl",
        "x.jsonl.gz.gz",
        "x.jsonl.zst.gz",
        "x.parquet.gz",
        "x.arrow.zst",
        "x.wat.gz",
        "x.txt ",
        "",
    ],
)
def test_unknown_suffix_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"the suffix is none of \.jsonl, \.ndjson, \.json, \.csv, \.tsv") as error:
        document_format(name)
    assert str(error.value).startswith(f"{name}: ")
    assert "may be followed by .gz, .zst, .bz2, .xz; of a folder with other files" in str(error.value)
