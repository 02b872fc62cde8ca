"""Finds wrong input before anything runs: a ValueError that names the field, the value and the rule."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress

import yaml
import zstandard

from infra.cluster import open_provider
from infra.storage import FileStorage, open_storage
from model.data.documents import DamagedFile, SourceFile, read_documents
from model.flops import parameter_count
from tasks.choices import load_choices
from tasks.config import PipelineConfig
from tasks.manifest import read_manifest
from tasks.sources import FoundSource, find_sources

SAMPLED_FILES = 200
SAMPLED_BYTES = 4 << 20
SAMPLED_DOCUMENT_BYTES = 1 << 20

# Candidate pieces are repeated substrings, so only text that is not itself a repetition gives any: 10 MB of English,
# 3 MB when compressed, give 214 thousand, 14 compressed bytes each. Fewer than this is beyond what text supports.
MIN_COMPRESSED_BYTES_PER_PIECE = 6


def begin_run(config: PipelineConfig, needs_cluster: bool = True) -> None:
    """Check the configuration, then write it down in the run directory.

    Raises:
        ValueError: the first thing found wrong.
    """
    check_run(config, needs_cluster)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    open_storage(config.run_uri).write("config.yaml", text.encode())


def check_run(config: PipelineConfig, needs_cluster: bool = True) -> None:
    """Everything that can be known before a run starts.

    Raises:
        ValueError: the first thing found wrong.
    """
    if needs_cluster:
        open_provider(config.cluster)
        load_choices(config.evaluation)
        _check_checkpoints(config)
    sources = find_sources(config.data)
    for index, source in enumerate(sources):
        _check_readable(f"data.sources.{index}.uri", source)
    _check_run_directory(config, sources)
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


def complete_steps(run_uri: str) -> list[int]:
    """The steps of the run's complete checkpoints, in order."""
    names = [entry.name.split("/") for entry in open_storage(run_uri).list("checkpoints")]
    return sorted(int(n[1].removeprefix("step-")) for n in names if n[-1] == "complete.json" and len(n) == 3)


def _check_checkpoints(config: PipelineConfig) -> None:
    """Refuse to go on from checkpoints of another model; of other tokens, the trainer refuses."""
    complete = complete_steps(config.run_uri)
    if not complete:
        return
    marker = json.loads(open_storage(config.run_uri).read(f"checkpoints/step-{complete[-1]:08d}/complete.json"))
    fields = config.training.model_dump() | config.model.model_dump()
    fields |= {"seed": config.seed, "vocab_size": config.tokenizer.vocab_size}
    for name, there in marker["identity"].items():
        if name in fields and fields[name] != there:
            raise ValueError(
                f"run_uri ({config.run_uri}) holds checkpoints with {name} {there}, not {fields[name]}: "
                "give a run of another model a directory of its own"
            )


def parameters(config: PipelineConfig) -> int:
    """The model's parameters, by count in closed form."""
    return parameter_count(config.model, config.tokenizer.vocab_size)


def checkpoint_bytes(config: PipelineConfig) -> int:
    """One checkpoint: fp32 weights and both Adam moments."""
    return 12 * parameters(config)


def _check_readable(field: str, source: FoundSource) -> None:
    for file in _spread(source.files):
        try:
            with closing(read_documents(file, SAMPLED_DOCUMENT_BYTES)) as records:
                next(records, None)
        except (OSError, DamagedFile) as error:
            raise ValueError(f"{field}: {file.name} cannot be read: {error}") from error


def _spread(files: tuple[SourceFile, ...]) -> list[SourceFile]:
    step = max(1, len(files) // SAMPLED_FILES)
    return list(files[::step])


def _check_run_directory(config: PipelineConfig, sources: list[FoundSource]) -> None:
    storage = open_storage(config.run_uri)
    if not isinstance(storage, FileStorage):
        return
    try:
        storage.root.mkdir(parents=True, exist_ok=True)
        storage.write(".writable", b"")
        storage.delete(".writable")
    except OSError as error:
        raise ValueError(f"run_uri ({config.run_uri}) cannot be written: {error.strerror}") from error
    needed = _needed_bytes(config, sum(source.size_bytes for source in sources))
    there = sum(entry.size_bytes for entry in storage.list())
    free = shutil.disk_usage(storage.root).free
    if needed > there + free:
        raise ValueError(
            f"run_uri ({config.run_uri}) has no space left for this run: about {needed / 2**30:.1f} GiB are needed, "
            f"{(there + free) / 2**30:.1f} GiB are free"
        )


def _needed_bytes(config: PipelineConfig, source_bytes: int) -> int:
    """Documents and their scratch copy, four bytes for every token, and one checkpoint more than is kept."""
    return 4 * source_bytes + (config.training.keep_checkpoints + 1) * checkpoint_bytes(config)


def _check_vocabulary(config: PipelineConfig, sources: list[FoundSource]) -> None:
    """Refuse a vocabulary that the text cannot support, judged by how small a sample of it compresses."""
    compressor = zstandard.ZstdCompressor().compressobj()
    sampled = compressed = 0
    for text in _sample(sources):
        data = text.encode()
        sampled += len(data)
        compressed += len(compressor.compress(data))
        if sampled >= SAMPLED_BYTES:
            break
    compressed += len(compressor.flush())
    if sampled >= SAMPLED_BYTES:  # what was not sampled is taken to be as varied as what was
        compressed = int(compressed * max(1.0, sum(source.size_bytes for source in sources) / sampled))
    supported = compressed // MIN_COMPRESSED_BYTES_PER_PIECE
    if config.tokenizer.vocab_size > max(supported, 300):
        raise ValueError(
            f"tokenizer.vocab_size ({config.tokenizer.vocab_size}) is more than the corpus supports: "
            f"its text compresses to {compressed / 1e6:.3f} MB, which gives no more than {supported} pieces; "
            "lower it or add text"
        )


def _sample(sources: list[FoundSource]) -> Iterator[str]:
    for source in sources:
        for file in _spread(source.files):
            taken = 0
            # A damaged tail is preprocess's to report; here only a sample is wanted.
            with closing(read_documents(file, SAMPLED_DOCUMENT_BYTES)) as records, suppress(DamagedFile):
                while taken < SAMPLED_DOCUMENT_BYTES and (record := next(records, None)) is not None:
                    if isinstance(record, str):
                        yield record
                        taken += len(record)
