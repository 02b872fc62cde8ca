"""Counts in closed form: parameters, and floating-point operations of training."""

from model.config import ModelConfig


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """The parameters of `GPT`, the tied embedding once.

    A block has 12 d^2 weights (4 attention projections, 2 x 4 in the MLP) and 13 d biases and norm parameters
    (4 + 5 biases, 2 norms of 2); the final norm has 2 d.
    """
    d = config.d_model
    return config.n_layer * (12 * d * d + 13 * d) + 2 * d + (vocab_size + config.seq_len) * d


def training_flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """Forward and backward, without recomputation: 6 per weight that multiplies, plus attention.

    N here is 12 n_layer d^2 and the head, vocab_size d: looking up an embedding and adding a bias multiply nothing.
    Attention scores and their weighted sum add 12 n_layer d seq_len; the causal half is not discounted.

    Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T.
    """
    d = config.d_model
    multiplying = 12 * config.n_layer * d * d + vocab_size * d
    return 6 * multiplying + 12 * config.n_layer * d * config.seq_len
