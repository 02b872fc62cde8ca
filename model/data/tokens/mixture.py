"""The global order of training: one sequence after another, fixed by a seed, and known at any place without the others.

So the order depends on no number of ranks, and the whole state of a run is how many sequences it has consumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import fsum

import numpy as np
from numpy.typing import NDArray

from model.data.config import MIXTURE_PLACES
from model.data.tokens.batches import Ids

# Which source each place of a block is of repeats from block to block. A block holds every weight to 1 / 65,536.
_BLOCK = MIXTURE_PLACES
_FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Source:
    """A source of sequences.

    Attributes:
        name: Its name, which is part of its order; empty where all text is one source.
        sequences: How many it has.
        weight: Its share of the order, relative to the other sources' weights; at least 1/MIXTURE_PLACES of them all.
    """

    name: str
    sequences: int
    weight: float = 1.0


class Mixture:
    """The order over sources with weights.

    Every source is read in permutations of all its sequences, another one for each epoch, so nothing repeats before all
    of it was read. The sources' turns are spaced evenly, so that every batch is mixed alike.

    Args:
        sources: In the order that numbers their sequences.
        seed: Chooses the permutations and the turns.
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self._sources = list(sources)
        self._seed = seed
        self._first = np.cumsum([0] + [source.sequences for source in sources])[:-1]
        self._turns = _share_out([source.weight for source in sources])  # (sources,), turns in a block
        assert self._turns.all(), "a weight is too small a share of all"
        self._block = self._spread_turns()  # (_BLOCK,), whose turn it is
        self._before = np.empty(_BLOCK, np.int64)  # turns of the same source before it in the block
        for number in range(len(sources)):
            places = self._block == number
            self._before[places] = np.arange(places.sum())

    def sequence_ids(self, start: int, count: int) -> Ids:
        """Returns the sequences at the places start to start + count of the order, (count,)."""
        blocks, places = np.divmod(np.arange(start, start + count, dtype=np.int64), _BLOCK)
        turn_of = self._block[places]
        ids = np.empty(count, np.int64)
        for number, source in enumerate(self._sources):
            mine = turn_of == number
            draws = blocks[mine] * self._turns[number] + self._before[places[mine]]
            ids[mine] = self._first[number] + shuffled(draws, source.sequences, _label(self._seed, source.name))
        return ids

    def epochs(self, count: int) -> list[float]:
        """Returns how many times each source is read in the first count places."""
        blocks, rest = divmod(count, _BLOCK)
        draws = blocks * self._turns + np.bincount(self._block[:rest], minlength=len(self._sources))
        return [int(drawn) / source.sequences for drawn, source in zip(draws, self._sources, strict=True)]

    def _spread_turns(self) -> NDArray[np.int64]:
        places = []
        for source, turns in zip(self._sources, self._turns.tolist(), strict=True):
            offset = (_key(f"{_label(self._seed, source.name)} turns") >> 11) / 2**53
            places.append((np.arange(turns) + offset) / turns)
        owners = np.repeat(np.arange(len(self._sources)), self._turns)
        return owners[np.argsort(np.concatenate(places), kind="stable")]


def shuffled(draws: Ids, n: int, label: str) -> Ids:
    """Returns which of n items each draw takes; each epoch of n draws is its own permutation, which the label fixes."""
    epochs = draws // n
    items = np.empty(len(draws), np.int64)
    for epoch in np.unique(epochs).tolist():
        mine = epochs == epoch
        items[mine] = permute(draws[mine] % n, n, _key(f"{label} {epoch}"))
    return items


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


def _share_out(weights: Sequence[float]) -> NDArray[np.int64]:
    """Returns the places of a block for each weight: rounded so that they add up, the largest remainders up."""
    exact = np.array(weights, np.float64) / fsum(weights) * _BLOCK
    turns = np.floor(exact).astype(np.int64)
    up = np.argsort(turns - exact, kind="stable")[: _BLOCK - int(turns.sum())]
    turns[up] += 1
    return turns


def _label(seed: int, name: str) -> str:
    return f"{seed} {name}" if name else f"{seed}"


def _key(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(), digest_size=8).digest(), "little")
