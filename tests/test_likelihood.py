import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from model.evaluation.likelihood import Score, score_completions, score_documents, shard

END = 0
VOCAB = 11


class Uniform(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(()).expand(*tokens.shape, self.vocab_size)


class Causal(nn.Module):
    """A tiny causal model whose prediction depends on every token before, so that wrong context shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, VOCAB)
        self.batches: list[list[list[int]]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.batches.append(tokens.tolist())
        hidden, _ = self.mix(self.embedding(tokens))
        return 3 * self.head(self.dropout(hidden))


def score(model: nn.Module, documents: list[list[int]], batch_size: int = 8, seq_len: int = 10) -> list[Score]:
    lengths = [3 * len(ids) for ids in documents]
    return score_documents(model, documents, lengths, seq_len=seq_len, batch_size=batch_size, end_of_text=END)


def by_hand(model: Causal, ids: list[int], first: int, before: int) -> float:
    """The sum over ids[first:] of log p(id | the `before` ids in front of it at most), one forward pass a token."""
    sequence = [END, *ids]
    total = 0.0
    for position in range(first + 1, len(sequence)):
        window = torch.tensor([sequence[max(0, position - before) : position]])
        total += model.eval()(window)[0, -1].log_softmax(-1)[sequence[position]].item()
    return total


def test_uniform_over_256000() -> None:
    # E1: 100 tokens of log2(256,000) = 17.9658 bits over 400 bytes.
    [result] = score_documents(Uniform(256_000), [range(100)], [400], seq_len=64, batch_size=4, end_of_text=END)
    assert result.bits_per_byte == pytest.approx(4.4914, abs=5e-5)
    assert (result.tokens, result.bytes) == (100, 400)
    assert result.log_probability_per_byte == pytest.approx(-math.log(256_000) / 4)


def test_scores_join_token_weighted() -> None:
    # E1: exp((2 ln 4 + 8 ln 2) / 10) = 2^1.2, where the mean of the perplexities would be 3.
    total = sum([Score(-2 * math.log(4), 2, 8), Score(-8 * math.log(2), 8, 8)], Score())
    assert total.perplexity == pytest.approx(2.2974, abs=5e-5)
    assert total.bits_per_byte == pytest.approx(12 / 16)


def test_windows_score_each_token_once_with_half_a_context() -> None:
    # E3: 20 tokens, window 10, stride 5: [0, 10) scores 10, [5, 15) and [10, 20) score their last 5.
    model, ids = Causal().eval(), list(range(1, 11)) * 2
    [result] = score(model, [ids], batch_size=1)
    sequence = [END, *ids]
    assert sorted(window for batch in model.batches for window in batch) == sorted(
        [sequence[0:10], sequence[5:15], sequence[10:20]]
    )
    expected = sum(
        model(torch.tensor([sequence[start : start + 10]]))[0]
        .log_softmax(-1)[place - 1 - start, sequence[place]]
        .item()
        for start, places in [(0, range(1, 11)), (5, range(11, 16)), (10, range(16, 21))]
        for place in places
    )
    assert result.log_probability == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [*range(9), 10, 11, 14, 15, 16, 37])
@pytest.mark.parametrize("seq_len", [1, 2, 3, 10])
def test_every_length_is_scored_once(length: int, seq_len: int) -> None:
    [result] = score_documents(Uniform(7), [[1] * length], [length], seq_len=seq_len, batch_size=3, end_of_text=END)
    assert result.log_probability == pytest.approx(-length * math.log(7), rel=1e-6)
    assert result.tokens == length


def test_the_first_token_is_conditioned_on_the_prefix_once() -> None:
    # E2: exactly the token that ends every document in training, and exactly once.
    model = Causal()
    [result] = score(model, [[5, 6]])
    assert model.batches == [[[END, 5]]]
    assert result.log_probability == pytest.approx(by_hand(model, [5, 6], 0, 10), abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=35), max_size=9), st.integers(2, 9))
def test_the_batch_size_changes_nothing(documents: list[list[int]], batch_size: int) -> None:
    # E4.
    model = Causal()
    alone, together = score(model, documents, 1), score(model, documents, batch_size)
    assert [result.tokens for result in together] == [len(ids) for ids in documents]
    for one, other in zip(alone, together, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-5, rel=1e-5)


def test_five_documents_on_two_ranks_are_five() -> None:
    # E4.
    documents = [[1], [2, 3], [4, 5, 6], [7] * 4, [8] * 5]
    assert sorted(length for rank in range(2) for length in map(len, shard(documents, rank, 2))) == [1, 2, 3, 4, 5]
    model = Causal()
    parts = [score(model, list(shard(documents, rank, 2))) for rank in range(2)]
    assert [len(part) for part in parts] == [3, 2]
    whole = sum(score(model, documents), Score())
    joined = sum((result for part in parts for result in part), Score())
    assert (joined.tokens, joined.bytes) == (whole.tokens, whole.bytes) == (15, 45)
    assert joined.log_probability == pytest.approx(whole.log_probability, abs=1e-4)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shards_hold_each_item_once(items: int, world_size: int) -> None:
    parts = [list(shard(range(items), rank, world_size)) for rank in range(world_size)]
    assert sorted(item for part in parts for item in part) == list(range(items))


def test_documents_are_drawn_as_they_are_needed() -> None:
    model = Causal()
    drawn_before_first_batch = []

    def stream():  # type: ignore[no-untyped-def]
        for _ in range(300):
            drawn_before_first_batch.append(not model.batches)
            yield [1]

    score_documents(model, stream(), [1] * 300, seq_len=8, batch_size=1, end_of_text=END)
    assert sum(drawn_before_first_batch) == 64


def test_dropout_rests_while_scoring() -> None:
    model = Causal().train()
    assert score(model, [[1, 2, 3]]) == score(model, [[1, 2, 3]])
    assert model.training


def test_lengths_must_belong_to_the_documents() -> None:
    with pytest.raises(ValueError, match="shorter"):
        score_documents(Uniform(3), [[1], [2]], [1], seq_len=4, batch_size=1, end_of_text=END)


def test_logits_that_are_not_finite_are_an_error() -> None:
    class Broken(Uniform):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * torch.nan

    with pytest.raises(FloatingPointError, match="text 0 is nan"):
        score(Broken(5), [[1, 2]])


def test_nothing_scored_has_no_bits_per_byte() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        _ = sum(score(Uniform(3), []), Score()).bits_per_byte


@pytest.mark.parametrize("batch_size", [1, 3])
def test_completions_are_scored_after_their_context(batch_size: int) -> None:
    model = Causal()
    pairs = [([1, 2, 3], [4, 5]), ([], [6]), ([7], [8, 9, 10, 1])]
    sums, tokens = score_completions(model, pairs, seq_len=10, batch_size=batch_size, end_of_text=END)
    assert tokens == [2, 1, 4]
    for value, (context, completion) in zip(sums, pairs, strict=True):
        assert value == pytest.approx(by_hand(model, [*context, *completion], len(context), 10), abs=1e-5)


def test_a_long_context_loses_its_beginning() -> None:
    model, context = Causal(), [1, 2, 3, 4] * 6
    [value], [tokens] = score_completions(model, [(context, [5])], seq_len=10, batch_size=1, end_of_text=END)
    assert model.batches == [[context[-10:]]]
    assert tokens == 1
    assert value == pytest.approx(by_hand(model, [*context, 5], len(context), 10), abs=1e-5)


def test_a_completion_longer_than_the_context_is_scored_whole() -> None:
    sums, tokens = score_completions(Uniform(7), [([1] * 13, [2] * 33)], seq_len=10, batch_size=2, end_of_text=END)
    assert tokens == [33]
    assert sums[0] == pytest.approx(-33 * math.log(7), rel=1e-6)
