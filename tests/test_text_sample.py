"""The sample of text that a vocabulary is trained on."""

import tempfile
from collections import Counter
from itertools import chain, groupby
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_tokenizer import write_shards

from model.data.pieces import InProcess
from model.data.tokenization import text_sample
from model.data.tokenization.text_sample import sample_text


def test_sample_is_even_over_shards_and_within_its_size(tmp_path: Path) -> None:  # case T6
    shards = write_shards([f"{number:03} " * 1000 for number in range(100)], tmp_path / "shards", 10)
    sample = sample_text(shards, 100_000, 3, tmp_path / "work", InProcess())
    assert 90_000 < sample.bytes <= 100_000
    # 400,000 bytes, of which a quarter is taken in blocks of 4,000: of each shard's ten texts, 0.25 * 10 on average.
    blocks = list(chain.from_iterable(sample.parts(sample.bytes)))
    assert sum(map(len, blocks)) == sample.bytes
    in_half_of_the_shards = sum(len(block) for block in blocks if int(block[2]) < 5)
    assert in_half_of_the_shards == pytest.approx(50_000, abs=20_000)
    smaller = list(chain.from_iterable(sample.parts(30_000)))
    assert 20_000 < sum(map(len, smaller)) <= 30_000
    assert Counter(smaller) <= Counter(blocks)


@given(st.lists(st.text("ab\n", max_size=30), max_size=20), st.integers(0, 200), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_sample_is_the_largest_of_its_size(texts: list[str], size: int, shards: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_shards(texts, folder / "shards", shards)
        sample = sample_text(paths, max(size, 1), seed, folder / "work", InProcess())
        found = Counter(chain.from_iterable(sample.parts(size)))
    n_chars = max(1, max(size, 1) // 16)
    blocks = [block for text in texts for block in text_sample._blocks(text, n_chars)]
    # By the hash of the block, as long as all that have it fit.
    expected: Counter[str] = Counter()
    for _, equal in groupby(sorted(blocks, key=lambda block: xxhash.xxh3_64_intdigest(block, seed))):
        some = [block.decode() for block in equal]
        if sum(map(len, expected.elements())) + sum(map(len, some)) > size:
            break
        expected.update(some)
    assert found == expected


def test_parts_are_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sample, "PART_BYTES", 5000)
    monkeypatch.setattr(text_sample, "_GROUP_BYTES", 1000)
    monkeypatch.setattr(text_sample, "_BLOCK_CHARS", 300)
    shards = write_shards(["a" * 30_000, *["b c"] * 4000], tmp_path / "shards", 2)
    sample = sample_text(shards, 1 << 20, 0, tmp_path / "work", InProcess())
    sizes = [sum(map(len, part)) for part in sample.parts(sample.bytes)]
    assert sum(sizes) == sample.bytes == 42_000
    assert 42_000 / 5000 <= len(sizes) <= 42_000 / 3700
    assert max(sizes) <= 5000
