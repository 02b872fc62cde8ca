"""The global order: pointwise, the same for any number of ranks, mixed by weight."""

from collections import Counter
from math import fsum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.config import DataConfig
from model.data.tokens.batches import PADDING, rank_batches
from model.data.tokens.mixture import Mixture, Source, permute

MIXED = [Source("web", 50_000, 6), Source("books", 900, 3), Source("code", 12_000, 1)]


def one_source(n: int, seed: int) -> Mixture:
    return Mixture([Source("", n)], seed)


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_permute_is_a_bijection(n: int, key: int) -> None:
    permuted = permute(np.arange(n), n, key)
    assert permuted.dtype == np.int64
    assert sorted(permuted.tolist()) == list(range(n))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_permute_is_pointwise(n: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    permuted = permute(index, n, key)
    assert ((permuted >= 0) & (permuted < n)).all()
    assert permuted.tolist() == [permute(np.array([i]), n, key)[0] for i in index]
    assert len(set(permuted.tolist())) == len(set(index.tolist()))


def test_permutation_looks_random() -> None:
    n = 4096
    orders = [permute(np.arange(n), n, key) for key in range(200)]
    for order in orders[:5]:
        # Of a random permutation the number of fixed points is Poisson(1), the correlation with its places N(0, 1/n).
        assert (order == np.arange(n)).sum() < 10
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / n**0.5
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / n**0.5
    # Over keys, the first place is uniform: a chi-squared of 16 cells (15 degrees of freedom), p = 1e-5 at 50.
    cells = np.bincount([int(order[0]) * 16 // n for order in orders], minlength=16)
    assert ((cells - 12.5) ** 2 / 12.5).sum() < 50


def test_every_order_of_three_is_reached() -> None:
    orders = {tuple(permute(np.arange(3), 3, key).tolist()) for key in range(200)}
    assert len(orders) == 6


def test_orders_are_fixed() -> None:
    # Written down from the first versions: a change would make old runs resume in another order.
    assert one_source(5, seed=1).sequence_ids(0, 12).tolist() == [2, 3, 0, 1, 4, 2, 0, 1, 4, 3, 3, 0]
    mixture = Mixture([Source("a", 5, 2), Source("b", 3, 1)], seed=1)
    assert mixture.sequence_ids(0, 12).tolist() == [2, 4, 6, 3, 0, 7, 1, 4, 5, 3, 1, 7]


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 50), st.integers(0, 2**31), st.integers(0, 200), st.lists(st.integers(0, 60), max_size=6))
def test_order_does_not_depend_on_how_it_is_asked_for(n: int, seed: int, start: int, counts: list[int]) -> None:
    # Cases B6, B7: a resumed run, or one with other batch sizes, sees what the uninterrupted run would have.
    for mixture in (one_source(n, seed), Mixture([Source("a", n, 0.7), Source("b", 2 * n + 1, 0.3)], seed)):
        whole = mixture.sequence_ids(0, start + sum(counts)).tolist()
        parts: list[int] = []
        for count in counts:
            parts += mixture.sequence_ids(start + len(parts), count).tolist()
        assert parts == whole[start:]


def test_killed_in_the_second_of_three_epochs() -> None:  # case B6
    unbroken = one_source(40, seed=3).sequence_ids(0, 120)
    epochs = unbroken.reshape(3, 40).tolist()
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    resumed = one_source(40, seed=3).sequence_ids(70, 50)  # killed in epoch 2 at sample 30
    assert resumed.tolist() == unbroken[70:].tolist()
    assert one_source(40, seed=4).sequence_ids(0, 40).tolist() != epochs[0]


@pytest.mark.parametrize("sources", [[Source("", 500)], MIXED])
def test_the_samples_of_a_step_are_the_same_for_any_number_of_ranks(sources: list[Source]) -> None:  # case B7
    unbroken = Mixture(sources, 5)
    for step, world_size in enumerate([4, 4, 2, 2, 1, 3, 3]):
        ids = Mixture(sources, 5).sequence_ids(step * 30, 30)
        ranks = [np.concatenate(rank_batches(ids, rank, world_size, 4)) for rank in range(world_size)]
        seen = np.concatenate(ranks)
        expected = unbroken.sequence_ids(0, 210)[step * 30 : step * 30 + 30]
        assert sorted(seen[seen != PADDING].tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("count", [5_000, 65_536, 100_003, 262_144])
def test_weights_are_met(count: int) -> None:
    ids = Mixture(MIXED, 3).sequence_ids(0, count)
    shares = np.histogram(ids, [0, 50_000, 50_900, 62_900])[0] / count
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 1e-3


def test_every_batch_is_mixed_alike() -> None:
    steps = Mixture(MIXED, 3).sequence_ids(0, 200 * 512).reshape(200, 512)
    for step in steps:
        shares = np.histogram(step, [0, 50_000, 50_900, 62_900])[0]
        assert np.abs(shares - np.array([0.6, 0.3, 0.1]) * 512).max() <= 2


def test_each_epoch_of_a_source_is_its_own_permutation() -> None:
    mixture = Mixture(MIXED, 3)
    ids = mixture.sequence_ids(0, 100_000)
    books = ids[(ids >= 50_000) & (ids < 50_900)]
    epochs = books[: len(books) // 900 * 900].reshape(-1, 900)
    assert len(epochs) == 33  # 30,000 of 900
    assert all(len(set(epoch.tolist())) == 900 for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 33
    web = Counter(ids[ids < 50_000].tolist())
    assert len(web) == 50_000
    assert set(web.values()) == {1, 2}  # 60,000 of 50,000


def test_planned_epochs_are_what_is_read() -> None:
    mixture = Mixture(MIXED, 3)
    for count in (0, 1, 700, 65_536, 100_000):
        ids = mixture.sequence_ids(0, count)
        read = np.histogram(ids, [0, 50_000, 50_900, 62_900])[0] / [50_000, 900, 12_000]
        assert mixture.epochs(count) == pytest.approx(read.tolist(), abs=1e-12)
    assert one_source(40, 0).epochs(100) == [2.5]


def test_a_source_keeps_its_order_when_another_comes() -> None:
    """Its sequences follow each other as before; only its turns are fewer."""
    before = Mixture([Source("a", 100, 1)], 3).sequence_ids(0, 100)
    after = Mixture([Source("a", 100, 1), Source("b", 50, 1)], 3).sequence_ids(0, 200)
    assert after[after < 100].tolist() == before.tolist()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_any_weights_are_met(weights: list[float], seed: int) -> None:
    sources = [Source(f"source {number}", 1 << 20, weight) for number, weight in enumerate(weights)]
    count = 1 << 16
    shares = np.bincount(Mixture(sources, seed).sequence_ids(0, count) >> 20, minlength=len(weights)) / count
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 1e-4


def weighted(*weights: Any) -> DataConfig:
    return DataConfig.model_validate({"sources": [{"uri": f"{n}.txt", "weight": w} for n, w in enumerate(weights)]})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1e308, 1e308), r"sources\.0\.weight\n.*less than or equal to 1000000000000000"),
        ((5e-324, 5e-324), r"sources\.0\.weight\n.*greater than or equal to 0\.000000001"),
        ((1, 0), r"sources\.1\.weight\n.*greater than or equal to 0\.000000001"),
        ((1, -1), r"sources\.1\.weight\n.*greater than or equal to 0\.000000001"),
        ((1, float("inf")), r"sources\.1\.weight\n.*finite number"),
        ((1, float("nan")), r"sources\.1\.weight\n.*finite number"),
        ((1, 1e-9), r"the weight of '1\.txt' \(1e-09\) must be at least 1/65536 of the sum of all weights \(1\)"),
        ((65536, 1), r"the weight of '1\.txt' \(1\) must be at least 1/65536 of the sum of all weights \(65537\)"),
        ((1e15, 1e-9, 1e15), r"the weight of '1\.txt' \(1e-09\) must be at least 1/65536"),
        ((1, None), r"weight is given for some, but not for '1\.txt'"),
    ],
)
def test_weights_that_cannot_be_met_are_refused(weights: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weighted(*weights)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=40))
def test_weights_are_met_or_refused(weights: list[float]) -> None:
    if min(weights) * 65536 < fsum(weights):
        with pytest.raises(ValueError, match="must be at least 1/65536"):
            weighted(*weights)
        return
    weighted(*weights)
    sources = [Source(f"source {number}", 1 << 20, weight) for number, weight in enumerate(weights)]
    shares = np.bincount(Mixture(sources, 0).sequence_ids(0, 65536) >> 20, minlength=len(weights)) / 65536
    assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 1 / 65536


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ((65535, 1), (65535, 1)),  # the least share that has a place
        ((1e15, 1e15), (32768, 32768)),
        ((1e-9, 3e-9), (16384, 49152)),
        ((7e12, 1e12), (57344, 8192)),  # weights may be the sources' tokens
        ((1, 1, 1), (21846, 21845, 21845)),
    ],
)
def test_every_block_holds_the_weights(weights: tuple[float, ...], turns: tuple[int, ...]) -> None:
    weighted(*weights)
    sources = [Source(f"source {number}", 1 << 20, weight) for number, weight in enumerate(weights)]
    for start in (0, 65536):
        ids = Mixture(sources, 3).sequence_ids(start, 65536)
        assert tuple(np.bincount(ids >> 20, minlength=len(weights)).tolist()) == turns


def test_sources_beyond_a_million_million_sequences() -> None:
    huge = 1 << 40
    ids = Mixture([Source("a", huge, 1), Source("b", huge, 1)], 0).sequence_ids(10**12, 1000)
    assert len(set(ids.tolist())) == 1000
    assert 490 <= (ids >= huge).sum() <= 510
