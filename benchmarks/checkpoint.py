"""Checkpoints beside plain torch.distributed.checkpoint (DCP) on disk, and DCP by s3fs and s3torchconnector on S3.

Two ranks save and load the same gigabyte, parameters and two moments of a GPT-2 in fp32. The S3 server is SeaweedFS, on
this machine, so its work is in every figure. DCP saves once as `dcp.save` and once as `dcp.async_save`, Jumbo twice in
the background: speed is that of the faster, what blocks is of the second, memory that of the save with a copy of the
state. Memory is the peak of both ranks beyond what they held before. What is loaded from disk is not in the page cache,
as after a restart of the machine. Jumbo alone hashes every byte when it saves, and verifies it when it loads.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from measure import ROOT, Row, alternate, arguments, compare, peer_python, report

from infra.chaos.s3_server import create_bucket, s3_server

HERE = Path(__file__).parent
DCP, S3FS, CONNECTOR = "dcp", "s3fs", "s3torchconnector"
MEGABYTES, QUICK_MEGABYTES = 1000, 20
DEADLINE_SECONDS = 600
WORLD_SIZE = 2

Figures = dict[str, Any]
Runs = dict[str, list[Figures]]


def main() -> None:
    options = arguments(__doc__ or "")
    megabytes, rounds = (QUICK_MEGABYTES, 1) if options.quick else (MEGABYTES, 3)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        disk = alternate(
            {
                "jumbo": partial(run, "jumbo", f"{folder}/jumbo", megabytes),
                DCP: partial(run, DCP, f"{folder}/dcp", megabytes),
            },
            rounds,
        )
        with s3_bucket(Path(folder)) as bucket:
            s3 = alternate(s3_works(bucket, megabytes), rounds)
    report(rows(s3, disk), options)


def s3_works(bucket: str, megabytes: int) -> dict[str, Callable[[], Figures]]:
    works: dict[str, Callable[[], Figures]] = {"jumbo": partial(run, "jumbo", f"{bucket}/jumbo", megabytes)}
    python = peer_python("checkpoint", dependencies=False)
    if python:
        for peer in (S3FS, CONNECTOR):
            works[peer] = partial(run, peer, f"{bucket}/{peer}", megabytes, python)
    return works


def run(side: str, uri: str, megabytes: int, python: Path = Path(sys.executable)) -> Figures:
    """What peers/checkpoint_driver.py says of one side, in a place that is emptied after it."""
    driver = HERE / ("checkpoint_ranks.py" if side == "jumbo" else "peers/checkpoint_driver.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT) if side == "jumbo" else ""}
    with tempfile.TemporaryDirectory() as local:
        command: list[str | Path] = [
            python,
            driver,
            side,
            f"{uri}/{uuid.uuid4().hex}",
            str(megabytes),
            f"{local}/store",
        ]
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(WORLD_SIZE)
        ]
        try:
            said = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, said, strict=True):
            if process.returncode:
                raise RuntimeError(f"{side} failed:\n{errors[-4000:]}")
    if "://" not in uri:
        shutil.rmtree(uri)
    figures: Figures = json.loads(said[0][0].splitlines()[-1])
    return figures


def rows(s3: Runs, disk: Runs) -> list[Row]:
    peers = [S3FS, CONNECTOR]
    shares = [figures["save"][-1]["blocked_seconds"] / figures["save"][-1]["seconds"] for figures in disk["jumbo"]]
    return [
        row("s3 save vs best peer", "MB/s", s3, peers, save_speed, ">= 1.0"),
        row("s3 load vs best peer", "MB/s", s3, peers, load_speed, ">= 1.0"),
        row("disk save vs dcp", "MB/s", disk, [DCP], save_speed, ">= 1.0"),
        row("disk load vs dcp", "MB/s", disk, [DCP], load_speed, ">= 1.0"),
        Row("blocked share of synchronous save", "", statistics.median(shares), {}, None, "<= 0.15"),
        row("s3 save memory vs best peer", "MiB", s3, peers, save_memory, "<= 1.0"),
        row("s3 load memory vs best peer", "MiB", s3, peers, load_memory, "<= 1.0"),
        row("disk save memory vs dcp", "MiB", disk, [DCP], save_memory, "<= 1.0"),
        row("disk load memory vs dcp", "MiB", disk, [DCP], load_memory, "<= 1.0"),
        row("blocked by a save to s3", "s", s3, peers, blocked, "<= 1.0"),
        row("blocked by a save to disk", "s", disk, [DCP], blocked, "<= 1.0"),
        row("first save to disk", "MB/s", disk, [], first_save_speed, ""),
        row("cpu of a load from disk", "s", disk, [DCP], load_cpu, ""),
    ]


def row(what: str, unit: str, runs: Runs, peers: list[str], figure: Callable[[Figures], float], goal: str) -> Row:
    """The ratio is to the best peer, which is the largest for a floor and the smallest for a ceiling."""
    result = compare({name: [figure(figures) for figures in of_name] for name, of_name in runs.items()}, peers)
    ratios = [ratio for ratio in result.ratios.values() if ratio is not None]
    best = (max if goal.startswith("<") else min)(ratios) if ratios else None
    return Row(what, unit, result.jumbo, result.peers, best, goal)


def save_speed(figures: Figures) -> float:
    return figures["bytes"] / 1e6 / min(save["seconds"] for save in figures["save"])


def first_save_speed(figures: Figures) -> float:
    """With the memory for the copy of the state still to be had."""
    return figures["bytes"] / 1e6 / figures["save"][0]["seconds"]


def load_speed(figures: Figures) -> float:
    return figures["bytes"] / 1e6 / figures["load"]["seconds"]


def save_memory(figures: Figures) -> float:
    """Of the save in the background, with its copy of the state; one that blocks has none."""
    return max(save["memory_bytes"] for save in figures["save"]) / 2**20


def load_memory(figures: Figures) -> float:
    return figures["load"]["memory_bytes"] / 2**20


def load_cpu(figures: Figures) -> float:
    return figures["load"]["cpu_seconds"]


def blocked(figures: Figures) -> float:
    return figures["save"][-1]["blocked_seconds"]


@contextmanager
def s3_bucket(folder: Path) -> Iterator[str]:
    """The URI of a bucket on a server of its own; the environment leads to it."""
    os.environ.update(
        AWS_ACCESS_KEY_ID="benchmark",
        AWS_SECRET_ACCESS_KEY="benchmark-secret",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    with s3_server(folder / "s3") as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        yield create_bucket(endpoint)


if __name__ == "__main__":
    main()
