"""Runs that hold documents, a tokenizer and token shards, without preprocessing; for tests."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow
from sample_text import make_documents

from infra.storage import open_storage
from model.data.document_shards import SCHEMA
from tasks.config import PipelineConfig
from tasks.manifest import FORMAT_VERSION, MANIFEST, Manifest, digest, record_file
from tasks.tokens import tokenize

Corpus = dict[str, list[str]]
"""The texts of each part by name, such as train/web-00000."""


def corpus(*sources: str, seed: int = 0) -> Corpus:
    return {
        f"{split}/{source}-00000": make_documents(count, seed=seed + 10 * len(source) + len(split))
        for source in sources
        for split, count in (("train", 12), ("validation", 4), ("test", 4))
    }


def stored(run_uri: str, directory: str, files: dict[str, Path], counts: dict[str, Any]) -> Manifest:
    """A stage's manifest, with its files stored."""
    records = [record_file(path, name) for name, path in sorted(files.items())]
    for name, path in files.items():
        open_storage(run_uri).upload(path, f"{directory}/{name}")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        stage={"documents": "preprocess"}.get(directory, directory),
        run_uri=run_uri,
        directory=directory,
        key="",
        inputs={},
        fingerprint=digest([[record.name, record.sha256] for record in records]),
        files=tuple(records),
        counts=counts,
        summary="",
        seconds=0,
        cost_usd=0,
        finished="",
    )
    open_storage(run_uri).write(f"{directory}/{MANIFEST}", manifest.model_dump_json().encode())
    return manifest


def write_documents(path: Path, source: str, texts: list[str]) -> dict[str, Any]:
    """Writes one file of documents; what their manifest says of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scores = {field.name: 2.0 for field in SCHEMA if field.type == pa.float32()} | {"mean_word_chars": float("nan")}
    rows = [
        {
            "text": text,
            "source": source,
            "document_id": f"{number:032x}",
            "origin": f"{source}.jsonl#{number + 1}",
            "language": "en" if number else "fr",
            **scores,
        }
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    languages = {"fr": min(1, len(texts)), "en": max(0, len(texts) - 1)}
    size = sum(len(text.encode()) for text in texts)
    return {"source": source, "documents": len(texts), "bytes": size, "languages": languages}


def prepare_tokens(config: PipelineConfig, texts: Corpus, tokenizer: Path, folder: Path) -> Manifest:
    """Runs the tokens stage on documents and a tokenizer that it stores first."""
    files, parts = {}, {}
    for name, documents in texts.items():
        files[f"{name}.parquet"] = folder / f"{name}.parquet"
        source = name.partition("/")[2].rpartition("-")[0]
        parts[f"{name}.parquet"] = write_documents(files[f"{name}.parquet"], source, documents)
    documents_manifest = stored(config.run_uri, "documents", files, {"parts": parts})
    tokenizer_manifest = stored(config.run_uri, "tokenizer", {"tokenizer.model": tokenizer}, {})

    @flow
    def run() -> Manifest:
        return tokenize(config, documents_manifest, tokenizer_manifest)

    return run()


def make_config(run: Path | str, *sources: str, weights: tuple[float, ...] = (), **layers: Any) -> PipelineConfig:
    uris = [{"uri": f"{source}.jsonl", "name": source} for source in sources]
    for uri, weight in zip(uris, weights, strict=False):
        uri["weight"] = weight  # type: ignore[assignment]
    return PipelineConfig.model_validate(
        {
            "run_uri": str(run),
            "data": {"sources": uris},
            "engine": {"processes": 1},
            "model": {"seq_len": 32},
            "training": {"steps": 10, "global_batch_size": 8, "ramp_start_batch_size": 8},
            **layers,
        }
    )
