import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_text import make_documents
from torch import nn
from trained_tokenizer import train_tokenizer

from model.config import EvaluationConfig, ModelConfig
from model.data.config import TokenizerConfig
from model.data.tokenization.tokenizer import Tokenizer
from model.evaluation.benchmark import Share, assemble, baselines, score_share, write_samples
from model.evaluation.multiple_choice import Row
from model.gpt import GPT, initialize

SEQ_LEN = 32
VOCAB_SIZE = 259


class Bytes:
    """A stand-in tokenizer: id 3 + the byte; 0 unknown, 1 end of text, 2 padding."""

    vocab_size = VOCAB_SIZE
    end_of_text = 1
    control_ids = frozenset({0, 1, 2})

    def encode(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if i > 2).decode("utf-8", "replace")


def gpt(seed: int) -> GPT:
    config = ModelConfig(n_layer=1, n_head=2, d_model=16, seq_len=SEQ_LEN)
    model = GPT(config, VOCAB_SIZE)
    initialize(model, seed)
    with torch.no_grad():
        model.token_embedding.weight *= 5  # opinions, so that models differ
    return model


TEXTS = ["Fellow-Citizens of the Senate", "", "année " * 15, "a", "and of the House of Representatives, " * 3]
ROWS = [
    Row.model_validate(
        {"candidates": [{"context": "of the ", "completion": c} for c in ("Union", "Onion", "moon")], "target_index": i}
    )
    for i in range(3)
]


def shares(world_size: int, batch_size: int = 4) -> list[Share]:
    models = gpt(1), gpt(2)
    return [
        score_share(
            *models,
            Bytes(),
            TEXTS,
            {"unions": ROWS},
            seq_len=SEQ_LEN,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 4), (3, 1), (7, 8)])
def test_the_report_does_not_depend_on_ranks_or_batches(world_size: int, batch_size: int) -> None:
    # E4, more ranks than documents included.
    one = assemble(shares(1), {}, [])["documents"]["test"]
    other = assemble(shares(world_size, batch_size), {}, [])["documents"]["test"]
    text_bytes = sum(len(text.encode()) for text in TEXTS)
    for result in (one, other):
        assert (result["documents"], result["bytes"], result["tokens"]) == (5, text_bytes, text_bytes)
    assert other["bits_per_byte"] == pytest.approx(one["bits_per_byte"], abs=1e-5)
    assert other["baselines"]["untrained"] == pytest.approx(one["baselines"]["untrained"], abs=1e-5)
    assert one["bits_per_byte"] != pytest.approx(one["baselines"]["untrained"], abs=1e-3)


def test_the_report_as_json() -> None:
    tokenizer = Bytes()
    counts = np.bincount(tokenizer.encode("".join(TEXTS)), minlength=VOCAB_SIZE)
    samples = [{"prompt": "The", "text": " end"}]
    report = json.loads(json.dumps(assemble(shares(2), baselines(tokenizer, TEXTS, counts), samples)))

    test = report["documents"]["test"]
    assert test["log_probability_per_byte"] == pytest.approx(-test["bits_per_byte"] * math.log(2))
    data = "".join(TEXTS).encode()
    assert test["baselines"]["xz"] == pytest.approx(8 * len(lzma.compress(data, preset=9)) / len(data))
    # The entropy of the bytes is what any unigram needs at least; one more count of each costs something.
    shares_of_bytes = np.unique(list(data), return_counts=True)[1] / len(data)
    entropy = -(shares_of_bytes * np.log2(shares_of_bytes)).sum()
    assert entropy < test["baselines"]["unigram"] < 8
    # Of three rows that differ in their target alone, one is right: sqrt(1/3 * 2/3 / 3) = 0.27217.
    choice = report["multiple_choice"]["unions"]
    assert (choice["rows"], choice["candidates"], choice["unaligned"]) == (3, 9, 0)
    assert choice["accuracy"] == pytest.approx(1 / 3)
    assert choice["chance"] == pytest.approx(1 / 3)
    assert choice["standard_error"] == pytest.approx(0.27217, abs=5e-6)
    assert report["samples"] == samples


def test_samples_continue_their_prompts_and_repeat() -> None:
    model, config = gpt(1), EvaluationConfig(prompts=("Fellow", "année", ""), sample_tokens=50)
    samples = write_samples(model, Bytes(), config, seq_len=SEQ_LEN, seed=3)
    assert [sample["prompt"] for sample in samples] == ["Fellow", "année", ""]
    assert all(sample["text"] for sample in samples)
    assert write_samples(model, Bytes(), config, seq_len=SEQ_LEN, seed=3) == samples
    alone = write_samples(model, Bytes(), config.model_copy(update={"prompts": ("année",)}), seq_len=SEQ_LEN, seed=3)
    assert alone == samples[1:2]
    assert write_samples(model, Bytes(), config, seq_len=SEQ_LEN, seed=4) != samples


class FondOfReserved(nn.Module):
    """The likeliest pieces are those that nobody may say, then the letter a."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.logits = torch.zeros(tokenizer.vocab_size)
        self.logits[tokenizer.encode("a")] = 20.0
        self.logits[[0, 2, 3, 4, 5]] = 40.0  # unknown, padding and the three reserved; 1 is the end of text
        self.logits[1] = -40.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_samples_have_no_padded_or_reserved_pieces(tmp_path: Path, temperature: float) -> None:  # case R7
    """The text is as long as it would be of that letter alone: a control piece would leave nothing in it."""
    config = TokenizerConfig(vocab_size=400, reserved_pieces=3)
    tokenizer = Tokenizer(train_tokenizer(make_documents(40), config, 0, tmp_path))
    evaluation = EvaluationConfig(prompts=("b",), sample_tokens=50, temperature=temperature)
    (sample,) = write_samples(FondOfReserved(tokenizer), tokenizer, evaluation, seq_len=SEQ_LEN, seed=0)
    assert sample["text"] == "a" * 50


def test_no_held_out_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        assemble([Share()], {}, [])
