"""Stage 1: raw text -> cleaned, filtered, deduplicated documents, split by content."""

from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from model.data.preparation import Funnel, prepare_documents
from tasks.config import PipelineConfig
from tasks.manifest import Manifest
from tasks.sources import find_sources, source_versions
from tasks.stage import artifact_key, stage_task
from tasks.stages import preprocess_stage


@stage_task("preprocess")
def preprocess(config: PipelineConfig) -> Manifest:
    """Documents as zstd Parquet shards under documents/{train,validation,test}, with the funnel in the manifest."""
    sources = find_sources(config.data, config.run_uri)
    stage = preprocess_stage(config, source_versions(sources))
    if done := stage.finished():
        return stage.cached(done)
    files = [file for source in sources for file in source.files]
    with stage.scratch() as out:
        funnel = prepare_documents(files, config.data, out, lambda funnel: stage.progress(_read(funnel)))
        records = stage.publish(out)
    for name, counts in funnel.sources.items():
        for damage in counts.damaged:
            get_run_logger().warning("%s: %s; the whole records before the damage are kept", name, damage)
    create_table_artifact(
        _table(funnel), key=artifact_key("documents", config.run_uri), description="Data funnel by source"
    )
    return stage.complete(records, funnel.to_dict(), _summary(funnel))


def _read(funnel: Funnel) -> str:
    return f"{sum(counts.read for counts in funnel.sources.values()):,} documents read"


def _summary(funnel: Funnel) -> str:
    read = sum(counts.read for counts in funnel.sources.values())
    kept = {split: counts.documents for split, counts in funnel.splits.items()}
    size = sum(counts.bytes for counts in funnel.splits.values())
    damaged = sum(len(counts.damaged) for counts in funnel.sources.values())
    splits = ", ".join(f"{split} {count:,}" for split, count in kept.items())
    note = f"; {damaged} DAMAGED files, kept in part" if damaged else ""
    return f"{read:,} documents read, {sum(kept.values()):,} kept ({splits}), {size / 1e6:.1f} MB{note}"


def _table(funnel: Funnel) -> list[dict[str, Any]]:
    return [
        {"source": name, "files": counts.files, "read": counts.read, "kept": counts.kept}
        | {f"dropped: {reason}": dropped for reason, dropped in sorted(counts.dropped.items())}
        for name, counts in funnel.sources.items()
    ]
