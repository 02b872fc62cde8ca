"""Token shards: fixed-width ids in one file, the ends of the documents in another, both memory-mapped to read.

part-00000.tokens   header, then one little-endian uint32 per token
part-00000.index    header, then one little-endian uint64 per document: the token after its last

header (32 bytes)   magic, format version, bytes per value, tokens, documents
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from model.data.documents import replace_surrogates
from model.data.tokenizer import Tokenizer

TOKEN = np.dtype("<u4")  # a vocabulary of 262,144 needs 18 bits
DOCUMENT_END = np.dtype("<u8")

_HEADER = struct.Struct("<8sIIQQ")
_TOKENS_MAGIC = b"JUMBOTOK"
_INDEX_MAGIC = b"JUMBOIDX"
_VERSION = 1
_PROGRESS_DOCUMENTS = 1000


@dataclass
class TokenCounts:
    """What was written. Bytes are of the documents' UTF-8 text; tokens include one end of text a document."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ShardWriter:
    """Writes one shard; its files have their names once it is closed, and leave nothing when an exception ends it."""

    def __init__(self, path: Path) -> None:
        self.tokens = 0
        self._path = path
        self._ends = array("Q")
        self._partial = path.with_suffix(".tokens.partial")
        self._file = self._partial.open("wb")
        self._file.write(bytes(_HEADER.size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
            self._partial.unlink()

    def add(self, ids: Sequence[int]) -> None:
        """Adds one document."""
        self._file.write(np.array(ids, TOKEN).tobytes())
        self.tokens += len(ids)
        self._ends.append(self.tokens)

    def close(self) -> None:
        self._file.seek(0)
        self._file.write(self._header(_TOKENS_MAGIC, TOKEN))
        self._file.close()
        index = self._path.with_suffix(".index")
        partial = self._path.with_suffix(".index.partial")
        partial.write_bytes(self._header(_INDEX_MAGIC, DOCUMENT_END) + np.array(self._ends, DOCUMENT_END).tobytes())
        partial.replace(index)
        self._partial.replace(self._path)

    def _header(self, magic: bytes, value: np.dtype) -> bytes:
        return _HEADER.pack(magic, _VERSION, value.itemsize, self.tokens, len(self._ends))


class TokenShard:
    """A shard, memory-mapped.

    Attributes:
        tokens: Every id, (tokens,) uint32.
        document_ends: For each document the position after its last token, (documents,) uint64.

    Raises:
        ValueError: A file is no shard of this format, or not whole.
    """

    def __init__(self, path: Path) -> None:
        index = path.with_suffix(".index")
        n_tokens, n_documents = _read_header(path, _TOKENS_MAGIC, TOKEN)
        if _read_header(index, _INDEX_MAGIC, DOCUMENT_END) != (n_tokens, n_documents):
            raise ValueError(f"{index}: is the index of another shard than {path.name}")
        self.tokens = _map(path, TOKEN, n_tokens)
        self.document_ends = _map(index, DOCUMENT_END, n_documents)
        ends = np.concatenate([[0], self.document_ends.astype(np.int64), [n_tokens]])
        if (np.diff(ends) < 0).any() or ends[-2] != n_tokens:
            raise ValueError(f"{index}: the document ends do not ascend to the number of tokens ({n_tokens})")

    def document(self, number: int) -> NDArray[np.uint32]:
        """Returns the ids of one document, its end of text included."""
        start = self.document_ends[number - 1] if number else 0
        return self.tokens[int(start) : int(self.document_ends[number])]


def write_token_shards(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    out: Path,
    shard_tokens: int,
    progress: Callable[[TokenCounts], None],
) -> TokenCounts:
    """Writes out/part-*.tokens with their indexes, and out/unigram.npy: how often each id occurs, (vocab_size,) uint64.

    Every document, an empty one too, gives its tokens and one end of text. A shard holds whole documents and at most
    shard_tokens tokens, more only for a single document. No documents at all give one empty shard.
    """
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("part-*"), *out.glob("unigram.npy")):
        stale.unlink()
    counts = TokenCounts()
    unigram = np.zeros(tokenizer.vocab_size, np.uint64)
    encoded = ((text, [*tokenizer.encode(text), tokenizer.end_of_text]) for text in documents)
    following = next(encoded, None)
    while following or not counts.shards:
        with ShardWriter(out / f"part-{counts.shards:05}.tokens") as writer:
            while following and (not writer.tokens or writer.tokens + len(following[1]) <= shard_tokens):
                text, ids = following
                writer.add(ids)
                np.add.at(unigram, ids, np.uint64(1))
                counts.documents += 1
                counts.tokens += len(ids)
                counts.bytes += len(replace_surrogates(text).encode())
                if counts.documents % _PROGRESS_DOCUMENTS == 0:
                    progress(counts)
                following = next(encoded, None)
        counts.shards += 1
        progress(counts)
    partial = out / "unigram.npy.partial"
    with partial.open("wb") as file:
        np.save(file, unigram)
    partial.replace(out / "unigram.npy")
    return counts


def _read_header(path: Path, magic: bytes, value: np.dtype) -> tuple[int, int]:
    """Returns the number of tokens and of documents after checking that the file is what its header says."""
    with path.open("rb") as file:
        data = file.read(_HEADER.size)
    if len(data) < _HEADER.size or not data.startswith(magic):
        raise ValueError(f"{path}: does not start with the header of a token shard ({magic.decode()})")
    _, version, width, tokens, documents = _HEADER.unpack(data)
    if version != _VERSION:
        raise ValueError(f"{path}: has format version {version}; this code reads version {_VERSION}")
    if width != value.itemsize:
        raise ValueError(f"{path}: holds values of {width} bytes; {value.itemsize} expected")
    size = _HEADER.size + width * (tokens if magic == _TOKENS_MAGIC else documents)
    if path.stat().st_size != size:
        raise ValueError(f"{path}: is {path.stat().st_size} bytes long; its header says {size}")
    return tokens, documents


def _map(path: Path, value: np.dtype, count: int) -> NDArray[Any]:
    if not count:  # an empty range cannot be mapped
        return np.empty(0, value)
    return np.memmap(path, value, mode="r", offset=_HEADER.size, shape=(count,))
