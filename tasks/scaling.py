"""Stage 5: the gate. Measures the cluster with the real model and stops the run below the thresholds."""

import json
from typing import Any

from prefect.artifacts import create_table_artifact

from infra.cluster import Cluster
from tasks.cluster import run_on_cluster
from tasks.config import PipelineConfig
from tasks.manifest import Manifest, record_bytes
from tasks.stage import artifact_key, stage_task
from tasks.stages import scaling_stage
from tasks.worker import WorkerJob

RESULT = "scaling/report.json"


class ScalingGateError(RuntimeError):
    """The cluster does not reach the thresholds; nothing was trained."""


@stage_task("validate-scaling")
def validate_scaling(config: PipelineConfig, cluster: Cluster | None, tokens: Manifest) -> Manifest:
    """scaling/report.json: all-reduce, throughput, efficiency, memory, checkpoints and a short run, and the verdict.

    Raises:
        ScalingGateError: with the figures that are not reached.
    """
    stage = scaling_stage(config, tokens)
    if done := stage.finished():
        return stage.cached(done)
    stage.storage.delete("scaling/checkpoints")  # of a measurement that was killed
    job = WorkerJob(kind="validate-scaling", config=config, result=RESULT)
    result, usd = run_on_cluster(cluster, job, lambda sign: stage.progress("measuring the cluster"))
    report: dict[str, Any] = json.loads(result)
    key = artifact_key("scaling", config.run_uri)
    create_table_artifact([_row(check) for check in report["checks"]], key=key, description="The gate before training")
    failed = [check for check in report["checks"] if not check["passed"]]
    if failed:
        lines = "; ".join(_fault(check) for check in failed)
        raise ScalingGateError(f"scaling validation says no-go, nothing was trained: {lines} (all in {RESULT})")
    summary = (
        f"go: {report['ranks']} ranks, {report['tokens_per_second']:,.0f} tokens/s, "
        f"efficiency {report['efficiency']:.0%}, all {len(report['checks'])} checks passed"
    )
    return stage.complete([record_bytes("report.json", result)], report, summary, usd)


def _row(check: dict[str, Any]) -> dict[str, Any]:
    return {"check": check["name"], "measured": f"{check['measured']:.4g} {check['unit']}".strip()} | {
        "bound": f"{check['relation']} {check['bound']:.4g}",
        "passed": "yes" if check["passed"] else "NO",
        "what it is": check["explanation"],
    }


def _fault(check: dict[str, Any]) -> str:
    measured = f"{check['measured']:.4g} {check['unit']}".strip()
    return f"{check['name']} is {measured}, must be {check['relation']} {check['bound']:.4g}"
