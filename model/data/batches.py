"""From token shards to batches: one order of sequences that a seed fixes, shared out over any number of ranks."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from model.data.shards import TokenShard

Ids = NDArray[np.int64]

IGNORED = -100  # a target without a loss
PADDING = -1  # a place in a batch without a sequence

_FEISTEL_ROUNDS = 6


class TokenDataset:
    """The shards as one stream of tokens, cut into sequences of seq_len inputs; each input's target is the next token.

    Raises:
        ValueError: There are too few tokens for one sequence.
    """

    def __init__(self, shards: Sequence[TokenShard], seq_len: int) -> None:
        self._shards = [shard.tokens for shard in shards]
        self._ends = np.cumsum([len(tokens) for tokens in self._shards], dtype=np.int64)
        self._seq_len = seq_len
        n_tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._length = max(0, n_tokens - 1) // seq_len
        if not self._length:
            raise ValueError(f"data: {n_tokens} tokens are less than one sequence of seq_len ({seq_len}) + 1")

    def __len__(self) -> int:
        return self._length

    def sequence(self, number: int) -> Ids:
        """Returns the tokens of one sequence and the one after them, (seq_len + 1,)."""
        if not 0 <= number < self._length:
            raise IndexError(f"sequence {number} of {self._length}")
        start = number * self._seq_len
        stop = start + self._seq_len + 1
        parts = []
        for shard in range(int(np.searchsorted(self._ends, start, side="right")), len(self._shards)):
            first = int(self._ends[shard]) - len(self._shards[shard])
            if first >= stop:
                break
            parts.append(self._shards[shard][max(0, start - first) : stop - first])
        return np.concatenate(parts).astype(np.int64)

    def batch(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns inputs and targets, both (B, T) int64. The targets of PADDING are all IGNORED."""
        inputs = torch.zeros(len(ids), self._seq_len, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        for row, number in enumerate(ids.tolist()):
            if number != PADDING:
                tokens = torch.from_numpy(self.sequence(number))
                inputs[row], targets[row] = tokens[:-1], tokens[1:]
        return inputs, targets


def sequence_ids(start: int, count: int, n: int, seed: int) -> Ids:
    """Returns the sequences at the places start to start + count of the run's order over n sequences.

    Each epoch is its own permutation of all n. An order depends on n and the seed alone, so that a run's whole state is
    the number of sequences it has consumed.
    """
    places = np.arange(start, start + count, dtype=np.int64)
    epochs = places // n
    ids = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        digest = blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
        ids[epochs == epoch] = permute(places[epochs == epoch] % n, n, int.from_bytes(digest, "little"))
    return ids


def permute(index: Ids, n: int, key: int) -> Ids:
    """Returns where a pseudo-random permutation of range(n) sends each index, without storing the permutation.

    Source: a Feistel network over a power of four, walked along its cycle until it is back below n: Black and Rogaway
    2002, "Ciphers with arbitrary finite domains", sections 4 and 5.
    """
    assert n >= 1
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    permuted = np.array(index, np.uint64)
    outside = np.ones(len(permuted), np.bool)
    while outside.any():
        permuted[outside] = _feistel(permuted[outside], half_bits, key)
        outside = permuted >= n
    return permuted.astype(np.int64)


def _feistel(value: NDArray[np.uint64], half_bits: int, key: int) -> NDArray[np.uint64]:
    """Returns a keyed bijection on 2 * half_bits bits; its rounds mix with SplitMix64's finalizer."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for round_number in range(1, _FEISTEL_ROUNDS + 1):
        mixed = right + np.uint64((key + round_number * 0x9E3779B97F4A7C15) % (1 << 64))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << bits) | right


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
