"""Token shards: written whole, read back as they were, refused when they are not what they say."""

import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import make_documents

from model.config import TokenizerConfig
from model.data.shards import ShardWriter, TokenCounts, TokenShard, write_token_shards
from model.data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = TokenizerConfig(vocab_size=500)
    return Tokenizer(train_tokenizer(make_documents(40), config, 0, tmp_path_factory.mktemp("tokenizer")))


def write(path: Path, *documents: list[int]) -> TokenShard:
    with ShardWriter(path) as writer:
        for document in documents:
            writer.add(document)
    return TokenShard(path)


def write_all(out: Path, tokenizer: Tokenizer, documents: list[str], shard_tokens: int = 1 << 20) -> TokenCounts:
    return write_token_shards(iter(documents), tokenizer, out, shard_tokens, lambda counts: None)


def read_all(out: Path) -> list[list[int]]:
    shards = [TokenShard(path) for path in sorted(out.glob("*.tokens"))]
    return [shard.document(i).tolist() for shard in shards for i in range(len(shard.document_ends))]


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


def test_every_document_ends_once(tmp_path: Path, tokenizer: Tokenizer) -> None:  # case B2
    counts = write_all(tmp_path, tokenizer, ["", "a", "", "<|endoftext|>"])
    documents = read_all(tmp_path)
    assert documents[0] == documents[2] == [END_OF_TEXT]
    assert [tokenizer.decode(ids) for ids in documents] == ["", "a", "", "<|endoftext|>"]
    assert [ids.count(END_OF_TEXT) for ids in documents] == [1, 1, 1, 1]
    assert counts.to_dict() == {"documents": 4, "tokens": sum(map(len, documents)), "bytes": 14, "shards": 1}


def test_no_documents_give_one_empty_shard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert write_all(tmp_path, tokenizer, []) == TokenCounts(shards=1)
    assert read_all(tmp_path) == []
    assert np.load(tmp_path / "unigram.npy").sum() == 0


def test_shards_hold_whole_documents_within_their_size(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_documents(12, seed=2)
    lengths = [len(tokenizer.encode(text)) + 1 for text in texts]
    limit = max(lengths)
    counts = write_all(tmp_path, tokenizer, [*texts, "\n".join(texts), "é"], shard_tokens=limit)
    shards = [TokenShard(path) for path in sorted(tmp_path.glob("part-*.tokens"))]
    assert counts.shards == len(shards)
    sizes = [len(shard.tokens) for shard in shards]
    assert [size for size in sizes if size > limit] == [len(tokenizer.encode("\n".join(texts))) + 1]
    assert [tokenizer.decode(ids) for ids in read_all(tmp_path)] == [*texts, "\n".join(texts), "é"]
    assert counts.bytes == 2 * sum(map(len, texts)) + 11 + 2


def test_unigram_counts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_documents(3, seed=3)
    write_all(tmp_path, tokenizer, texts)
    unigram = np.load(tmp_path / "unigram.npy")
    assert unigram.shape == (500,)
    assert unigram.dtype == np.uint64
    expected = Counter(token for text in texts for token in [*tokenizer.encode(text), END_OF_TEXT])
    assert {token: count for token, count in enumerate(unigram.tolist()) if count} == expected


def test_same_documents_give_the_same_bytes_whatever_stood_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_documents(12, seed=2)
    write_all(tmp_path / "a", tokenizer, texts, shard_tokens=1024)
    write_all(tmp_path / "b", tokenizer, texts, shard_tokens=256)  # more shards than the second time
    (tmp_path / "b" / "part-00000.tokens.partial").write_bytes(b"of a run that was killed")
    write_all(tmp_path / "b", tokenizer, texts, shard_tokens=1024)

    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert contents(tmp_path / "a") == contents(tmp_path / "b")
