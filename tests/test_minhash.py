"""MinHash: the shape from the threshold, and keys that agree as often as they should, for short texts too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from model.data.config import DeduplicationConfig
from model.data.duplicates.minhash import band_keys, lsh_shape
from model.data.words import split_words, word_hashes

CONFIG = DeduplicationConfig()
SINGLE_WORDS = DeduplicationConfig(ngram_words=1)


def keys_of(texts: list[str], config: DeduplicationConfig = CONFIG) -> NDArray[np.uint64]:
    return band_keys(*word_hashes(split_words(texts)), config)


def test_the_shape_has_the_most_rows_that_find_999_of_1000_pairs() -> None:
    # 1 - (1 - 0.8^5)^25 = 0.99995; six rows leave 21 bands: 1 - (1 - 0.8^6)^21 = 0.9983.
    assert lsh_shape(0.8, 128) == (25, 5)
    # One band: 0.9999^10 = 0.99900045, and 0.9999^11 = 0.9989.
    assert lsh_shape(0.9999, 16) == (1, 10)


@given(st.floats(0.1, 0.99), st.integers(128, 1024))
def test_a_row_more_would_find_fewer(min_jaccard: float, num_hashes: int) -> None:
    def found(rows: int) -> float:
        return 1 - (1 - min_jaccard**rows) ** (num_hashes // rows)

    bands, rows = lsh_shape(min_jaccard, num_hashes)
    assert bands * rows <= num_hashes
    assert found(rows) >= 0.999
    assert all(found(more) < 0.999 for more in range(rows + 1, num_hashes + 1))


def test_too_few_hashes_for_a_low_threshold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_hashes \(16\) is too small to find pairs at min_jaccard \(0\.1\)"):
        lsh_shape(0.1, 16)
    with pytest.raises(ValidationError, match=r"num_hashes \(16\) is too small to find pairs at min_jaccard \(0\.1\)"):
        DeduplicationConfig(min_jaccard=0.1, num_hashes=16)


def test_texts_of_fewer_words_than_an_ngram_have_no_key() -> None:
    keys = keys_of(["one two three four", "", "one two three four five", "- ! ? ... -"])
    assert keys.shape == (25, 4)
    assert not keys[:, [0, 1, 3]].any()
    assert keys[:, 2].all()


def test_the_same_set_of_ngrams_has_the_same_keys() -> None:
    long, longer, other = keys_of(["a b c " * 10, "A, b - c! " * 5000, "a b c d " * 10]).T
    assert (long == longer).all()
    assert not (long == other).any()


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=60), min_size=1, max_size=8))
def test_a_text_has_its_keys_in_every_batch(texts: list[list[str]]) -> None:
    joined = [" ".join(text) for text in texts]
    together = keys_of(joined)
    alone = np.concatenate([keys_of([text]) for text in joined], axis=1)
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("words", [5, 16, 56, 130, 1000])
@pytest.mark.parametrize("similarity", [0.5, 0.8])
def test_pairs_are_candidates_as_often_as_the_shape_says(words: int, similarity: float) -> None:
    """Sets of words: 1 - (1 - s^5)^25 is 0.548 at 0.5 and 0.99995 at 0.8. A large and a small set agree as well."""
    trials, shared = 1500, round(2 * words * similarity / (1 + similarity))
    chance = np.random.default_rng(0)
    sets = chance.integers(1, 2**64, (trials, 2 * words - shared), dtype=np.uint64)
    starts = np.arange(trials + 1) * words
    one = band_keys(sets[:, :words].ravel(), starts, SINGLE_WORDS)
    other = band_keys(sets[:, -words:].ravel(), starts, SINGLE_WORDS)
    true = shared / (2 * words - shared)
    expected = 1 - (1 - true**5) ** 25
    assert (one == other).any(axis=0).mean() == pytest.approx(expected, abs=0.05 if expected < 0.99 else 0.002)


def test_sets_of_different_sizes_agree_as_their_similarity_says() -> None:
    """120 of 150 words: around the number of bins, where a text may need another round of hashing than its peer."""
    words = np.random.default_rng(1).integers(1, 2**64, (2000, 150), dtype=np.uint64)
    small = band_keys(words[:, :120].ravel(), np.arange(2001) * 120, SINGLE_WORDS)
    large = band_keys(words.ravel(), np.arange(2001) * 150, SINGLE_WORDS)
    assert (small == large).mean() == pytest.approx(0.8**5, abs=0.01)
    assert (small == large).any(axis=0).mean() >= 0.999
