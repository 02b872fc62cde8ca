"""One optimizer step over all ranks: what it changes is what a checkpoint holds."""

import math
import resource
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model.config import ModelConfig, TrainingConfig
from model.data.tokens.batches import IGNORED
from model.gpt import derive_seed
from model.optim import build_optimizer, optimizer_state
from model.parallel import AXES, build_stages, reshard
from model.parallel_plan import ParallelPlan
from model.pipeline import Batches, Pipeline
from model.spikes import SpikeGuard

DATA_AXES = ("replicas", "shards")


@dataclass(frozen=True)
class StepResult:
    """What one step measured, the same on every rank."""

    loss: float
    gradient_norm: float
    skipped: str = ""
    """Why the parameters were left as they were; empty where they were not."""


class Learner:
    """The model with its optimizer, on one rank of the mesh.

    Args:
        mesh: of the plan, by `build_mesh`.

    Attributes:
        data_rank: Which share of a step's sequences is this rank's, of `plan.dp`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        training_config: TrainingConfig,
        vocab_size: int,
        seed: int,
        plan: ParallelPlan,
        mesh: DeviceMesh,
    ) -> None:
        assert vocab_size % plan.tp == 0, "the plan is of another vocabulary"
        self.config = training_config
        self.seed = seed
        self.plan = plan
        self.mesh = mesh
        self.data_rank = mesh["replicas"].get_local_rank() * plan.shards + mesh["shards"].get_local_rank()
        self.device = torch.device(mesh.device_type)
        place = mesh.get_coordinate()
        assert place is not None, "this rank is not in the mesh"
        self._place = int(np.ravel_multi_index(tuple(place), mesh.shape))
        precision = compute_precision(training_config, mesh.device_type)
        self.stages = build_stages(model_config, vocab_size, seed, plan, mesh, precision)
        self.optimizer = build_optimizer(self.stages, training_config)
        self.guard = SpikeGuard(training_config.spike_sigmas, training_config.spike_window_steps)
        dtype = precision or next(self.stages[0].parameters()).dtype
        self.pipeline = Pipeline(self.stages, plan, mesh, dtype) if plan.pp > 1 else None

    def step(self, step: int, batches: Batches, learning_rate: float) -> StepResult:
        """One optimizer step over the micro-batches of all ranks; nothing changes where the guard is against it."""
        torch.manual_seed(derive_seed(self.seed, "dropout", step, self._place))
        tokens = self._sum(sum(int((targets != IGNORED).sum()) for _, targets in batches), DATA_AXES)
        self.optimizer.zero_grad()
        for stage in self.stages:
            stage.train()
        if self.pipeline:
            loss_sum = self.pipeline.train(batches, tokens)
            self.pipeline.sum_tied_gradients()
        else:
            loss_sum = self._forward_backward(batches, tokens)
        loss = self._sum(loss_sum, ("pp", *DATA_AXES)) / tokens
        gradient_norm = self._gradient_norm()
        if skipped := self.guard.judge(loss, gradient_norm):
            return StepResult(loss, gradient_norm, skipped)
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        norm = torch.tensor(gradient_norm, dtype=torch.float64, device=self.device)
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return StepResult(loss, gradient_norm)

    @torch.no_grad()
    def mean_loss(self, batches: Batches) -> float:
        """The loss per token over the micro-batches of all ranks, without dropout."""
        for stage in self.stages:
            stage.eval()
        tokens = self._sum(sum(int((targets != IGNORED).sum()) for _, targets in batches), DATA_AXES)
        if self.pipeline:
            loss_sum = self.pipeline.evaluate(batches)
        else:
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            for inputs, targets in batches:
                loss_sum += self.stages[0](inputs.to(self.device), targets.to(self.device))
        for stage in self.stages:
            reshard(stage)
        return self._sum(loss_sum, ("pp", *DATA_AXES)) / tokens

    def state(self) -> dict[str, Tensor]:
        """The live tensors under names that no layout changes: `model.*`, `optimizer.*` and `guard.*`.

        Both copies of a tied embedding have its one name: they are equal.
        """
        state = self.guard.state()
        for stage in self.stages:
            parameters = {f"model.{name}": parameter.detach() for name, parameter in stage.named_parameters()}
            assert all(isinstance(parameter, DTensor) for parameter in parameters.values()), "the model is not sharded"
            state |= parameters | optimizer_state(stage, self.optimizer)
        return state

    def used_memory_bytes(self) -> int:
        """The most memory that this rank has used: of the GPU, or resident where there is none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_memory_bytes(self) -> int:
        """The most memory that any rank has used."""
        peak = torch.tensor(self.used_memory_bytes(), device=self.device)
        for axis in self.mesh.mesh_dim_names or ():
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.mesh[axis].get_group())
        return int(peak)

    def _forward_backward(self, batches: Batches, tokens: float) -> Tensor:
        """Leaves the gradients of the loss per token; returns this rank's summed loss."""
        (stage,) = self.stages
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (inputs, targets) in enumerate(batches, start=1):
            if self.plan.replicas > 1:  # within a copy at every micro-batch, between copies once
                assert isinstance(stage, FSDPModule)
                stage.set_requires_all_reduce(number == len(batches))
            summed = stage(inputs.to(self.device), targets.to(self.device))
            (summed / tokens).backward()
            loss_sum += summed.detach()
        return loss_sum

    @torch.no_grad()
    def _gradient_norm(self) -> float:
        """Over all parameters and ranks, each once; the same on every rank and, but for the order of sums, layout."""
        tied = self.pipeline.tied if self.pipeline else None
        parts: dict[int, list[Tensor]] = {}  # this rank's, by how many ranks have them too
        for parameter in (parameter for stage in self.stages for parameter in stage.parameters()):
            gradient = parameter.grad
            if gradient is not None and parameter is not tied:
                assert isinstance(gradient, DTensor)
                sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
                copies = math.prod(size for placement, size in sizes if placement.is_replicate())
                parts.setdefault(copies, []).append(gradient.to_local())
        squares = [torch.nn.utils.get_total_norm(some).double() ** 2 / copies for copies, some in parts.items()]
        return math.sqrt(self._sum(sum(squares, torch.zeros((), dtype=torch.float64, device=self.device)), AXES))

    def _sum(self, value: float | Tensor, axes: tuple[str, ...]) -> float:
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        for axis in axes:
            if self.mesh[axis].size() > 1:
                dist.all_reduce(total, group=self.mesh[axis].get_group())
        return total.item()


def compute_precision(config: TrainingConfig, device_type: str) -> torch.dtype | None:
    """What is computed in, beside parameters and sums that stay in fp32; None for fp32 everywhere."""
    wanted = config.precision if config.precision != "auto" else ("bf16" if device_type == "cuda" else "fp32")
    return torch.bfloat16 if wanted == "bf16" else None
