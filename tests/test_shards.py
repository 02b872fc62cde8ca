"""Token shards: written whole, read back as they were, refused when they are not what they say."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.data.tokens.shards import ShardWriter, StreamedTokens, TokenShard


def write(path: Path, *documents: list[int]) -> TokenShard:
    with ShardWriter(path) as writer:
        for document in documents:
            writer.add(document)
    return TokenShard(path)


def test_ids_come_back_as_they_went_in(tmp_path: Path) -> None:  # case B1
    shard = write(tmp_path / "part-00000.tokens", [65535, 65536], [], [200_000, 255_999])
    assert shard.tokens.tolist() == [65535, 65536, 200_000, 255_999]
    assert shard.tokens.dtype == np.uint32
    assert shard.document_ends.tolist() == [2, 2, 4]
    assert [shard.document(i).tolist() for i in range(3)] == [[65535, 65536], [], [200_000, 255_999]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-00000.index", "part-00000.tokens"]


def test_the_format_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.tokens"
    write(path, [1, 2], [3])
    assert path.read_bytes() == b"JUMBOTOK" + struct.pack("<IIQQ III", 1, 4, 3, 2, 1, 2, 3)
    assert path.with_suffix(".index").read_bytes() == b"JUMBOIDX" + struct.pack("<IIQQ QQ", 1, 8, 3, 2, 2, 3)


def test_empty_shard(tmp_path: Path) -> None:  # case B2
    shard = write(tmp_path / "part-00000.tokens")
    assert len(shard.tokens) == len(shard.document_ends) == 0


def patched(path: Path, offset: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".tokens", ".index"])
@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"NUMPY", "does not start with the header"),
        (8, struct.pack("<I", 2), "has format version 2; this code reads version 1"),
        (12, struct.pack("<I", 2), "holds values of 2 bytes; (4|8) expected"),  # case B1
        (16, struct.pack("<QQ", 9, 9), "is (44|48) bytes long; its header says"),
    ],
)
def test_what_is_no_shard_is_refused(tmp_path: Path, suffix: str, offset: int, value: bytes, message: str) -> None:
    path = tmp_path / "part-00000.tokens"
    write(path, [1, 2], [3])
    patched(path.with_suffix(suffix), offset, value)
    with pytest.raises(ValueError, match=message) as error:
        TokenShard(path)
    assert str(error.value).startswith(str(path.with_suffix(suffix)))


@pytest.mark.parametrize("suffix", [".tokens", ".index"])
@pytest.mark.parametrize("length", [0, 20, 33, -1])
def test_cut_shard_is_refused(tmp_path: Path, suffix: str, length: int) -> None:
    path = tmp_path / "part-00000.tokens"
    write(path, [1, 2], [3])
    cut = path.with_suffix(suffix)
    cut.write_bytes(cut.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"part-00000\{suffix}: (does not start with|is \d+ bytes long)"):
        TokenShard(path)


def test_index_of_another_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.tokens", [1, 2], [3])
    write(tmp_path / "b.tokens", [1, 2, 3])
    (tmp_path / "b.index").replace(tmp_path / "a.index")
    with pytest.raises(ValueError, match=r"a\.index: is the index of another shard than a\.tokens"):
        TokenShard(tmp_path / "a.tokens")


@pytest.mark.parametrize("ends", [(3, 2), (2, 2), (1, 4), (2**64 - 1, 3)])
def test_index_that_does_not_fit_is_refused(tmp_path: Path, ends: tuple[int, int]) -> None:
    path = tmp_path / "part-00000.tokens"
    write(path, [1, 2], [3])
    patched(path.with_suffix(".index"), 32, struct.pack("<QQ", *ends))
    with pytest.raises(ValueError, match=r"do not ascend to the number of tokens \(3\)"):
        TokenShard(path)


def test_missing_index(tmp_path: Path) -> None:
    write(tmp_path / "a.tokens", [1])
    (tmp_path / "a.index").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.index"):
        TokenShard(tmp_path / "a.tokens")


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_failed_write_leaves_nothing(tmp_path: Path, bad: int) -> None:
    with pytest.raises(OverflowError):
        write(tmp_path / "part-00000.tokens", [1], [bad])
    assert not list(tmp_path.iterdir())


@given(documents=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=8))
def test_any_documents_come_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    shard = write(tmp_path_factory.mktemp("shard") / "part-00000.tokens", *documents)
    assert [shard.document(i).tolist() for i in range(len(documents))] == documents


def streamed(path: Path, vocab_size: int = 256_000) -> tuple[StreamedTokens, list[tuple[int, int]]]:
    """A shard read in ranges, and the ranges that were read."""
    asked = []

    def read(start: int, length: int) -> bytes:
        asked.append((start, length))
        return path.read_bytes()[start : start + length]

    return StreamedTokens(str(path), path.stat().st_size, read, vocab_size), asked


def test_a_streamed_shard_reads_what_is_asked_for(tmp_path: Path) -> None:
    shard = write(tmp_path / "a.tokens", [65535, 65536], [200_000, 255_999, 7])
    tokens, asked = streamed(tmp_path / "a.tokens")
    assert len(tokens) == 5
    assert tokens[1:4].tolist() == shard.tokens[1:4].tolist() == [65536, 200_000, 255_999]
    assert tokens[0:5].dtype == np.uint32
    assert tokens[2:2].tolist() == []
    assert asked == [(0, 32), (36, 12), (32, 20), (40, 0)]


def test_a_streamed_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.tokens", [1, 2, 500, 3])
    tokens, _ = streamed(tmp_path / "a.tokens", vocab_size=500)
    assert tokens[0:2].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"a\.tokens: holds the token id 500; the vocabulary has 500 ids"):
        tokens[1:3]


@pytest.mark.parametrize(
    ("length", "message"), [(20, "does not start with the header"), (-1, r"is 39 bytes long; its header says 40")]
)
def test_a_streamed_shard_that_is_not_whole_is_refused(tmp_path: Path, length: int, message: str) -> None:
    path = tmp_path / "a.tokens"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=message):
        streamed(path)
