"""From documents to token shards: a shard for every Parquet file of documents, each made by itself."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from model.data.pieces import Engine, Piece
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokens.shards import ShardWriter, Tokens

ENCODING_VERSION = 1  # of what follows from documents and a tokenizer; another one is encoded anew

_BATCH_BYTES = 8 << 20
_READ_ROWS = 256
_COUNT_TOKENS = 4 << 20


@dataclass(frozen=True)
class EncodedPart:
    """What one shard holds. Bytes are of the documents' UTF-8 text; tokens include one end of text a document."""

    documents: int
    tokens: int
    bytes: int


def encode_parts(
    parts: Mapping[str, Path], tokenizer: Path, work: Path, out: Path, engine: Engine
) -> dict[str, EncodedPart]:
    """Writes out/NAME.tokens and out/NAME.index for each part and returns what they hold, by name.

    Every document, an empty one too, gives its tokens and one end of text. A shard follows from its documents and the
    tokenizer alone.

    Args:
        parts: Parquet files of documents by name, such as train/web-00000.
        tokenizer: A tokenizer.model.
        work: A folder of these parts' own. What an earlier run finished in it is not done again.
        out: An empty folder on the same file system.
        engine: What encodes the parts.
    """
    pieces = {name: Piece(work / name, partial(encode_part, path, tokenizer)) for name, path in parts.items()}
    engine.finish("encoding", list(pieces.values()))
    encoded = {}
    for name, piece in pieces.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".tokens", ".index"):
            Path(f"{out / name}{suffix}").hardlink_to(piece.folder / f"part{suffix}")
        encoded[name] = EncodedPart(**json.loads((piece.folder / "counts.json").read_text()))
    return encoded


def encode_part(documents: Path, tokenizer: Path, out: Path) -> None:
    """Writes out/part.tokens, out/part.index and what they hold, out/counts.json."""
    model = _load(tokenizer, tokenizer.stat().st_mtime_ns)
    n_bytes = 0
    with ShardWriter(out / "part.tokens") as writer:
        for texts, size in _batches(documents):
            writer.extend(*model.encode_documents(texts))
            n_bytes += size
    counts = {"documents": writer.documents, "tokens": writer.tokens, "bytes": n_bytes}
    (out / "counts.json").write_text(json.dumps(counts))


def count_ids(tokens: Tokens, vocab_size: int) -> NDArray[np.uint64]:
    """Returns how often each id occurs, (vocab_size,) uint64.

    Raises:
        ValueError: An id is not in the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _COUNT_TOKENS):
        found = np.bincount(tokens[start : start + _COUNT_TOKENS], minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(f"holds the token id {len(found) - 1}; the vocabulary has {vocab_size} ids")
        counts += found
    return counts.astype(np.uint64)


@lru_cache(maxsize=1)
def _load(tokenizer: Path, version: int) -> Tokenizer:
    """The tokenizer, once for all the parts that a process encodes; `version` changes with the file."""
    return Tokenizer(tokenizer)


def _batches(documents: Path) -> Iterator[tuple[list[str], int]]:
    """Yields texts of a Parquet file in order, about _BATCH_BYTES at once, with their size in bytes."""
    texts: list[str] = []
    size = 0
    with pq.ParquetFile(documents) as file:
        for batch in file.iter_batches(_READ_ROWS, columns=["text"]):
            column = batch.column("text")
            texts += column.to_pylist()
            size += pc.sum(pc.binary_length(column)).as_py() or 0
            if size >= _BATCH_BYTES:
                yield texts, size
                texts, size = [], 0
    yield texts, size
