"""Mining: what the chunks of a text are, and which groups of them are counted."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import make_documents
from trained_tokenizer import write_shards

from model.data.pieces import InProcess
from model.data.tokenization import phrases
from model.data.tokenization.phrases import Candidates, joins, mine_candidates, split_chunks
from model.data.tokenization.text_sample import sample_text


def mine(
    texts: Sequence[str], max_chunks: int = 4, min_count: int = 10, max_chars: int = 32, shards: int = 1
) -> Candidates:
    with TemporaryDirectory() as folder:
        paths = write_shards(texts, Path(folder) / "shards", shards)
        sample = sample_text(paths, 1 << 30, 0, Path(folder) / "sample", InProcess())
        parts = sample.parts(sample.bytes)
        return mine_candidates(
            parts, sample.bytes, max_chunks, min_count, max_chars, Path(folder) / "work", InProcess()
        )


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("It's 1990, isn’t it?", ["It's", " 1", "9", "9", "0", ",", " isn’t", " it", "?"]),
        ("a  b\t\tc   ", ["a", " ", " b", "\t", "\t", "c", "   "]),
        ("नमस्ते दुनिया", ["नमस्ते", " दुनिया"]),
        ("日本 の", ["日", "本", " の"]),
        ("snake_case", ["snake", "_", "case"]),
        ("x" * 130, ["x" * 64, "x" * 64, "xx"]),
    ],
)
def test_chunks(text: str, chunks: list[str]) -> None:
    assert split_chunks(text) == chunks


@given(st.text() | st.text("a B,.’'\n\t_7 é\u0301"))
def test_chunks_make_up_the_text(text: str) -> None:
    assert "".join(split_chunks(text)) == text


def test_words_and_punctuation_join_but_digits_and_space_do_not() -> None:
    assert all(map(joins, ["a", " the", " isn't", ",", " (", '."', "_", "-"]))
    assert not any(map(joins, ["1", " 1", " ", "  ", "\n", "\t", "----", ""]))


def test_groups_of_words_and_punctuation() -> None:
    # A line is a document. "a, b." ten times: the counts are those of a person with a pencil.
    found = mine(["x a, b."] * 10 + ["x a"] * 5, max_chunks=3)
    assert dict(found.words) == {"x": 15, " a": 15, ",": 10, " b": 10, ".": 10, "\n": 15}
    assert dict(found.groups) == {
        "x a": 15, " a,": 10, ", b": 10, " b.": 10, "x a,": 10, " a, b": 10, ", b.": 10,
    }  # fmt: skip
    assert found.words[:3] == [("\n", 15), (" a", 15), ("x", 15)]
    assert found.groups[0] == ("x a", 15)


@given(
    st.lists(st.lists(st.sampled_from(["the", "of", "a", "is", "we", "1"]), max_size=12), max_size=8),
    st.integers(1, 5),
    st.integers(2, 4),
)
def test_groups_are_those_that_plain_counting_finds(lines: list[list[str]], max_chunks: int, min_count: int) -> None:
    texts = [" ".join(line) for line in lines]
    counted: Counter[str] = Counter()
    for text in texts:
        chunks = split_chunks(text)
        for size in range(2, max_chunks + 1):
            for start in range(len(chunks) - size + 1):
                if all(map(joins, chunks[start : start + size])):
                    counted["".join(chunks[start : start + size])] += 1
    expected = {group: count for group, count in counted.items() if count >= min_count and len(group) <= 16}
    assert dict(mine(texts, max_chunks, min_count, max_chars=16).groups) == expected


def test_groups_respect_count_and_chars() -> None:
    texts = ["alpha beta gamma delta"] * 20
    longest = max(mine(texts).groups, key=lambda group: len(group[0]))
    assert longest == ("alpha beta gamma delta", 20)
    assert {group for group, _ in mine(texts, max_chars=11).groups} == {"alpha beta", " beta gamma", " gamma delta"} - {
        " gamma delta"
    }
    assert mine(texts, min_count=21).groups == []
    assert mine(texts, max_chunks=1).groups == []


def test_shards_and_partitions_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_documents(20)
    whole = mine(texts)
    monkeypatch.setattr(phrases, "_PARTITION_BYTES", 4000)
    assert mine(texts, shards=3) == whole
    assert len(whole.groups) > 50


def test_only_the_most_frequent_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_documents(20)
    whole = mine(texts)
    monkeypatch.setattr(phrases, "MAX_WORDS", 100)
    assert mine(texts).words == whole.words[:100]


def test_no_text() -> None:
    assert mine([]) == Candidates([], []) == mine([], shards=0)
    assert mine(["", ""]) == Candidates([], [])
