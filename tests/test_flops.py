import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig
from model.flops import parameter_count, training_flops_per_token
from model.gpt import GPT

SHAPES = [
    (ModelConfig(n_layer=2, n_head=2, d_model=16, seq_len=12), 50),
    (ModelConfig(n_layer=3, n_head=4, d_model=32, seq_len=8), 300),
]


@pytest.mark.parametrize(("config", "vocab_size"), SHAPES)
def test_parameters_are_those_of_the_built_model(config: ModelConfig, vocab_size: int) -> None:
    assert parameter_count(config, vocab_size) == sum(p.numel() for p in GPT(config, vocab_size).parameters())


@pytest.mark.parametrize(("config", "vocab_size"), SHAPES)
def test_flops_are_those_that_torch_counts(config: ModelConfig, vocab_size: int) -> None:
    model = GPT(config, vocab_size)
    tokens = torch.zeros(2, config.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert counter.get_total_flops() == training_flops_per_token(config, vocab_size) * tokens.numel()


def test_the_published_model_costs_six_flops_a_parameter_and_a_little() -> None:
    """PaLM's 6 N + 12 L H Q T for J1-Jumbo: 6 x 177.95e9 and 2.4 % more."""
    jumbo = ModelConfig(n_layer=76, n_head=96, d_model=13824, seq_len=2048)
    assert training_flops_per_token(jumbo, 262_144) == pytest.approx(6 * 177.95e9 + 12 * 76 * 13824 * 2048, rel=1e-3)
