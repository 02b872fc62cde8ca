"""The metrics where the pipeline keeps them: in a run directory, which may be remote."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import tiny_config, write_corpus

from infra.storage import open_storage
from model.metrics import MetricsLog
from tasks.preflight import check_run
from tasks.worker import Rank, _metrics_log


def begin_on(scratch: Path, uri: str, step: int) -> tuple[MetricsLog, Any]:
    """An attempt from `step` on whose machine is new, and its open log."""
    training = SimpleNamespace(tensorboard=True)
    rank = SimpleNamespace(
        rank=0, scratch=scratch, storage=open_storage(uri), config=SimpleNamespace(training=training)
    )
    opened = _metrics_log(cast(Rank, rank))
    metrics, _ = opened.__enter__()
    metrics.begin(step)
    return metrics, opened


def test_attempts_and_tensorboard_travel_with_the_metrics(s3_bucket: str, tmp_path: Path) -> None:
    for number, first_step in enumerate([0, 2]):
        metrics, opened = begin_on(tmp_path / str(number), f"{s3_bucket}/run", first_step)
        for step in range(first_step + 1, first_step + 4):
            metrics.write({"step": step, "loss": 1.0})
        opened.__exit__(None, None, None)
    run = open_storage(f"{s3_bucket}/run/metrics")
    assert [json.loads(line)["step"] for line in run.read("train.jsonl").splitlines()] == [1, 2, 3, 4, 5]
    attempts = [json.loads(line) for line in run.read("attempts.jsonl").splitlines()]
    assert [(attempt["first_step"], attempt["lost_steps"]) for attempt in attempts] == [(0, 0), (2, 1)]
    assert len([entry for entry in run.list("tensorboard") if "events.out.tfevents" in entry.name]) == 2


def test_tensorboard_that_is_asked_for_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path / "run", write_corpus(tmp_path), training={"tensorboard": True})
    check_run(config)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    with pytest.raises(
        ValueError, match=r"^training\.tensorboard \(True\) needs the package tensorboard, which is not"
    ):
        check_run(config)
    check_run(tiny_config(tmp_path / "run", write_corpus(tmp_path)))
