"""Repeated paragraphs: one occurrence always stays, in a document that stays, the same one in every order."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_folders import DyingEngine, Killed, all_bytes, write_read_folders
from sample_text import make_documents

from model.data.config import DeduplicationConfig
from model.data.duplicates.deduplication import deduplicate
from model.data.duplicates.paragraphs import (
    find_repeated_paragraphs,
    read_repeated_paragraphs,
    remove_paragraphs,
    split_paragraphs,
)
from model.data.pieces import InProcess

CONFIG = DeduplicationConfig(repeated_paragraphs=True, min_paragraph_words=3)
MEMORY = 1 << 20


def without_repeated(root: Path, shards: Sequence[Sequence[str]], memory_bytes: int = MEMORY) -> list[list[str]]:
    """What both passes leave of each shard's documents."""
    folders = write_read_folders(root / "read", shards, CONFIG)
    verdicts = deduplicate(folders, CONFIG, root / "documents", InProcess(), MEMORY)
    found = find_repeated_paragraphs(folders, verdicts, CONFIG, root / "paragraphs", InProcess(), memory_bytes)
    left = []
    for texts, verdict, folder in zip(shards, verdicts, found, strict=True):
        removed = read_repeated_paragraphs(folder)
        survives = np.load(verdict / "survives.npy")
        assert not [row for row in removed if not survives[row]]
        left.append([remove_paragraphs(text, removed.get(row, [])) for row, text in enumerate(texts) if survives[row]])
    return left


def test_two_passes_do_not_eat_each_other(tmp_path: Path) -> None:
    """Case D7, dclm 83: 100 unique documents of 50 words come out unchanged; so they do beside copies of themselves."""
    documents = [" ".join(f"word{50 * number + k}" for k in range(50)) for number in range(100)]
    assert without_repeated(tmp_path / "alone", [documents[:60], documents[60:]]) == [documents[:60], documents[60:]]
    twice = without_repeated(tmp_path / "twice", [documents, documents[::-1]])
    assert sorted(twice[0] + twice[1]) == sorted(documents)


def test_a_repeated_paragraph_stays_once(tmp_path: Path) -> None:
    notice = "All rights reserved by us."
    shards = [
        [
            f"The first text here.\n\n{notice}\n\nIts own end comes.",
            f"{notice.upper()}\n \nA second text here.\n\nShort one",
        ],
        [f"A third text here.\n\n\n{notice}\n\nShort one\n\n{notice}"],
    ]
    left = [text for texts in without_repeated(tmp_path, shards) for text in texts]
    assert sum(text.lower().count(notice.lower()) for text in left) == 1
    assert sum(text.count("Short one") for text in left) == 2
    assert [re.sub(rf"(?i)\s*{notice}\s*", "|", text).strip("|") for text in left] == [
        "The first text here.|Its own end comes."
        if notice in left[0]
        else "The first text here.\n\nIts own end comes.",
        "A second text here.\n\nShort one",
        "A third text here.|Short one" if notice in left[2] else "A third text here.\n\nShort one",
    ]


@settings(deadline=None, max_examples=8)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from([300, MEMORY]))
def test_every_paragraph_stays_once_whatever_the_order(chance: random.Random, shards: int, memory_bytes: int) -> None:
    paragraphs = [line for document in make_documents(6) for line in document.split("\n")]
    source = random.Random(0)
    documents = ["\n\n".join(source.choices(paragraphs, k=source.randint(1, 6))) for _ in range(25)]
    with TemporaryDirectory() as root:
        expected = without_repeated(Path(root) / "one", [documents])
        chance.shuffle(documents)
        spread = without_repeated(
            Path(root) / "other", [documents[start::shards] for start in range(shards)], memory_bytes
        )
    assert sorted(text for texts in spread for text in texts) == sorted(expected[0])
    counts = Counter(paragraph for text in expected[0] for paragraph in split_paragraphs(text) if paragraph)
    assert set(counts.values()) == {1}
    assert set(counts) == {paragraph for text in documents for paragraph in text.split("\n\n")}


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    shards = [[f"This is of all documents.\n\nThis is of document {number}." for number in range(5)] for _ in range(3)]
    folders = write_read_folders(tmp_path / "read", shards, CONFIG)
    verdicts = deduplicate(folders, CONFIG, tmp_path / "documents", InProcess(), MEMORY)
    whole = DyingEngine(10**9)
    find_repeated_paragraphs(folders, verdicts, CONFIG, tmp_path / "whole", whole, 300)
    for pieces in range(whole.made):
        work = tmp_path / f"{pieces}"
        with pytest.raises(Killed):
            find_repeated_paragraphs(folders, verdicts, CONFIG, work, DyingEngine(pieces), 300)
        rest = DyingEngine(10**9)
        find_repeated_paragraphs(folders, verdicts, CONFIG, work, rest, 300)
        assert rest.made == whole.made - pieces
        assert all_bytes(work) == all_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("numbers", "left"),
    [
        ([], "a\nb\n\n  c\n \n\t\nd"),
        ([0], "  c\n \n\t\nd"),
        ([1], "a\nb\n \n\t\nd"),
        ([2], "a\nb\n\n  c"),
        ([0, 2], "  c"),
        ([0, 1, 2], ""),
    ],
)
def test_a_paragraph_goes_with_the_blank_lines_before_it(numbers: list[int], left: str) -> None:
    text = "a\nb\n\n  c\n \n\t\nd"
    assert split_paragraphs(text) == ["a\nb", "  c", "d"]
    assert remove_paragraphs(text, numbers) == left


@given(st.text(st.sampled_from("ab \n\t\r"), max_size=40), st.sets(st.integers(0, 10)))
def test_the_paragraphs_that_stay_are_as_they_were(text: str, numbers: set[int]) -> None:
    assert remove_paragraphs(text, []) == text
    stay = [paragraph for number, paragraph in enumerate(split_paragraphs(text)) if number not in numbers]
    assert split_paragraphs(remove_paragraphs(text, sorted(numbers))) == (stay or [""])
