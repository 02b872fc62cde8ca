"""Text from a model: greedy or nucleus sampling, one sequence at a time."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """The model without dropout and without autograd; its mode is what it was before when this ends."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    seq_len: int,
    vocab_size: int,
    end_of_text: int,
    forbidden: Collection[int] = (),
    device: torch.device | str = "cpu",
) -> list[int]:
    """The ids that follow the prompt: at most `max_tokens`, ended early by (and without) `end_of_text`.

    The prompt is read as the start of a document, so after `end_of_text`, as in training. Once prompt and continuation
    exceed `seq_len`, the model sees the last `seq_len` ids. Sampling happens on the CPU with a CPU `generator`: the
    same logits give the same ids on any device.

    Args:
        model: Ids (1, T) -> logits (1, T, V); V may be padded beyond `vocab_size`.
        temperature: 0 takes the likeliest id each time.
        top_p: Sample from the fewest likeliest ids that hold this probability.
        vocab_size: Ids from here on are padding and never chosen.
        forbidden: Ids never chosen, such as the control pieces.

    Raises:
        ValueError: temperature below 0, or top_p outside of (0, 1].
    """
    if temperature < 0:
        raise ValueError(f"temperature ({temperature}) must be at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be above 0 and at most 1")
    excluded = torch.tensor(sorted(forbidden), dtype=torch.long)
    ids = [end_of_text, *prompt_ids]
    start = len(ids)
    with inference(model):
        while len(ids) - start < max_tokens:
            window = torch.tensor([ids[-seq_len:]], device=device)
            logits = model(window)[0, -1, :vocab_size].float().cpu()
            logits[excluded] = -torch.inf
            chosen = _choose(logits, temperature, top_p, generator)
            if chosen == end_of_text:
                break
            ids.append(chosen)
    return ids[start:]


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Subtracting the largest first keeps a tiny temperature from overflowing to inf - inf.
    probabilities = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    sorted_probabilities, order = probabilities.sort(descending=True, stable=True)
    held_by_likelier = sorted_probabilities.cumsum(0) - sorted_probabilities
    nucleus = sorted_probabilities.masked_fill(held_by_likelier >= top_p, 0.0)
    nucleus[0] = sorted_probabilities[0]
    return int(order[torch.multinomial(nucleus, 1, generator=generator)])
