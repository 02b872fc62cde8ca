"""From token shards to batches: sequences of fixed length, and how the ranks share those of a step."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.data.tokens.shards import Tokens

Ids = NDArray[np.int64]

IGNORED = -100  # a target without a loss
PADDING = -1  # a place in a batch without a sequence


class TokenDataset:
    """Sources of tokens, each cut into sequences of seq_len inputs; each input's target is the next token.

    The shards of a source are one stream. No sequence crosses from one source to another. Sequences are numbered
    through all sources.

    Attributes:
        lengths: The number of sequences of each source.

    Raises:
        ValueError: A source has too few tokens for one sequence.
    """

    def __init__(self, sources: Sequence[Sequence[Tokens]], seq_len: int) -> None:
        self._seq_len = seq_len
        self._shards = [shard for shards in sources for shard in shards if len(shard)]
        self._starts = np.cumsum([0, *map(len, self._shards)], dtype=np.int64)[:-1].tolist()
        sizes = [sum(map(len, shards)) for shards in sources]
        for size in sizes:
            if size <= seq_len:
                raise ValueError(f"data: {size} tokens are less than one sequence of seq_len ({seq_len}) + 1")
        self.lengths = [n_sequences(size, seq_len) for size in sizes]
        # Of each source, among all sequences the first, and among all tokens the first.
        self._first_sequence = [sum(self.lengths[:source]) for source in range(len(sources))]
        self._first_token = [sum(sizes[:source]) for source in range(len(sources))]
        self._length = sum(self.lengths)

    def __len__(self) -> int:
        return self._length

    def sequence(self, number: int) -> Ids:
        """Returns the tokens of one sequence and the one after them, (seq_len + 1,)."""
        tokens = np.empty(self._seq_len + 1, np.int64)
        self._read(number, tokens)
        return tokens

    def batch(self, numbers: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns inputs and targets, both (B, T) int64. The targets of PADDING are all IGNORED."""
        tokens = np.empty((len(numbers), self._seq_len + 1), np.int64)
        padded = False
        for row, number in zip(tokens, numbers.tolist(), strict=True):
            if number == PADDING:
                row[:] = 0
                padded = True
            else:
                self._read(number, row)
        inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
        if padded:
            targets = targets.masked_fill(torch.from_numpy(numbers == PADDING)[:, None], IGNORED)
        return inputs, targets

    def _read(self, number: int, out: Ids) -> None:
        if not 0 <= number < self._length:
            raise IndexError(f"sequence {number} of {self._length}")
        source = bisect_right(self._first_sequence, number) - 1
        start = self._first_token[source] + (number - self._first_sequence[source]) * self._seq_len
        while len(out):  # more than once where the sequence goes on in the next shard
            shard = bisect_right(self._starts, start) - 1
            first = start - self._starts[shard]
            part = self._shards[shard][first : first + len(out)]
            out[: len(part)] = part
            out, start = out[len(part) :], start + len(part)


def n_sequences(n_tokens: int, seq_len: int) -> int:
    """Returns how many sequences a source of so many tokens has; the last token is a target only."""
    return max(0, n_tokens - 1) // seq_len


def rank_batches(ids: Ids, rank: int, world_size: int, micro_batch_size: int) -> list[Ids]:
    """Returns the micro-batches of one rank: its share of a step's sequences, PADDING in the places that are left over.

    All micro-batches of all ranks have one shape, at most micro_batch_size long, because the ranks have to run the same
    collectives; padding is no more than that takes, and is spread over the ranks.
    """
    assert len(ids)
    assert 0 <= rank < world_size
    per_rank = -(-len(ids) // world_size)
    n_batches = -(-per_rank // micro_batch_size)
    batch_size = -(-per_rank // n_batches)
    padded = np.full(n_batches * batch_size * world_size, PADDING, np.int64)
    padded[: len(ids)] = ids
    return list(padded[rank::world_size].reshape(n_batches, batch_size))
