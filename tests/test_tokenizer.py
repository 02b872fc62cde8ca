"""The vocabulary: its training, exact encoding, and the quality gate."""

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import PHRASES, make_documents
from trained_tokenizer import train_tokenizer

from model.data.config import TokenizerConfig
from model.data.document_shards import Document
from model.data.tokenization.report import TokenizerGateError, check_tokenizer
from model.data.tokenization.tokenizer import CONTROL_PIECES, END_OF_TEXT, PAD, Tokenizer
from tasks.pool import ProcessPool

TEXTS = make_documents(150)
CONFIG = TokenizerConfig(vocab_size=1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(TEXTS, CONFIG, 0, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- training


def test_vocabulary_has_the_size_and_the_control_pieces_asked_for(model: Path, tokenizer: Tokenizer) -> None:
    assert model.name == "tokenizer.model"
    assert sorted(path.name for path in model.parent.iterdir()) == ["tokenizer.model", "use.npy"]
    assert tokenizer.vocab_size == 1000
    assert tokenizer.end_of_text == END_OF_TEXT == 1
    assert pieces(tokenizer)[:4] == [*CONTROL_PIECES, "\n"] == ["<unk>", "<|endoftext|>", "<pad>", "\n"]
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces(tokenizer))
    assert "<s>" not in pieces(tokenizer)


@pytest.mark.parametrize("method", ["phrases", "direct"])
def test_reserved_pieces(tmp_path: Path, method: str) -> None:
    config = TokenizerConfig(vocab_size=400, reserved_pieces=3, method=method)
    tokenizer = Tokenizer(train_tokenizer(TEXTS, config, 0, tmp_path))
    reserved = ["<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>"]
    assert pieces(tokenizer)[:7] == [*CONTROL_PIECES, *reserved, "\n"]
    assert tokenizer.vocab_size == 400
    assert tokenizer.control_ids == {0, 1, 2, 3, 4, 5}
    for text in reserved:
        ids = tokenizer.encode(text)
        assert not {3, 4, 5} & set(ids)
        assert tokenizer.decode([3, *ids, 4]) == text


@pytest.mark.parametrize("vocab_size", [5000, 256_000])
def test_vocabulary_that_the_corpus_does_not_support(tmp_path: Path, vocab_size: int) -> None:  # case T1
    texts = TEXTS[:5]
    with pytest.raises(ValueError, match=rf"tokenizer\.vocab_size \({vocab_size}\) is more than the corpus") as error:
        train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size), 0, tmp_path)
    assert not list(tmp_path.iterdir())
    supported = int(str(error.value).split("supports (")[1].split(")")[0])
    config = TokenizerConfig(vocab_size=supported)
    assert Tokenizer(train_tokenizer(texts, config, 0, tmp_path)).vocab_size == supported


def test_lines_that_do_not_support_the_vocabulary(tmp_path: Path) -> None:  # case T1
    config = TokenizerConfig(vocab_size=256_000, method="direct")
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size \(256000\) is more than the corpus supports \(\d+\)"):
        train_tokenizer(TEXTS[:2], config, 0, tmp_path)


@pytest.mark.parametrize("method", ["phrases", "direct"])
@pytest.mark.parametrize("texts", [[], [""], ["\t\r\n", "\0"], ["\u2581\u2585"]])
def test_no_text_to_train_on(tmp_path: Path, texts: list[str], method: str) -> None:
    with pytest.raises(ValueError, match="there is no text to train on"):
        train_tokenizer(texts, TokenizerConfig(vocab_size=1000, method=method), 0, tmp_path)


@pytest.mark.parametrize("method", ["phrases", "direct"])
def test_overlong_lines_and_words_are_trained_on(tmp_path: Path, method: str) -> None:  # case T2
    line = "Ж" * 3000
    assert len(line.encode()) == 6000
    tokenizer = Tokenizer(train_tokenizer([line, *TEXTS], TokenizerConfig(vocab_size=500, method=method), 0, tmp_path))
    assert "Ж" in pieces(tokenizer)
    assert tokenizer.decode(tokenizer.encode(line)) == line


def test_multi_word_pieces(tokenizer: Tokenizer) -> None:  # case T3
    multi_word = {tokenizer.piece(token) for token in range(1000) if tokenizer.is_multi_word(token)}
    assert "▁the▁House▁of▁Representatives" in multi_word
    assert max(map(len, multi_word)) > 16
    assert all("▁" in piece.strip("▁") for piece in multi_word)


def test_phrases_keep_to_the_bounds(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=700, max_phrase_words=1, max_piece_chars=5)
    tokenizer = Tokenizer(train_tokenizer(TEXTS, config, 0, tmp_path))
    assert not any(tokenizer.is_multi_word(token) for token in range(700))
    assert all(len(piece) <= 5 for piece in pieces(tokenizer) if not piece.startswith("<"))


def test_phrases_need_fewer_tokens_than_words_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = Tokenizer(train_tokenizer(TEXTS, TokenizerConfig(vocab_size=1000, max_phrase_words=1), 0, tmp_path))
    held_out = make_documents(20, seed=1)
    # PHRASES put 4 to 8 words into every sentence of 4 to 12 others.
    assert sum(map(len, map(tokenizer.encode, held_out))) < 0.8 * sum(map(len, map(words.encode, held_out)))


def test_small_vocabulary_of_a_large_script(tmp_path: Path) -> None:
    # 3,000 characters do not fit into 400 pieces: the rare ones are written as bytes.
    source = random.Random(0)
    hanzi = [chr(0x4E00 + i) for i in range(3000)]
    text = "".join(source.choices(hanzi, [1 / (i + 1) for i in range(3000)], k=50_000))
    tokenizer = Tokenizer(train_tokenizer([text], TokenizerConfig(vocab_size=400), 0, tmp_path))
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert hanzi[0] in pieces(tokenizer)


def test_order_of_documents_and_division_into_shards_do_not_matter(model: Path, tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(TEXTS, k=len(TEXTS))
    assert digest(train_tokenizer(shuffled, CONFIG, 0, tmp_path, shards=3)) == digest(model)


def test_pool_of_processes_gives_the_same(model: Path, tmp_path: Path) -> None:
    pool = ProcessPool(2, lambda _: None)
    trained = train_tokenizer(TEXTS, CONFIG, 0, tmp_path, shards=3, engine=pool)
    pool.close()
    assert digest(trained) == digest(model)


def test_sample_depends_on_the_seed_alone(tmp_path: Path) -> None:  # case T6
    total = sum(map(len, TEXTS))
    config = TokenizerConfig(vocab_size=500, sample_bytes=total // 3)
    shuffled = random.Random(1).sample(TEXTS, k=len(TEXTS))
    first = digest(train_tokenizer(TEXTS, config, 7, tmp_path, shards=2))
    assert digest(train_tokenizer(shuffled, config, 7, tmp_path, shards=5)) == first
    assert digest(train_tokenizer(TEXTS, config, 8, tmp_path)) != first


def test_one_text_larger_than_the_sample(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=400, sample_bytes=50_000)
    assert Tokenizer(train_tokenizer(["\n".join(TEXTS)], config, 0, tmp_path)).vocab_size == 400


def test_direct_training(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=500, method="direct")
    tokenizer = Tokenizer(train_tokenizer(TEXTS, config, 0, tmp_path))
    assert tokenizer.vocab_size == 500
    assert any("House▁of▁Rep" in piece for piece in pieces(tokenizer))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_training_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(TEXTS, TokenizerConfig(vocab_size=500), 0, tmp_path)
    with pytest.raises(ValueError, match="supports"):
        train_tokenizer(TEXTS[:2], CONFIG, 0, tmp_path)
    assert capfd.readouterr() == ("", "")


# --- encoding


HOSTILE = [
    "a  b", "a\nb", " x", "x ", "ﬁ½", "…", "\t\ttabs\t", "a\r\nb", "nul\0byte", "😀👩‍👩‍👧‍👦", "a\u2028b\x85c", "",
    "\n", "\n\n", " ", "   ", "\ufeffmark", "\u00a0\u2003\u3000", "▁", "▁▁x ▁ y▁", "▅ ⁇", "\x1b[0m", "\ue000\U0010ffff",
    "日本語テキスト", "e\u0301", "\u200b\u200d", "the Supreme Court of the United States ▁ in\nconnection with",
]  # fmt: skip

CONTROL_TEXTS = ["</s>", "<s>", "<unk>", "<|endoftext|>", "<pad>", "<0x0A>", "▁<unk>", "a<|endoftext|><|endoftext|>b"]


@pytest.mark.parametrize("text", HOSTILE)
def test_exact_round_trip(tokenizer: Tokenizer, text: str) -> None:  # case T4
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text() | st.text("▁▅ \n\ta<|é😀") | st.lists(st.sampled_from([*HOSTILE, *CONTROL_TEXTS])).map("".join))
def test_exact_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:  # cases T4 and T5
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(PAD < token < tokenizer.vocab_size for token in ids)


@pytest.mark.parametrize("text", CONTROL_TEXTS)
def test_text_that_looks_like_a_control_piece(tokenizer: Tokenizer, text: str) -> None:  # case T5
    ids = tokenizer.encode(text)
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode(ids) == text


def test_control_ids_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = [END_OF_TEXT, *tokenizer.encode("one"), 0, PAD, END_OF_TEXT, *tokenizer.encode(" two")]
    assert tokenizer.decode(ids) == "one two"
    assert tokenizer.decode(np.array(ids, np.uint32)) == "one two"
    assert tokenizer.decode([]) == ""


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83d\nb\udc00")) == "a\ufffd\nb\ufffd"


@given(st.lists(st.sampled_from(HOSTILE + list(PHRASES)), min_size=1, max_size=5))
def test_lines_are_encoded_on_their_own(tokenizer: Tokenizer, texts: list[str]) -> None:
    newline = tokenizer.encode("\n")
    assert len(newline) == 1
    expected = tokenizer.encode(texts[0])
    for text in texts[1:]:
        expected = expected + newline + tokenizer.encode(text)
    assert tokenizer.encode("\n".join(texts)) == expected


def test_long_line(tokenizer: Tokenizer) -> None:
    line = " ".join(TEXTS).replace("\n", " ")
    assert len(line) > 150_000
    assert tokenizer.decode(tokenizer.encode(line)) == line


# --- the gate


def documents(texts: list[str], source: str = "made", language: str = "en") -> list[Document]:
    return [Document(text, source, str(number), "", language) for number, text in enumerate(texts)]


def use_of(model: Path) -> np.ndarray:
    return np.load(model.parent / "use.npy")


def test_report(model: Path, tokenizer: Tokenizer) -> None:
    held_out = make_documents(20, seed=1)
    given = documents(held_out[:5], "first") + documents(held_out[5:], "second", "de")
    report = check_tokenizer(tokenizer, iter(given), use_of(model), CONFIG)
    ids = [tokenizer.encode(text) for text in held_out]
    tokens = [token for some in ids for token in some]
    assert report.documents == 20
    assert report.bytes == sum(len(text.encode()) for text in held_out)
    assert report.tokens == len(tokens)
    assert report.tokens_per_byte == len(tokens) / report.bytes < 0.3
    assert 0 < report.encoded_mb_per_second < 1e4
    assert report.tokens_per_byte_by_source == {
        "first": sum(map(len, ids[:5])) / sum(map(len, held_out[:5])),
        "second": sum(map(len, ids[5:])) / sum(map(len, held_out[5:])),
    }
    words = [len(text.split()) for text in held_out]
    assert report.tokens_per_word_by_language == {
        "de": sum(map(len, ids[5:])) / sum(words[5:]),
        "en": sum(map(len, ids[:5])) / sum(words[:5]),
    }
    multi_word = [token for token in range(1000) if tokenizer.is_multi_word(token)]
    assert report.multi_word_pieces == len(multi_word)
    assert report.multi_word_piece_share == len(multi_word) / 1000
    assert report.multi_word_token_share == sum(token in multi_word for token in tokens) / len(tokens) > 0
    assert "the House of Representatives" in report.examples
    assert report.to_dict()["vocab_size"] == 1000


def test_named_entities(tmp_path: Path) -> None:
    texts = [f"{text}\nNew York\nSouth Carolina\n" for text in TEXTS]
    model = train_tokenizer(texts, TokenizerConfig(vocab_size=1000), 0, tmp_path)
    report = check_tokenizer(Tokenizer(model), documents(texts), use_of(model), CONFIG)
    assert {"New York", "South Carolina"} & set(report.entity_examples)
    assert all(word[0].isupper() for text in report.entity_examples for word in text.split())
    assert report.entity_piece_share == report.entity_pieces / 1000 > 0


def test_undertrained_pieces(model: Path, tokenizer: Tokenizer) -> None:
    use = use_of(model)
    assert use.shape == (1000,)
    assert use.sum() == sum(len(tokenizer.encode(text)) for text in TEXTS)
    normal = [token for token in range(1000) if tokenizer.is_normal(token)]
    assert len(normal) == 1000 - 256 - 4
    assert check_tokenizer(tokenizer, documents(TEXTS), use, CONFIG).undertrained_pieces == sum(use[normal] == 0)
    none = check_tokenizer(tokenizer, documents(TEXTS), np.zeros_like(use), CONFIG)
    assert none.undertrained_pieces == len(normal)


def test_only_so_many_documents_are_checked(model: Path, tokenizer: Tokenizer) -> None:
    config = TokenizerConfig(vocab_size=1000, round_trip_documents=3)
    assert check_tokenizer(tokenizer, documents(TEXTS), use_of(model), config).documents == 3


def test_too_many_tokens_fail_the_gate(model: Path, tokenizer: Tokenizer) -> None:
    config = TokenizerConfig(vocab_size=1000, max_tokens_per_byte=0.01)
    with pytest.raises(TokenizerGateError, match=r"more than max_tokens_per_byte \(0\.01\)"):
        check_tokenizer(tokenizer, documents(TEXTS), use_of(model), config)


def test_lossy_tokenizer_fails_the_gate(model: Path) -> None:
    class Lossy(Tokenizer):
        def decode(self, ids: object) -> str:
            return super().decode(ids).replace("Court", "court")  # type: ignore[arg-type]

    with pytest.raises(TokenizerGateError, match="document 1 does not come back: at character 12 'the Supreme Court'"):
        check_tokenizer(Lossy(model), documents(["fine", "the Supreme Court"]), use_of(model), CONFIG)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_nothing_to_check(model: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no held-out text"):
        check_tokenizer(tokenizer, documents(texts), use_of(model), CONFIG)
