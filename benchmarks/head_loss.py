"""The loss of a large vocabulary and its gradients, in a fresh process: head_loss.py FORM DTYPE TOKENS PIECES WIDTH.

FORM is "jumbo" or "plain", the cross entropy of the full logits; DTYPE "float32" or "bfloat16". Prints the seconds of
the faster of two times, the peak of resident memory beyond inputs and the gradient of the weight, the loss, and the
norms of the gradients, as JSON.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.loss import token_loss

_THREADS = 2


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """In at least fp32, as transformers does, and autocast."""
    return F.cross_entropy((hidden @ weight.t()).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def peak_bytes() -> int:
    """Of this process alone: what getrusage gives begins with the parent's."""
    status = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert status
    return 1024 * int(status[1])


def main(form: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype, N: int, V: int, d: int) -> None:
    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    # Made in place, so that this leaves no higher peak than what stays.
    hidden = torch.empty(1, N, d, dtype=dtype).normal_().requires_grad_()
    weight = torch.empty(V, d, dtype=dtype).normal_(std=0.02).requires_grad_()
    targets = torch.randint(V, (1, N))
    before, seconds = peak_bytes(), []
    for _ in range(2):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        loss = form(hidden, weight, targets) / N
        loss.backward()
        seconds.append(time.perf_counter() - started)
    assert hidden.grad is not None
    assert weight.grad is not None
    result = {
        "seconds": min(seconds),
        "bytes": peak_bytes() - before - weight.grad.nbytes,
        "loss": loss.item(),
        "norms": [hidden.grad.double().norm().item(), weight.grad.double().norm().item()],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main({"jumbo": token_loss, "plain": plain}[sys.argv[1]], getattr(torch, sys.argv[2]), *map(int, sys.argv[3:]))
