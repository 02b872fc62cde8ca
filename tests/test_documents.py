"""Reading raw documents: formats, compression, damage, and records that are none."""

import gzip
import io
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from model.data.config import SourceConfig
from model.data.documents import DamagedFile, Dropped, SourceFile, document_format, read_documents

LIMIT = 1 << 20

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    # With a checksum, as the command line tool writes it.
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
}


class Trickle(io.BytesIO):
    """A stream that gives read_bytes at a time, as a network does."""

    def __init__(self, data: bytes, read_bytes: int) -> None:
        super().__init__(data)
        self.read_bytes = read_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self.read_bytes)


def source_file(name: str, data: bytes, **source: str) -> SourceFile:
    return SourceFile(
        SourceConfig.model_validate({"uri": "x", **source}), "s", name, lambda: io.BytesIO(data), len(data)
    )


def read(name: str, data: bytes, limit: int = LIMIT, **source: str) -> list[str | Dropped]:
    return list(read_documents(source_file(name, data, **source), limit))


def json_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def read_until_damage(name: str, data: bytes, **source: str) -> tuple[list[str | Dropped], str]:
    records: list[str | Dropped] = []
    with pytest.raises(DamagedFile) as damage:
        records.extend(read_documents(source_file(name, data, **source), LIMIT))
    return records, str(damage.value)


def decoded_byte_by_byte(data: bytes, suffix: str) -> bytes:
    decoder = zlib.decompressobj(wbits=31) if suffix == ".gz" else zstandard.ZstdDecompressor().decompressobj()
    return b"".join(decoder.decompress(data[i : i + 1]) for i in range(len(data)))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_only_newlines_end_records(suffix: str) -> None:  # case D1
    texts = ["a\u2028b", "c\x85d", "e\u2029f\x0b\x0c\x1c"]
    data = json_lines(*texts).replace(b"\n", b"\r\n")
    assert read("x.jsonl" + suffix, COMPRESS.get(suffix, bytes)(data)) == texts


def test_one_carriage_return_belongs_to_the_line_end() -> None:
    assert read("x.txt", b"a\r\r\nb\rc\n", txt_document="line") == ["a\r", "b\rc"]


def test_last_line_needs_no_newline() -> None:
    assert read("x.ndjson", json_lines("a", "b").rstrip()) == ["a", "b"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_no_records(ending: str) -> None:
    data = ending.join(["", '{"text": "a"}', " \t ", "", '{"text": ""}', ""]).encode()
    assert read("x.jsonl", data) == ["a", ""]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_every_member_and_frame_is_read(suffix: str) -> None:  # case D3
    data = json_lines(*(f"line {i}" for i in range(20_000)))
    assert len(read("x.jsonl" + suffix, 2 * COMPRESS[suffix](data))) == 40_000


def test_line_across_members_empty_members_and_zero_padding() -> None:
    parts = (b'{"text": "a', b"", b'b"}\n{"te', b'xt": "c"}\n')
    data = b"".join(gzip.compress(part) + bytes(700) for part in parts)
    assert read("x.jsonl.gz", data) == ["ab", "c"]


def test_zstd_skippable_frames() -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    frame = zstandard.compress(json_lines("a"))
    assert read("x.jsonl.zst", skippable + frame + skippable + frame + skippable) == ["a", "a"]


def test_zstd_window_above_the_default_limit() -> None:  # as `zstd --long=28` and longer write it
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(json_lines("a")) + compressor.flush()
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert read("x.jsonl.zst", data) == ["a"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("frames", [1, 2])
def test_cut_file_gives_its_whole_records(suffix: str, frames: int) -> None:  # case D4
    texts = [f"line {i} {i * i}" for i in range(5000)]
    frame = COMPRESS[suffix](json_lines(*texts))
    data = (frames * frame)[:-20]
    whole = 5000 * (frames - 1) + decoded_byte_by_byte(frame[:-20], suffix).count(b"\n")
    records, message = read_until_damage("x.jsonl" + suffix, data)
    assert "x.jsonl" + suffix in message
    assert records == (frames * texts)[: len(records)]
    assert len(records) == whole < 5000 * frames


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_right_after_a_record_keeps_it(suffix: str) -> None:
    # Two frames, the second cut inside its header.
    data = COMPRESS[suffix](json_lines("a", "b"))
    records, _ = read_until_damage("x.jsonl" + suffix, data + data[:3])
    assert records == ["a", "b"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("data", [b"plain text, whatever the name says", b"\0" * 64])
def test_what_is_not_compressed_is_damaged(suffix: str, data: bytes) -> None:
    assert read_until_damage("x.txt" + suffix, data)[0] == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_text_file_gives_no_document(suffix: str) -> None:
    assert read_until_damage("x.txt" + suffix, COMPRESS[suffix](b"a text " * 1000)[:-5])[0] == []


def wrong_checksum(data: bytes, suffix: str) -> bytes:
    # gzip ends in the CRC and the size, four bytes each; zstd in the checksum.
    place = len(data) - (8 if suffix == ".gz" else 4)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("whole_frames", [0, 3])
def test_a_wrong_checksum_loses_no_record(suffix: str, whole_frames: int) -> None:
    frame = COMPRESS[suffix](json_lines(*(20_000 * ["the same line"])))
    records, message = read_until_damage("x.jsonl" + suffix, whole_frames * frame + wrong_checksum(frame, suffix))
    assert records == (whole_frames + 1) * 20_000 * ["the same line"]
    assert message.startswith(f"x.jsonl{suffix}: ")


TEXTS = [f"line {i} of {i * i * 7919 % 1_000_003}" for i in range(15_000)]  # three zstd blocks


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_every_line_before_the_damage_is_read(suffix: str) -> None:
    data = COMPRESS[suffix](json_lines(*TEXTS))
    for place in range(100, len(data), len(data) // 12):
        whole = decoded_byte_by_byte(data[:place], suffix).count(b"\n")
        damaged = data[:place] + bytes(byte ^ 0x55 for byte in data[place : place + 40]) + data[place + 40 :]
        assert read_until_damage("x.jsonl" + suffix, damaged)[0][:whole] == TEXTS[:whole]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("read_bytes", [1, 700, 5000])
def test_the_second_reading_may_come_in_other_pieces(suffix: str, read_bytes: int) -> None:
    damaged = wrong_checksum(COMPRESS[suffix](json_lines(*TEXTS)), suffix)
    records: list[str | Dropped] = []
    streams = iter([Trickle(damaged, 3001), Trickle(damaged, read_bytes)])
    file = SourceFile(SourceConfig(uri="x"), "s", "x.jsonl" + suffix, lambda: next(streams), 1)
    with pytest.raises(DamagedFile):
        records.extend(read_documents(file, LIMIT))
    assert records == TEXTS


def test_a_line_that_nothing_ends_is_no_record_of_a_cut_stream() -> None:
    data = json_lines("a", "b").rstrip()
    compressor = zlib.compressobj(wbits=31)
    flushed = compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)
    assert decoded_byte_by_byte(flushed, ".gz") == data
    assert read_until_damage("x.jsonl.gz", flushed)[0] == ["a"]
    assert read_until_damage("x.jsonl.gz", gzip.compress(data)[:-1])[0] == ["a"]
    assert read_until_damage("x.jsonl.zst", COMPRESS[".zst"](data)[:-1])[0] == ["a"]
    assert read("x.jsonl", data) == ["a", "b"]  # not compressed: nothing tells a cut from a missing newline


def test_garbage_after_a_member_is_damage() -> None:
    assert read_until_damage("x.jsonl.gz", gzip.compress(json_lines("a")) + b"garbage")[0] == ["a"]
    assert read_until_damage("x.txt.gz", gzip.compress(b"a\n") + b"garbage", txt_document="line")[0] == ["a"]


def test_surrogate_escapes() -> None:  # case D5
    data = rb'{"text": "\ud83d alone, \ud83d\ude00 pair, \ude00 low, \ud83d\ud83d\ude00"}'
    assert read("x.jsonl", data) == ["\ufffd alone, 😀 pair, \ufffd low, \ufffd😀"]


def test_invalid_utf8_becomes_replacement_characters() -> None:
    assert read("x.txt", b"a\xffb\xe2\x82") == ["a\ufffdb\ufffd"]
    assert read("x.jsonl", b'{"text": "a\xff"}\n') == ["a\ufffd"]


def test_byte_order_mark_is_dropped() -> None:
    mark = b"\xef\xbb\xbf"
    assert read("x.jsonl", mark + json_lines("a") + mark + json_lines("b")) == ["a", "b"]
    assert read("x.txt", mark + b"a") == ["a"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_utf16_is_dropped_record_by_record(encoding: str, suffix: str) -> None:
    def encoded(text: str) -> bytes:
        return COMPRESS.get(suffix, bytes)(("\ufeff" + text).encode(encoding))

    lines = encoded('{"text": "a"}\n\r\n \n{"text": "é"}\n')
    assert read("x.jsonl" + suffix, lines) == 2 * [Dropped("not_utf8")]
    assert read("x.txt" + suffix, lines, txt_document="line") == 2 * [Dropped("not_utf8")]
    assert read("x.txt" + suffix, lines) == [Dropped("not_utf8")]
    assert read("x.jsonl" + suffix, encoded("")) == []
    bytewise = SourceFile(SourceConfig(uri="x"), "s", "x.txt" + suffix, lambda: Trickle(encoded("a"), 1), 1)
    assert list(read_documents(bytewise, LIMIT)) == [Dropped("not_utf8")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "invalid_json"),
        ('{"text": "a"} {"text": "b"}', "invalid_json"),
        ('{"text": "raw \t tab"}', "invalid_json"),
        ("[" * 200_000, "invalid_json"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "invalid_json"),
        ('["text"]', "not_an_object"),
        ('"text"', "not_an_object"),
        ("null", "not_an_object"),
        ("NaN", "not_an_object"),
        ('{"Text": "a"}', "no_text_field"),
        ("{}", "no_text_field"),
        ('{"text": null}', "not_text"),
        ('{"text": 1}', "not_text"),
        ('{"text": ["a"]}', "not_text"),
    ],
)
def test_unreadable_records_are_dropped_with_a_reason(line: str, reason: str) -> None:
    assert read("x.jsonl", f'{line}\n{{"text": "next"}}'.encode()) == [Dropped(reason), "next"]


def test_odd_but_readable_json() -> None:
    assert read("x.jsonl", b'{"text": "first", "x": NaN, "text": "last", "\\ud800": Infinity}') == ["last"]


def test_long_records_are_skipped_and_counted() -> None:  # case D2
    expected = ["a", Dropped("too_long"), "b"]
    data = json_lines("a", "x" * 5000, "b")
    assert read("x.jsonl", data, limit=1024) == expected
    assert read("x.txt", b"a\n" + b"x" * 1025 + b"\n" + b"b", limit=1024, txt_document="line") == expected
    assert read("x.txt", b"x" * 1024, limit=1024) == ["x" * 1024]
    assert read("x.txt", b"x" * 1025, limit=1024) == [Dropped("too_long")]


def gzip_bomb() -> bytes:
    compressor = zlib.compressobj(wbits=31)
    return b"".join(compressor.compress(b"x" * (1 << 20)) for _ in range(64)) + compressor.flush()


@pytest.mark.parametrize(
    ("suffix", "bomb", "peak_bytes"),
    [
        # zlib makes at most 1,032 bytes out of one; zstd 128 KiB out of four.
        (".gz", gzip_bomb, 16 << 20),
        (".zst", lambda: zstandard.compress(b"x" * (256 << 20)), 160 << 20),
    ],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_line_far_above_the_limit_is_never_held(
    suffix: str, bomb: Callable[[], bytes], peak_bytes: int, is_damaged: bool
) -> None:
    compress = COMPRESS[suffix]
    data = compress(json_lines("a")) + bomb() + compress(b"\n" + json_lines("b"))
    damaged = wrong_checksum(data, suffix)
    tracemalloc.start()
    records = read_until_damage("x.jsonl" + suffix, damaged)[0] if is_damaged else read("x.jsonl" + suffix, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == ["a", Dropped("too_long"), "b"]  # case D2
    assert peak < peak_bytes


def test_file_or_line_is_a_text_document() -> None:
    assert read("x.txt", b"a\nb\n") == ["a\nb\n"]
    assert read("x.txt", b"a\nb\n", txt_document="line") == ["a", "b"]


def test_empty_files() -> None:
    assert read("x.jsonl", b"") == []
    assert read("x.jsonl.gz", b"") == []
    assert read("x.txt", b"") == [""]


@given(st.lists(st.text(), max_size=20), st.integers(1, 40))
def test_any_text_comes_back_from_json_lines(texts: list[str], read_bytes: int) -> None:
    data = b"".join(json.dumps({"text": text}).encode() + b"\r\n" for text in texts)
    file = SourceFile(SourceConfig(uri="x"), "s", "x.jsonl", lambda: Trickle(data, read_bytes), 1)
    assert list(read_documents(file, LIMIT)) == texts


def parquet(column: pa.Array, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"number": pa.array(range(len(column))), "text": column}), sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize(
    "column_type",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_parquet_text_columns(column_type: pa.DataType) -> None:
    column = pa.array(["a", "é\r\n", None, "", "x" * 2000, *map(str, range(200))], column_type)
    expected = ["a", "é\r\n", Dropped("not_text"), "", Dropped("too_long"), *map(str, range(200))]
    assert read("x.PARQUET", parquet(column, row_group_size=7), limit=1024) == expected


def test_parquet_without_text() -> None:
    data = parquet(pa.array([1, 2]))
    assert read("x.parquet", data) == 2 * [Dropped("not_text")]
    assert read("x.parquet", data, text_fields="body") == 2 * [Dropped("no_text_field")]
    nested = parquet(pa.array([{"text": "a"}]))
    assert read("x.parquet", nested) == [Dropped("not_text")]
    assert read("x.parquet", nested, text_fields="text.text") == [Dropped("no_text_field")]


def test_parquet_with_two_text_columns() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["text", "text", "n"]), sink)
    records, message = read_until_damage("x.parquet", sink.getvalue())
    assert (records, message) == ([], "x.parquet: 2 columns are named 'text'")
    assert read("x.parquet", sink.getvalue(), text_fields="n") == [Dropped("not_text")]


def test_parquet_with_invalid_utf8() -> None:
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xff\xfeab")])
    assert read("x.parquet", parquet(column)) == ["\ufffd\ufffd", "ab"]


def test_parquet_from_a_stream_that_cannot_seek() -> None:
    class Stream(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: int) -> int:
            raise io.UnsupportedOperation

    data = parquet(pa.array(["a", "b"]))
    file = SourceFile(SourceConfig(uri="x"), "s", "x.parquet", lambda: Stream(data), 1)
    assert list(read_documents(file, LIMIT)) == ["a", "b"]


def test_damaged_parquet() -> None:
    data = bytearray(parquet(pa.array([f"text {i}" for i in range(5000)]), row_group_size=1000, use_dictionary=False))
    assert read_until_damage("x.parquet", bytes(data[:-20]))[0] == []
    data[len(data) // 2] ^= 0xFF
    records, message = read_until_damage("x.parquet", bytes(data))
    assert records[:1000] == [f"text {i}" for i in range(1000)]
    assert message.startswith("x.parquet: ")


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt.gz", "x.parquet"])
def test_a_failing_disk_is_no_damaged_file(name: str) -> None:
    class Failing(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

    def opened() -> BinaryIO:
        return Failing(b"x" * 100)

    with pytest.raises(OSError, match="Input/output error"):
        list(read_documents(SourceFile(SourceConfig(uri="x"), "s", name, opened, 1), LIMIT))


def test_document_format() -> None:
    assert document_format("A.B.JSONL.Gz") == ("jsonl", "gzip")
    assert document_format("snappy.parquet") == ("parquet", None)
    assert document_format("x.txt.zst") == ("txt", "zstd")


@pytest.mark.parametrize("name", ["x", "x.csv", "x.gz", "jsonl", "x.jsonl.gz.gz", "x.parquet.gz", "x.txt.bz2", ""])
def test_unknown_suffix_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"the suffix is none of \.jsonl, \.ndjson, \.txt, \.parquet") as error:
        document_format(name)
    assert str(error.value).startswith(f"{name}: ")
