"""Any texts, in any format and compression, come back; whatever bytes are read, nothing breaks."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from source_files import COMPRESS, csv_rows, json_array, json_lines, read, source_file

from model.data.readers.documents import DamagedFile, Dropped, read_documents


def warc(texts: Sequence[str]) -> bytes:
    out = b""
    for content in (text.encode() for text in texts):
        head = (
            f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        out += head.encode() + content + b"\r\n\r\n"
    return out


def parquet(texts: Sequence[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), out, row_group_size=3)
    return out.getvalue()


def arrow(texts: Sequence[str]) -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return out.getvalue()


STREAMED: dict[str, Callable[[Sequence[str]], bytes]] = {
    ".jsonl": lambda texts: json_lines(*texts),
    ".ndjson": lambda texts: b"".join(json.dumps({"text": text}).encode() + b"\r\n" for text in texts),
    ".json": lambda texts: json_array(*texts),
    ".csv": csv_rows,
    ".tsv": lambda texts: csv_rows(texts, "\t", csv.QUOTE_ALL),
    ".wet": warc,
}
COLUMNAR: dict[str, Callable[[Sequence[str]], bytes]] = {".parquet": parquet, ".arrow": arrow}

# A mark at the start of a record is dropped, and zeros may make ASCII look like UTF-16.
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), max_size=30), max_size=8
)

# Each test runs for many formats; some load a library at first.
FEW = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize("name", STREAMED)
@FEW
@given(texts=TEXTS, read_bytes=st.integers(1, 100))
def test_any_texts_come_back(name: str, suffix: str, texts: list[str], read_bytes: int) -> None:
    data = COMPRESS.get(suffix, bytes)(STREAMED[name](texts))
    assert read("x" + name + suffix, data, read_bytes=read_bytes) == texts


@pytest.mark.parametrize("name", COLUMNAR)
@FEW
@given(texts=TEXTS)
def test_any_texts_come_back_from_columns(name: str, texts: list[str]) -> None:
    assert read("x" + name, COLUMNAR[name](texts)) == texts


@pytest.mark.parametrize("suffix", COMPRESS)
@FEW
@given(texts=TEXTS.map("\n".join), read_bytes=st.integers(1, 100))
@example(texts="\n\x08", read_bytes=1)
def test_any_text_file_comes_back(suffix: str, texts: str, read_bytes: int) -> None:
    data = COMPRESS[suffix](texts.encode())
    assert read("x.txt" + suffix, data, read_bytes=read_bytes) == [texts]
    lines = [line.removesuffix("\r") for line in texts.split("\n")]
    assert read("x.txt" + suffix, data, read_bytes=read_bytes, txt_document="line") == [
        line for line in lines if line.encode().strip()
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", STREAMED)
@FEW
@given(texts=TEXTS, place=st.floats(0, 1, exclude_max=True))
def test_any_cut_gives_the_records_before(name: str, suffix: str, texts: list[str], place: float) -> None:
    data = COMPRESS[suffix](STREAMED[name](texts))
    cut = int(place * len(data))
    records: list[str | Dropped] = []
    if cut == 0:
        assert read("x" + name + suffix, b"") == []
        return
    with pytest.raises(DamagedFile):
        records.extend(read_documents(source_file("x" + name + suffix, data[:cut]), 1 << 20))
    assert records == texts[: len(records)]


NAMES = [*STREAMED, *COLUMNAR, ".txt", ".html", ".warc"]


def outcome(name: str, data: bytes) -> None:
    file = source_file(name, data, txt_document="line", text_fields=("text", "a.b"))
    with suppress(DamagedFile):
        for record in read_documents(file, 1 << 10):
            if isinstance(record, Dropped):
                assert len(record.sample) <= 200
            (record.sample if isinstance(record, Dropped) else record).encode()


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.binary(max_size=300))
def test_no_bytes_break_a_reader(name: str, data: bytes) -> None:
    outcome("x" + name, data)
    if name not in COLUMNAR:
        outcome(f"x{name}.gz", COMPRESS[".gz"](data))


SAMPLE = ["a text", 'with "quotes", \n', "é €", "x" * 300]


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
@pytest.mark.parametrize("name", [*STREAMED, *COLUMNAR])
@FEW
@given(places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5))
def test_no_change_of_a_file_breaks_a_reader(name: str, suffix: str, places: list[tuple[float, int]]) -> None:
    if name in COLUMNAR and suffix:
        return
    data = bytearray(COMPRESS.get(suffix, bytes)((STREAMED | COLUMNAR)[name](SAMPLE)))
    for place, value in places:
        data[int(place * len(data))] = value
    outcome("x" + name + suffix, bytes(data))
