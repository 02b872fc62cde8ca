"""Stage 3: documents -> packed token shards, one folder a split."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from infra.storage import open_storage
from model.data.document_shards import SPLITS
from model.data.pieces import remove_partial
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokens.encoding import ENCODING_VERSION, count_ids, encode_parts
from model.data.tokens.shards import TokenShard
from tasks.config import PipelineConfig
from tasks.dataset import open_tokens, planned_epochs, training_order
from tasks.engine import open_engine
from tasks.manifest import FileRecord, Manifest, digest, inside
from tasks.stage import Stage, artifact_key, stage_task
from tasks.stages import tokens_stage

Parts = dict[str, dict[str, Any]]
"""By name, such as train/web-00000, what there is to say of a shard: source, what it is made from, and its counts."""


@stage_task("tokens")
def tokenize(config: PipelineConfig, documents: Manifest, tokenizer: Manifest) -> Manifest:
    """tokens/{train,validation,test}/SOURCE-*.tokens and .index, one for each file of documents, with the counts of
    each piece. Shards whose documents and tokenizer are those of the last time stay as they are."""
    stage = tokens_stage(config, documents, tokenizer)
    if done := stage.finished():
        _check(config, done.counts)
        return stage.cached(done)
    parts = _parts(documents, tokenizer)
    kept = _kept(stage, parts)
    with stage.workspace() as work, open_engine(config.engine, stage.progress) as engine:
        remove_partial(work)
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        storage = open_storage(documents.run_uri)
        paths = {
            name: storage.local(inside(documents.directory, f"{name}.parquet"))
            for name, part in parts.items()
            if "tokens" not in part
        }
        model = tokenizer.local_files(".model")[0]
        for name, encoded in encode_parts(paths, model, work / "parts", out, engine).items():
            parts[name] |= asdict(encoded)
        counts = _counts(parts, Tokenizer(model).vocab_size)
        _check(config, counts)
        _write_piece_counts(stage, kept, counts, out)
        records = stage.publish(out, kept)
        manifest = stage.complete(records, counts, _summary(counts, len(parts) - len(paths)))
    _report(config, counts)
    return manifest


def _parts(documents: Manifest, tokenizer: Manifest) -> Parts:
    """Every shard that is to be, with its source and what it is made from."""
    (model,) = (file.sha256 for file in tokenizer.files if file.name.endswith(".model"))
    parts = {}
    for file in documents.files:
        if part := documents.counts["parts"].get(file.name):
            made_from = digest([ENCODING_VERSION, file.sha256, model])
            parts[file.name.removesuffix(".parquet")] = {"source": part["source"], "made_from": made_from}
    return parts


def _kept(stage: Stage, parts: Parts) -> Manifest | None:
    """What the stage made last, with only those shards that would be the same now; their counts go into `parts`."""
    earlier = stage.earlier()
    if earlier is None:
        return None
    there: dict[str, list[FileRecord]] = {}
    for file in earlier.files:
        there.setdefault(file.name.rpartition(".")[0], []).append(file)
    kept = []
    for name, before in earlier.counts.get("parts", {}).items():
        part = parts.get(name)
        if part and part["made_from"] == before["made_from"] and len(there.get(name, ())) == 2:  # tokens and index
            parts[name] = before | part
            kept += there[name]
    return earlier.model_copy(update={"files": tuple(kept)})


def _counts(parts: Parts, vocab_size: int) -> dict[str, Any]:
    """What the manifest says: of each split, of each shard, and how many ids there are."""
    splits = {}
    for split in SPLITS:
        of_split = [part for name, part in parts.items() if name.startswith(f"{split}/")]
        splits[split] = {field: sum(part[field] for part in of_split) for field in ("documents", "tokens", "bytes")}
        splits[split]["shards"] = len(of_split)
    return {"splits": splits, "parts": parts, "vocab_size": vocab_size}


def _write_piece_counts(stage: Stage, kept: Manifest | None, counts: Mapping[str, Any], out: Path) -> None:
    """Write out/SPLIT/unigram.npy: how often each id occurs, (vocab_size,) uint64."""
    stage.progress("counting pieces")
    vocab_size = counts["vocab_size"]
    files = {file.name: file for file in kept.files} if kept else {}
    for split in SPLITS:
        unigram = np.zeros(vocab_size, np.uint64)
        for name in counts["parts"]:
            if name.startswith(f"{split}/"):
                file = files.get(f"{name}.tokens")
                tokens = (
                    open_tokens(stage.storage, stage.directory, file, vocab_size)
                    if file
                    else TokenShard(out / f"{name}.tokens").tokens
                )
                unigram += count_ids(tokens, vocab_size)
        (out / split).mkdir(exist_ok=True)
        np.save(out / split / "unigram.npy", unigram)


def _check(config: PipelineConfig, counts: Mapping[str, Any]) -> None:
    """Whether the run can be trained on this; that training would read a source too often is said, and refused there.

    Raises:
        ValueError: a split has too few tokens for a sequence.
    """
    tokens = counts["splits"]["validation"]["tokens"]
    if tokens <= config.model.seq_len:
        raise ValueError(
            f"model.seq_len ({config.model.seq_len}) must be less than the validation split's tokens ({tokens}); "
            "lower it or add text"
        )
    training_order(config, counts)
    try:
        epochs = planned_epochs(config, counts)
    except ValueError as error:
        get_run_logger().warning("%s", error)
        return
    read = ", ".join(f"{name or 'all text'} {times:.2f}" for name, times in epochs.items())
    get_run_logger().info("epochs that %s steps will read: %s", f"{config.training.steps:,}", read)


def _summary(counts: Mapping[str, Any], kept: int) -> str:
    splits = ", ".join(f"{split} {count['tokens']:,}" for split, count in counts["splits"].items())
    return f"{splits} tokens" + (f"; {kept} of {len(counts['parts'])} shards were there" if kept else "")


def _report(config: PipelineConfig, counts: Mapping[str, Any]) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for name, part in counts["parts"].items():
        row = rows.setdefault(part["source"], {"source": part["source"]} | dict.fromkeys(SPLITS, 0))
        row[name.partition("/")[0]] += part["tokens"]
    key = artifact_key("tokens", config.run_uri)
    create_table_artifact(list(rows.values()), key=key, description="Tokens by source and split")
