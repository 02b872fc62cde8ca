"""The evaluation of a checkpoint: every rank scores its share, the shares add up to `evaluation/report.json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from model.config import EvaluationConfig
from model.data.tokenization.tokenizer import Tokenizer
from model.evaluation.baselines import unigram_bits_per_byte, xz_bits_per_byte
from model.evaluation.likelihood import Score, score_documents, shard
from model.evaluation.multiple_choice import Row, Tally, score_rows
from model.serving.generation import generate


@dataclass(frozen=True)
class Share:
    """What one rank has scored; `+` joins the ranks'."""

    trained: Score = field(default_factory=Score)
    untrained: Score = field(default_factory=Score)
    documents: int = 0
    choices: dict[str, Tally] = field(default_factory=dict)

    def __add__(self, other: "Share") -> "Share":
        return Share(
            self.trained + other.trained,
            self.untrained + other.untrained,
            self.documents + other.documents,
            {
                name: self.choices.get(name, Tally()) + other.choices.get(name, Tally())
                for name in self.choices | other.choices
            },
        )


def score_share(
    trained: nn.Module,
    untrained: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    choices: Mapping[str, Sequence[Row]],
    *,
    seq_len: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> Share:
    """This rank's part of the held-out texts, under both models, and of the multiple-choice rows.

    Args:
        texts: All held-out documents, in the same order on every rank.
        choices: Name -> all its rows, in the same order on every rank.
    """
    own = list(shard(texts, rank, world_size))
    documents = [tokenizer.encode(text) for text in own]
    byte_lengths = [len(text.encode()) for text in own]
    how: dict[str, Any] = {
        "seq_len": seq_len,
        "batch_size": batch_size,
        "end_of_text": tokenizer.end_of_text,
        "device": device,
    }
    return Share(
        trained=sum(score_documents(trained, documents, byte_lengths, **how), Score()),
        untrained=sum(score_documents(untrained, documents, byte_lengths, **how), Score()),
        documents=len(own),
        choices={
            name: score_rows(trained, tokenizer, shard(rows, rank, world_size), **how) for name, rows in choices.items()
        },
    )


def write_samples(
    model: nn.Module,
    tokenizer: Tokenizer,
    config: EvaluationConfig,
    *,
    seq_len: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> list[dict[str, str]]:
    """The model's continuation of each prompt: [{"prompt", "text"}]. One prompt does not change another's text."""
    samples = []
    for prompt in config.prompts:
        prompt_ids = tokenizer.encode(prompt)
        ids = generate(
            model,
            prompt_ids,
            max_tokens=config.sample_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            generator=torch.Generator().manual_seed(seed),
            seq_len=seq_len,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            forbidden=tokenizer.control_ids - {tokenizer.end_of_text},
            device=device,
        )
        # Decoded together: what joins two pieces (a space, the bytes of one character) lies between them.
        whole = tokenizer.decode([*prompt_ids, *ids])
        samples.append({"prompt": prompt, "text": whole.removeprefix(prompt)})
    return samples


def baselines(tokenizer: Tokenizer, texts: Sequence[str], counts: NDArray[np.int64]) -> dict[str, float]:
    """Bits per byte of the held-out texts without a neural network.

    Args:
        counts: Occurrences of each id in the training tokens, (V,).
    """
    return {
        "unigram": unigram_bits_per_byte(
            (tokenizer.encode(text) for text in texts),
            (len(text.encode()) for text in texts),
            counts,
            tokenizer.end_of_text,
        ),
        "xz": xz_bits_per_byte(texts),
    }


def assemble(
    shares: Iterable[Share], baselines_bits_per_byte: Mapping[str, float], samples: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """`evaluation/report.json` from the shares of all ranks."""
    total = sum(shares, Share())
    return {
        "documents": {
            "test": {
                "bits_per_byte": total.trained.bits_per_byte,
                "log_probability_per_byte": total.trained.log_probability_per_byte,
                "tokens": total.trained.tokens,
                "bytes": total.trained.bytes,
                "documents": total.documents,
                "baselines": {"untrained": total.untrained.bits_per_byte, **baselines_bits_per_byte},
            }
        },
        "multiple_choice": {name: tally.report() for name, tally in total.choices.items()},
        "samples": [dict(sample) for sample in samples],
    }
