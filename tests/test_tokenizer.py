"""The vocabulary: phrases, training, exact encoding, and the quality gate."""

import hashlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import PHRASES, make_documents

from model.data.config import TokenizerConfig
from model.data.phrases import count_chunks
from model.data.tokenizer import (
    CONTROL_PIECES,
    END_OF_TEXT,
    PAD,
    Tokenizer,
    TokenizerGateError,
    check_tokenizer,
    train_tokenizer,
)

TEXTS = make_documents(150)
CONFIG = TokenizerConfig(vocab_size=1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(TEXTS, CONFIG, seed=0, out=tmp_path_factory.mktemp("tokenizer"))


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
    assert [path.name for path in model.parent.iterdir()] == ["tokenizer.model"]
    assert tokenizer.vocab_size == 1000
    assert tokenizer.end_of_text == END_OF_TEXT == 1
    assert pieces(tokenizer)[:4] == [*CONTROL_PIECES, "\n"] == ["<unk>", "<|endoftext|>", "<pad>", "\n"]
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces(tokenizer))
    assert "<s>" not in pieces(tokenizer)


@pytest.mark.parametrize("vocab_size", [5000, 256_000])
def test_vocabulary_that_the_corpus_does_not_support(tmp_path: Path, vocab_size: int) -> None:  # case T1
    texts = TEXTS[:5]
    with pytest.raises(ValueError, match=rf"tokenizer\.vocab_size \({vocab_size}\) is more than the corpus") as error:
        train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size), 0, tmp_path)
    assert not list(tmp_path.iterdir())
    supported = int(str(error.value).split("supports (")[1].split(")")[0])
    config = TokenizerConfig(vocab_size=supported)
    assert Tokenizer(train_tokenizer(texts, config, 0, tmp_path)).vocab_size == supported


@pytest.mark.parametrize("texts", [[], [""], ["\t\r\n", "\0"], ["\u2581\u2585"]])
def test_no_text_to_train_on(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="there is no text to train on"):
        train_tokenizer(texts, CONFIG, 0, tmp_path)


def test_overlong_lines_and_words_are_trained_on(tmp_path: Path) -> None:  # case T2
    line = "Ж" * 3000
    assert len(line.encode()) == 6000
    tokenizer = Tokenizer(train_tokenizer([line, *TEXTS], CONFIG, 0, tmp_path))
    assert "Ж" in pieces(tokenizer)
    assert tokenizer.decode(tokenizer.encode(line)) == line


def test_multi_word_pieces(tokenizer: Tokenizer) -> None:  # case T3
    multi_word = {tokenizer.piece(token) for token in range(1000) if tokenizer.is_multi_word(token)}
    assert "▁House▁of▁Representatives" in multi_word
    assert max(map(len, multi_word)) > 16
    assert all("▁" in piece.strip("▁") for piece in multi_word)


def test_phrases_keep_to_the_bounds(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=700, max_phrase_words=1, max_piece_chars=5)
    tokenizer = Tokenizer(train_tokenizer(TEXTS, config, 0, tmp_path))
    assert not any(tokenizer.is_multi_word(token) for token in range(700))
    assert all(len(piece) <= 5 for piece in pieces(tokenizer) if not piece.startswith("<"))


def test_small_vocabulary_of_a_large_script(tmp_path: Path) -> None:
    # 3,000 characters do not fit into 400 pieces: the rare ones are written as bytes.
    source = random.Random(0)
    hanzi = [chr(0x4E00 + i) for i in range(3000)]
    text = "".join(source.choices(hanzi, [1 / (i + 1) for i in range(3000)], k=50_000))
    tokenizer = Tokenizer(train_tokenizer([text], TokenizerConfig(vocab_size=400), 0, tmp_path))
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert hanzi[0] in pieces(tokenizer)


def test_order_of_texts_and_memory_do_not_matter(model: Path, tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(TEXTS, k=len(TEXTS))
    assert digest(train_tokenizer(iter(shuffled), CONFIG, 0, tmp_path)) == digest(model)


def test_sample_depends_on_the_seed_alone(tmp_path: Path) -> None:  # case T6
    total = sum(map(len, TEXTS))
    config = TokenizerConfig(vocab_size=500, sample_bytes=total // 3)
    shuffled = random.Random(1).sample(TEXTS, k=len(TEXTS))
    first = digest(train_tokenizer(TEXTS, config, 7, tmp_path))
    assert digest(train_tokenizer(shuffled, config, 7, tmp_path)) == first
    assert digest(train_tokenizer(TEXTS, config, 8, tmp_path)) != first


def test_sample_is_even_over_texts_and_within_its_size() -> None:
    from model.data.tokenizer import _sample

    texts = [f"{number:03} " * 1000 for number in range(100)]
    sample = list(_sample(texts, 100_000, seed=3))
    assert 90_000 < sum(map(len, sample)) <= 100_000
    seen = Counter(number for block in sample for number in block.split())
    # 400,000 bytes in blocks of 4,000 to 6,250: about a quarter of the texts, from both halves.
    halves = sum(count for number, count in seen.items() if int(number) < 50), seen.total()
    assert 0.2 < halves[0] / halves[1] < 0.8


def test_one_text_larger_than_the_sample(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=400, sample_bytes=50_000)
    assert Tokenizer(train_tokenizer(["\n".join(TEXTS)], config, 0, tmp_path)).vocab_size == 400


def test_training_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(TEXTS, TokenizerConfig(vocab_size=500), 0, tmp_path)
    with pytest.raises(ValueError, match="supports"):
        train_tokenizer(TEXTS[:2], CONFIG, 0, tmp_path)
    assert capfd.readouterr() == ("", "")


# --- phrases


def test_chunks_are_counted_and_frequent_groups_merged() -> None:
    texts = [f"word{i} the United States of America." for i in range(10)]
    texts += [f"the states of {letter}" for letter in "abcdefghij"]
    counts = count_chunks(texts, max_words=4, min_count=10, max_chars=32)
    assert counts[" United States of America"] == 10
    assert counts["word"] == counts["."] == 10
    assert counts["1"] == 1
    assert counts["\n"] == 21
    assert counts["the states of"] + counts.get(" states of", 0) == 10


def test_phrases_respect_words_chars_and_count() -> None:
    texts = [f"{i} alpha beta gamma delta epsilon" for i in range(20)]

    def chunks(**bounds: int) -> set[str]:
        counts = count_chunks(texts, **{"max_words": 8, "min_count": 20, "max_chars": 64, **bounds})
        return {chunk for chunk in counts if chunk.startswith(" ")}

    def longest(**bounds: int) -> int:
        return max(len(chunk.split()) for chunk in chunks(**bounds))

    assert chunks() == {" alpha beta gamma delta epsilon"}
    assert [longest(max_words=words) for words in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert max(map(len, chunks(max_chars=11))) == 11  # " alpha beta" or " beta gamma"
    assert longest(min_count=21) == 1


def test_words_that_meet_by_chance_are_no_phrase() -> None:
    source = random.Random(0)
    texts = [" ".join(source.choices(["aa", "bb", "cc", "dd"], [8, 1, 1, 1], k=1000)) for _ in range(20)]
    counts = count_chunks(texts, max_words=2, min_count=10, max_chars=32)
    independent = 20_000 * (8 / 11) * (1 / 11)
    # Only sampling noise lifts a pair above chance; a true phrase would take all of its occurrences.
    assert counts[" bb"] > 0
    assert all(count < 1.2 * independent for chunk, count in counts.items() if chunk.count(" ") == 2 and "bb" in chunk)


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("It's 1990, isn’t it?", ["It's", " 1", "9", "9", "0", ",", " isn’t", " it", "?"]),
        ("a  b\t\tc   ", ["a", " ", " b", "\t", "\t", "c", "   "]),
        ("नमस्ते दुनिया", ["नमस्ते", " दुनिया"]),
        ("snake_case", ["snake", "_", "case"]),
        ("x" * 130, ["x" * 64, "x" * 64, "xx"]),
    ],
)
def test_chunks(text: str, chunks: list[str]) -> None:
    counts = count_chunks([text], max_words=1, min_count=2, max_chars=32)
    assert counts == Counter([*chunks, "\n", "\n"])


@given(st.lists(st.text(), max_size=5), st.integers(1, 8))
def test_chunks_hold_every_character_of_the_texts(texts: list[str], max_words: int) -> None:
    counts = count_chunks(texts, max_words, min_count=2, max_chars=32)
    chars = Counter[str]()
    for chunk, count in counts.items():
        for char in chunk:
            chars[char] += count
    assert chars == Counter("".join(texts)) + Counter("\n" * (len(texts) + 1))


def test_slices_of_the_corpus_give_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = count_chunks(TEXTS[:30], 4, 10, 32)
    monkeypatch.setattr("model.data.phrases._SLICE_IDS", 1000)
    sliced = count_chunks(TEXTS[:30], 4, 10, 32)
    assert sliced.pop("\n") > whole.pop("\n")  # one more newline begins each slice
    assert sliced == whole


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


def test_report(tokenizer: Tokenizer) -> None:
    held_out = make_documents(20, seed=1)
    report = check_tokenizer(tokenizer, iter(held_out), CONFIG)
    ids = [token for text in held_out for token in tokenizer.encode(text)]
    assert report.documents == 20
    assert report.bytes == sum(len(text.encode()) for text in held_out)
    assert report.tokens == len(ids)
    assert report.tokens_per_byte == len(ids) / report.bytes < 0.3
    multi_word = [token for token in range(1000) if tokenizer.is_multi_word(token)]
    assert report.multi_word_pieces == len(multi_word)
    assert report.multi_word_piece_share == len(multi_word) / 1000
    assert report.multi_word_token_share == sum(token in multi_word for token in ids) / len(ids) > 0
    assert "House of Representatives" in report.examples
    assert report.to_dict()["vocab_size"] == 1000


def test_only_so_many_documents_are_checked(tokenizer: Tokenizer) -> None:
    config = TokenizerConfig(vocab_size=1000, round_trip_documents=3)
    assert check_tokenizer(tokenizer, TEXTS, config).documents == 3


def test_too_many_tokens_fail_the_gate(tokenizer: Tokenizer) -> None:
    config = TokenizerConfig(vocab_size=1000, max_tokens_per_byte=0.01)
    with pytest.raises(TokenizerGateError, match=r"more than max_tokens_per_byte \(0\.01\)"):
        check_tokenizer(tokenizer, TEXTS, config)


def test_lossy_tokenizer_fails_the_gate(model: Path) -> None:
    class Lossy(Tokenizer):
        def decode(self, ids: object) -> str:
            return super().decode(ids).replace("Court", "court")  # type: ignore[arg-type]

    with pytest.raises(TokenizerGateError, match="document 1 does not come back: at character 12 'the Supreme Court'"):
        check_tokenizer(Lossy(model), ["fine", "the Supreme Court"], CONFIG)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_nothing_to_check(tokenizer: Tokenizer, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no held-out text"):
        check_tokenizer(tokenizer, texts, CONFIG)
