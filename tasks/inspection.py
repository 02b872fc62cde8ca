"""What there is to see in documents and token shards, of a run or of one file. Imports no Prefect."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infra.storage import find, open_storage
from model.data.document_shards import SPLITS
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokens.encoding import count_ids
from model.data.tokens.shards import TOKEN, TokenShard
from tasks.manifest import inside, read_manifest

FREQUENT_PIECES = 20
_READ_ROWS = 256
_NOT_SCORES = {"text", "source", "document_id", "origin", "language"}


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
    """Documents of a run or file: what there is, in which languages, and some of them from `file`."""

    lines: list[Line]
    languages: dict[str, int]
    file: str
    examples: list[SeenDocument]


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


def see_documents(target: str, split: str, source: str, number: int) -> SeenDocuments:
    """Looks at `number` documents, evenly spaced over the first file of a run's split and source, or over one file.

    Raises:
        ValueError: the target is neither, or has no such split or source.
        OSError: it cannot be read.
    """
    if target.endswith(".parquet"):
        path = _local(target)
        lines, languages = _count_documents(path)
        return SeenDocuments(lines, languages, target, _examples(path, number))
    manifest = read_manifest(target, "documents")
    parts = manifest.counts["parts"]
    name = _chosen(target, "documents", parts, split, source)
    languages = Counter[str]()
    for part in parts.values():
        languages.update(part["languages"])
    path = open_storage(target).local(inside(manifest.directory, name))
    return SeenDocuments(
        _lines(parts), dict(languages.most_common()), f"{target}/documents/{name}", _examples(path, number)
    )


def see_tokens(target: str, split: str, source: str, document: int, tokenizer: str) -> SeenTokens:
    """Looks at the first shard of a run's split and source, or at one shard, and at one of its documents.

    Args:
        tokenizer: The tokenizer.model of a single shard; empty for the one of the run that it lies in.

    Raises:
        ValueError: the target is neither, or has no such split, source or document, or no tokenizer is found.
        OSError: it cannot be read.
    """
    if target.endswith(".tokens"):
        shard, model = _shard(target), Tokenizer(_local(tokenizer or _tokenizer_beside(target)))
        lines = [Line("", "", len(shard), None, len(shard.tokens))]
        return _seen_tokens(lines, target, shard, model, document, None)
    manifest = read_manifest(target, "tokens")
    name = _chosen(target, "tokens", manifest.counts["parts"], split, source)
    shard = _shard(f"{target}/tokens/{name}.tokens")
    model = Tokenizer(read_manifest(target, "tokenizer").local_files(".model")[0])
    documents = open_storage(target).local(f"documents/{name}.parquet")
    return _seen_tokens(
        _lines(manifest.counts["parts"]), f"{target}/tokens/{name}.tokens", shard, model, document, documents
    )


def _seen_tokens(
    lines: list[Line], file: str, shard: TokenShard, model: Tokenizer, document: int, documents: Path | None
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
    )


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


def _chosen(target: str, directory: str, parts: Mapping[str, Mapping[str, Any]], split: str, source: str) -> str:
    """The first file of a split and source that holds a document."""
    of_split = {name: part for name, part in parts.items() if name.startswith(f"{split}/") and part["documents"]}
    if not of_split:
        splits = ", ".join(dict.fromkeys(name.partition("/")[0] for name in parts))
        raise ValueError(f"split ({split}) has no {directory} in {target}; there are {splits}")
    of_source = [name for name, part in of_split.items() if source in ("", part["source"])]
    if not of_source:
        sources = ", ".join(dict.fromkeys(part["source"] for part in of_split.values()))
        raise ValueError(f"source ({source}) has no {directory} in the {split} split of {target}; there are {sources}")
    return of_source[0]


def _local(uri: str) -> Path:
    storage, entries = find(uri)
    if len(entries) != 1:
        raise ValueError(f"{uri} is no file")
    return storage.local(entries[0].name)


def _shard(uri: str) -> TokenShard:
    path = _local(uri)
    _local(uri.removesuffix(".tokens") + ".index")  # fetched to where the other is
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
                about |= {
                    name: f"{score:,.0f}" if score >= 100 else f"{score:.3g}"
                    for name, score in document.items()
                    if name not in _NOT_SCORES and score is not None and not isnan(score)
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
    columns = file.schema_arrow.names
    if not {"text", "source", "origin", "language"} <= set(columns):
        file.close()
        raise ValueError(f"{path} is no shard of documents that Jumbo wrote: its columns are {', '.join(columns)}")
    return file
