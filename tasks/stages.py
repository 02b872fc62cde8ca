"""What each stage depends on: the graph's edges and the parts of the configuration, in one place."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from model.data.preparation import PREPARATION_VERSION
from model.data.tokenization.training import TRAINING_VERSION
from model.data.tokens.encoding import ENCODING_VERSION
from tasks.config import PipelineConfig
from tasks.manifest import Manifest, record_file
from tasks.sources import source_weights
from tasks.stage import Stage


def _settings(**sections: BaseModel | int) -> dict[str, Any]:
    return {k: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for k, v in sections.items()}


def preprocess_stage(config: PipelineConfig, versions: dict[str, str], read: dict[str, str]) -> Stage:
    """`versions`: the version of every source file by its URI; `read`: the digest of all else that is read."""
    settings = _settings(data=config.data, version=PREPARATION_VERSION)
    for source in settings["data"]["sources"]:
        del source["weight"]  # for the order of training
    del settings["data"]["filters"]["c4"]["bad_words"]  # what the file lists counts, not where it is
    return Stage(config.run_uri, "preprocess", "documents", settings, versions | read)


def tokenizer_stage(config: PipelineConfig, documents: Manifest, given: Path | None) -> Stage:
    """`given`: the tokenizer that takes the place of one to train."""
    settings = _settings(tokenizer=config.tokenizer, seed=config.seed, version=TRAINING_VERSION)
    inputs = _inputs(documents) | ({"tokenizer": record_file(given, "").sha256} if given else {})
    return Stage(config.run_uri, "tokenizer", "tokenizer", settings, inputs)


def tokens_stage(config: PipelineConfig, documents: Manifest, tokenizer: Manifest) -> Stage:
    return Stage(config.run_uri, "tokens", "tokens", {"encoding": ENCODING_VERSION}, _inputs(documents, tokenizer))


def scaling_stage(config: PipelineConfig, tokens: Manifest) -> Stage:
    settings = _settings(
        scaling=config.scaling,
        cluster=config.cluster,
        parallel=config.parallel,
        model=config.model,
        training=config.training,
        seed=config.seed,
    )
    # A longer run of the same model on the same cluster is validated already.
    for harmless in (
        "steps",
        "resume",
        "keep_checkpoints",
        "checkpoint_every_steps",
        "validate_every_steps",
        "tensorboard",
    ):
        del settings["training"][harmless]
    return Stage(config.run_uri, "validate-scaling", "scaling", settings, _inputs(tokens))


def training_stage(config: PipelineConfig, tokens: Manifest) -> Stage:
    settings = _settings(model=config.model, training=config.training, seed=config.seed)
    settings["weights"] = source_weights(config.data)
    for harmless in ("resume", "tensorboard"):
        del settings["training"][harmless]
    return Stage(config.run_uri, "train", "checkpoints", settings, _inputs(tokens))


def evaluation_stage(config: PipelineConfig, tokens: Manifest, checkpoint: str, directory: str = "evaluation") -> Stage:
    """`checkpoint`: the fingerprint of the checkpoint that is scored."""
    settings = _settings(evaluation=config.evaluation, seed=config.seed)
    inputs = _inputs(tokens) | {"checkpoint": checkpoint}
    return Stage(config.run_uri, "evaluate", directory, settings, inputs)


def report_stage(config: PipelineConfig, manifests: list[Manifest]) -> Stage:
    return Stage(config.run_uri, "report", "", {"config": config.model_dump(mode="json")}, _inputs(*manifests))


def scaling_is_due(config: PipelineConfig, tokens: Manifest) -> bool:
    """Whether the cluster is still to be validated."""
    return scaling_stage(config, tokens).finished() is None


def cluster_has_work(config: PipelineConfig, tokens: Manifest) -> bool:
    """Whether any stage that needs machines is still to be done."""
    if scaling_is_due(config, tokens):
        return True
    trained = training_stage(config, tokens).finished()
    return trained is None or evaluation_stage(config, tokens, trained.fingerprint).finished() is None


def _inputs(*manifests: Manifest) -> dict[str, str]:
    return {manifest.stage: manifest.fingerprint for manifest in manifests}
