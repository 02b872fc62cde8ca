"""Mining: what the chunks of a text are, and which groups of them are counted."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_text import make_documents
from trained_tokenizer import write_shards

from model.data.pieces import InProcess
from model.data.tokenization import phrases, text_sample
from model.data.tokenization.phrases import GroupLimits, joins, mine_groups, mine_words, split_chunks
from model.data.tokenization.text_sample import sample_text

MEMORY = """
import random, resource
from test_phrases import mine, phrases, text_sample
random.seed(0)
text_sample.PART_BYTES, phrases._PARTITION_BYTES, phrases._PARTITION_CHUNKS = 1 << 18, 1 << 20, 1 << 16
words = ["".join(random.choices("abcdefghij", k=5)) for _ in range(5000)]
documents = [" ".join(random.choices(words, k=1000)) for _ in range(70)]
mine(["the same"] * 100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = mine(documents * 8, max_chunks=6, min_count=8, max_chars=128, max_groups=4096)
print(len(found.groups), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


class Mined(NamedTuple):
    words: list[tuple[str, int]]
    groups: list[tuple[str, int]]


def mine(
    texts: Sequence[str],
    max_chunks: int = 4,
    min_count: int = 10,
    max_chars: int = 32,
    shards: int = 1,
    max_groups: int = 1 << 20,
) -> Mined:
    with TemporaryDirectory() as name:
        folder, engine = Path(name), InProcess()
        sample = sample_text(write_shards(texts, folder / "shards", shards), 1 << 30, 0, folder / "sample", engine)
        words = mine_words(sample.parts(sample.bytes), sample.bytes, folder / "words", engine)
        lexicon = [chunk for chunk, count in words.counts if count >= min_count and joins(chunk)]
        limits = GroupLimits(max_chunks, min_count, max_chars, max_groups)
        return Mined(words.counts, mine_groups(words, lexicon, limits, folder / "groups", engine))


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
@settings(deadline=None, max_examples=50)
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


def cut_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sample, "PART_BYTES", 5000)
    monkeypatch.setattr(text_sample, "_GROUP_BYTES", 2000)
    monkeypatch.setattr(phrases, "_PARTITION_BYTES", 4000)
    monkeypatch.setattr(phrases, "_PARTITION_CHUNKS", 700)
    monkeypatch.setattr(phrases, "_TEXTS_AT_ONCE", 7)


def test_shards_parts_and_partitions_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_documents(20)
    whole = mine(texts)
    cut_finely(monkeypatch)
    assert mine(texts, shards=3) == whole
    assert len(whole.groups) > 50


def test_only_the_most_frequent_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_documents(20)
    whole = mine(texts)
    monkeypatch.setattr(phrases, "MAX_WORDS", 100)
    assert mine(texts).words == whole.words[:100]


@pytest.mark.parametrize("max_groups", [1, 10, 50])
def test_only_the_most_frequent_groups_are_kept(monkeypatch: pytest.MonkeyPatch, max_groups: int) -> None:
    texts = make_documents(20)
    whole = mine(texts, max_chunks=5).groups
    cut_finely(monkeypatch)
    monkeypatch.setattr(phrases, "MAX_GROUPS", max_groups)
    kept = mine(texts, max_chunks=5, max_groups=max_groups).groups
    assert [count for _, count in kept] == [count for _, count in whole[:max_groups]]
    least = kept[-1][1]
    # Which of the least are kept is not said, but that these are some of them.
    assert [group for group in kept if group[1] > least] == [group for group in whole if group[1] > least]
    assert set(kept) < set(whole)


def test_memory_does_not_grow_with_what_repeats() -> None:
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=True)
    groups, kilobytes = map(int, done.stdout.split())
    # 350,000 groups are frequent: the list of them alone would take 60 MB more.
    assert groups == 4096
    assert kilobytes < 95_000


def test_no_text() -> None:
    assert mine([]) == Mined([], []) == mine([], shards=0)
    assert mine(["", ""]) == Mined([], [])
