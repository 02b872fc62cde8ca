"""Stage 8: report.html and report.json in the run directory, and the same as artifacts in Prefect."""

import base64
import json
from datetime import UTC, datetime
from typing import Any, cast

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from infra.storage import FileStorage, Storage, open_storage
from model.config import Section
from model.evaluation.facts import Facts
from model.evaluation.report import figures, render, summary_markdown
from model.flops import parameter_count
from model.metrics import parse_lines
from tasks.config import PipelineConfig
from tasks.manifest import Manifest, record_bytes
from tasks.stage import Stage, artifact_key, say_outcome, stage_task
from tasks.stages import report_stage
from tasks.worker import METRICS


class RunResult(Section):
    """What a finished run gives to whoever called it."""

    run_uri: str
    report_uri: str
    checkpoint_uri: str
    bits_per_byte: float
    baselines: dict[str, float]
    cost_usd: float


@stage_task("report")
def publish(config: PipelineConfig, manifests: list[Manifest]) -> RunResult:
    """report.html, self-contained, and report.json with all its facts."""
    stage = report_stage(config, manifests)
    if done := stage.finished():
        return stage.cached(done, _result(config, manifests))
    facts = run_facts(config, manifests, stage.storage)
    page, data = render(facts).encode(), json.dumps(facts, indent=1).encode()
    stage.storage.write("report.json", data)
    stage.storage.write("report.html", page)
    result = _result(config, manifests)
    _publish_artifacts(facts, result)
    stage.complete([record_bytes("report.html", page), record_bytes("report.json", data)], {}, result.report_uri)
    return result


@stage_task("report")
def publish_data(config: PipelineConfig, manifests: list[Manifest]) -> str:
    """report.html of data preparation alone; its URI. `pretrain` writes the whole one over it."""
    stage = Stage(config.run_uri, "report", "", {}, {})
    facts = cast(Facts, data_facts(config, manifests))
    stage.storage.write("report.json", json.dumps(facts, indent=1).encode())
    stage.storage.write("report.html", render(facts).encode())
    report_uri = f"{config.run_uri}/report.html"
    say_outcome(stage.name, "done", stage.seconds, report_uri)
    return report_uri


def data_facts(config: PipelineConfig, manifests: list[Manifest]) -> dict[str, Any]:
    """What the report shows of the stages that the manifests are of."""
    counts = {manifest.stage: manifest.counts for manifest in manifests}
    facts = {
        "run": {
            "uri": config.run_uri,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": sum(manifest.seconds for manifest in manifests),
            "cost_usd": sum(manifest.cost_usd for manifest in manifests),
        },
        "configuration": config.model_dump(mode="json"),
        "stages": [
            {"name": m.stage, "outcome": "completed", "seconds": m.seconds, "cost_usd": m.cost_usd} for m in manifests
        ],
        "funnel": counts["preprocess"],
    }
    for stage in ("tokenizer", "tokens"):
        if stage in counts:
            facts[stage] = counts[stage]["splits"] if stage == "tokens" else counts[stage]
    return facts


def run_facts(config: PipelineConfig, manifests: list[Manifest], storage: Storage) -> Facts:
    """All that the report shows, from the manifests and the metrics."""
    counts = {manifest.stage: manifest.counts for manifest in manifests}
    scaling = counts["validate-scaling"]
    facts = data_facts(config, manifests) | {
        "scaling": scaling | {"tokens_per_second_all_ranks": scaling["tokens_per_second"]},
        "training": _metrics(storage),
        "goodput": counts["train"].get("goodput"),
        "evaluation": counts["evaluate"],
    }
    facts["run"]["parameters"] = parameter_count(config.model, counts["tokenizer"]["vocab_size"])
    return cast(Facts, facts)


def _metrics(storage: Storage) -> list[dict[str, Any]]:
    try:
        return parse_lines(storage.read(METRICS), METRICS)
    except FileNotFoundError:  # lost, but the model is not: the report leaves the curves out
        return []


def _result(config: PipelineConfig, manifests: list[Manifest]) -> RunResult:
    test = next(m for m in manifests if m.stage == "evaluate").counts["documents"]["test"]
    return RunResult(
        run_uri=config.run_uri,
        report_uri=f"{config.run_uri}/report.html",
        checkpoint_uri=f"{config.run_uri}/checkpoints/step-{config.training.steps:08d}",
        bits_per_byte=test["bits_per_byte"],
        baselines=test["baselines"],
        cost_usd=sum(manifest.cost_usd for manifest in manifests),
    )


def _publish_artifacts(facts: Facts, result: RunResult) -> None:
    def key(kind: str) -> str:
        return artifact_key(kind, result.run_uri)

    create_markdown_artifact(summary_markdown(facts), key=key("summary"), description="The run in short")
    # In markdown, because an image artifact prints its data: URI as text.
    encoded = {name: base64.b64encode(png).decode() for name, png in figures(facts).items()}
    pictures = "\n\n".join(f"![{name}](data:image/png;base64,{png})" for name, png in encoded.items())
    create_markdown_artifact(pictures, key=key("figures"), description="Loss, baselines, scaling")
    # Browsers open no file: link from a page, so the path stands there too.
    create_link_artifact(
        _link(result.report_uri), result.report_uri, key=key("report"), description="The report's page"
    )


def _link(uri: str) -> str:
    storage = open_storage(uri)
    return storage.root.as_uri() if isinstance(storage, FileStorage) else storage.uri
