"""A run in quiet, the same run under faults: their directory, their length, and what they share.

DIR/corpus.jsonl, quiet/       the quiet run
DIR/state/                     clusters of both
DIR/attempts/NNN/              what each attempt of the disturbed run said, and the logs of its ranks
DIR/disk/                      a small disk, in memory: the disturbed run, or only its scratch where that is in S3
DIR/disturbed/                 the disturbed run, from that disk, where it came out otherwise than the quiet one
DIR/s3/, s3.log                the S3 server
"""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from infra.chaos.disk import SmallDisk
from infra.chaos.plan import DISK_KINDS, Kind, make_plan
from infra.chaos.s3_proxy import S3Proxy
from infra.chaos.s3_server import create_bucket, s3_server
from infra.storage import open_storage
from tasks.chaos import ChaosFailure, DisturbedRun, Fault, copy_stages, end_clusters
from tasks.chaos_flow import FlowAttempts, start_flow
from tasks.chaos_verdict import differences, final_hashes, overall_hash
from tasks.config import PipelineConfig
from tasks.manifest import read_manifest

TRAINING_SECONDS = 2.0
"""Of undisturbed training for every fault: to be ahead again of what was there before, and to save."""
FAULT_SECONDS = 6.0
"""That a fault takes with its recovery, at least: the time may be over before all that is planned has come."""
MIN_STEPS_PER_FAULT = 16
CHECKPOINTS_PER_FAULT = 4
SPARE_FAULTS = 5
"""Whose steps stay free at the end: the ranks train on while nobody watches them, after a kill of the flow."""
DOCUMENTS, WORDS = 150, 800


@dataclass(frozen=True)
class Outcome:
    """Of the disturbed run.

    Attributes:
        not_injected: kinds that could not be, and why.
        differences: from the quiet run, in lines; empty where there are none.
        hash: of the quiet run's final weights and optimizer state.
    """

    faults: list[Fault]
    not_injected: dict[Kind, str]
    differences: list[str]
    hash: str


class Experiment:
    """Both runs of one configuration.

    Args:
        config: without a run directory, sources and a number of steps, which are the experiment's.
        directory: empty.
        say: told what happens, a line at a time.
    """

    def __init__(self, config: PipelineConfig, directory: Path, say: Callable[[str], None]) -> None:
        self._directory, self._say = directory, say
        self._state_dir = directory / "state"
        self._quiet_uri = str(directory / "quiet")
        corpus = directory / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in _documents(config.seed)))
        data = config.data.model_dump() | {"sources": [{"uri": str(corpus), "name": "made-up"}]}
        self._config = PipelineConfig.model_validate(config.model_dump() | {"run_uri": self._quiet_uri, "data": data})
        self._steps_per_fault = MIN_STEPS_PER_FAULT

    def run_quietly(self, faults: int) -> None:
        """Prepare, measure, and train for as many steps as give every fault its time.

        Raises:
            ChaosFailure: the run failed, with nothing to disturb it.
        """
        self._write_config(self._config)
        self._run_quietly("validate-scaling")
        measured = read_manifest(self._quiet_uri, "scaling").counts
        training = self._config.training
        step_seconds = training.global_batch_size * self._config.model.seq_len / measured["tokens_per_second"]
        self._steps_per_fault = max(MIN_STEPS_PER_FAULT, math.ceil(TRAINING_SECONDS / step_seconds))
        every = self._steps_per_fault // CHECKPOINTS_PER_FAULT
        steps = self._steps_per_fault * (1 + faults + SPARE_FAULTS)
        self._say(f"{steps:,} steps of {1000 * step_seconds:.0f} ms, a checkpoint every {every} steps, {faults} faults")
        changed = training.model_copy(update={"steps": steps, "checkpoint_every_steps": every})
        self._config = self._config.model_copy(update={"training": changed})
        self._write_config(self._config)
        self._run_quietly("pretrain")

    def run_disturbed(
        self, kinds: Sequence[Kind], faults: int, seconds: float, storage: Literal["file", "s3"]
    ) -> Outcome:
        """Train again, under faults, and compare.

        Raises:
            ChaosFailure: no fault of these kinds can be injected here.
        """
        seed = self._config.seed
        with ExitStack() as stack:
            disk = stack.enter_context(SmallDisk(self._directory / "disk"))
            run_uri, proxy, variables = str(disk.path / "run"), None, {}
            if storage == "s3":
                run_uri, proxy = stack.enter_context(self._s3_run(seed))
                (disk.path / "tmp").mkdir()
                variables = {"AWS_ENDPOINT_URL": proxy.endpoint, "TMPDIR": str(disk.path / "tmp")}
            not_injected = {kind: disk.why_not for kind in kinds if disk.why_not and kind in DISK_KINDS}
            possible = [kind for kind in kinds if kind not in not_injected]
            if not possible:
                raise ChaosFailure(f"nothing can be injected: {disk.why_not}")
            first_step = self._steps_per_fault  # by then there are checkpoints to damage
            last_step = self._config.training.steps - SPARE_FAULTS * self._steps_per_fault
            plan = make_plan(possible, faults, first_step, last_step, seed)
            copy_stages(self._quiet_uri, run_uri)
            flow = FlowAttempts(run_uri, self._state_dir, self._directory / "attempts", variables)
            run = DisturbedRun(flow, run_uri, disk, proxy, plan, seconds, self._say)
            try:
                run.run()
                found = differences(self._quiet_uri, run_uri)
                found += [f"the run ended before {kind} had come" for kind in run.missing]
            except ChaosFailure as failure:
                found = [str(failure)]
            if found and storage == "file" and not disk.why_not:  # the disk's content ends with the disk
                shutil.copytree(disk.path / "run", self._directory / "disturbed")
            return Outcome(run.faults, not_injected, found, overall_hash(final_hashes(self._quiet_uri)))

    @contextmanager
    def _s3_run(self, seed: int) -> Iterator[tuple[str, S3Proxy]]:
        """A run directory in S3, which this process reaches itself, and the proxy through which the run does."""
        # The server takes the key for its own, and no process of the run may have another.
        os.environ |= {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos-secret-0123456789"}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        with s3_server(self._directory / "s3") as endpoint, S3Proxy(endpoint, seed) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            yield f"{create_bucket(endpoint)}/run", proxy

    def _write_config(self, config: PipelineConfig) -> None:
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        open_storage(self._quiet_uri).write("config.yaml", text.encode())

    def _run_quietly(self, command: str) -> None:
        """A command of the quiet run, which shows its own progress."""
        flow = start_flow(command, self._quiet_uri, self._state_dir, {})
        try:
            if code := flow.wait():
                raise ChaosFailure(f"the quiet run failed: jumbo {command} ended with exit code {code}")
        finally:
            flow.kill()
            end_clusters(self._state_dir)


def _documents(seed: int) -> Iterator[str]:
    """Made-up prose, whose words follow Zipf's law."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("etaoinshrdlu", k=2 + number % 7)) for number in range(WORDS)]
    weights = [1 / (rank + 1) for rank in range(WORDS)]
    for _ in range(DOCUMENTS):
        sentences = (" ".join(chance.choices(words, weights, k=chance.randint(5, 14))) for _ in range(20))
        yield "\n".join(f"{sentence.capitalize()}." for sentence in sentences)
