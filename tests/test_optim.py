import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.config import ModelConfig, TrainingConfig
from model.gpt import GPT, initialize
from model.optim import Schedule, batch_size, build_optimizer, learning_rate, optimizer_state

MODEL = ModelConfig(n_layer=1, n_head=2, d_model=16, seq_len=8)


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    model = GPT(MODEL, 20)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer([model], TrainingConfig(weight_decay=0.3)).param_groups
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(names)
    assert decay["token_embedding.weight"] == decay["layers.0.mlp.output.weight"] == 0.3
    assert decay["layers.0.mlp_norm.weight"] == decay["layers.0.attention.qkv.bias"] == decay["norm.weight"] == 0.0


def test_the_optimizer_state_is_what_adamw_makes() -> None:
    """State made ahead, as for loading a checkpoint, changes nothing about the first steps."""
    models = [GPT(MODEL, 20), GPT(MODEL, 20)]
    optimizers = [build_optimizer([model], TrainingConfig()) for model in models]
    for model in models:
        initialize(model, 0)
    made = optimizer_state(models[0], optimizers[0])
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.arange(8).unsqueeze(0)).square().sum().backward()
            optimizer.step()
    first, second = (optimizer_state(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
    assert first.keys() == second.keys() == made.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(first[key] is made[key] for key in made)
    assert first["optimizer.norm.weight.step"].item() == 2


def test_learning_rate_by_hand() -> None:
    config = TrainingConfig(learning_rate=0.1, min_learning_rate_fraction=0.1, warmup_tokens=100, decay_tokens=300)
    points = [(0, 0.0), (1, 0.001), (99, 0.099), (100, 0.1), (200, 0.055), (300, 0.01), (301, 0.01), (10**12, 0.01)]
    for tokens, expected in points:  # 200 is half of the cosine: the mean of 0.1 and 0.01
        assert learning_rate(tokens, config, total_tokens=10**9) == pytest.approx(expected, abs=1e-15)
    quarter = 0.01 + 0.09 * (1 + math.cos(math.pi / 4)) / 2
    assert learning_rate(150, config, total_tokens=10**9) == pytest.approx(quarter)


def test_decay_ends_with_the_run_when_its_tokens_are_not_given() -> None:
    config = TrainingConfig(steps=10, global_batch_size=2, ramp_start_batch_size=2, warmup_tokens=32)
    schedule = Schedule(config, seq_len=8)
    rates = [schedule.learning_rate(step) for step in range(10)]
    assert rates[1] == max(rates) == config.learning_rate  # 2 steps of 16 tokens are the warm-up
    assert rates[9] == pytest.approx(config.learning_rate * 0.1)
    assert all(earlier > later for earlier, later in pairwise(rates[1:]))


@pytest.mark.parametrize("warmup_tokens", [160, 10_000])
def test_a_run_that_ends_within_its_warmup_only_warms_up(warmup_tokens: int) -> None:
    config = TrainingConfig(steps=9, global_batch_size=2, ramp_start_batch_size=2, warmup_tokens=warmup_tokens)
    schedule = Schedule(config, seq_len=8)
    assert schedule.learning_rate(8) == pytest.approx(config.learning_rate * 144 / warmup_tokens)


def test_batch_size_by_hand() -> None:
    config = TrainingConfig(global_batch_size=10, ramp_start_batch_size=2, ramp_tokens=800)
    sizes = [batch_size(tokens, config) for tokens in (0, 99, 100, 799, 800, 10**15)]
    assert sizes == [2, 2, 3, 9, 10, 10]


def test_the_published_ramp_of_jurassic() -> None:
    """From 32K tokens a step to 3.2M over 2B tokens: the precomputed part stays small and ends where it should."""
    config = TrainingConfig(
        steps=100_000, global_batch_size=1562, ramp_start_batch_size=16, ramp_tokens=2 * 10**9, micro_batch_size=1
    )
    schedule = Schedule(config, seq_len=2048)
    full = next(step for step in range(100_000) if schedule.batch_size(step) == 1562)
    assert schedule.tokens(full - 1) < 2 * 10**9 <= schedule.tokens(full)
    # dx/dt grows linearly with x, so x = a (e^(bt) - 1): ln(1562 / 16) x 2e9 / (1546 x 2048) steps.
    assert full == pytest.approx(math.log(1562 / 16) * 2e9 / (1546 * 2048), rel=0.01)


@given(
    start=st.integers(1, 20),
    growth=st.integers(0, 20),
    ramp_tokens=st.integers(0, 5000),
    steps=st.integers(1, 60),
    seq_len=st.integers(8, 40),
)
def test_steps_follow_each_other_without_gap(
    start: int, growth: int, ramp_tokens: int, steps: int, seq_len: int
) -> None:
    config = TrainingConfig(
        steps=steps, global_batch_size=start + growth, ramp_start_batch_size=start, ramp_tokens=ramp_tokens
    )
    schedule = Schedule(config, seq_len)
    consumed = 0
    for step in range(steps):
        assert schedule.first_sample(step) == consumed
        assert schedule.tokens(step) == consumed * seq_len
        assert schedule.batch_size(step) == batch_size(consumed * seq_len, config)
        consumed += schedule.batch_size(step)
    assert schedule.total_tokens == consumed * seq_len
