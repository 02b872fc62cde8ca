"""Sequences, their global order, and how ranks share a step."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.data.tokens.batches import IGNORED, PADDING, TokenDataset, n_sequences, rank_batches
from model.data.tokens.shards import ShardWriter, Tokens, TokenShard


def make_shards(folder: Path, *sizes: int) -> list[Tokens]:
    """The tokens of shards that hold 0, 1, 2, … one after another."""
    folder.mkdir(exist_ok=True)
    first = 0
    shards: list[Tokens] = []
    for number, size in enumerate(sizes):
        path = folder / f"part-{number:05}.tokens"
        with ShardWriter(path) as writer:
            writer.add(list(range(first, first + size)))
        first += size
        shards.append(TokenShard(path).tokens)
    return shards


@pytest.mark.parametrize("sizes", [(33,), (1, 32), (10, 0, 3, 0, 20), (0, 33, 0), (1,) * 33])
def test_sequences_cross_shards_and_overlap_by_their_target(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    dataset = TokenDataset([make_shards(tmp_path, *sizes)], seq_len=8)
    assert len(dataset) == 4  # 33 tokens: 4 x 8 inputs, and the last target
    for number in range(4):
        sequence = dataset.sequence(number)
        assert sequence.dtype == np.int64
        assert sequence.tolist() == list(range(8 * number, 8 * number + 9))


@pytest.mark.parametrize(("tokens", "length"), [(9, 1), (16, 1), (17, 2), (18, 2)])
def test_number_of_sequences(tmp_path: Path, tokens: int, length: int) -> None:
    dataset = TokenDataset([make_shards(tmp_path, tokens)], seq_len=8)
    assert len(dataset) == length
    for number in (-1, length):
        with pytest.raises(IndexError):
            dataset.sequence(number)


@pytest.mark.parametrize("sizes", [(), (0,), (8,), (4, 4)])
def test_too_few_tokens(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{sum(sizes)} tokens are less than one sequence of seq_len \(8\) \+ 1"):
        TokenDataset([make_shards(tmp_path, *sizes)], seq_len=8)


def test_no_sequence_crosses_sources(tmp_path: Path) -> None:
    first, second = make_shards(tmp_path / "a", 10, 15), make_shards(tmp_path / "b", 20)
    dataset = TokenDataset([first, second], seq_len=8)
    assert dataset.lengths == [3, 2]
    assert len(dataset) == 5
    starts = [dataset.sequence(number)[0] for number in range(5)]
    assert starts == [0, 8, 16, 0, 8]
    assert all(np.diff(dataset.sequence(number)).tolist() == [1] * 8 for number in range(5))
    with pytest.raises(IndexError):
        dataset.sequence(5)
    with pytest.raises(ValueError, match=r"8 tokens are less than one sequence of seq_len \(8\) \+ 1"):
        TokenDataset([first, make_shards(tmp_path / "c", 8)], seq_len=8)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 9))
def test_any_shards_are_one_stream(sizes: list[int], seq_len: int) -> None:
    total = sum(sizes)
    shards: list[Tokens] = list(np.split(np.arange(total, dtype=np.uint32), np.cumsum(sizes)[:-1]))
    if total <= seq_len:
        with pytest.raises(ValueError, match="tokens are less than one sequence"):
            TokenDataset([shards], seq_len)
        return
    dataset = TokenDataset([shards], seq_len)
    assert len(dataset) == n_sequences(total, seq_len) == (total - 1) // seq_len
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    assert inputs.flatten().tolist() == list(range(len(dataset) * seq_len))
    assert targets.flatten().tolist() == list(range(1, len(dataset) * seq_len + 1))


def test_batch_is_inputs_and_next_tokens(tmp_path: Path) -> None:
    dataset = TokenDataset([make_shards(tmp_path, 20, 20)], seq_len=4)
    inputs, targets = dataset.batch(np.array([4, PADDING, 0]))
    assert inputs.tolist() == [[16, 17, 18, 19], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert targets.tolist() == [[17, 18, 19, 20], [IGNORED] * 4, [1, 2, 3, 4]]
    assert inputs.dtype == targets.dtype
    assert str(inputs.dtype) == "torch.int64"


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
