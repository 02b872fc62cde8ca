"""Parallelism as functions outside the model, applied in one order: build on meta, shard, materialize."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from model.config import ModelConfig
from model.gpt import GPT, initialize


def build_model(config: ModelConfig, vocab_size: int, seed: int, mesh: DeviceMesh) -> GPT:
    """The initialized model, sharded over the mesh; no rank ever holds all of it."""
    with torch.device("meta"):
        model = GPT(config, vocab_size)
    parallelize(model, mesh)
    model.to_empty(device=mesh.device_type)
    initialize(model, seed)
    return model


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Shard parameters, gradients and optimizer state over the data-parallel mesh (FSDP2: Zhao et al. 2023).

    The loss is already a sum over tokens divided by the tokens of all ranks, so gradients are summed, never averaged.
    """
    on_gpu = mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def reshard(model: nn.Module) -> None:
    """Give up the whole parameters that a forward pass without a backward pass leaves behind in the outermost module.

    Until then the model shows those in place of its shards, which the optimizer and the checkpoint know.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm over all parameters and ranks is at most `max_norm`.

    Returns:
        The norm before clipping, the same on every rank.
    """
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm.item()
