"""The training and validation loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.data.tokens.batches import IGNORED


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross entropy in nats, in at least fp32, and the number of counted tokens.

    A sum, not a mean: means of micro-batches with different numbers of tokens cannot be averaged, sums can be added
    and divided once by the tokens of all ranks.

    Args:
        logits: (B, T, vocab_size)
        targets: (B, T), IGNORED where nothing is to be predicted
    """
    precise = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(precise, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()
