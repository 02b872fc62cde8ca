"""Stage 6: training, from the newest complete checkpoint to the last step."""

import json
from typing import Any

from infra.cluster import Cluster
from infra.storage import Storage
from model.goodput import Goodput
from tasks.cluster import ProgressArtifact, run_on_cluster
from tasks.config import PipelineConfig
from tasks.dataset import planned_epochs
from tasks.manifest import FileRecord, Manifest, record_bytes
from tasks.stage import artifact_key, stage_task
from tasks.stages import training_stage
from tasks.worker import WorkerJob

RESULT = "metrics/outcome.json"


@stage_task("train", retries=0)  # restarts after kills are the launcher's, from the newest checkpoint
def train(config: PipelineConfig, cluster: Cluster | None, tokens: Manifest) -> Manifest:
    """checkpoints/step-*/, metrics/train.jsonl and metrics/attempts.jsonl."""
    stage = training_stage(config, tokens)
    if done := stage.finished():
        return stage.cached(done)
    epochs = planned_epochs(config, tokens.counts)
    artifact = ProgressArtifact(artifact_key("training", config.run_uri), f"Training {config.run_uri}")

    def progress(sign: dict[str, Any]) -> None:
        if sign.get("phase") in ("training", "validation", "checkpoint"):
            artifact.update(sign["step"] / sign["steps"])
            stage.progress(f"step {sign['step']:,} of {sign['steps']:,}")

    result, usd = run_on_cluster(cluster, WorkerJob(kind="train", config=config, result=RESULT), progress)
    outcome = json.loads(result) | {"epochs": epochs}
    artifact.update(1.0)
    files = _last_checkpoint(stage.storage, config.training.steps)
    loss, validation = _nats(outcome["loss"]), _nats(outcome["validation_loss"])
    goodput = Goodput(**outcome["goodput"])
    summary = (
        f"{config.training.steps:,} steps, loss {loss}, validation {validation} nats a token; "
        f"goodput {_percent(goodput.share)}, {goodput.restarts:,} restarts; "
        f"{outcome['peak_memory_bytes'] / 2**30:.2f} GiB a rank"
    )
    return stage.complete(files, outcome, summary, usd)


def _last_checkpoint(storage: Storage, step: int) -> list[FileRecord]:
    """Every file of the last step's checkpoint, by its marker."""
    directory = f"step-{step:08d}"
    marker = storage.read(f"checkpoints/{directory}/complete.json")
    files = [FileRecord(name=f"{directory}/{name}", **file) for name, file in json.loads(marker)["files"].items()]
    return [*sorted(files, key=lambda file: file.name), record_bytes(f"{directory}/complete.json", marker)]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _nats(loss: float | None) -> str:
    """None where the metrics of a finished step were lost."""
    return "unknown" if loss is None else f"{loss:.3f}"
