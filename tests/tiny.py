"""The smallest run that goes through the whole graph, for tests."""

import json
from pathlib import Path
from typing import Any

from sample_text import make_documents

from flows.presets import preset
from tasks.config import PipelineConfig

TINY: dict[str, Any] = {
    # The made-up prose repeats its phrases too often for Gopher's rules.
    "data": {"validation_fraction": 0.1, "test_fraction": 0.1, "filters": {"gopher": {"enabled": False}}},
    "tokenizer": {"vocab_size": 500, "max_tokens_per_byte": 0.6},
    "model": {"n_layer": 2, "n_head": 2, "d_model": 32, "seq_len": 32},
    "training": {
        "steps": 12,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "ramp_start_batch_size": 2,
        "ramp_tokens": 1000,
        "warmup_tokens": 500,
        "checkpoint_every_steps": 4,
        "validate_every_steps": 6,
        "validation_sequences": 8,
    },
    "cluster": {"nodes": 1, "ranks_per_node": 2},
    "scaling": {
        "all_reduce_mib": [1],
        "timed_steps": 2,
        "short_run_steps": 3,
        "min_efficiency": 0.0,
        "min_tokens_per_second": 1,
        "min_all_reduce_gb_per_second": 0.0001,
    },
    "evaluation": {"max_test_bytes": 4096, "sample_tokens": 4, "prompts": ["The House"]},
}


def write_corpus(folder: Path, documents: int = 120) -> str:
    """A JSONL file of made-up prose; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_documents(documents)), encoding="utf-8")
    return str(path)


def tiny_config(run: Path | str, corpus: str, **layers: Any) -> PipelineConfig:
    """The tiny run in `run`; `layers` are sections to merge over it."""
    named = {"run_uri": str(run), "data": {"sources": [{"uri": corpus, "name": "made-up"}]}}
    return preset("laptop", TINY, named, layers)


def option_list(run: Path | str, corpus: str) -> list[str]:
    """The same as options of the command line."""
    options = ["--run-uri", str(run), "--data.sources", json.dumps([{"uri": corpus, "name": "made-up"}])]
    for section, fields in TINY.items():
        for name, value in fields.items():
            text = value if isinstance(value, str) else json.dumps(value)
            options += [f"--{section}.{name.replace('_', '-')}", text]
    return options
