"""Finds wrong input before anything runs: a ValueError that names the field, the value and the rule."""

import importlib.util
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import zstandard

from infra.cluster import open_provider
from infra.storage import FileStorage, open_storage
from model.checkpoint_marker import MARKER, Marker
from model.config import TrainingConfig
from model.data.readers.documents import DamagedFile, Dropped, SourceFile, document_format, read_documents
from model.data.readers.fields import check_fields
from model.flops import parameter_count
from tasks.bad_words import load_bad_words
from tasks.choices import load_choices
from tasks.config import PipelineConfig
from tasks.given_tokenizer import given_tokenizer
from tasks.manifest import read_manifest
from tasks.sources import FoundSource, find_sources

SAMPLED_FILES = 200
SAMPLED_BYTES = 4 << 20
SAMPLED_DOCUMENT_BYTES = 1 << 20

# Candidate pieces are repeated substrings, so only text that is not itself a repetition gives any: 10 MB of English,
# 3 MB when compressed, give 214 thousand, 14 compressed bytes each. Fewer than this is beyond what text supports.
MIN_COMPRESSED_BYTES_PER_PIECE = 6
COMPRESSION_RATIO = 4  # of English text
# What any run needs beside its data: logs of the ranks, manifests, the report.
MIN_RUN_BYTES = 32 << 20


def check_run(config: PipelineConfig, needs_cluster: bool = True) -> None:
    """Everything that can be known before a run starts.

    Raises:
        ValueError: the first thing found wrong.
    """
    if needs_cluster:
        open_provider(config.cluster)
        load_choices(config.evaluation)
        _check_tensorboard(config.training)
        _check_checkpoints(config)
    load_bad_words(config.data.filters)
    sources = find_sources(config.data, config.run_uri)
    for index, source in enumerate(sources):
        _check_readable(f"data.sources.{index}.uri", source)
        _check_fields(f"data.sources.{index}.text_fields", source)
    _check_run_directory(config, sources)
    only_documents = config.data.filters.score_only and not needs_cluster
    if not (only_documents or given_tokenizer(config.tokenizer)):
        _check_vocabulary(config, sources)


def check_scoring(config: PipelineConfig, step: int | None) -> None:
    """Whether the run holds what scoring needs.

    Raises:
        ValueError: a stage is missing, or the checkpoint is.
    """
    open_provider(config.cluster)
    load_choices(config.evaluation)
    for directory in ("documents", "tokenizer", "tokens"):
        read_manifest(config.run_uri, directory)
    complete = complete_steps(config.run_uri)
    if not complete:
        raise ValueError(f"{config.run_uri} holds no complete checkpoint; train first")
    if step is not None and step not in complete:
        raise ValueError(f"step ({step}) has no complete checkpoint in {config.run_uri}; there are {complete}")
    _check_identity(config.run_uri, step or complete[-1], config.model.model_dump())


def complete_steps(run_uri: str) -> list[int]:
    """The steps of the run's complete checkpoints, in order."""
    marker = re.compile(r"checkpoints/step-(\d{8,})/complete\.json")
    names = [entry.name for entry in open_storage(run_uri).list("checkpoints")]
    return sorted(int(match[1]) for name in names if (match := marker.fullmatch(name)))


def _check_tensorboard(config: TrainingConfig) -> None:
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "training.tensorboard (True) needs the package tensorboard, which is not installed: "
            "pip install 'jumbo[tensorboard]', or leave it False"
        )


def _check_checkpoints(config: PipelineConfig) -> None:
    """Refuse to go on from checkpoints of another model or training; of other tokens, the trainer refuses."""
    complete = complete_steps(config.run_uri)
    if not complete:
        return
    if complete[-1] > config.training.steps:
        raise ValueError(
            f"training.steps ({config.training.steps}) is below the newest checkpoint (step {complete[-1]}) in "
            f"{config.run_uri}: score that checkpoint, or give the shorter run a directory of its own"
        )
    fields = config.training.model_dump() | config.model.model_dump()
    _check_identity(config.run_uri, complete[-1], fields | {"seed": config.seed})


def _check_identity(run_uri: str, step: int, fields: dict[str, Any]) -> None:
    """Compare what a checkpoint was made with; a damaged marker is the trainer's to report."""
    try:
        marker = Marker.decode(open_storage(run_uri).read(f"checkpoints/step-{step:08d}/{MARKER}"), step)
    except (FileNotFoundError, ValueError):
        return
    for name, there in marker.identity.items():
        if name in fields and fields[name] != there:
            raise ValueError(
                f"run_uri ({run_uri}) holds checkpoints with {name} {there}, not {fields[name]}: "
                "give a run of another model or training a directory of its own"
            )


def parameters(config: PipelineConfig) -> int:
    """The model's parameters, by count in closed form."""
    return parameter_count(config.model, config.tokenizer.vocab_size)


def checkpoint_bytes(config: PipelineConfig) -> int:
    """One checkpoint: fp32 weights and both Adam moments."""
    return 12 * parameters(config)


def _check_readable(field: str, source: FoundSource) -> None:
    """Open every file, and read the first record of a sample of them."""
    sampled = {file.name for file in _spread(source.files)}
    for file in source.files:
        try:
            if file.name in sampled:
                with closing(read_documents(file, SAMPLED_DOCUMENT_BYTES)) as records:
                    next(records, None)
            elif source.is_local:
                file.open().close()
        except (OSError, DamagedFile, ValueError) as error:
            raise ValueError(f"{field}: {file.name} cannot be read: {error}") from error


def _check_fields(field: str, source: FoundSource) -> None:
    try:
        check_fields(_spread(source.files), SAMPLED_DOCUMENT_BYTES)
    except (OSError, DamagedFile, ValueError) as error:
        raise ValueError(f"{field}: {error}") from error


def _spread(files: tuple[SourceFile, ...]) -> list[SourceFile]:
    step = max(1, len(files) // SAMPLED_FILES)
    return list(files[::step])


def _check_run_directory(config: PipelineConfig, sources: list[FoundSource]) -> None:
    try:
        storage = open_storage(config.run_uri)
        storage.write(".writable", b"")
        storage.delete(".writable")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"run_uri ({config.run_uri}) cannot be written: {reason}") from error
    if not isinstance(storage, FileStorage):
        return
    needed = _needed_bytes(config, sum(map(_text_bytes, sources)))
    there = sum(entry.size_bytes for entry in storage.list())
    free = shutil.disk_usage(storage.root).free
    if needed > there + free:
        raise ValueError(
            f"run_uri ({config.run_uri}) has no space left for this run: about {needed / 2**30:.2f} GiB are needed, "
            f"{(there + free) / 2**30:.2f} GiB are free"
        )


def _text_bytes(source: FoundSource) -> int:
    """About how much text the source's files hold."""
    return sum(
        entry.size_bytes * (COMPRESSION_RATIO if document_format(entry.name)[1] else 1) for entry in source.entries
    )


def _needed_bytes(config: PipelineConfig, text_bytes: int) -> int:
    """Documents, twice while they are made, tokens likewise, and one checkpoint more than is kept."""
    return MIN_RUN_BYTES + 4 * text_bytes + (config.training.keep_checkpoints + 1) * checkpoint_bytes(config)


def _check_vocabulary(config: PipelineConfig, sources: list[FoundSource]) -> None:
    """Refuse a vocabulary that the text cannot support, judged by how small a sample of it compresses."""
    compressor = zstandard.ZstdCompressor().compressobj()
    sampled = compressed = 0
    dropped: Counter[str] = Counter()
    for record in _sample(sources):
        if isinstance(record, Dropped):
            dropped[record.reason] += 1
            continue
        data = record.encode()
        sampled += len(data)
        compressed += len(compressor.compress(data))
        if sampled >= SAMPLED_BYTES:
            break
    compressed += len(compressor.flush())
    if dropped.keys() == {"too_long"} and not sampled:
        return  # too long for a sample, not for the run
    if not sampled:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "no records"
        raise ValueError(f"data.sources: the first records of the files hold no text ({reasons})")
    # What was not sampled is taken to be as varied as what was; the tokenizer sees sample_bytes of it.
    total = max(sampled, sum(map(_text_bytes, sources)))
    compressed = int(compressed * min(total, config.tokenizer.sample_bytes) / sampled)
    supported = compressed // MIN_COMPRESSED_BYTES_PER_PIECE
    if config.tokenizer.vocab_size > max(supported, 300):
        raise ValueError(
            f"tokenizer.vocab_size ({config.tokenizer.vocab_size}) is more than the corpus supports: "
            f"its text compresses to {compressed / 1e6:.3f} MB, which gives no more than {supported} pieces; "
            "lower it or add text"
        )


def _sample(sources: list[FoundSource]) -> Iterator[str | Dropped]:
    for source in sources:
        for file in _spread(source.files):
            taken = 0
            # A damaged tail is preprocess's to report; here only a sample is wanted.
            with closing(read_documents(file, SAMPLED_DOCUMENT_BYTES)) as records, suppress(DamagedFile):
                while taken < SAMPLED_DOCUMENT_BYTES and (record := next(records, None)) is not None:
                    yield record
                    taken += len(record) if isinstance(record, str) else 1
