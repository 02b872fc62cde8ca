"""The training and validation loss, over a vocabulary so large that its logits are never held all at once.

For 262,144 pieces the logits of 1,024 tokens take a gigabyte in fp32, and so does their gradient. Here the logits of a
few tokens at a time give their loss and the gradient with it, and are gone: nothing is left to recompute in the
backward pass, which only scales what the forward pass found. Where the head is split over ranks by vocabulary, each
has the logits of its own pieces, and three sums a token are all that is exchanged.

Source: chunks with their gradient in the forward pass: Hsu et al. 2024, arXiv:2410.10989, section 3.2
(FusedLinearCrossEntropy); the split by vocabulary: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from model.data.tokens.batches import IGNORED

LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Of the logits that are held at a time: few on a CPU, whose caches they leave; more where matrices must be large."""

_SUM_ROWS = 1 << 14  # of the weight, whose gradient is added to in fp32 at a time


def token_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed cross entropy in nats, in at least fp32.

    A sum, not a mean: means of micro-batches with different numbers of tokens cannot be averaged, sums can be added
    and divided once by the tokens of all ranks.

    Args:
        hidden: What the logits are made of, (B, T, d_model); split by T where the weight is split.
        weight: The head, (vocab_size, d_model); a DTensor where it is split over ranks by vocabulary.
        targets: (B, T), IGNORED where nothing is to be predicted.
    """
    group, first = None, 0
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        group, first = mesh.get_group(), mesh.get_local_rank() * (weight.shape[0] // mesh.size())
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
        # Each rank's gradient is what its own pieces contribute.
        hidden = hidden.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        weight = weight.to_local(grad_placements=[Shard(0)])
    return _HeadLoss.apply(hidden.flatten(0, 1), weight, targets.flatten(), group, first)


class _HeadLoss(torch.autograd.Function):
    """The summed cross entropy of hidden @ weight.T, (N, d_model) and (pieces, d_model), the pieces from `first` on of
    a vocabulary that the ranks of `group` share."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup | None, first: int
    ) -> Tensor:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=precise, device=hidden.device)
        wanted = any(ctx.needs_input_grad[:2])
        if wanted:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight, dtype=precise)
        rows = max(1, LOGITS_BYTES[hidden.device.type] // (weight.shape[0] * precise.itemsize))
        for start in range(0, len(hidden), rows):
            some, chosen = hidden[start : start + rows], targets[start : start + rows, None]
            logits = (some @ weight.t()).to(precise)  # (rows, pieces); becomes the gradient
            loss += _softmax_loss(logits, chosen, group, first)
            if wanted:
                gradient = logits.to(hidden.dtype)
                torch.mm(gradient, weight, out=grad_hidden[start : start + rows])
                _add_outer(grad_weight, gradient, some)
        ctx.gradients = (grad_hidden, grad_weight) if wanted else None
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        assert ctx.gradients is not None, "the gradients were given away by an earlier backward pass"
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        return grad_hidden.mul_(gradient), grad_weight.mul_(gradient).to(ctx.dtype), None, None, None


def _softmax_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, first: int) -> Tensor:
    """The summed cross entropy; leaves its gradient in place of the logits.

    Args:
        logits: Of the pieces from `first` on, (rows, pieces).
        targets: (rows, 1), of the whole vocabulary or IGNORED.
    """
    counted = targets != IGNORED
    chosen = targets - first
    mine = counted & (chosen >= 0) & (chosen < logits.shape[1])
    chosen = chosen.where(mine, 0)
    at_target = logits.gather(1, chosen).where(mine, 0)
    highest = logits.amax(1, keepdim=True)
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = logits.sub_(highest).exp_().sum(1, keepdim=True)
    if group is not None:
        both = torch.cat([total, at_target], 1)
        dist.all_reduce(both, group=group)
        total, at_target = both.split(1, 1)
    logits.div_(total).scatter_add_(1, chosen, -mine.to(logits.dtype)).mul_(counted)
    return (highest + total.log() - at_target).where(counted, 0).sum()


def _add_outer(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add gradient.T @ hidden: of chunks in lower precision, the sum over them is in fp32."""
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    for start in range(0, len(total), _SUM_ROWS):
        rows = slice(start, start + _SUM_ROWS)
        total[rows] += gradient[:, rows].t() @ hidden
