"""Sequences, their global order, and how ranks share a step."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.batches import IGNORED, PADDING, TokenDataset, permute, rank_batches, sequence_ids
from model.data.shards import ShardWriter, TokenShard


def make_shards(folder: Path, *sizes: int) -> list[TokenShard]:
    """Shards that hold 0, 1, 2, … one after another."""
    first = 0
    shards = []
    for number, size in enumerate(sizes):
        path = folder / f"part-{number:05}.tokens"
        with ShardWriter(path) as writer:
            writer.add(list(range(first, first + size)))
        first += size
        shards.append(TokenShard(path))
    return shards


@pytest.mark.parametrize("sizes", [(33,), (1, 32), (10, 0, 3, 0, 20), (0, 33, 0), (1,) * 33])
def test_sequences_cross_shards_and_overlap_by_their_target(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    dataset = TokenDataset(make_shards(tmp_path, *sizes), seq_len=8)
    assert len(dataset) == 4  # 33 tokens: 4 x 8 inputs, and the last target
    for number in range(4):
        sequence = dataset.sequence(number)
        assert sequence.dtype == np.int64
        assert sequence.tolist() == list(range(8 * number, 8 * number + 9))


@pytest.mark.parametrize(("tokens", "length"), [(9, 1), (16, 1), (17, 2), (18, 2)])
def test_number_of_sequences(tmp_path: Path, tokens: int, length: int) -> None:
    dataset = TokenDataset(make_shards(tmp_path, tokens), seq_len=8)
    assert len(dataset) == length
    for number in (-1, length):
        with pytest.raises(IndexError):
            dataset.sequence(number)


@pytest.mark.parametrize("sizes", [(), (0,), (8,), (4, 4)])
def test_too_few_tokens(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{sum(sizes)} tokens are less than one sequence of seq_len \(8\) \+ 1"):
        TokenDataset(make_shards(tmp_path, *sizes), seq_len=8)


def test_batch_is_inputs_and_next_tokens(tmp_path: Path) -> None:
    dataset = TokenDataset(make_shards(tmp_path, 20, 20), seq_len=4)
    inputs, targets = dataset.batch(np.array([4, PADDING, 0]))
    assert inputs.tolist() == [[16, 17, 18, 19], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert targets.tolist() == [[17, 18, 19, 20], [IGNORED] * 4, [1, 2, 3, 4]]
    assert inputs.dtype == targets.dtype
    assert str(inputs.dtype) == "torch.int64"


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


def test_order_is_fixed() -> None:
    # Written down from the first version: a change would make old runs resume in another order.
    assert sequence_ids(0, 12, 5, seed=1).tolist() == [2, 3, 0, 1, 4, 2, 0, 1, 4, 3, 3, 0]


@settings(max_examples=40)
@given(st.integers(3, 50), st.integers(0, 2**31), st.integers(0, 200), st.lists(st.integers(0, 60), max_size=6))
def test_order_does_not_depend_on_how_it_is_asked_for(n: int, seed: int, start: int, counts: list[int]) -> None:
    # Cases B6, B7: a resumed run, or one with other batch sizes, sees what the uninterrupted run would have.
    whole = sequence_ids(0, start + sum(counts), n, seed).tolist()
    parts: list[int] = []
    for count in counts:
        parts += sequence_ids(start + len(parts), count, n, seed).tolist()
    assert parts == whole[start:]


def test_each_epoch_has_every_sequence_once_in_its_own_order() -> None:  # case B6
    epochs = sequence_ids(0, 120, 40, seed=3).reshape(3, 40).tolist()
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sequence_ids(0, 40, 40, seed=4).tolist() != epochs[0]


@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 20))
def test_ranks_share_a_step_exactly(count: int, world_size: int, micro_batch_size: int) -> None:  # case B7
    ids = np.random.default_rng(0).permutation(count)
    ranks = [rank_batches(ids, rank, world_size, micro_batch_size) for rank in range(world_size)]
    shapes = {tuple(batch.shape for batch in batches) for batches in ranks}
    assert len(shapes) == 1
    (shape,) = shapes
    assert len(set(shape)) == 1
    assert shape[0][0] <= micro_batch_size
    places = np.concatenate([np.concatenate(batches) for batches in ranks])
    assert sorted(places[places != PADDING].tolist()) == list(range(count))
    # Less than one more sequence a rank and micro-batch than an even share needs.
    assert len(places) - count < world_size * len(shape)
    padding = [sum(int((batch == PADDING).sum()) for batch in batches) for batches in ranks]
    assert max(padding) - min(padding) <= 1


def test_ranks_of_a_small_step() -> None:
    ids = np.array([7, 8, 9, 10, 11])
    assert [[batch.tolist() for batch in rank_batches(ids, rank, 2, 2)] for rank in range(2)] == [
        [[7, 9], [11, PADDING]],
        [[8, 10], [PADDING, PADDING]],
    ]
    assert [batch.tolist() for batch in rank_batches(ids, 0, 1, 8)] == [[7, 8, 9, 10, 11]]
    assert [batch.tolist() for batch in rank_batches(ids, 6, 7, 2)] == [[PADDING]]
