"""The whole graph: raw text in, a validated, trained and evaluated model out.

    raw text -> documents -> tokenizer -> token shards
             -> [cluster: scaling validation -> training -> evaluation] -> report

Run it again with the same run directory and it continues where it stopped.
"""

from prefect import flow

from tasks.cluster import cluster_for
from tasks.config import PipelineConfig
from tasks.dataset import planned_epochs
from tasks.evaluate import evaluate
from tasks.preprocess import preprocess
from tasks.publish import RunResult, publish
from tasks.run import open_run
from tasks.scaling import validate_scaling
from tasks.stages import cluster_has_work
from tasks.tokenizer import train_tokenizer
from tasks.tokens import tokenize
from tasks.train import train


@flow(name="pretrain", flow_run_name="pretrain {config.run_uri}")
def pretrain(config: PipelineConfig) -> RunResult:
    """Pretrain a language model from raw text, end to end.

    Args:
        config: Everything that the run is made of.
    """
    with open_run(config):
        documents = preprocess(config)
        tokenizer = train_tokenizer(config, documents)
        tokens = tokenize(config, documents, tokenizer)
        planned_epochs(config, tokens.counts)  # refuses to read a source more often than is allowed
        with cluster_for(config, needed=cluster_has_work(config, tokens)) as cluster:
            scaling = validate_scaling(config, cluster, tokens)
            model = train(config, cluster, tokens)
            evaluation = evaluate(config, cluster, tokens, model)
        return publish(config, [documents, tokenizer, tokens, scaling, model, evaluation])
