import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from model.serving.generation import generate, inference

END = 0


class Successor(nn.Module):
    """Finds (last id + 1) likeliest, the one after that half as likely, and everything else impossible-ish."""

    def __init__(self, vocab_size: int = 8) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.lengths: list[int] = []
        self.seen: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.lengths.append(tokens.shape[1])
        self.seen.append(tokens[0].tolist())
        logits = torch.full((*tokens.shape, self.vocab_size), -30.0)
        logits.scatter_(2, ((tokens + 1) % self.vocab_size)[..., None], math.log(2 / 3))
        return logits.scatter_(2, ((tokens + 2) % self.vocab_size)[..., None], math.log(1 / 3))


class Constant(nn.Module):
    """The same logits everywhere."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, -1)


def run(model: nn.Module, prompt: list[int], seed: int = 0, **changes: object) -> list[int]:
    settings: dict = {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "seq_len": 16,
        "vocab_size": 8,
        "end_of_text": END,
    }
    return generate(model, prompt, generator=torch.Generator().manual_seed(seed), **(settings | changes))


def test_greedy_takes_the_likeliest_and_ends_at_end_of_text_without_it() -> None:
    assert run(Successor(), [1], temperature=0) == [2, 3, 4, 5]
    assert run(Successor(), [4], temperature=0, max_tokens=50) == [5, 6, 7]


def test_the_prompt_follows_end_of_text_as_in_training() -> None:
    model = Successor()
    run(model, [3, 5], max_tokens=1)
    assert model.seen == [[END, 3, 5]]
    assert run(Successor(), [], temperature=0, max_tokens=2) == [1, 2]


def test_a_full_context_slides() -> None:
    model = Successor()
    assert run(model, [1, 2, 3], temperature=0, seq_len=3, max_tokens=3) == [4, 5, 6]
    assert model.seen == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_padded_ids_are_never_chosen() -> None:
    # R7: a vocabulary of 1,000 padded to 1,024, where the padding has the largest logits of all.
    model = Constant([-90.0] + [0.0] * 999 + [50.0] * 24)
    for temperature in (0, 0.01, 1, 5):
        ids = run(model, [1], temperature=temperature, vocab_size=1000, max_tokens=200)
        assert ids
        assert max(ids) < 1000


def test_forbidden_ids_are_never_chosen() -> None:
    model = Constant([-9.0, 9.0, 0.0, 9.0])
    assert run(model, [2], temperature=0, vocab_size=4, forbidden={1, 3}) == [2, 2, 2, 2]
    assert set(run(model, [2], vocab_size=4, forbidden=[1, 3], max_tokens=100)) == {2}


def test_the_nucleus_holds_the_fewest_ids_with_the_probability() -> None:
    # 0.5, 0.3, 0.15, 0.05: three ids hold 0.9, two hold 0.8, and one holds any probability up to 0.5.
    model = Constant([-math.inf, *(math.log(p) for p in (0.15, 0.5, 0.05, 0.3))])
    for top_p, ids in [(0.9, {2, 4, 1}), (0.7, {2, 4}), (0.4, {2}), (1e-9, {2}), (1.0, {1, 2, 3, 4})]:
        assert set(run(model, [1], top_p=top_p, vocab_size=5, max_tokens=400)) == ids


def test_sampling_follows_the_probabilities() -> None:
    model = Constant([-math.inf, math.log(0.25), math.log(0.75)])
    counts = Counter(run(model, [1], vocab_size=3, max_tokens=4000))
    assert counts[1] / 4000 == pytest.approx(0.25, abs=0.035)  # 5 standard errors
    # At temperature 1/2 the odds of 1 to 3 become 1 to 9.
    counts = Counter(run(model, [1], vocab_size=3, max_tokens=4000, temperature=0.5))
    assert counts[1] / 4000 == pytest.approx(0.1, abs=0.025)


def test_the_generator_alone_decides() -> None:
    model = Constant([-math.inf, 0.0, 0.0, 0.0, 0.0])
    first = run(model, [1], seed=7, vocab_size=5, max_tokens=40)
    torch.manual_seed(1)
    assert run(model, [1], seed=7, vocab_size=5, max_tokens=40) == first
    assert run(model, [1], seed=8, vocab_size=5, max_tokens=40) != first


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert run(Constant([0.0, 800.0, 900.0]), [1], temperature=temperature, vocab_size=3) == [2, 2, 2, 2]


def test_no_tokens_asked_for() -> None:
    assert run(Successor(), [1], max_tokens=0) == []


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan)]
)
def test_wrong_settings_name_field_and_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} \({value}\) must be"):
        run(Successor(), [1], **{field: value})


def test_dropout_rests_and_the_mode_comes_back_even_after_an_error() -> None:
    model = nn.Dropout(0.5)
    with inference(model):
        assert torch.equal(model(torch.ones(100)), torch.ones(100))
    assert model.training
    with pytest.raises(RuntimeError, match="stop"), inference(model):
        raise RuntimeError("stop")
    assert model.training
    with inference(model.eval()):
        pass
    assert not model.training
