"""The pipeline: stages of the model in a row of ranks, and micro-batches on their way through them.

Source: 1F1B: Narayanan et al. 2019 (PipeDream), arXiv:1806.03377; interleaved: Narayanan et al. 2021, arXiv:2104.04473,
section 2.2.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import irecv, isend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from model.data.tokens.batches import IGNORED
from model.gpt import GPT
from model.parallel_plan import ParallelPlan

Batches = Sequence[tuple[Tensor, Tensor]]
"""One rank's micro-batches: inputs (b, T) and targets (b, T); as many of one shape on every rank."""

Schedule = Schedule1F1B | ScheduleInterleaved1F1B


class Pipeline:
    """Runs micro-batches through a row of ranks, of whose stages these are one rank's.

    Every rank of the row makes the same calls with the same batches.

    Args:
        dtype: What goes from stage to stage.
    """

    def __init__(self, stages: list[GPT], plan: ParallelPlan, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self.stages = stages
        self.plan = plan
        self.rank = mesh["pp"].get_local_rank()
        self.device = torch.device(mesh.device_type)
        self.dtype = dtype
        self._group = mesh["pp"].get_group()
        # The last one for training and for evaluation: each has buffers for its number and shape of micro-batches.
        self._schedules: dict[bool, tuple[tuple[int, ...], Schedule]] = {}
        self._tokens = 1.0
        self._loss_sum = torch.zeros(())

    def train(self, batches: Batches, tokens: float) -> Tensor:
        """Leaves the gradients of the loss per token, of `tokens`; returns this rank's summed loss, 0 but on the last
        rank of the row."""
        self._tokens = tokens
        return self._run(batches, training=True)

    def evaluate(self, batches: Batches) -> Tensor:
        """This rank's summed loss, 0 but on the last rank of the row."""
        return self._run(batches, training=False)

    @property
    def tied(self) -> Tensor | None:
        """The embedding where the row's last rank has its copy of it."""
        return self.stages[-1].token_embedding.weight if self.stages[-1].is_last else None

    def sum_tied_gradients(self) -> None:
        """Give both copies of the embedding, on the first and the last rank, the sum of their gradients.

        They start equal and are updated equally, so they stay one parameter.
        """
        last = self.plan.pp - 1
        if self.rank not in (0, last):
            return
        gradient = (self.stages[0] if self.rank == 0 else self.stages[-1]).token_embedding.weight.grad
        assert isinstance(gradient, DTensor)
        mine, group, peer = gradient.to_local(), self._group, last - self.rank
        other = torch.empty_like(mine)
        swap = [dist.P2POp(do, part, group=group, group_peer=peer) for do, part in ((isend, mine), (irecv, other))]
        for transfer in dist.batch_isend_irecv(swap):
            transfer.wait()
        mine += other

    def _run(self, batches: Batches, training: bool) -> Tensor:
        batches = [*batches, *[_empty(batches[0])] * (self._count(len(batches)) - len(batches))]
        inputs, targets = (torch.cat(part).to(self.device) for part in zip(*batches, strict=True))
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        schedule = self._schedule((len(batches), *batches[0][0].shape), training)
        run = schedule.step if training else schedule.eval
        first = (inputs,) if self.rank == 0 else ()
        run(*first, target=targets, targets=targets, tokens=inputs, return_outputs=False)
        return self._loss_sum

    def _count(self, n_batches: int) -> int:
        """How many micro-batches the schedule can run that has to run so many."""
        pp = self.plan.pp
        return -(-n_batches // pp) * pp if self.plan.stages_per_rank > 1 else max(n_batches, pp)

    def _schedule(self, shape: tuple[int, ...], training: bool) -> Schedule:
        if training not in self._schedules or self._schedules[training][0] != shape:
            self._schedules[training] = shape, self._make_schedule(*shape)
        return self._schedules[training][1]

    def _make_schedule(self, n_batches: int, size: int, seq_len: int) -> Schedule:
        stages = [self._pipeline_stage(number, size, seq_len) for number in range(self.plan.stages_per_rank)]
        if self.plan.stages_per_rank > 1:
            return ScheduleInterleaved1F1B([*stages], n_batches, self._loss, scale_grads=False)
        return Schedule1F1B(stages[0], n_batches, self._loss, scale_grads=False)

    def _pipeline_stage(self, number: int, size: int, seq_len: int) -> PipelineStage:
        """With shapes stated, so that nothing has to be run to find them."""
        stage = self.stages[number]
        d_model = stage.config.d_model
        hidden = torch.empty(size, seq_len // self.plan.tp, d_model, dtype=self.dtype, device="meta").requires_grad_()
        tokens = torch.empty(size, seq_len, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device="meta").requires_grad_()
        return PipelineStage(
            stage,
            number * self.plan.pp + self.rank,
            self.plan.n_stages,
            self.device,
            input_args=tokens if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self._group,
        )

    def _loss(self, loss_sum: Tensor, targets: Tensor) -> Tensor:
        """The last stage has made the loss already, because only there the head is whole."""
        self._loss_sum += loss_sum.detach()
        return loss_sum / self._tokens


def _empty(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return torch.zeros_like(inputs), torch.full_like(targets, IGNORED)
