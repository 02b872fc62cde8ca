import math

import pytest
import torch

from model.data.tokens.batches import IGNORED
from model.loss import token_loss


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary_each() -> None:
    loss, tokens = token_loss(torch.zeros(2, 3, 100), torch.ones(2, 3, dtype=torch.int64))
    assert loss.item() == pytest.approx(6 * math.log(100))
    assert tokens.item() == 6


def test_ignored_targets_count_for_nothing() -> None:
    logits = torch.randn(1, 4, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, IGNORED, 3, IGNORED]])
    loss, tokens = token_loss(logits, targets)
    expected = -logits.log_softmax(-1)[0, [0, 2], [1, 3]].sum()
    assert loss.item() == pytest.approx(expected.item())
    assert tokens.item() == 2


def test_only_ignored_targets_cost_nothing_and_have_no_gradient() -> None:
    logits = torch.randn(1, 4, 10, requires_grad=True)
    loss, tokens = token_loss(logits, torch.full((1, 4), IGNORED))
    loss.backward()
    assert (loss.item(), tokens.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros(1, 4, 10))


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_loss_is_at_least_fp32(given: torch.dtype, computed: torch.dtype) -> None:
    loss, _ = token_loss(torch.zeros(1, 2, 10, dtype=given), torch.zeros(1, 2, dtype=torch.int64))
    assert loss.dtype == computed
