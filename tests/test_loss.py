import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import model.loss
from model.data.tokens.batches import IGNORED
from model.loss import token_loss


@pytest.fixture
def chunk_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many tokens have their logits at a time, of 50 pieces in fp64."""
    return lambda rows: monkeypatch.setitem(model.loss.LOGITS_BYTES, "cpu", rows * 50 * 8)


def made(tokens: tuple[int, int], dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*tokens, 16, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 50, tokens, generator=chance)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary_each() -> None:
    loss = token_loss(torch.zeros(2, 3, 4), torch.zeros(100, 4), torch.ones(2, 3, dtype=torch.int64))
    assert loss.item() == pytest.approx(6 * math.log(100))


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_value_and_gradients_are_those_of_the_plain_form(rows: int, chunk_rows: Callable[[int], None]) -> None:
    chunk_rows(rows)
    hidden, weight, targets = made((2, 5))
    targets[1, 2:4] = IGNORED
    expected = plain(hidden, weight, targets)
    gradients = torch.autograd.grad(expected / 7, [hidden, weight])
    loss = token_loss(hidden, weight, targets)
    (loss / 7).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(hidden.grad, gradients[0], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(weight.grad, gradients[1], rtol=1e-11, atol=1e-14)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9)), ignored=st.sets(st.integers(0, 26)), seed=st.integers(0, 9)
)
def test_any_tokens_may_be_ignored(shape: tuple[int, int], ignored: set[int], seed: int) -> None:
    hidden, weight, targets = made(shape, seed=seed)
    for place in ignored:
        if place < targets.numel():
            targets.view(-1)[place] = IGNORED
    expected = torch.autograd.grad(plain(hidden, weight, targets), [hidden, weight])
    loss = token_loss(hidden, weight, targets)
    loss.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), expected, rtol=1e-11, atol=1e-13)


def test_only_ignored_targets_cost_nothing_and_have_no_gradient() -> None:
    hidden, weight, _ = made((1, 4))
    loss = token_loss(hidden, weight, torch.full((1, 4), IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[[1.0]]])
    loss = token_loss(hidden, torch.tensor([[3e4], [-3e4]]), torch.tensor([[1]]))
    assert loss.item() == pytest.approx(6e4)


def test_not_a_number_is_not_hidden() -> None:
    hidden = torch.full((1, 1, 1), math.nan)
    loss = token_loss(hidden, torch.ones(2, 1), torch.tensor([[1]]))
    assert math.isnan(loss.item())


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_loss_is_at_least_fp32(dtype: torch.dtype, computed: torch.dtype) -> None:
    hidden, weight, targets = made((1, 2), dtype)
    loss = token_loss(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == computed
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)


def test_the_sum_over_chunks_loses_nothing_in_bf16(chunk_rows: Callable[[int], None]) -> None:
    """Of a thousand chunks that each add a little, bf16 alone would lose most: it has 8 bits."""
    chunk_rows(2)  # 4 tokens, of fp32
    hidden, weight, targets = made((8, 500), torch.bfloat16)
    expected = torch.autograd.grad(
        plain(hidden.double().detach(), exact := weight.double().detach().requires_grad_(), targets), exact
    )[0]
    token_loss(hidden, weight, targets).backward()
    error = (weight.grad - expected).norm() / expected.norm()
    assert error < 2**-8  # the rounding of a bf16 number


def test_gradients_are_given_once() -> None:
    loss = token_loss(*made((1, 2)))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="given away"):
        loss.backward()


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    hidden, weight, targets = made((1, 3))
    with torch.no_grad():
        loss = token_loss(hidden, weight, targets)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(plain(hidden, weight, targets).item())
