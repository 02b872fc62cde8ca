"""The guard against steps that would do harm: a loss or gradient that is not a number, or far from all recent ones."""

import math

import torch
from torch import Tensor

NOT_FINITE = "not finite"
SPIKE = "spike"


class SpikeGuard:
    """Judges each step by the loss and the gradient norm of the finite steps before it.

    A step is a spike where either is above the mean of the last `window` steps by more than `sigmas` standard
    deviations. Spikes are among the last steps too, so that a change that lasts is accepted in the end. Nothing is
    called a spike before half a window is known.

    Source: OLMo-core, SkipStepOptimizer.
    """

    def __init__(self, sigmas: float, window: int) -> None:
        self._sigmas = sigmas
        self._window = window
        self._recent = torch.zeros(2, window, dtype=torch.float64)  # losses and norms, in a ring
        self._count = torch.zeros((), dtype=torch.int64)  # of steps that were put into it
        self._skipped = torch.zeros((), dtype=torch.int64)

    @property
    def skipped(self) -> int:
        """Steps of the run that were skipped until now."""
        return int(self._skipped)

    def judge(self, loss: float, gradient_norm: float) -> str:
        """Why the step is to be skipped; empty where it is not. To be asked once a step."""
        why = self._judge(loss, gradient_norm)
        self._skipped += bool(why)
        return why

    def _judge(self, loss: float, gradient_norm: float) -> str:
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            return NOT_FINITE
        count = int(self._count)
        known = self._recent[:, : min(count, self._window)].clone()
        now = torch.tensor([loss, gradient_norm], dtype=torch.float64)
        self._recent[:, count % self._window] = now
        self._count += 1
        if known.shape[1] < self._window / 2:
            return ""
        mean = known.mean(1)
        # Steps that are all alike deviate by rounding alone, which is no spike.
        deviation = known.std(1, correction=0).maximum(mean * torch.finfo(torch.float32).eps)
        most = mean + self._sigmas * deviation
        return SPIKE if (now > most).any() else ""

    def state(self) -> dict[str, Tensor]:
        """The live tensors, for a checkpoint."""
        return {"guard.recent": self._recent, "guard.count": self._count, "guard.skipped": self._skipped}
