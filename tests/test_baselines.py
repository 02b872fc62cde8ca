import lzma
import random
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from model.evaluation.baselines import unigram_bits_per_byte, xz_bits_per_byte


def test_unigram_by_hand() -> None:
    # Counts 3, 0, 1 and 4 ends of documents, which are left out: p = 4/7, 1/7, 2/7.
    counts = np.array([3, 4, 0, 1])
    bits = -(2 * np.log2(4 / 7) + np.log2(1 / 7) + np.log2(2 / 7))
    assert unigram_bits_per_byte([[0, 2], [0, 3], []], [5, 3, 0], counts, end_of_text=1) == pytest.approx(bits / 8)
    assert counts.tolist() == [3, 4, 0, 1]


def test_unigram_without_counts_is_uniform() -> None:
    # 17.9658 bits a token of 4 bytes, as in E1.
    counts = np.zeros(256_001, dtype=np.int64)
    assert unigram_bits_per_byte([range(100)], [400], counts, end_of_text=256_000) == pytest.approx(4.4914, abs=5e-5)


def test_end_of_text_is_not_scored() -> None:
    with pytest.raises(AssertionError, match="end_of_text"):
        unigram_bits_per_byte([[0, 1]], [2], np.array([1, 1, 1]), end_of_text=1)


def sentences() -> list[str]:
    chance = random.Random(0)
    words = ("the", "of", "and", "to", "Congress", "Constitution", "année", "naïve", "憲法", "peace", "treaty")
    return [" ".join(chance.choices(words, k=40)) + "\n" for _ in range(300)]


def test_xz_compresses_the_texts_as_one() -> None:
    texts = sentences()
    data = "".join(texts).encode()
    expected = 8 * len(lzma.compress(data, preset=9)) / len(data)
    assert xz_bits_per_byte(texts) == expected
    assert expected < 3


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is not installed")
def test_xz_is_xz_9() -> None:
    data = "".join(sentences()).encode()
    packed = subprocess.run(["xz", "-9", "--threads=1", "--stdout"], input=data, capture_output=True, check=True).stdout
    assert xz_bits_per_byte([data.decode()]) == pytest.approx(8 * len(packed) / len(data), rel=1e-6)


def test_xz_takes_a_stream() -> None:
    def stream() -> Iterator[str]:
        yield from sentences()

    assert xz_bits_per_byte(stream()) == xz_bits_per_byte(sentences())


def test_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        xz_bits_per_byte([])
    with pytest.raises(ValueError, match="at least 1 byte"):
        unigram_bits_per_byte([], [], np.array([1, 1]), end_of_text=0)
