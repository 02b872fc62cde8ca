"""Shuffled reading of training sequences: beside a raw memory map of the same windows, and MosaicML streaming.

Everyone reads every window of one file of tokens once, in a random order, and gives batches of int64 tensors
(B, T + 1). The raw map is a NumPy memory map whose windows are stacked, in an order that is known beforehand; Jumbo
computes its order as it goes, a step of 1,600 sequences at a time (3.2 million tokens, as Jurassic-1's).
"""

import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import Row, arguments, paired, peer_python, report

from model.data.tokens.batches import TokenDataset
from model.data.tokens.mixture import Mixture, Source
from model.data.tokens.shards import ShardWriter, TokenShard

HERE = Path(__file__).parent
PEER = "MosaicML streaming"
RAW = "raw memory map"
SEQ_LEN = 2048
BATCH_SIZE = 16
STEP_SEQUENCES = 1600
SHARD_TOKENS = 16 << 20


def main() -> None:
    options = arguments(__doc__ or "")
    n_tokens = (8 << 20) if options.quick else (128 << 20)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        report([measure(Path(folder), n_tokens, 1 if options.quick else 5)], options)


def measure(folder: Path, n_tokens: int, rounds: int) -> Row:
    shards, raw = write(folder, n_tokens)
    dataset = TokenDataset([[TokenShard(path).tokens for path in shards]], SEQ_LEN)
    check(dataset, raw)
    streaming = prepare_streaming(raw, folder / "mds")
    figures = paired(partial(read_dataset, dataset), {RAW: partial(read_map, raw), PEER: streaming}, rounds)
    return Row(
        "shuffled read vs memory map",
        "tokens per second",
        figures.jumbo,
        figures.peers,
        figures.ratios[RAW],
        ">= 0.8",
    )


def write(folder: Path, n_tokens: int) -> tuple[list[Path], Path]:
    """Returns shards, and one file with the same tokens."""
    random = np.random.default_rng(0)
    shards, raw = [], folder / "tokens.bin"
    with raw.open("wb") as file:
        for number, start in enumerate(range(0, n_tokens, SHARD_TOKENS)):
            tokens = random.integers(0, 262_144, min(SHARD_TOKENS, n_tokens - start), np.uint32)
            shards.append(folder / f"part-{number:05}.tokens")
            with ShardWriter(shards[-1]) as writer:
                writer.extend(tokens, np.array([len(tokens)]))
            file.write(tokens.tobytes())
    return shards, raw


def check(dataset: TokenDataset, raw: Path) -> None:
    """Both read the same windows."""
    tokens = np.memmap(raw, np.uint32, mode="r")
    for number in (0, 1, len(dataset) // 2, len(dataset) - 1):
        start = number * SEQ_LEN
        if not np.array_equal(dataset.sequence(number), tokens[start : start + SEQ_LEN + 1]):
            raise AssertionError(f"sequence {number} is not the window of the map")


def read_dataset(dataset: TokenDataset) -> float:
    order = Mixture([Source("", len(dataset))], seed=1)
    count, started = 0, time.perf_counter()
    for first in range(0, len(dataset), STEP_SEQUENCES):
        ids = order.sequence_ids(first, min(STEP_SEQUENCES, len(dataset) - first))
        for place in range(0, len(ids), BATCH_SIZE):
            inputs, _ = dataset.batch(ids[place : place + BATCH_SIZE])  # inputs and targets share (B, T + 1)
            count += inputs.shape[0] * (inputs.shape[1] + 1)
    return count / (time.perf_counter() - started)


def read_map(raw: Path) -> float:
    tokens = np.memmap(raw, np.uint32, mode="r")
    order = np.random.default_rng(1).permutation((len(tokens) - 1) // SEQ_LEN) * SEQ_LEN
    count, started = 0, time.perf_counter()
    for place in range(0, len(order), BATCH_SIZE):
        windows = [tokens[start : start + SEQ_LEN + 1] for start in order[place : place + BATCH_SIZE].tolist()]
        count += torch.from_numpy(np.stack(windows).astype(np.int64)).numel()
    return count / (time.perf_counter() - started)


def prepare_streaming(raw: Path, folder: Path) -> Callable[[], float] | None:
    """Returns what reads with MosaicML streaming once; None where it is missing."""
    python = peer_python("streaming", dependencies=False)
    if python is None:
        return None
    driver = HERE / "peers" / "streaming_driver.py"

    def run(*command: object) -> str:
        done = subprocess.run([python, driver, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{PEER} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    run("write", raw, SEQ_LEN, folder)
    return lambda: float(run("read", folder, BATCH_SIZE))


if __name__ == "__main__":
    main()
