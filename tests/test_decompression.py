"""Compressed source files: several members, damage, cuts and bombs."""

import bz2
import gzip
import itertools
import lzma
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard
from source_files import (
    COMPRESS,
    LIMIT,
    Trickle,
    decoded_byte_by_byte,
    json_lines,
    read,
    read_until_damage,
)

from model.data.config import SourceConfig
from model.data.readers.documents import DamagedFile, Dropped, SourceFile, read_documents

SUFFIXES = list(COMPRESS)
TEXTS = [f"line {i} of {i * i * 7919 % 1_000_003}" for i in range(15_000)]  # three zstd blocks


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_member_and_frame_is_read(suffix: str) -> None:  # case D3
    data = json_lines(*(f"line {i}" for i in range(20_000)))
    assert len(read("x.jsonl" + suffix, 2 * COMPRESS[suffix](data))) == 40_000


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_line_across_members_empty_members_and_zero_padding(suffix: str) -> None:
    parts = (b'{"text": "a', b"", b'b"}\n{"te', b'xt": "c"}\n')
    data = b"".join(COMPRESS[suffix](part) + bytes(700) for part in parts)
    assert read("x.jsonl" + suffix, data) == ["ab", "c"]
    assert read("x.jsonl" + suffix, data, read_bytes=1) == ["ab", "c"]


@pytest.mark.parametrize("suffix", [".zst", ".bz2"])
def test_zero_padding_of_what_allows_none_is_damage(suffix: str) -> None:
    assert read_until_damage("x.jsonl" + suffix, COMPRESS[suffix](json_lines("a")) + bytes(8))[0] == ["a"]


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


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("frames", [1, 2])
def test_cut_file_gives_its_whole_records(suffix: str, frames: int) -> None:  # case D4
    texts = [f"line {i} {i * i}" for i in range(5000)]
    frame = COMPRESS[suffix](json_lines(*texts))
    data = (frames * frame)[:-20]
    whole = 5000 * (frames - 1) + decoded_byte_by_byte(frame[:-20], suffix).count(b"\n")
    records, message = read_until_damage("x.jsonl" + suffix, data)
    assert message.startswith(f"x.jsonl{suffix}: the ")
    assert records == (frames * texts)[: len(records)]
    # 20 bytes are the whole footer of xz, before which all records lie, and cut the only block of bzip2.
    assert len(records) == whole <= 5000 * frames
    assert whole < 5000 * frames or suffix == ".xz"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_cut_right_after_a_record_keeps_it(suffix: str) -> None:
    # Two frames, the second cut inside its header.
    data = COMPRESS[suffix](json_lines("a", "b"))
    records, _ = read_until_damage("x.jsonl" + suffix, data + data[:3])
    assert records == ["a", "b"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("data", [b"plain text, whatever the name says", b"\0" * 64])
def test_what_is_not_compressed_is_damaged(suffix: str, data: bytes) -> None:
    assert read_until_damage("x.txt" + suffix, data)[0] == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_cut_text_file_gives_no_document(suffix: str) -> None:
    assert read_until_damage("x.txt" + suffix, COMPRESS[suffix](b"a text " * 1000)[:-5])[0] == []


def wrong_checksum(data: bytes, suffix: str) -> bytes:
    # gzip ends in the CRC and the size, four bytes each; zstd in the checksum; bzip2 in its CRC and up to seven bits.
    place = len(data) - {".gz": 8, ".zst": 4, ".bz2": 3}[suffix]
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("whole_frames", [0, 3])
def test_a_wrong_checksum_loses_no_record(suffix: str, whole_frames: int) -> None:
    frame = COMPRESS[suffix](json_lines(*(5000 * ["the same line"])))
    records, message = read_until_damage("x.jsonl" + suffix, whole_frames * frame + wrong_checksum(frame, suffix))
    assert records == (whole_frames + 1) * 5000 * ["the same line"]
    assert message.startswith(f"x.jsonl{suffix}: ")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_line_before_the_damage_is_read(suffix: str) -> None:
    data = COMPRESS[suffix](json_lines(*TEXTS))
    for place in range(100, len(data) - 40, len(data) // 5):
        whole = decoded_byte_by_byte(data[:place], suffix).count(b"\n")
        damaged = data[:place] + bytes(byte ^ 0x55 for byte in data[place : place + 40]) + data[place + 40 :]
        assert read_until_damage("x.jsonl" + suffix, damaged)[0][:whole] == TEXTS[:whole]


@pytest.mark.parametrize("compress", [lambda data: bz2.compress(data, 1), lambda data: lzma.compress(data, preset=0)])
def test_what_a_decoder_holds_back_before_garbage_is_read(compress: Callable[[bytes], bytes]) -> None:
    suffix = ".xz" if compress(b"").startswith(b"\xfd7z") else ".bz2"
    data = compress(json_lines(*TEXTS))  # six blocks of bzip2 -1
    assert read_until_damage("x.jsonl" + suffix, data + b"garbage")[0] == TEXTS
    half = data[: len(data) // 2]
    whole = decoded_byte_by_byte(half, suffix).count(b"\n")
    assert 0 < whole < len(TEXTS)
    assert read_until_damage("x.jsonl" + suffix, half + b"\xff" * 5000)[0][:whole] == TEXTS[:whole]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("read_bytes", [1, 700, 5000])
def test_the_second_reading_may_come_in_other_pieces(suffix: str, read_bytes: int) -> None:
    damaged = wrong_checksum(COMPRESS[suffix](json_lines(*TEXTS)), suffix)
    records: list[str | Dropped] = []
    streams = itertools.chain([Trickle(damaged, 3001), Trickle(damaged, read_bytes)])
    file = SourceFile(SourceConfig(uri="x"), "s", "x.jsonl" + suffix, lambda: next(streams), len(damaged))
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
    assert read_until_damage("x.jsonl.bz2", bz2.compress(data)[:-1])[0] == ["a"]
    assert read_until_damage("x.jsonl.xz", lzma.compress(data)[:-1])[0] == ["a"]
    assert read("x.jsonl", data) == ["a", "b"]  # not compressed: nothing tells a cut from a missing newline


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_garbage_after_a_member_is_damage(suffix: str) -> None:
    compress = COMPRESS[suffix]
    assert read_until_damage("x.jsonl" + suffix, compress(json_lines("a")) + b"garbage")[0] == ["a"]
    assert read_until_damage("x.txt" + suffix, compress(b"a\n") + b"garbage", txt_document="line")[0] == ["a"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_file_holds_nothing(suffix: str) -> None:
    assert read("x.jsonl" + suffix, b"") == []
    assert read("x.jsonl" + suffix, COMPRESS[suffix](b"")) == []
    assert read("x.txt" + suffix, COMPRESS[suffix](b"")) == [""]


def gzip_bomb() -> bytes:
    compressor = zlib.compressobj(wbits=31)
    return b"".join(compressor.compress(b"x" * (1 << 20)) for _ in range(64)) + compressor.flush()


@pytest.mark.parametrize(
    ("suffix", "bomb", "peak_bytes"),
    [
        # zlib makes at most 1,032 bytes out of one; zstd 128 KiB out of four; bzip2 and xz are told how many to make.
        (".gz", gzip_bomb, 16 << 20),
        (".zst", lambda: zstandard.compress(b"x" * (128 << 20)), 160 << 20),
        (".bz2", lambda: bz2.compress(b"x" * (32 << 20)), 16 << 20),
        (".xz", lambda: lzma.compress(b"x" * (32 << 20), preset=0), 16 << 20),
    ],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_line_far_above_the_limit_is_never_held(
    suffix: str, bomb: Callable[[], bytes], peak_bytes: int, is_damaged: bool
) -> None:
    compress = COMPRESS[suffix]
    data = compress(json_lines("a")) + bomb() + compress(b"\n" + json_lines("b"))
    damaged = data + b"garbage" if suffix == ".xz" else wrong_checksum(data, suffix)
    tracemalloc.start()
    records = read_until_damage("x.jsonl" + suffix, damaged)[0] if is_damaged else read("x.jsonl" + suffix, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == ["a", Dropped("too_long"), "b"]  # case D2
    assert peak < peak_bytes
