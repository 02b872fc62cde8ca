"""The worker with a fault: `python -m life_worker FAULT JOB`."""

import os
import runpy
import sys
import time
from typing import Any

from infra.storage import open_storage
from model.data.tokens.batches import TokenDataset
from model.learner import Learner
from model.trainer import Trainer
from tasks.worker import WorkerJob

fault = sys.argv.pop(1)


def none() -> None:
    pass


def sleep_in_the_loader_once() -> None:
    """In the second generation, rank 1 gets no more batches after some."""
    storage = open_storage(WorkerJob.model_validate_json(sys.argv[1]).config.run_uri)
    attempts = storage.read("metrics/attempts.jsonl") if storage.list("metrics") else b""
    if os.environ["RANK"] != "1" or attempts.count(b"\n") != 1:
        return
    original, calls = TokenDataset.batch, iter(range(10**9))

    def batch(self: TokenDataset, *arguments: Any) -> Any:
        if next(calls) > 40:
            time.sleep(3600)
        return original(self, *arguments)

    TokenDataset.batch = batch  # type: ignore[method-assign]


def sleep_in_validation() -> None:
    Trainer.validate = lambda self: time.sleep(3600)  # type: ignore[method-assign, assignment, return-value]


def sleep_in_the_first_step() -> None:
    """As when it is compiled."""
    Learner.step = lambda *_: time.sleep(3600)  # type: ignore[method-assign, assignment, return-value]


{f.__name__: f for f in (none, sleep_in_the_loader_once, sleep_in_validation, sleep_in_the_first_step)}[fault]()
runpy.run_module("tasks.worker", run_name="__main__")
