"""Stage 3: documents -> packed token shards, one folder a split."""

from collections.abc import Mapping
from functools import partial

from model.data.preparation import SPLITS, iter_documents
from model.data.shards import TokenCounts, write_token_shards
from model.data.tokenizer import Tokenizer
from tasks.config import PipelineConfig
from tasks.manifest import Manifest
from tasks.stage import Stage, stage_task
from tasks.stages import tokens_stage


@stage_task("tokens")
def tokenize(config: PipelineConfig, documents: Manifest, tokenizer: Manifest) -> Manifest:
    """tokens/{train,validation,test}/part-*.tokens and .index, with the counts of each piece."""
    stage = tokens_stage(config, documents, tokenizer)
    if done := stage.finished():
        _require_sequences(config, done.counts)
        return stage.cached(done)
    vocabulary = Tokenizer(tokenizer.local_files(".model")[0])
    counts = {}
    with stage.scratch() as out:
        for split in SPLITS:
            texts = (document.text for document in iter_documents(documents.local_files(".parquet", f"{split}/")))
            counts[split] = write_token_shards(
                texts,
                vocabulary,
                out / split,
                config.tokens.shard_tokens,
                partial(_say, stage, split),
            ).to_dict()
        _require_sequences(config, counts)
        records = stage.publish(out)
    summary = ", ".join(f"{split} {count['tokens']:,}" for split, count in counts.items()) + " tokens"
    return stage.complete(records, counts, summary)


def _say(stage: Stage, split: str, done: TokenCounts) -> None:
    stage.progress(f"{split}: {done.documents:,} documents, {done.tokens:,} tokens")


def _require_sequences(config: PipelineConfig, counts: Mapping[str, Mapping[str, int]]) -> None:
    for split in ("train", "validation"):
        tokens = counts[split]["tokens"]
        if tokens <= config.model.seq_len:
            raise ValueError(
                f"model.seq_len ({config.model.seq_len}) must be less than the {split} split's tokens ({tokens}); "
                "lower it or add text"
            )
