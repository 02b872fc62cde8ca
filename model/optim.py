"""The optimizer, and the schedule of batch size and learning rate, both counted in tokens."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.config import TrainingConfig


def build_optimizer(stages: Sequence[nn.Module], config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices, not biases and norms.

    The embeddings are decayed too, as in GPT-2 and GPT-3: the token embedding is also the head, whose growth is what
    decay keeps in check.
    """
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)


def optimizer_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The live state tensors, as `optimizer.<parameter>.<key>`; made as AdamW would at its first step."""
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter.detach())
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
        named |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return named


def learning_rate(tokens: int, config: TrainingConfig, total_tokens: int) -> float:
    """The learning rate of the step that brings the consumed tokens to `tokens`.

    Linear warm-up to the peak at warmup_tokens, then half a cosine down to min_learning_rate_fraction of the peak at
    decay_tokens (total_tokens where that is empty), constant from there.

    Source: Brown et al. 2020, appendix B.
    """
    if tokens < config.warmup_tokens:
        return config.learning_rate * tokens / config.warmup_tokens
    minimum = config.learning_rate * config.min_learning_rate_fraction
    decay_tokens = total_tokens if config.decay_tokens is None else config.decay_tokens
    if tokens >= decay_tokens:
        return minimum
    progress = (tokens - config.warmup_tokens) / (decay_tokens - config.warmup_tokens)
    return minimum + (config.learning_rate - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


def batch_size(tokens: int, config: TrainingConfig) -> int:
    """Sequences in the step that begins when `tokens` tokens have been consumed."""
    if tokens >= config.ramp_tokens:
        return config.global_batch_size
    growth = config.global_batch_size - config.ramp_start_batch_size
    return config.ramp_start_batch_size + growth * tokens // config.ramp_tokens


class Schedule:
    """What each step consumes and how fast it learns: a function of the step and the configuration alone.

    Steps count from 0. Nothing here depends on the number of ranks or on what was interrupted.
    """

    def __init__(self, config: TrainingConfig, seq_len: int) -> None:
        self.config = config
        self.seq_len = seq_len
        # While the batch grows, a step's place depends on all steps before it; afterwards it is a line.
        self._ramp = [0]
        while len(self._ramp) <= config.steps and self._ramp[-1] * seq_len < config.ramp_tokens:
            self._ramp.append(self._ramp[-1] + batch_size(self._ramp[-1] * seq_len, config))
        self.total_tokens = self.first_sample(config.steps) * seq_len

    def first_sample(self, step: int) -> int:
        """The index, in the order of the whole run, of the step's first sequence."""
        last = len(self._ramp) - 1
        if step <= last:
            return self._ramp[step]
        return self._ramp[last] + (step - last) * self.config.global_batch_size

    def batch_size(self, step: int) -> int:
        """Sequences in the step, over all ranks."""
        return self.first_sample(step + 1) - self.first_sample(step)

    def tokens(self, step: int) -> int:
        """Tokens consumed before the step."""
        return self.first_sample(step) * self.seq_len

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.tokens(step + 1), self.config, self.total_tokens)
