"""One seam to storage: a directory or an S3 prefix, by URI. Nothing else in the project opens an S3 client.

Names are relative to the storage's URI, use "/" and may hold any character but NUL. `file:` URIs and plain paths are
taken as they stand, without percent-decoding. An object appears whole or not at all: local files are written beside
their place and renamed; S3 does so by itself. A local link is what it leads to: a broken one is ignored, one to a
directory is followed, unless it leads back to a directory that holds it. What cannot be read is never skipped.

What goes wrong is an OSError or ValueError of one line, whatever the kind of storage: FileNotFoundError,
PermissionError (credentials too), ConnectionError, ValueError for a name that cannot be.
"""

import importlib.util
import os
import re
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Protocol

from infra.storage_file import FileStorage
from infra.storage_names import WILD, Entries, Entry
from infra.storage_s3 import S3Storage

__all__ = ["Entries", "Entry", "FileStorage", "S3Storage", "Storage", "find", "has_credentials", "open_storage"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class Storage(Protocol):
    """What both kinds of storage do."""

    uri: str

    def list(self, prefix: str = "") -> Entries:
        """Everything below the directory `prefix`, or the object of exactly that name, sorted by name."""

    def glob(self, pattern: str) -> Entries:
        """The objects whose name matches; `*` and `?` stay within a name, `**` crosses directories, all else is
        literal. Only directories that can hold a match are read."""

    def open(self, name: str) -> BinaryIO:
        """A stream of the object's bytes. Raises FileNotFoundError."""

    def stream(self, name: str) -> RawIOBase:
        """The same without a buffer, for one reading of a large object into pages of the caller's: nothing of it stays
        in the page cache. Raises FileNotFoundError."""

    def read(self, name: str) -> bytes:
        """The whole object, for small ones. Raises FileNotFoundError."""

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Exactly these bytes of the object. Raises FileNotFoundError, or OSError where it ends before them."""

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Store `data`, replacing what was there. It is not copied, whatever its size."""

    def upload(self, path: Path, name: str) -> None:
        """Store the local file `path`, replacing what was there."""

    def download(self, name: str, path: Path) -> None:
        """Fetch the object to the local file `path`. Raises FileNotFoundError."""

    def delete(self, name: str) -> None:
        """Remove the object `name` and everything below it; what is not there is no error."""

    def delete_unfinished(self) -> None:
        """Remove what writers that were killed have left anywhere in the storage; nobody may be writing."""

    def local(self, name: str) -> Path:
        """A local file with the object's content, itself or a copy for this version of it. Raises FileNotFoundError."""


def open_storage(uri: str) -> Storage:
    """The storage at a path, a `file:` URI, an `s3://bucket/prefix` URI or `package:NAME/PATH`.

    Raises:
        ValueError: another scheme, no bucket, or a package that is not installed.
    """
    if uri.startswith("s3://"):
        bucket, _, prefix = uri[len("s3://") :].partition("/")
        if not bucket:
            raise ValueError(f"{uri!r} names no bucket; write s3://BUCKET/PREFIX")
        return S3Storage(bucket, prefix.strip("/"))
    if uri.startswith("package:"):
        package, _, path = uri[len("package:") :].partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"{uri!r} needs the package {package!r}, which is not installed (pip install {package})")
        return FileStorage(Path(spec.submodule_search_locations[0]) / path)
    if not _is_local(uri):
        raise ValueError(f"{uri!r} has an unknown scheme; use a path, file:, s3:// or package:")
    return FileStorage(_local_path(uri))


def _is_local(uri: str) -> bool:
    return uri.startswith("file:") or not (_SCHEME.match(uri) or uri.startswith("package:"))


def _local_text(uri: str) -> str:
    """The absolute path of a local URI, its links and `..` as they stand."""
    path = os.path.expanduser(uri.removeprefix("file://" if uri.startswith("file://") else "file:"))
    if path.startswith("~"):
        raise ValueError(f"{uri!r}: there is no home directory for {path.partition('/')[0]!r}")
    return "/" + os.path.join(os.getcwd(), path).lstrip("/")


def _local_path(uri: str) -> Path:
    try:
        return Path(_local_text(uri)).resolve()
    except RuntimeError as error:  # links in a circle
        raise ValueError(f"{uri!r} is no path: {error}") from None


def has_credentials() -> bool:
    """Whether boto3's chain finds AWS credentials; asks no service but the machine's own metadata."""
    import boto3

    return boto3.Session().get_credentials() is not None


def find(uri: str) -> tuple[Storage, Entries]:
    """The storage and objects that a URI or glob names: an object, everything below a directory, or what matches.

    `*` and `?` stay within a name, `**` crosses directories, all else is literal. A local path that exists is itself,
    even where it holds wildcards.

    Raises:
        ValueError: as `open_storage`, or `..` after a wildcard.
    """
    if local := _is_local(uri):
        uri = _local_text(uri)
    first = 1 if local or uri.startswith("package:") else 3  # parts that the storage cannot do without
    parts = uri.split("/")
    wild = next((i for i in range(first, len(parts)) if WILD.search(parts[i])), len(parts))
    if wild < len(parts) and not (local and Path(uri).exists()):
        storage = open_storage("/".join(parts[:wild]) or "/")
        return storage, storage.glob("/".join(parts[wild:]))
    if len(parts) <= first or parts[-1] in ("", ".", ".."):
        storage = open_storage(uri)
        return storage, storage.list()
    storage = open_storage("/".join(parts[:-1]) or "/")
    return storage, storage.list(parts[-1])
