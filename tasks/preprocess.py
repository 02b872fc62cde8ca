"""Stage 1: raw text -> cleaned, filtered, deduplicated documents, split by content."""

from prefect.artifacts import create_table_artifact

from model.data.preparation import Funnel, prepare_documents
from tasks.config import PipelineConfig
from tasks.manifest import Manifest
from tasks.sources import find_sources, source_versions
from tasks.stage import stage_task
from tasks.stages import preprocess_stage


@stage_task("preprocess")
def preprocess(config: PipelineConfig) -> Manifest:
    """Documents as zstd Parquet shards under documents/{train,validation,test}, with the funnel in the manifest."""
    sources = find_sources(config.data)
    stage = preprocess_stage(config, source_versions(sources))
    if done := stage.finished():
        return stage.cached(done)
    files = [file for source in sources for file in source.files]
    with stage.scratch() as out:
        funnel = prepare_documents(files, config.data, out, lambda funnel: stage.progress(_summary(funnel)))
        records = stage.publish(out)
    create_table_artifact(_table(funnel), key="documents", description="Data funnel by source")
    return stage.complete(records, funnel.to_dict(), _summary(funnel))
