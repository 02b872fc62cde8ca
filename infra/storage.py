"""One seam to storage: a directory or an S3 prefix, by URI. Nothing else in the project opens an S3 client.

Names are relative to the storage's URI, use "/" and may hold any character but NUL. `file:` URIs and plain paths are
taken as they stand, without percent-decoding. An object appears whole or not at all: local files are written beside
their place and renamed; S3 does so by itself. A local link is what it leads to: a broken one is ignored, one to a
directory is followed, unless it leads back to a directory that holds it. What cannot be read is never skipped.

What goes wrong is an OSError or ValueError of one line, whatever the kind of storage: FileNotFoundError,
PermissionError (credentials too), ConnectionError, ValueError for a name that cannot be.
"""

import errno
import hashlib
import importlib.util
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import IO, Any, BinaryIO, Protocol

from infra.errors import s3_errors, s3_refusal

S3_ATTEMPTS = 8
_PARTIAL = ".partial-"
_WILD = re.compile(r"[*?]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Entry:
    """One stored object. `version` changes when its content does."""

    name: str
    size_bytes: int
    version: str


Entries = list[Entry]


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

    def read(self, name: str) -> bytes:
        """The whole object, for small ones. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """Store `data`, replacing what was there."""

    def upload(self, path: Path, name: str) -> None:
        """Store the local file `path`, replacing what was there."""

    def download(self, name: str, path: Path) -> None:
        """Fetch the object to the local file `path`. Raises FileNotFoundError."""

    def delete(self, name: str) -> None:
        """Remove the object `name` and everything below it; what is not there is no error."""

    def local(self, name: str) -> Path:
        """A local file with the object's content, itself or a copy for this version of it. Raises FileNotFoundError."""


class FileStorage:
    """A directory on this machine; `root` and `uri` are the same for all its spellings."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.uri = str(self.root)

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError(f"object name {name!r} must stay below {self.uri}")
        return self.root / name

    def list(self, prefix: str = "") -> Entries:
        name = self._path(prefix).relative_to(self.root).as_posix()
        stat = _stat(self.root / name)
        if stat is not None and S_ISREG(stat.st_mode):
            return [_entry(name, stat)]
        return self._walk("" if name == "." else name, ("**", "*"))

    def glob(self, pattern: str) -> Entries:
        return self._walk("", _parts(self._path(pattern).relative_to(self.root).as_posix()))

    def _walk(self, top: str, pattern: tuple[str, ...]) -> Entries:
        """The files below the directory `top` whose names from there on match."""
        entries = []
        # A directory's parts below `top`, and where it and those that led to it through links really are.
        pending: list[tuple[tuple[str, ...], tuple[Path, ...]]] = [((), ((self.root / top).resolve(),))]
        while pending:
            directory, places = pending.pop()
            for name in _names(self.root.joinpath(top, *directory), pattern[: len(directory) + 1]):
                parts = (*directory, name)
                matches, leads = _matches(parts, pattern), _matches(parts, pattern, leads=True)
                path = self.root.joinpath(top, *parts)
                stat = _stat(path) if matches or leads else None
                if stat is None:
                    continue
                if matches and S_ISREG(stat.st_mode) and not name.startswith(_PARTIAL):
                    entries.append(_entry(path.relative_to(self.root).as_posix(), stat))
                elif leads and S_ISDIR(stat.st_mode):
                    real = places[-1] / name
                    if not real.is_symlink():
                        pending.append((parts, (*places[:-1], real)))
                    elif not any(place.is_relative_to(real.resolve()) for place in places):
                        pending.append((parts, (*places, real.resolve())))
        return sorted(entries, key=lambda entry: entry.name)

    def open(self, name: str) -> BinaryIO:
        return self._path(name).open("rb")

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with self._replacing(name) as file:
            file.write(data)

    def upload(self, path: Path, name: str) -> None:
        with path.open("rb") as source, self._replacing(name) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.open(name) as source, path.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def delete(self, name: str) -> None:
        path = self._path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def local(self, name: str) -> Path:
        path = self._path(name)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        return path

    @contextmanager
    def _replacing(self, name: str) -> Iterator[IO[bytes]]:
        """A file that takes its name only when it is whole and on the disk."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_PARTIAL, delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


class S3Storage:
    """A prefix in an S3 bucket. Credentials, region and endpoint come from boto3's own chain (AWS_ENDPOINT_URL …),
    which is asked at the first use."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"

    @cached_property
    def _client(self) -> Any:
        import boto3  # a second of import that local runs need not pay
        from botocore.config import Config

        retries = {"mode": "adaptive", "total_max_attempts": S3_ATTEMPTS}
        config = Config(retries=retries, connect_timeout=10, read_timeout=60, s3={"addressing_style": "path"})
        return boto3.Session().client("s3", config=config)  # the default session is not for several threads

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix and name else self.prefix or name

    def list(self, prefix: str = "") -> Entries:
        key = self._key(prefix)
        below = f"{key.rstrip('/')}/" if key else ""
        strip = len(self.prefix) + 1 if self.prefix else 0
        with s3_errors(self.uri, prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=key)
            found = [item for page in pages for item in page.get("Contents", ())]
        return [
            Entry(item["Key"][strip:], item["Size"], item["ETag"].strip('"'))
            for item in found
            if item["Key"] == key or item["Key"].startswith(below)
        ]

    def glob(self, pattern: str) -> Entries:
        parts = _parts(pattern)
        return [entry for entry in self.list() if _matches(entry.name.split("/"), parts)]

    def open(self, name: str) -> BinaryIO:
        with s3_errors(self.uri, name):
            body = self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"]
            return io.BufferedReader(_S3Body(body, self.uri, name), 1 << 20)

    def read(self, name: str) -> bytes:
        with self.open(name) as body:
            return body.read()

    def write(self, name: str, data: bytes) -> None:
        with s3_errors(self.uri, name):
            self._client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data, ChecksumAlgorithm="CRC32")

    def upload(self, path: Path, name: str) -> None:
        with s3_errors(self.uri, name):
            self._client.upload_file(str(path), self.bucket, self._key(name), ExtraArgs={"ChecksumAlgorithm": "CRC32"})

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with s3_errors(self.uri, name):
            self._client.download_file(self.bucket, self._key(name), str(path))

    def delete(self, name: str) -> None:
        keys = [{"Key": self._key(entry.name)} for entry in self.list(name)]
        for start in range(0, len(keys), 1000):  # the API's limit
            with s3_errors(self.uri, name):
                batch = {"Objects": keys[start : start + 1000], "Quiet": True}
                reply = self._client.delete_objects(Bucket=self.bucket, Delete=batch)
            for refused in reply.get("Errors", ()):
                raise s3_refusal(f"s3://{self.bucket}/{refused['Key']}", refused["Code"], refused["Message"], 0)

    def local(self, name: str) -> Path:
        with s3_errors(self.uri, name):
            etag = self._client.head_object(Bucket=self.bucket, Key=self._key(name))["ETag"].strip('"')
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jumbo"
        path = cache / hashlib.sha256(self.uri.encode()).hexdigest()[:16] / name
        version = path.with_name(f"{_PARTIAL}{path.name}.version")  # written after the file that it speaks of
        if not (path.exists() and version.exists() and version.read_text() == etag):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=_PARTIAL) as scratch:
                self.download(name, Path(scratch) / "object")
                (Path(scratch) / "version").write_text(etag)
                version.unlink(missing_ok=True)
                os.replace(Path(scratch) / "object", path)
                os.replace(Path(scratch) / "version", version)
        return path


class _S3Body(io.RawIOBase):
    """An object's bytes as they come; an end before their time is an error."""

    def __init__(self, body: Any, *name: str) -> None:
        self._body, self._name = body, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with s3_errors(*self._name):
            data = self._body.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        with s3_errors(*self._name):
            return self._body.read()

    def close(self) -> None:
        self._body.close()
        super().close()


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
    wild = next((i for i in range(first, len(parts)) if _WILD.search(parts[i])), len(parts))
    if wild < len(parts) and not (local and Path(uri).exists()):
        storage = open_storage("/".join(parts[:wild]) or "/")
        return storage, storage.glob("/".join(parts[wild:]))
    if len(parts) <= first or parts[-1] in ("", ".", ".."):
        storage = open_storage(uri)
        return storage, storage.list()
    storage = open_storage("/".join(parts[:-1]) or "/")
    return storage, storage.list(parts[-1])


def _entry(name: str, stat: os.stat_result) -> Entry:
    return Entry(name, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}")


def _names(directory: Path, pattern: tuple[str, ...]) -> Iterable[str]:
    """The names in a directory that can match the pattern's last part."""
    if "**" not in pattern and not _WILD.search(pattern[-1]):
        return pattern[-1:]
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):  # deleted while we looked
        return ()


def _stat(path: Path) -> os.stat_result | None:
    """What the path leads to; None where that is nothing, since it was deleted meanwhile or is a broken link."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _parts(pattern: str) -> tuple[str, ...]:
    """The pattern's parts; a `**` at its end means the files at any depth."""
    parts = pattern.split("/")
    parts = [part for i, part in enumerate(parts) if part != "**" or parts[i + 1 : i + 2] != ["**"]]
    return (*parts, "*") if parts[-1] == "**" else tuple(parts)


def _matches(name: Sequence[str], pattern: Sequence[str], leads: bool = False) -> bool:
    """Whether the name matches; with `leads`, whether names below it can."""
    if not name or not pattern:
        return bool(pattern) if leads else not name and not pattern
    if pattern[0] == "**":
        return _matches(name, pattern[1:], leads) or _matches(name[1:], pattern, leads)
    return bool(_regex(pattern[0]).fullmatch(name[0])) and _matches(name[1:], pattern[1:], leads)


@cache
def _regex(part: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"(\\\*)+", ".*", re.escape(part)).replace(r"\?", "."), re.DOTALL)
