"""Score any checkpoint of a run again, with evaluation settings of its own."""

from prefect import flow

from tasks.cluster import cluster_for
from tasks.config import PipelineConfig
from tasks.evaluate import score_checkpoint
from tasks.manifest import Manifest, read_manifest
from tasks.preflight import check_scoring


@flow(name="scoring", flow_run_name="scoring {config.run_uri}")
def scoring(config: PipelineConfig, step: int | None = None) -> Manifest:
    """Evaluate one checkpoint.

    Args:
        config: Everything that the run is made of; its run directory holds the checkpoint.
        step: The checkpoint's step; the newest complete one if empty.
    """
    check_scoring(config, step)
    tokens = read_manifest(config.run_uri, "tokens")
    with cluster_for(config) as cluster:
        return score_checkpoint(config, cluster, tokens, step)
