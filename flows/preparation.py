"""Data, tokenizer and token shards, without a cluster: raw text -> documents -> tokenizer -> token shards."""

from prefect import flow

from tasks.config import PipelineConfig
from tasks.manifest import Manifest
from tasks.preprocess import preprocess
from tasks.publish import publish_data
from tasks.run import open_run
from tasks.tokenizer import train_tokenizer
from tasks.tokens import tokenize


@flow(name="preparation", flow_run_name="preparation {config.run_uri}")
def preparation(config: PipelineConfig) -> Manifest:
    """Prepare a corpus for training; `pretrain` with the same run directory goes on from here. Where documents are only
    to be scored, it ends with them.

    Args:
        config: Everything that the run is made of.
    """
    with open_run(config, needs_cluster=False):
        documents = preprocess(config)
        if config.data.filters.score_only:
            publish_data(config, [documents])
            return documents
        tokenizer = train_tokenizer(config, documents)
        tokens = tokenize(config, documents, tokenizer)
        publish_data(config, [documents, tokenizer, tokens])
        return tokens
