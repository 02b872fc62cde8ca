"""The model: a GPT-2 style decoder, pre-LayerNorm, with learned positions and tied embeddings.

It knows nothing of ranks. `parallel.py` splits it; the layers' names are global, so a name means the same tensor in
every layout.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from model.config import ModelConfig
from model.data.tokenization.tokenizer import END_OF_TEXT


class Attention(nn.Module):
    """Causal self-attention. The projections are separate, so that each can be split by heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.d_head = width // config.n_head
        self.dropout = config.dropout

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """x: (B, T, d_model); visible: which tokens each one sees, (B, 1, T, T), where that is not all before it."""
        B, T, _ = x.shape
        query, key, value = (
            project(x).view(B, T, -1, self.d_head).transpose(1, 2)  # (B, n_head, T, d_head)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, dropout_p=dropout
        )
        return self.output(mixed.transpose(1, 2).reshape(B, T, -1))  # (B, T, d_model)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.d_model, 4 * config.d_model)
        self.output = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.expand(x), approximate="tanh"))  # (B, T, d_model)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), visible))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Maps tokens (B, T) to logits (B, T, vocab_size), for any T up to seq_len.

    The parameters hold no values that matter until `initialize` or a checkpoint sets them.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layer)})
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        assert self.config.seq_len >= T, f"{T} tokens do not fit seq_len {self.config.seq_len}"
        positions = torch.arange(T, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, d_model)
        x = self.dropout(x)
        visible = same_document(tokens) if self.config.isolate_documents else None
        for layer in self.layers.values():
            x = layer(x, visible)
        # Tied: the head is the embedding itself, so there are no two copies that could drift apart.
        return F.linear(self.norm(x), self.token_embedding.weight)  # (B, T, vocab_size)


def same_document(tokens: Tensor) -> Tensor:
    """Which tokens each one sees, (B, 1, T, T): those before it, back to the end of text that its document follows.

    The end of text of one document is what the next one's first token is predicted from, so it belongs to that one.
    """
    documents = (tokens == END_OF_TEXT).cumsum(1)
    T = tokens.shape[1]
    before = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
    return (before & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """Set every parameter to its initial value, which depends on the seed and the parameter's name alone.

    So a model that is split over any number of ranks starts from the same values, and no rank has to send them.

    Source: Radford et al. 2019 (GPT-2), section 2.3, and its code: normal with 0.02; the projections back into the
    residual stream, of which there are 2 n_layer, scaled by 1 / sqrt(2 n_layer); biases zero; LayerNorm at identity.
    """
    residual_scale = 1 / math.sqrt(2 * model.config.n_layer)
    for name, parameter in model.named_parameters():
        full = torch.zeros(parameter.shape, dtype=torch.float32)
        if parameter.ndim >= 2:
            std = 0.02 * residual_scale if name.endswith("output.weight") else 0.02
            full.normal_(0.0, std, generator=torch.Generator().manual_seed(derive_seed(seed, name)))
        elif name.endswith("norm.weight"):
            full.fill_(1.0)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
            parameter.to_local().copy_(full)
        else:
            parameter.copy_(full)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) for what `parts` name: the same everywhere, unrelated for different parts."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
