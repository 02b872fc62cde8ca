"""From documents to token shards: the ids are SentencePiece's own, a shard follows from its part alone."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_text import make_documents
from trained_tokenizer import train_tokenizer

import model.data.tokens.encoding
from model.data.config import TokenizerConfig
from model.data.pieces import InProcess
from model.data.tokenization.tokenizer import END_OF_TEXT, Tokenizer
from model.data.tokenization.vocabulary import ModelProto
from model.data.tokens.encoding import EncodedPart, count_ids, encode_parts
from model.data.tokens.shards import TokenShard


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TokenizerConfig(vocab_size=500)
    return train_tokenizer(make_documents(40), config, 0, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


def write_part(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    return path


def encode(
    folder: Path, model_path: Path, parts: dict[str, list[str]]
) -> tuple[dict[str, EncodedPart], dict[str, TokenShard]]:
    """Encodes the parts below a folder; what was counted, and the shards, by name."""
    paths = {name: write_part(folder / f"documents/{name}.parquet", texts) for name, texts in parts.items()}
    (folder / "out").mkdir()
    counts = encode_parts(paths, model_path, folder / "work", folder / "out", InProcess())
    return counts, {name: TokenShard(folder / f"out/{name}.tokens") for name in parts}


def documents(shard: TokenShard) -> list[list[int]]:
    return [shard.document(number).tolist() for number in range(len(shard))]


AWKWARD = [
    "",
    "\n",
    "\n\n",
    "a\nb",
    "a\nb\n",
    " x ",
    "a\u2581b\n\u2581",
    "…ﬁ½\r\n\t\0",
    "<|endoftext|>",
    "\u2028x",
]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(st.characters(), max_size=30) | st.sampled_from(AWKWARD), max_size=6))
def test_many_at_once_are_encoded_as_each_alone(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids, ends = tokenizer.encode_documents(texts)
    assert ids.dtype == np.uint32
    expected = [[*tokenizer.encode(text), END_OF_TEXT] for text in texts]
    assert [part.tolist() for part in np.split(ids, ends)[:-1]] == expected
    assert ids.tolist() == [token for document in expected for token in document]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=60), min_size=1, max_size=6
    )
)
def test_ids_are_those_of_sentencepiece(tokenizer: Tokenizer, model_path: Path, texts: list[str]) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    texts = [*make_documents(3, seed=5), "One line, and\n\nthat line, and that line\nthat line", *texts]
    whole = [[*reference.encode(text), END_OF_TEXT] for text in texts]
    assert tokenizer.encode_documents(texts)[0].tolist() == [token for ids in whole for token in ids]


def test_a_line_has_the_same_ids_wherever_it_stands(tokenizer: Tokenizer, model_path: Path) -> None:
    """The sums of scores grow along a document, and would be rounded differently if they were not exact."""
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    lines = [line for text in make_documents(400, seed=6) for line in text.split("\n")]
    newline = reference.piece_to_id("\n")
    expected = [token for ids in reference.encode(lines) for token in (*ids, newline)][:-1]
    assert reference.encode("\n".join(lines)) == expected == tokenizer.encode("\n".join(lines))


def test_scores_are_exact(tmp_path: Path, model_path: Path) -> None:
    model = ModelProto.FromString(model_path.read_bytes())
    assert all(piece.score * 64 % 1 == 0 for piece in model.pieces)
    assert {piece.piece for piece in model.pieces if piece.type == ModelProto.SentencePiece.USER_DEFINED} == set()
    model.pieces[-1].score += 1 / 100
    (tmp_path / "other.model").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"other\.model is of another system: its scores are not multiples of 1 / 64"):
        Tokenizer(tmp_path / "other.model")


def test_a_model_of_another_system_is_refused(tmp_path: Path, model_path: Path) -> None:
    def changed(**normalizer: object) -> Any:
        proto = ModelProto.FromString(model_path.read_bytes())
        for name, value in normalizer.items():
            setattr(proto.normalizer_spec, name, value)
        return proto

    words, space_lost, renamed = changed(), changed(), changed()
    words.trainer_spec.model_type = words.trainer_spec.WORD
    next(piece for piece in space_lost.pieces if piece.piece == "\u2581").piece = "other"
    renamed.pieces[1].piece = "</s>"
    faults = {
        "it is no unigram model": words,
        "it changes text before it encodes it": changed(add_dummy_prefix=True),
        "it has not all bytes": space_lost,
        "its first pieces are not <unk>": renamed,
    }
    path = tmp_path / "other.model"
    for fault, changed_model in faults.items():
        path.write_bytes(changed_model.SerializeToString())
        with pytest.raises(ValueError, match=fault):
            Tokenizer(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="its first pieces are not"):
        Tokenizer(path)


def test_every_document_ends_once(tmp_path: Path, model_path: Path, tokenizer: Tokenizer) -> None:  # case B2
    texts = ["", "a", "", "<|endoftext|>"]
    counts, shards = encode(tmp_path, model_path, {"train/a-00000": texts, "train/empty-00000": []})
    found = documents(shards["train/a-00000"])
    assert found[0] == found[2] == [END_OF_TEXT]
    assert [tokenizer.decode(ids) for ids in found] == texts
    assert [ids.count(END_OF_TEXT) for ids in found] == [1, 1, 1, 1]
    assert counts["train/a-00000"] == EncodedPart(documents=4, tokens=sum(map(len, found)), bytes=14)
    assert documents(shards["train/empty-00000"]) == []
    assert counts["train/empty-00000"] == EncodedPart(0, 0, 0)


def test_batches_do_not_show(
    tmp_path: Path, model_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.data.tokens.encoding, "_BATCH_BYTES", 3000)
    monkeypatch.setattr(model.data.tokens.encoding, "_READ_ROWS", 3)
    texts = [*make_documents(20, seed=2), "é"]
    counts, shards = encode(tmp_path, model_path, {"train/a-00000": texts})
    assert [tokenizer.decode(ids) for ids in documents(shards["train/a-00000"])] == texts
    assert counts["train/a-00000"].bytes == sum(len(text.encode()) for text in texts)


def test_a_part_is_encoded_alone_and_once(tmp_path: Path, model_path: Path) -> None:
    texts = {"train/a-00000": make_documents(5), "train/b-00000": make_documents(5, seed=1)}
    encode(tmp_path / "both", model_path, texts)
    encode(tmp_path / "one", model_path, {"train/b-00000": texts["train/b-00000"]})
    for suffix in (".tokens", ".index"):
        shards = [tmp_path / f"{folder}/out/train/b-00000{suffix}" for folder in ("both", "one")]
        assert shards[0].read_bytes() == shards[1].read_bytes()
    # A killed run's: what it finished stays, and what it left behind does not disturb.
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "one/work").rglob("*.tokens")}
    os.rename(tmp_path / "one/out", tmp_path / "one/before")
    encode(tmp_path / "one", model_path, texts)
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_ids_are_counted(tmp_path: Path, model_path: Path, tokenizer: Tokenizer) -> None:
    texts = make_documents(3, seed=3)
    _, shards = encode(tmp_path, model_path, {"train/a-00000": texts})
    unigram = count_ids(shards["train/a-00000"].tokens, 500)
    assert unigram.shape == (500,)
    assert unigram.dtype == np.uint64
    expected = Counter(token for text in texts for token in [*tokenizer.encode(text), END_OF_TEXT])
    assert {token: count for token, count in enumerate(unigram.tolist()) if count} == expected
    with pytest.raises(ValueError, match=r"holds the token id \d+; the vocabulary has 4 ids"):
        count_ids(shards["train/a-00000"].tokens, 4)


def test_another_tokenizer_in_the_same_place_is_used(tmp_path: Path, model_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_path.read_bytes())
    first, _ = encode(tmp_path / "first", path, {"train/a-00000": make_documents(3)})
    config = TokenizerConfig(vocab_size=400)
    path.write_bytes(train_tokenizer(make_documents(40, seed=9), config, 0, tmp_path / "other").read_bytes())
    second, shards = encode(tmp_path / "second", path, {"train/a-00000": make_documents(3)})
    assert first != second
    assert int(shards["train/a-00000"].tokens.max()) < 400
