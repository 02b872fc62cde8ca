"""How likely a model finds text: the sum of log-probabilities, each token counted exactly once."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from model.serving.generation import inference

Item = TypeVar("Item")

# Windows sorted together by length, in batches. Bounds the memory and leaves little padding.
POOL_BATCHES = 64


@dataclass(frozen=True)
class Score:
    """A summed log-probability in nats and what it was summed over. `+` joins the scores of two texts exactly."""

    log_probability: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.log_probability + other.log_probability, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers, and with compressors."""
        return -self.log_probability_per_byte / math.log(2)

    @property
    def log_probability_per_byte(self) -> float:
        """The measure of the Jurassic-1 paper, in nats per UTF-8 byte."""
        if not self.bytes:
            raise ValueError("no text was scored: log-probability per byte needs at least 1 byte")
        return self.log_probability / self.bytes

    @property
    def perplexity(self) -> float:
        """Per token, every token with the same weight."""
        if not self.tokens:
            raise ValueError("no text was scored: perplexity needs at least 1 token")
        return math.exp(-self.log_probability / self.tokens)


def shard(items: Iterable[Item], rank: int, world_size: int) -> Iterator[Item]:
    """Every `world_size`-th item from `rank` on: over all ranks each item once, none padded or dropped."""
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    return islice(items, rank, None, world_size)


def score_documents(
    model: nn.Module,
    documents: Iterable[Sequence[int]],
    byte_lengths: Iterable[int],
    *,
    seq_len: int,
    batch_size: int,
    end_of_text: int,
    device: torch.device | str = "cpu",
) -> list[Score]:
    """One score a document, in order; `sum(scores, Score())` is the score of them all.

    Each token is conditioned on `end_of_text` and then on the document before it; the end of the document is not
    scored. A document longer than `seq_len` is read in windows that overlap by half, so that every token after the
    first window has at least half a context before it. Documents are drawn as they are needed.

    Args:
        model: Ids (B, T) -> logits (B, T, V), causal.
        documents: Ids of each document, without `end_of_text`.
        byte_lengths: UTF-8 bytes of each document's text.
    """
    sizes: list[tuple[int, int]] = []

    def windows() -> Iterator[_Window]:
        for index, (ids, byte_length) in enumerate(zip(documents, byte_lengths, strict=True)):
            sizes.append((len(ids), byte_length))
            yield from _windows(index, [end_of_text, *ids], 1, seq_len)

    sums = _sum_log_probabilities(model, windows(), batch_size, end_of_text, device)
    return [Score(sums.get(index, 0.0), tokens, length) for index, (tokens, length) in enumerate(sizes)]


def score_completions(
    model: nn.Module,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    seq_len: int,
    batch_size: int,
    end_of_text: int,
    device: torch.device | str = "cpu",
) -> tuple[list[float], list[int]]:
    """Summed log-probability of each completion after its context, and its number of tokens.

    The context is conditioned on `end_of_text`; where both do not fit into `seq_len`, its beginning is cut.

    Args:
        pairs: Ids of (context, completion).
    """
    windows = (
        window
        for index, (context, completion) in enumerate(pairs)
        for window in _windows(index, [end_of_text, *context, *completion], len(context) + 1, seq_len)
    )
    sums = _sum_log_probabilities(model, windows, batch_size, end_of_text, device)
    return [sums.get(index, 0.0) for index in range(len(pairs))], [len(completion) for _, completion in pairs]


@dataclass(frozen=True)
class _Window:
    item: int
    inputs: Sequence[int]
    targets: Sequence[int]
    """The successors of the last `len(targets)` inputs: the tokens that this window scores."""


def _windows(item: int, sequence: Sequence[int], first: int, seq_len: int) -> Iterator[_Window]:
    """Windows of at most `seq_len` inputs that score `sequence[first:]`, each token once."""
    stride = max(1, seq_len // 2)
    while first < len(sequence):
        stop = min(len(sequence), max(first + stride, seq_len + 1))
        start = max(0, stop - 1 - seq_len)
        yield _Window(item, sequence[start : stop - 1], sequence[first:stop])
        first = stop


def _sum_log_probabilities(
    model: nn.Module, windows: Iterator[_Window], batch_size: int, pad: int, device: torch.device | str
) -> dict[int, float]:
    """Item -> its summed log-probability."""
    sums: dict[int, float] = {}
    with inference(model):
        while pool := list(islice(windows, batch_size * POOL_BATCHES)):
            # Longest first: a batch that does not fit into memory fails at once.
            pool.sort(key=lambda window: -len(window.inputs))
            for begin in range(0, len(pool), batch_size):
                batch = pool[begin : begin + batch_size]
                for window, value in zip(batch, _score_batch(model, batch, pad, device), strict=True):
                    sums[window.item] = sums.get(window.item, 0.0) + value
    for item, value in sums.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the log-probability of text {item} is {value}: the model's logits are not finite"
            )
    return sums


def _score_batch(model: nn.Module, batch: Sequence[_Window], pad: int, device: torch.device | str) -> list[float]:
    longest = max(len(window.inputs) for window in batch)
    # Padding on the right is invisible to the tokens before it, because the model is causal.
    tokens = torch.tensor(
        [[*window.inputs, *[pad] * (longest - len(window.inputs))] for window in batch], device=device
    )
    logits = model(tokens)
    values = []
    for row, window in zip(logits, batch, strict=True):  # (T, V); row by row, or the float32 copy doubles the memory
        scored = row[len(window.inputs) - len(window.targets) : len(window.inputs)].float()
        targets = torch.tensor(window.targets, device=device)
        values.append(-F.cross_entropy(scored, targets, reduction="none").double().sum().item())
    return values
