"""Parallelism as functions outside the model, applied in one order.

A stage of the model is built on the meta device, where it takes no memory, and then:

1. tensor parallel: each matrix is split over the ranks of a machine, and what lies between matrices by sequence;
2. activation checkpointing: wraps what a block computes, so it comes before that is compiled;
3. compile: one graph a block;
4. FSDP or HSDP: shards what the others have left of each parameter, and gathers it around them;
5. materialize: only now there is memory, for this rank's parts, and initial values.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.config import ModelConfig
from model.gpt import GPT, Block, initialize
from model.parallel_plan import ParallelPlan

AXES = ("pp", "replicas", "shards", "tp")


def build_mesh(plan: ParallelPlan, device_type: str) -> DeviceMesh:
    """All ranks by their place in the plan. The ranks of a tp group are neighbours, so that they share a machine."""
    return init_device_mesh(device_type, (plan.pp, plan.replicas, plan.shards, plan.tp), mesh_dim_names=AXES)


def build_stages(
    config: ModelConfig, vocab_size: int, seed: int, plan: ParallelPlan, mesh: DeviceMesh, precision: torch.dtype | None
) -> list[GPT]:
    """This rank's stages of the model, initialized and laid out; no rank ever holds what is not its own.

    Args:
        precision: what is computed in; None for the parameters' own. Parameters and sums of gradients stay as they are.
    """
    layers = plan.stage_layers(config.n_layer)[mesh["pp"].get_local_rank() :: plan.pp]
    return [_build_stage(config, vocab_size, seed, plan, mesh, precision, some) for some in layers]


def _build_stage(
    config: ModelConfig,
    vocab_size: int,
    seed: int,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    precision: torch.dtype | None,
    layers: range,
) -> GPT:
    with torch.device("meta"):
        stage = GPT(config, vocab_size, layers)
    if plan.tp > 1:
        split_tensors(stage, mesh["tp"])
    checkpoint_activations(stage, plan.checkpointing)
    if plan.compile:
        for block in stage.layers.values():
            block.compile()
    shard(stage, mesh["replicas", "shards"] if plan.replicas > 1 else mesh["shards"], plan, precision)
    stage.to_empty(device=mesh.device_type)
    initialize(stage, seed)
    return stage


def split_tensors(stage: GPT, mesh: DeviceMesh) -> None:
    """Split every matrix over the mesh: by heads, by hidden units, by vocabulary; what lies between by sequence.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; by sequence: Korthikanti et al. 2022, arXiv:2205.05198,
    section 4.2.2.
    """
    by_sequence = partial(PrepareModuleInput, desired_input_layouts=(Replicate(), None))
    table: dict[str, ParallelStyle] = {
        "token_embedding": _EmbeddingByVocabulary(),
        "position_embedding": _EmbeddingBySequence(),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": by_sequence(input_layouts=(Shard(1), None)),
        "layers.*.attention.qkv": ColwiseParallel(),
        "layers.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.mlp.expand": ColwiseParallel(),
        "layers.*.mlp.output": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    present = {name.split(".")[0] for name, _ in stage.named_children()}
    parallelize_module(stage, mesh, {name: style for name, style in table.items() if name.split(".")[0] in present})


class _EmbeddingByVocabulary(ParallelStyle):
    """Each rank looks up its own rows; the sum over ranks is scattered by sequence.

    DTensor's own lookup would make a gradient of the whole vocabulary on every rank: 13 GiB for J1-Jumbo.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(tokens: Tensor) -> Tensor:
            weight = _local_rows(module)
            rows = tokens - device_mesh.get_local_rank() * weight.shape[0]
            others = (rows < 0) | (rows >= weight.shape[0])
            found = nn.functional.embedding(rows.masked_fill(others, 0), weight).masked_fill(others.unsqueeze(-1), 0)
            whole = DTensor.from_local(found, device_mesh, [Partial()], run_check=False)
            return whole.redistribute(placements=[Shard(1)]).to_local()

        module.forward = forward
        return distribute_module(module, device_mesh, _split_rows)


class _EmbeddingBySequence(ParallelStyle):
    """Each rank has the rows of its part of the sequence, which must be of full length."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(positions: Tensor) -> Tensor:
            rows = _local_rows(module)
            assert len(positions) == len(rows) * device_mesh.size(), "tensor parallel takes whole sequences only"
            return rows

        module.forward = forward
        return distribute_module(module, device_mesh, _split_rows)


def _split_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    weight = module.get_parameter("weight")
    module.weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None))


def _local_rows(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Shard(0)])


def checkpoint_activations(stage: GPT, kind: str) -> None:
    """Have blocks compute their activations again in the backward pass: all of them, or those that are cheap to get.

    Source: Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198, section 5. Here
    what is kept are the results of matrix products and of attention. Of attention with dropout they are not: what is
    kept draws no numbers when the rest is computed again, and later masks would be made of those.
    """
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        kept = _PRODUCTS if stage.config.dropout else _PRODUCTS + _ATTENTION
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    for block in stage.layers.values():
        assert isinstance(block, Block)
        # Not a wrapper module, which would change the parameters' names.
        setattr(block, "forward", partial(_checkpointed, block, block.forward, options))  # noqa: B010 - mypy


def _checkpointed(
    block: Block, compute: Any, options: dict[str, Any], x: Tensor, visible: Tensor | None = None
) -> Tensor:
    return checkpoint(compute, x, visible, **options) if block.training else compute(x, visible)


_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def shard(stage: GPT, mesh: DeviceMesh, plan: ParallelPlan, precision: torch.dtype | None) -> None:
    """Shard parameters, gradients and optimizer state over the mesh, of which a first axis has copies.

    The loss is already a sum over tokens divided by the tokens of all ranks, so gradients are summed, never averaged,
    and in fp32 at least.

    Source: FSDP: Zhao et al. 2023, arXiv:2304.11277; with copies, HSDP: the same, section 3.2.2.
    """
    policy = MixedPrecisionPolicy(precision, torch.float32) if precision else MixedPrecisionPolicy()
    # A pipeline comes back to its stage for every micro-batch, so it keeps what it has gathered.
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": plan.pp == 1}
    for block in stage.layers.values():
        fully_shard(block, **options)
    fully_shard(stage, **options)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def reshard(stage: nn.Module) -> None:
    """Give up the whole parameters that a forward pass without a backward pass leaves behind in the outermost module.

    Until then the model shows those in place of its shards, which the optimizer and the checkpoint know.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
