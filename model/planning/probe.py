"""Measures a cluster from inside its ranks, with the code that will train on it."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from model.checkpoint import Checkpointer
from model.config import ModelConfig, ScalingConfig, TrainingConfig
from model.data.tokens.batches import TokenDataset, rank_batches
from model.data.tokens.mixture import Mixture
from model.learner import Learner
from model.parallel import AXES
from model.parallel_plan import ParallelPlan
from model.pipeline import Batches
from model.planning.scaling import AllReduce, ScalingMeasurement, ShortRun


def measure(
    *,
    model_config: ModelConfig,
    training_config: TrainingConfig,
    scaling_config: ScalingConfig,
    vocab_size: int,
    seed: int,
    data: TokenDataset,
    order: Mixture,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    checkpointer: Checkpointer,
) -> ScalingMeasurement:
    """Everything the gate needs. All ranks call it, and all return the same.

    Args:
        mesh: all ranks.
        checkpointer: on the storage that checkpoints will go to, below a prefix that the caller removes afterwards.
    """

    def build(plan: ParallelPlan, mesh: DeviceMesh) -> Learner:
        return Learner(model_config, training_config, vocab_size, seed, plan, mesh)

    all_reduce = tuple(measure_all_reduce(mib, mesh.device_type) for mib in scaling_config.all_reduce_mib)
    # One copy of the model alone gets the work it has among all, so that efficiency compares like with like.
    sequences = -(-training_config.global_batch_size // plan.dp)
    batches = _random_batches(model_config.seq_len, vocab_size, sequences, training_config.micro_batch_size)
    alone = replace(plan, replicas=1, shards=1)
    one_copy = DeviceMesh(mesh.device_type, mesh.mesh[:, :1, :1, :], mesh_dim_names=AXES)
    one = measure_throughput(partial(build, alone, one_copy), batches, one_copy, scaling_config)
    everything = measure_throughput(partial(build, plan, mesh), batches, mesh, scaling_config)
    learner = build(plan, mesh)
    first_batch = order.sequence_ids(0, training_config.global_batch_size)
    micro_batches = rank_batches(first_batch, learner.data_rank, plan.dp, training_config.micro_batch_size)
    short_run = run_short(learner, [data.batch(ids) for ids in micro_batches], scaling_config.short_run_steps)
    save_seconds, load_seconds = measure_checkpoint(learner, checkpointer, scaling_config.short_run_steps)
    return ScalingMeasurement(
        ranks=mesh.size(),
        copies=plan.dp,
        all_reduce=all_reduce,
        tokens_per_second_one_copy=one,
        tokens_per_second=everything,
        peak_memory_gib=learner.peak_memory_bytes() / 2**30,
        checkpoint_save_seconds=save_seconds,
        checkpoint_load_seconds=load_seconds,
        short_run=short_run,
    )


def measure_all_reduce(mib: int, device_type: str, repeats: int = 5) -> AllReduce:
    """Bus bandwidth of a sum over all n ranks: bytes / seconds x 2 (n - 1) / n, which more ranks do not lower.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    """
    ranks = dist.get_world_size()
    message = torch.zeros(mib * 2**20 // 4, dtype=torch.float32, device=device_type)

    def reduce_all() -> None:
        for _ in range(repeats):
            dist.all_reduce(message)

    reduce_all()  # connections and buffers are made at first use
    seconds = _slowest(_timed(reduce_all, device_type), device_type) / repeats
    return AllReduce(mib, message.nbytes / seconds * 2 * (ranks - 1) / ranks / 1e9)


def measure_throughput(
    build: Callable[[], Learner], batches: Batches, mesh: DeviceMesh, config: ScalingConfig
) -> float:
    """Tokens per second of real training steps on the ranks of `mesh`; the other ranks wait for them.

    The median step counts: with so few of them, one that something else on the machine slows would spoil a mean.
    """
    seconds = 0.0
    if mesh.get_coordinate() is not None:
        learner = build()

        def step() -> None:
            learner.step(0, batches, learner.config.learning_rate)

        steps = [_timed(step, mesh.device_type) for _ in range(config.warmup_steps + config.timed_steps)]
        seconds = median(steps[config.warmup_steps :])
    copies = mesh["replicas"].size() * mesh["shards"].size()
    tokens = sum(inputs.numel() for inputs, _ in batches) * copies
    return tokens / _slowest(seconds, mesh.device_type)


def run_short(learner: Learner, batches: Batches, steps: int) -> ShortRun:
    """Steps of the real model at full batch size, all on the run's first batch, up to the peak learning rate.

    On one batch the loss must fall within a few steps if gradients, reduction and optimizer work; over different
    batches, in the first steps of a long warm-up, it need not. Without a warm-up the first steps overshoot.
    """
    peak = learner.config.learning_rate
    losses = [learner.step(step, batches, peak * (step + 1) / steps).loss for step in range(steps)]
    return ShortRun(steps, losses[0], losses[-1])


def measure_checkpoint(learner: Learner, checkpointer: Checkpointer, step: int) -> tuple[float, float]:
    """Seconds to save the state until its marker is stored, and to load it."""

    def save() -> None:
        checkpointer.save(step, learner.state(), {})
        checkpointer.wait()

    def load() -> None:
        loaded = checkpointer.load_latest(learner.state(), {}, required=True)
        assert loaded == step, f"saved step {step} and loaded {loaded}"

    device_type = learner.device.type
    return _slowest(_timed(save, device_type), device_type), _slowest(_timed(load, device_type), device_type)


def _random_batches(seq_len: int, vocab_size: int, sequences: int, micro_batch_size: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (sequences, seq_len + 1), generator=generator)
    return [(micro[:, :-1], micro[:, 1:]) for micro in tokens.split(micro_batch_size)]


def _timed(work: Callable[[], None], device_type: str) -> float:
    """Seconds that `work` takes, including what it left running on the GPU."""
    if device_type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _slowest(seconds: float, device_type: str) -> float:
    """The most that any rank of the job took."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device_type)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
