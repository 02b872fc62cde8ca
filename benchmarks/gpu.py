"""One GPU, within ten minutes: J1-Large's layers and head by the real Learner beside a nanoGPT-style loop, in bf16 with
compile; the loss of its vocabulary beside the full logits; and what a step waits for a checkpoint's copy.

J1-Large itself needs several GPUs: a few of its 32 layers are trained, and the whole head. The micro-batch is the
largest power of two that fits; the sides run one after the other, since both would not. MFU is of the device's peak in
model/peaks.py, or where that has none, of the largest rate of torch.mm found here. Where there is no GPU, that is said
and the figures are null; `--quick --device cpu` shows that it runs.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Row, parser, report
from peers.nanogpt import NanoGPT
from peers.training_driver import Batches, Job, PlainLoop
from torch import Tensor
from train_steps import build_learner, model_config

from model.checkpoint_files import StagedFiles
from model.flops import training_flops_per_token
from model.loss import token_loss
from model.parallel_plan import ParallelPlan
from model.peaks import peak_of

NANOGPT, PLAIN, FIRST, MM = "nanogpt", "plain", "first copy", "torch.mm"
WHATS = {
    "MFU vs nanogpt": "of peak",
    "tokens per second vs nanogpt": "tokens per second",
    "micro-batch vs nanogpt": "sequences",
    "peak memory vs nanogpt": "GiB",
    "large-vocabulary loss time vs plain": "ms",
    "large-vocabulary loss memory vs plain": "GiB",
    "checkpoint staging": "GB/s",
    "blocked by a checkpoint's copy": "steps",
}


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    job: What is trained; its batch sizes are found.
    largest: The largest micro-batch that is tried.
    loss_tokens: Of the loss of the vocabulary.
    mm: The side of the matrices whose product is timed.
    """

    job: Job
    largest: int
    loss_tokens: int
    steps: int
    mm: int


_LARGE = Job(
    n_layer=4,
    n_head=32,
    d_model=4096,
    seq_len=2048,
    vocab_size=262_144,
    precision="bf16",
    sequences="",
    held_out=0,
    learning_rate=1.2e-4,
)
FULL = Sizes(_LARGE, largest=16, loss_tokens=4096, steps=8, mm=8192)
QUICK = Sizes(
    replace(_LARGE, n_layer=1, n_head=2, d_model=32, seq_len=32, vocab_size=512),
    largest=2,
    loss_tokens=64,
    steps=2,
    mm=64,
)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: shows that it runs")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("No GPU is here: nothing is measured.")
        report([Row(what, unit, None, {}, None, "") for what, unit in WHATS.items()], chosen)
        return
    sizes = QUICK if chosen.quick else FULL
    backend = "cpu:gloo,cuda:nccl" if chosen.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        report([*training_rows(sizes, chosen.device), *loss_rows(sizes, chosen.device)], chosen)
    finally:
        dist.destroy_process_group()


# Training.

Take = Callable[[int, Batches], object]


@dataclass(frozen=True)
class Speed:
    """A side's training: its micro-batch in sequences, the seconds of a step of two, and its peak of memory."""

    micro_batch: int
    seconds: float
    peak_bytes: int


def training_rows(sizes: Sizes, device: str) -> list[Row]:
    ours, copies = train_jumbo(sizes, device)
    theirs = train_nanogpt(sizes, device)
    peak = peak_of(torch.device(device), torch.bfloat16)
    rate, of = (peak.flops_per_second, peak.device) if peak else (matrix_rate(sizes, device), MM)
    job = sizes.job
    flops = training_flops_per_token(model_config(job), job.vocab_size)
    tokens = [2 * side.micro_batch * job.seq_len / side.seconds for side in (ours, theirs)]
    print(f"Peak: {rate / 1e12:.4g} TFLOP/s, {of}")
    figures = [
        [count * flops / rate for count in tokens],
        tokens,
        [side.micro_batch for side in (ours, theirs)],
        [side.peak_bytes / 2**30 if device == "cuda" else None for side in (ours, theirs)],
    ]
    rows = [row(what, jumbo, NANOGPT, peer) for what, (jumbo, peer) in zip(list(WHATS)[:4], figures, strict=True)]
    first, later, size = copies
    rows.append(row("checkpoint staging", size / later / 1e9, FIRST, size / first / 1e9))
    return [*rows, Row("blocked by a checkpoint's copy", "steps", later / ours.seconds, {}, None, "")]


def row(what: str, jumbo: float | None, name: str, peer: float | None) -> Row:
    ratio = jumbo / peer if jumbo is not None and peer else None
    return Row(what, WHATS[what], jumbo, {name: peer}, ratio, "")


def train_jumbo(sizes: Sizes, device: str) -> tuple[Speed, tuple[float, float, int]]:
    """Returns its speed; and of its state's copy the seconds of the first, whose memory is made, those of a later one,
    and its bytes."""

    def build(compiled: bool) -> Take:
        learner = build_learner(sizes.job, device, ParallelPlan(compile=compiled))
        built.append(learner)
        return lambda step, batches: learner.step(step, batches, sizes.job.rate(step))

    built: list = []
    speed = train(build, built.clear, sizes, device)
    state = built[-1].state()
    group = dist.new_group([0], backend="gloo")
    started = time.perf_counter()
    staged = StagedFiles(state, group)
    staged.copy(state)
    first = time.perf_counter() - started
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        staged.copy(state)
        seconds.append(time.perf_counter() - started)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    del staged, state
    built.clear()
    return speed, (first, statistics.median(seconds), size)


def train_nanogpt(sizes: Sizes, device: str) -> Speed:
    """With the whole model compiled, as nanoGPT does."""
    job = sizes.job

    def build(compiled: bool) -> Take:
        with torch.device(device):
            model = NanoGPT(job.n_layer, job.n_head, job.d_model, job.seq_len, job.vocab_size)
        return PlainLoop(job, model, torch.compile(model) if compiled else model).train

    return train(build, lambda: None, sizes, device)


def train(build: Callable[[bool], Take], drop: Callable[[], None], sizes: Sizes, device: str) -> Speed:
    """Finds the micro-batch without compile, which needs no less memory, and times steps of two of them with it.

    Args:
        build: Makes the side, compiled or not; what it keeps of it is gone after `drop`.
    """
    take, fitting = build(False), 0
    for size in (2**power for power in range(sizes.largest.bit_length())):
        if not fits(take, sizes.job, size):
            break
        fitting = size
    if not fitting:
        raise RuntimeError("not even one sequence fits the GPU's memory")
    del take
    drop()
    release(device)
    take = build(device == "cuda")
    batches = random_batches(sizes.job, fitting)
    for step in range(3):
        take(step, batches)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(lambda: take(9, batches), device) for _ in range(sizes.steps)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Speed(fitting, statistics.median(seconds), peak)


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def fits(take: Take, job: Job, micro_batch: int) -> bool:
    try:
        take(0, random_batches(job, micro_batch))
        take(1, random_batches(job, micro_batch))  # the optimizer's state is there now
    except torch.OutOfMemoryError:
        return False
    return True


def random_batches(job: Job, micro_batch: int) -> Batches:
    tokens = torch.randint(job.vocab_size, (2 * micro_batch, job.seq_len + 1))
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(micro_batch)]


def timed(work: Callable[[], object], device: str) -> float:
    """The seconds until all of it is done."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_rate(sizes: Sizes, device: str) -> float:
    left, right = (torch.randn(sizes.mm, sizes.mm, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(timed(lambda: left @ right, device) for _ in range(20))
    return 2 * sizes.mm**3 / seconds


# The loss.


def loss_rows(sizes: Sizes, device: str) -> list[Row]:
    """Forward and backward; memory beside inputs and the gradient of the weight."""
    release(device)
    job = sizes.job
    hidden = torch.randn(1, sizes.loss_tokens, job.d_model, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.empty(job.vocab_size, job.d_model, device=device, dtype=torch.bfloat16).normal_(std=0.02)
    weight.requires_grad_()
    targets = torch.randint(job.vocab_size, (1, sizes.loss_tokens), device=device)
    forms = {
        "jumbo": token_loss,
        PLAIN: lambda hidden, weight, targets: F.cross_entropy(
            (hidden @ weight.t()).flatten(0, 1).float(), targets.flatten(), reduction="sum"
        ),
    }
    results = {name: measure_loss(form, hidden, weight, targets, device) for name, form in forms.items()}
    (ours, our_bytes), (theirs, their_bytes) = results["jumbo"], results[PLAIN]
    return [
        row("large-vocabulary loss time vs plain", 1000 * ours, PLAIN, 1000 * theirs),
        row("large-vocabulary loss memory vs plain", our_bytes, PLAIN, their_bytes),
    ]


def measure_loss(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, device: str
) -> tuple[float, float | None]:
    """Returns the median seconds, and GiB, which only a GPU tells."""

    def once() -> None:
        hidden.grad = weight.grad = None
        (form(hidden, weight, targets) / targets.numel()).backward()

    once()
    hidden.grad = weight.grad = None
    release(device)
    if device != "cuda":
        return statistics.median(timed(once, device) for _ in range(3)), None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(once, device) for _ in range(5))
    return seconds, (torch.cuda.max_memory_allocated() - before - weight.nbytes) / 2**30


if __name__ == "__main__":
    main()
