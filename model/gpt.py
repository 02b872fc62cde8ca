"""The model: a GPT-2 style decoder, pre-LayerNorm, with learned positions and tied embeddings.

It knows nothing of ranks. `parallel.py` splits it; names are global, so a name means the same tensor in every layout,
whichever layers a pipeline stage has.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from model.config import ModelConfig
from model.data.tokenization.tokenizer import END_OF_TEXT
from model.loss import token_loss

_BLOCK_ROWS = 1024  # of a matrix, which get their initial values together


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` go by heads, each with its query, key and value together, so that it can be split by heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.d_head = width // config.n_head
        self.dropout = config.dropout

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """x: (B, T, d_model); visible: which tokens each one sees, (B, 1, T, T), where that is not all before it."""
        B, T, _ = x.shape
        # (B, n_head, T, d_head) each
        query, key, value = self.qkv(x).view(B, T, -1, 3, self.d_head).transpose(1, 2).unbind(3)
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
    """Maps tokens (B, T) to logits (B, T, vocab_size), or with targets (B, T) to their token_loss, for T up to seq_len.

    With some of the layers it is a pipeline stage: the first embeds tokens, the last has the head, and between them
    go hidden states (B, T, d_model). The embedding is the head too, so first and last stage have it both.

    The parameters hold no values that matter until `initialize` or a checkpoint sets them.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.n_layer) if layers is None else layers
        self.config = config
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.n_layer
        if self.is_first or self.is_last:
            self.token_embedding = nn.Embedding(vocab_size, config.d_model)
        if self.is_first:
            self.position_embedding = nn.Embedding(config.seq_len, config.d_model)
            self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, targets: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """x: tokens, or in a later stage hidden states; tokens: what isolated documents are told by where x is not."""
        if self.is_first:
            tokens, x = x, self._embed(x)
        visible = same_document(tokens) if self.config.isolate_documents and tokens is not None else None
        for layer in self.layers.values():
            x = layer(x, visible)
        if not self.is_last:
            return x
        # Tied: the head is the embedding itself, so within a stage there are no two copies that could drift apart.
        x, head = self.norm(x), self.token_embedding.weight
        return F.linear(x, head) if targets is None else token_loss(x, head, targets)

    def _embed(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        assert self.config.seq_len >= T, f"{T} tokens do not fit seq_len {self.config.seq_len}"
        positions = torch.arange(T, device=tokens.device)
        return self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))  # (B, T, d_model)


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
    """Set every parameter to its initial value, which depends on the seed, the parameter's name and the row alone.

    So a model that is split over any ranks starts from the same values, and no rank has to send or make those of
    others.

    Source: Radford et al. 2019 (GPT-2), section 2.3, and its code: normal with 0.02; the projections back into the
    residual stream, of which there are 2 n_layer, scaled by 1 / sqrt(2 n_layer); biases zero; LayerNorm at identity.
    """
    residual_scale = 1 / math.sqrt(2 * model.config.n_layer)
    for name, parameter in model.named_parameters():
        local, offset = _local_part(parameter)
        if parameter.ndim >= 2:
            std = 0.02 * residual_scale if name.endswith("output.weight") else 0.02
            _fill_normal(local, std, (seed, name), parameter.shape[1], offset)
        else:
            local.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def _local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offset)


def _fill_normal(local: Tensor, std: float, name: tuple[int, str], columns: int, offset: tuple[int, ...]) -> None:
    """Fill a part of a matrix of so many columns, the rows of which are made in blocks, each by a seed of its own."""
    first, end = offset[0], offset[0] + local.shape[0]
    for block in range(first // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)):
        start = block * _BLOCK_ROWS
        chance = torch.Generator().manual_seed(derive_seed(*name, block))
        values = torch.empty(_BLOCK_ROWS, columns, dtype=torch.float32).normal_(0.0, std, generator=chance)
        rows = slice(max(first, start), min(end, start + _BLOCK_ROWS))
        mine = values[rows.start - start : rows.stop - start, offset[1] : offset[1] + local.shape[1]]
        local[rows.start - first : rows.stop - first] = mine.to(local.device)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) for what `parts` name: the same everywhere, unrelated for different parts."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
