"""What there is to see in documents and token shards, of a run or of one file. Imports no Prefect."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from pydantic import ValidationError

from infra.storage import find, open_storage
from model.data.document_shards import SCHEMA, SPLITS
from model.data.funnel import SourceCounts
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokens.encoding import count_ids
from model.data.tokens.shards import TOKEN, TokenShard
from model.optim import Schedule
from tasks.config import PipelineConfig
from tasks.dataset import ALL, epochs_by_source
from tasks.dropped_documents import DROPPED, DroppedDocument, see_dropped, shown
from tasks.inspection_target import chosen_part, local_file, run_manifest
from tasks.manifest import Manifest, inside, read_manifest
from tasks.sources import source_weights

FREQUENT_PIECES = 20
_READ_ROWS = 256
_SCORES = [field.name for field in SCHEMA if field.type == pa.float32()]
_SHOWN_COLUMNS = 8
_NEEDED = [SCHEMA.field(name) for name in ("text", "source", "origin", "language")]


@dataclass(frozen=True)
class Line:
    """What one source has in one split; tokens are None of documents."""

    split: str
    source: str
    documents: int
    bytes: int | None
    tokens: int | None = None


@dataclass(frozen=True)
class SeenDocument:
    """One document; `about` is where it is from and its scores, by name."""

    number: int
    text: str
    about: dict[str, str]


@dataclass(frozen=True)
class SeenDocuments:
    """Documents of a run or file.

    Attributes:
        lines: What there is.
        languages: Documents of each.
        file: What the examples are from.
        examples: Some documents.
        sources: What became of each source's records, by name; of a run alone.
        samples: Where samples of what was dropped are; empty where nothing was.
        dropped: In place of examples, some of what was dropped, if that was asked for.
    """

    lines: list[Line]
    languages: dict[str, int]
    file: str
    examples: list[SeenDocument]
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    samples: str = ""
    dropped: list[DroppedDocument] = field(default_factory=list)


@dataclass(frozen=True)
class MixedSource:
    """How training will read one source.

    Attributes:
        weight: As it is configured; None where there are no weights.
        tokens: What the training split has of it.
        share: Its share of the tokens that training reads.
        epochs: How many times it is read.
    """

    name: str
    weight: float | None
    tokens: int
    share: float
    epochs: float


@dataclass(frozen=True)
class SeenMixture:
    """What a run's configuration makes of its sources in training.

    Attributes:
        steps, tokens: Of the whole training.
        max_epochs: More than this is refused.
        fault: Why there are no sources here, where there are none.
    """

    steps: int
    tokens: int
    max_epochs: float
    sources: list[MixedSource]
    fault: str = ""


@dataclass(frozen=True)
class SeenTokens:
    """Token shards of a run or one shard, and one document of it piece by piece.

    Attributes:
        lines: What there is; bytes are None for a single file.
        file: The shard that all else is of.
        bytes_per_token: Width of an id in the file.
        lengths: Tokens of each document of the shard, (documents,).
        frequent: The most frequent pieces of the shard, and how often each occurs.
        document: The number of the document that `pieces` are of.
        pieces: Each piece as text; a byte is <0xE2>.
        text_bytes: UTF-8 bytes of the document's text.
        round_trip: What is wrong with the text that the tokens give; empty where they are exact.
        mixture: How training will read the run; None for a single file.
    """

    lines: list[Line]
    file: str
    bytes_per_token: int
    vocab_size: int
    lengths: np.ndarray
    frequent: list[tuple[str, int]]
    document: int
    pieces: list[str]
    text_bytes: int
    round_trip: str
    mixture: SeenMixture | None


def see_documents(target: str, split: str, source: str, number: int, dropped: str) -> SeenDocuments:
    """Looks at `number` documents, evenly spaced over the first file of a run's split and source, or over one file.

    Args:
        dropped: Look at `number` of what was dropped for this reason instead (see `see_dropped`); empty for documents.

    Raises:
        ValueError: the target is neither, or has no such split, source or reason.
        OSError: it cannot be read.
    """
    if target.endswith(".parquet"):
        if dropped:
            raise ValueError(f"dropped ({dropped}) needs a run directory, not a file: {target}")
        path = local_file(target)
        lines, languages = _count_documents(path)
        return SeenDocuments(lines, languages, target, _examples(path, number))
    manifest = run_manifest(target, "documents")
    parts = manifest.counts["parts"]
    sources = {name: SourceCounts(**counts) for name, counts in manifest.counts["sources"].items()}
    languages = Counter[str]()
    for part in parts.values():
        languages.update(part["languages"])
    lines, languages = _lines(parts), dict(languages.most_common())
    samples = f"{target}/documents/{DROPPED}" if any(counts.dropped for counts in sources.values()) else ""
    if dropped:
        shown_dropped = see_dropped(manifest, sources, dropped, source, number)
        return SeenDocuments(lines, languages, "", [], sources, samples, shown_dropped)
    name = chosen_part(manifest, split, source)
    path = open_storage(target).local(inside(manifest.directory, name))
    return SeenDocuments(lines, languages, f"{target}/documents/{name}", _examples(path, number), sources, samples)


def see_tokens(target: str, split: str, source: str, document: int, tokenizer: str) -> SeenTokens:
    """Looks at the first shard of a run's split and source, or at one shard, and at one of its documents.

    Args:
        tokenizer: The tokenizer.model of a single shard; empty for the one of the run that it lies in.

    Raises:
        ValueError: the target is neither, or has no such split, source or document, or no tokenizer is found.
        OSError: it cannot be read.
    """
    if target.endswith(".tokens"):
        shard, model = _shard(target), Tokenizer(local_file(tokenizer or _tokenizer_beside(target)))
        lines = [Line("", "", len(shard), None, len(shard.tokens))]
        return _seen_tokens(lines, target, shard, model, document, None, None)
    manifest = run_manifest(target, "tokens")
    name = chosen_part(manifest, split, source)
    shard = _shard(f"{target}/tokens/{name}.tokens")
    model = Tokenizer(read_manifest(target, "tokenizer").local_files(".model")[0])
    documents = open_storage(target).local(f"documents/{name}.parquet")
    return _seen_tokens(
        _lines(manifest.counts["parts"]),
        f"{target}/tokens/{name}.tokens",
        shard,
        model,
        document,
        documents,
        _mixture(manifest),
    )


def _seen_tokens(
    lines: list[Line],
    file: str,
    shard: TokenShard,
    model: Tokenizer,
    document: int,
    documents: Path | None,
    mixture: SeenMixture | None,
) -> SeenTokens:
    if not 0 <= document < len(shard):
        raise ValueError(f"document ({document}) must be below the number of documents ({len(shard)}) in {file}")
    counts = count_ids(shard.tokens, model.vocab_size)
    frequent = np.argsort(counts, kind="stable")[::-1][:FREQUENT_PIECES]
    ids = shard.document(document)
    text = model.decode(ids)
    wrong = "" if np.array_equal(model.encode_documents([text])[0], ids) else "its text gives other tokens"
    if documents and text != _text(documents, document):
        wrong = f"its text is not that of {documents.name}"
    return SeenTokens(
        lines=lines,
        file=file,
        bytes_per_token=TOKEN.itemsize,
        vocab_size=model.vocab_size,
        lengths=np.diff(shard.document_ends.astype(np.int64), prepend=0),
        frequent=[(_piece(model, token), int(counts[token])) for token in frequent.tolist() if counts[token]],
        document=document,
        pieces=[_piece(model, token) for token in ids.tolist()],
        text_bytes=len(text.encode()),
        round_trip=wrong,
        mixture=mixture,
    )


def _mixture(tokens: Manifest) -> SeenMixture | None:
    """What the run's configuration, as it was used last, makes of its tokens."""
    try:
        config = PipelineConfig.model_validate(yaml.safe_load(open_storage(tokens.run_uri).read("config.yaml")))
    except FileNotFoundError:
        return None
    except (ValidationError, yaml.YAMLError):
        return SeenMixture(0, 0, 0, [], "config.yaml is damaged, or of another version")
    steps, seq_len = config.training.steps, config.model.seq_len
    mixture = SeenMixture(steps, Schedule(config.training, seq_len).total_tokens, config.tokens.max_epochs, [])
    tokens_of = Counter[str]()
    for name, part in tokens.counts["parts"].items():
        if name.startswith("train/"):
            tokens_of[part["source"]] += part["tokens"]
    weights = source_weights(config.data)
    if weights and not tokens_of.keys() <= weights.keys():
        return replace(mixture, fault="config.yaml names other sources than the tokens were made of")
    try:
        epochs = epochs_by_source(config, tokens.counts)
    except ValueError as error:
        return replace(mixture, fault=str(error))
    # Without weights all text is one source, of which each has the share that it has of the tokens.
    shares = weights or tokens_of
    for name in weights or sorted(tokens_of):
        mixture.sources.append(
            MixedSource(
                name=name,
                weight=weights[name] if weights else None,
                tokens=tokens_of[name],
                share=shares[name] / sum(shares.values()),
                epochs=epochs[name if weights else ALL],
            )
        )
    return mixture


def _piece(model: Tokenizer, token: int) -> str:
    return model.piece(token).replace("\u2581", " ")


def _lines(parts: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """What the files have by split and source."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for name, part in parts.items():
        fields = ("documents", "bytes", "tokens")
        sums.setdefault((name.partition("/")[0], part["source"]), Counter()).update(
            {field: part[field] for field in fields if field in part}
        )
    lines = [
        Line(split, source, total["documents"], total["bytes"], total.get("tokens"))
        for (split, source), total in sums.items()
    ]
    return sorted(lines, key=lambda line: SPLITS.index(line.split))


def _shard(uri: str) -> TokenShard:
    path = local_file(uri)
    local_file(uri.removesuffix(".tokens") + ".index")  # fetched to where the other is
    return TokenShard(path)


def _tokenizer_beside(shard: str) -> str:
    """The tokenizer of the run that a shard lies in, as RUN/tokens/SPLIT/NAME.tokens."""
    parts = shard.split("/")
    run = "/".join(parts[:-3]) or "."
    try:
        (model,) = find(f"{run}/tokenizer/tokenizer.model")[1]
    except ValueError:
        raise ValueError(f"{shard} lies in no run directory; name its tokenizer.model with --tokenizer") from None
    return f"{run}/tokenizer/{Path(model.name).name}"


def _count_documents(path: Path) -> tuple[list[Line], dict[str, int]]:
    documents, sizes, languages = Counter[str](), Counter[str](), Counter[str]()
    with _parquet(path) as file:
        for batch in file.iter_batches(_READ_ROWS, columns=["text", "source", "language"]):
            if any(column.null_count for column in batch.columns):
                raise ValueError(f"{path} is no shard of documents that Jumbo wrote: it holds nulls")
            lengths = pc.binary_length(batch.column("text")).to_pylist()
            for source, size in zip(batch.column("source").to_pylist(), lengths, strict=True):
                documents[source] += 1
                sizes[source] += size
            languages.update(batch.column("language").to_pylist())
    return [Line("", source, documents[source], sizes[source]) for source in documents], dict(languages.most_common())


def _examples(path: Path, number: int) -> list[SeenDocument]:
    with _parquet(path) as file:
        total = file.metadata.num_rows
        wanted = sorted({int(place) for place in np.linspace(0, total - 1, min(number, total)).round()})
        seen, first = [], 0
        for batch in file.iter_batches(_READ_ROWS):
            for row in [place - first for place in wanted if first <= place < first + len(batch)]:
                document = batch.slice(row, 1).to_pylist()[0]
                about = {name: document[name] for name in ("source", "origin", "language")}
                scores = {name: document.get(name) for name in _SCORES}
                about |= {
                    name: shown(score) for name, score in scores.items() if score is not None and not isnan(score)
                }
                seen.append(SeenDocument(first + row, document["text"], about))
            first += len(batch)
    return seen


def _text(path: Path, number: int) -> str | None:
    with _parquet(path) as file:
        for batch in file.iter_batches(_READ_ROWS, columns=["text"]):
            if number < len(batch):
                return batch.column("text")[number].as_py()
            number -= len(batch)
    return None


def _parquet(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no Parquet file of documents: {' '.join(str(error).split())}") from None
    there = {column.name: column.type for column in file.schema_arrow}
    wrong = [column for column in (*_NEEDED, *SCHEMA) if there.get(column.name, column.type) != column.type]
    if wrong or any(column.name not in there for column in _NEEDED):
        file.close()
        columns = [f"{name} ({type_})" for name, type_ in list(there.items())[:_SHOWN_COLUMNS]]
        more = f" and {len(there) - len(columns)} more" if len(there) > len(columns) else ""
        raise ValueError(
            f"{path} is no shard of documents that Jumbo wrote: its columns are {', '.join(columns)}{more}; "
            "to make documents of it, name it in --data.sources"
        )
    return file
