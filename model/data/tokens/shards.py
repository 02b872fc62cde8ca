"""Token shards: fixed-width ids in one file, the ends of the documents in another; memory-mapped, or read in ranges.

NAME.tokens   header, then one little-endian uint32 per token
NAME.index    header, then one little-endian uint64 per document: the token after its last

header (32 bytes)   magic, format version, bytes per value, tokens, documents
"""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

TOKEN = np.dtype("<u4")  # a vocabulary of 262,144 needs 18 bits
DOCUMENT_END = np.dtype("<u8")

_HEADER = struct.Struct("<8sIIQQ")
_TOKENS_MAGIC = b"JUMBOTOK"
_INDEX_MAGIC = b"JUMBOIDX"
_VERSION = 1


class Tokens(Protocol):
    """The tokens of one shard, wherever they are: an array, a memory map, or what is read from afar."""

    def __len__(self) -> int:
        """The number of tokens."""

    def __getitem__(self, part: slice) -> NDArray[np.uint32]:
        """The tokens from part.start to part.stop, or to the shard's end; uint32."""


class ShardWriter:
    """Writes one shard; its files have their names once it is closed, and leave nothing when an exception ends it."""

    def __init__(self, path: Path) -> None:
        self.tokens = 0
        self.documents = 0
        self._path = path
        self._ends: list[NDArray[np.uint64]] = []
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
        self.extend(np.array(ids, TOKEN), np.array([len(ids)]))

    def extend(self, ids: NDArray[np.uint32], ends: NDArray[Any]) -> None:
        """Adds documents.

        Args:
            ids: Their tokens, one document after the other.
            ends: For each document the place in ids after its last token.
        """
        assert ids.dtype == TOKEN
        self._file.write(ids.data)
        self._ends.append(np.asarray(ends, DOCUMENT_END) + np.uint64(self.tokens))
        self.tokens += len(ids)
        self.documents += len(ends)

    def close(self) -> None:
        self._file.seek(0)
        self._file.write(self._header(_TOKENS_MAGIC, TOKEN))
        self._file.close()
        index = self._path.with_suffix(".index")
        partial = self._path.with_suffix(".index.partial")
        ends = np.concatenate([np.empty(0, DOCUMENT_END), *self._ends])
        partial.write_bytes(self._header(_INDEX_MAGIC, DOCUMENT_END) + ends.tobytes())
        partial.replace(index)
        self._partial.replace(self._path)

    def _header(self, magic: bytes, value: np.dtype) -> bytes:
        return _HEADER.pack(magic, _VERSION, value.itemsize, self.tokens, self.documents)


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

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_ends)

    def document(self, number: int) -> NDArray[np.uint32]:
        """Returns the ids of one document, its end of text included."""
        start = self.document_ends[number - 1] if number else 0
        return self.tokens[int(start) : int(self.document_ends[number])]


class StreamedTokens:
    """The tokens of a shard that lies elsewhere; every slice is read when it is asked for.

    Args:
        name: Of the .tokens file, for errors.
        size_bytes: Of the .tokens file.
        read: Returns so many bytes of it from a place on: read(start, length).
        vocab_size: Every id must be below it.

    Raises:
        ValueError: The file is no shard of this format, or not whole.
    """

    def __init__(self, name: str, size_bytes: int, read: Callable[[int, int], bytes], vocab_size: int) -> None:
        self._name, self._read, self._vocab_size = name, read, vocab_size
        header = read(0, min(_HEADER.size, size_bytes))
        self._length, _ = _check_header(name, header, size_bytes, _TOKENS_MAGIC, TOKEN)

    def __len__(self) -> int:
        """The number of tokens."""
        return self._length

    def __getitem__(self, part: slice) -> NDArray[np.uint32]:
        """Returns the tokens from part.start to part.stop, or to the shard's end.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        length = min(part.stop, self._length) - part.start
        assert length >= 0
        data = self._read(_HEADER.size + part.start * TOKEN.itemsize, length * TOKEN.itemsize)
        tokens = np.frombuffer(data, TOKEN)
        if (highest := int(tokens.max(initial=0))) >= self._vocab_size:
            raise ValueError(f"{self._name}: holds the token id {highest}; the vocabulary has {self._vocab_size} ids")
        return tokens


def _read_header(path: Path, magic: bytes, value: np.dtype) -> tuple[int, int]:
    with path.open("rb") as file:
        return _check_header(str(path), file.read(_HEADER.size), path.stat().st_size, magic, value)


def _check_header(name: str, header: bytes, size_bytes: int, magic: bytes, value: np.dtype) -> tuple[int, int]:
    """Returns the number of tokens and of documents after checking that the file is what its header says."""
    if len(header) < _HEADER.size or not header.startswith(magic):
        raise ValueError(f"{name}: does not start with the header of a token shard ({magic.decode()})")
    _, version, width, tokens, documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{name}: has format version {version}; this code reads version {_VERSION}")
    if width != value.itemsize:
        raise ValueError(f"{name}: holds values of {width} bytes; {value.itemsize} expected")
    size = _HEADER.size + width * (tokens if magic == _TOKENS_MAGIC else documents)
    if size_bytes != size:
        raise ValueError(f"{name}: is {size_bytes} bytes long; its header says {size}")
    return tokens, documents


def _map(path: Path, value: np.dtype, count: int) -> NDArray[Any]:
    if not count:  # an empty range cannot be mapped
        return np.empty(0, value)
    # A plain array over the map: slices of np.memmap itself are several times slower to make.
    return np.asarray(np.memmap(path, value, mode="r", offset=_HEADER.size, shape=(count,)))
