"""Small runs on a cluster, held against thresholds: go or no-go, before a long run is paid for."""

from prefect import flow

from tasks.cluster import cluster_for
from tasks.config import PipelineConfig
from tasks.manifest import Manifest
from tasks.preprocess import preprocess
from tasks.run import open_run
from tasks.scaling import validate_scaling
from tasks.stages import scaling_is_due
from tasks.tokenizer import train_tokenizer
from tasks.tokens import tokenize


@flow(name="scaling-validation", flow_run_name="scaling-validation {config.run_uri}")
def scaling_validation(config: PipelineConfig) -> Manifest:
    """Measure a cluster with the real model and data, and fail below the thresholds.

    Args:
        config: Everything that the run is made of.
    """
    with open_run(config):
        documents = preprocess(config)
        tokenizer = train_tokenizer(config, documents)
        tokens = tokenize(config, documents, tokenizer)
        with cluster_for(config, needed=scaling_is_due(config, tokens)) as cluster:
            return validate_scaling(config, cluster, tokens)
