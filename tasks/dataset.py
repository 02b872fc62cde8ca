"""A run's token shards as what training reads: its sequences, and their order. Imports no Prefect."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from infra.storage import FileStorage, Storage, open_storage
from model.data.tokens.batches import TokenDataset, n_sequences
from model.data.tokens.mixture import Mixture, Source
from model.data.tokens.shards import StreamedTokens, Tokens, TokenShard
from model.optim import Schedule
from tasks.config import PipelineConfig
from tasks.manifest import FileRecord, Manifest, inside
from tasks.sources import source_weights

ALL = ""  # the one source, where there are no weights


def open_dataset(config: PipelineConfig, tokens: Manifest, split: str) -> TokenDataset:
    """The sequences of a split. Local shards are memory-mapped; of remote ones, only what is asked for is read.

    Raises:
        ValueError: a shard is damaged, or a source has too few tokens for a sequence.
    """
    storage = open_storage(tokens.run_uri)
    files = {file.name: file for file in tokens.files}
    sources: dict[str, list[Tokens]] = {name: [] for name in _sources(config, tokens.counts, split)}
    weighted = ALL not in sources
    for name, part in tokens.counts["parts"].items():
        if name.startswith(f"{split}/"):
            source = part["source"] if weighted else ALL
            file = files[f"{name}.tokens"]
            sources[source].append(open_tokens(storage, tokens.directory, file, tokens.counts["vocab_size"]))
    return TokenDataset(list(sources.values()), config.model.seq_len)


def open_tokens(storage: Storage, directory: str, file: FileRecord, vocab_size: int) -> Tokens:
    """The tokens of a shard in a run directory."""
    name = inside(directory, file.name)
    if isinstance(storage, FileStorage):
        return TokenShard(storage.local(name)).tokens
    uri = f"{storage.uri}/{name}"
    return StreamedTokens(uri, file.size_bytes, partial(storage.read_range, name), vocab_size)


def training_order(config: PipelineConfig, counts: Mapping[str, Any]) -> Mixture:
    """The order of the training split's sequences.

    Args:
        counts: what the tokens stage counted.

    Raises:
        ValueError: a source has too few tokens for a sequence.
    """
    weights = source_weights(config.data) or {}
    sources = []
    for name, n_tokens in _sources(config, counts, "train").items():
        sequences = n_sequences(n_tokens, config.model.seq_len)
        if not sequences:
            of = f" of source {name!r}" if name else ""
            raise ValueError(
                f"model.seq_len ({config.model.seq_len}) must be less than the train split's tokens{of} ({n_tokens}); "
                "lower it or add text"
            )
        sources.append(Source(name, sequences, weights.get(name, 1.0)))
    return Mixture(sources, config.seed)


def epochs_by_source(config: PipelineConfig, counts: Mapping[str, Any]) -> dict[str, float]:
    """How many times the run's steps read each source.

    Raises:
        ValueError: as `training_order`.
    """
    sequences = Schedule(config.training, config.model.seq_len).first_sample(config.training.steps)
    names = _sources(config, counts, "train")
    return dict(zip(names, training_order(config, counts).epochs(sequences), strict=True))


def planned_epochs(config: PipelineConfig, counts: Mapping[str, Any]) -> dict[str, float]:
    """How many times the run will read each source.

    Raises:
        ValueError: as `training_order`, or it is more than tokens.max_epochs.
    """
    epochs = epochs_by_source(config, counts)
    limit = config.tokens.max_epochs
    for name, times in epochs.items():
        if times > limit:
            what = f"source {name!r}" if name else "the training text"
            remedy = "lower its weight, add text" if name else "add text"
            raise ValueError(
                f"training.steps ({config.training.steps}) would read {what} {times:.2f} times, more than "
                f"tokens.max_epochs ({limit:g}): lower training.steps, {remedy}, or allow more epochs"
            )
    return epochs


def _sources(config: PipelineConfig, counts: Mapping[str, Any], split: str) -> dict[str, int]:
    """The tokens of each source that has an order of its own; training alone is weighted, validation is one source."""
    weights = source_weights(config.data) if split == "train" else None
    if weights is None:
        return {ALL: counts["splits"][split]["tokens"]}
    tokens = dict.fromkeys(weights, 0)
    for name, part in counts["parts"].items():
        if name.startswith(f"{split}/"):
            tokens[part["source"]] += part["tokens"]
    return tokens
