"""Stage 7: a checkpoint on held-out text and multiple choice, beside baselines, with samples of what it writes."""

import json
from typing import Any

from prefect.artifacts import create_table_artifact

from infra.cluster import Cluster
from tasks.cluster import run_on_cluster
from tasks.config import PipelineConfig
from tasks.manifest import Manifest, digest, record_bytes
from tasks.preflight import complete_steps
from tasks.stage import Stage, artifact_key, stage_task
from tasks.stages import evaluation_stage
from tasks.worker import WorkerJob


@stage_task("evaluate")
def evaluate(config: PipelineConfig, cluster: Cluster | None, tokens: Manifest, model: Manifest) -> Manifest:
    """evaluation/report.json for the run's last checkpoint."""
    stage = evaluation_stage(config, tokens, model.fingerprint)
    return stage.cached(done) if (done := stage.finished()) else _score(stage, config, cluster, config.training.steps)


@stage_task("score")
def score_checkpoint(config: PipelineConfig, cluster: Cluster | None, tokens: Manifest, step: int | None) -> Manifest:
    """scores/step-*/report.json for any checkpoint of the run; None takes the newest."""
    step = complete_steps(config.run_uri)[-1] if step is None else step
    stage = evaluation_stage(config, tokens, digest(step), f"scores/step-{step:08d}")
    return _score(stage, config, cluster, step)


def _score(stage: Stage, config: PipelineConfig, cluster: Cluster | None, step: int) -> Manifest:
    name = f"{stage.directory}/report.json"
    job = WorkerJob(kind="evaluate", config=config, result=name, step=step)
    result, usd = run_on_cluster(cluster, job, lambda sign: stage.progress(f"evaluating step {step:,}"))
    report = json.loads(result)
    test = report["documents"]["test"]
    scores = {"this model": test["bits_per_byte"], **test["baselines"]}
    rows = [{"model": name, "bits per byte": round(value, 4)} for name, value in scores.items()]
    key = artifact_key("bits-per-byte", f"{config.run_uri}-{step}")
    create_table_artifact(rows, key=key, description=f"Held-out text at step {step:,}, beside baselines")
    return stage.complete([record_bytes("report.json", result)], report, _summary(report), usd)


def _summary(report: dict[str, Any]) -> str:
    test = report["documents"]["test"]
    beside = ", ".join(f"{name} {value:.3f}" for name, value in test["baselines"].items())
    choices = "".join(f"; {name} {score['accuracy']:.0%}" for name, score in report["multiple_choice"].items())
    return f"{test['bits_per_byte']:.3f} bits a byte ({beside}){choices}"
