"""One seam to storage: a directory or an S3 prefix, by URI. Nothing else in the project opens an S3 client.

Names are relative to the storage's URI, use "/" and may hold any character but NUL. `file:` URIs and plain paths are
taken as they stand, without percent-decoding. An object appears whole or not at all: local files are written beside
their place and renamed; S3 does so by itself.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import IO, Any, BinaryIO, Protocol, cast

logger = logging.getLogger(__name__)

WILDCARDS = "*?["
_PARTIAL = ".partial-"


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
        """The objects whose name matches; `*` and `?` stay within a name, `**` crosses directories."""

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
        """A local file with the object's content: the file itself, or a copy kept for this version of it.

        Raises:
            FileNotFoundError: there is no such object.
        """


class FileStorage:
    """A directory on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError(f"object name {name!r} must stay below {self.uri}")
        return self.root / name

    def list(self, prefix: str = "") -> Entries:
        top = self._path(prefix)
        return self._entries([top] if top.is_file() else top.rglob("*"))

    def glob(self, pattern: str) -> Entries:
        return self._entries(self.root.glob(pattern))

    def _entries(self, paths: Iterable[Path]) -> Entries:
        entries = []
        for path in paths:
            try:
                stat = path.stat()
            except FileNotFoundError:  # deleted while we looked
                continue
            if not S_ISREG(stat.st_mode) or path.name.startswith(_PARTIAL):
                continue
            name = path.relative_to(self.root).as_posix()
            entries.append(Entry(name, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}"))
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
        if path.is_dir():
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
    """A prefix in an S3 bucket. Credentials, region and endpoint come from boto3's own chain (AWS_ENDPOINT_URL …)."""

    def __init__(self, bucket: str, prefix: str) -> None:
        import boto3  # a second of import that local runs need not pay
        from botocore.config import Config

        self.bucket = bucket
        self.prefix = prefix
        self.uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        retries = {"mode": "adaptive", "total_max_attempts": 8}
        config = Config(retries=retries, connect_timeout=10, read_timeout=60, s3={"addressing_style": "path"})
        self._client: Any = boto3.client("s3", config=config)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix and name else self.prefix or name

    def list(self, prefix: str = "") -> Entries:
        key = self._key(prefix)
        below = f"{key.rstrip('/')}/" if key else ""
        strip = len(self.prefix) + 1 if self.prefix else 0
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=key)
        found = [item for page in pages for item in page.get("Contents", ())]
        return [
            Entry(item["Key"][strip:], item["Size"], item["ETag"].strip('"'))
            for item in found
            if item["Key"] == key or item["Key"].startswith(below)
        ]

    def glob(self, pattern: str) -> Entries:
        return [entry for entry in self.list() if _matches(entry.name.split("/"), pattern.split("/"))]

    def open(self, name: str) -> BinaryIO:
        with self._naming(name):
            return cast(BinaryIO, self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"])

    def read(self, name: str) -> bytes:
        with self.open(name) as body:
            return body.read()

    def write(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data, ChecksumAlgorithm="CRC32")

    def upload(self, path: Path, name: str) -> None:
        extra = {"ChecksumAlgorithm": "CRC32"}
        self._client.upload_file(str(path), self.bucket, self._key(name), ExtraArgs=extra)

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._naming(name):
            self._client.download_file(self.bucket, self._key(name), str(path))

    def delete(self, name: str) -> None:
        keys = [{"Key": self._key(entry.name)} for entry in self.list(name)]
        for start in range(0, len(keys), 1000):  # the API's limit
            reply = self._client.delete_objects(
                Bucket=self.bucket, Delete={"Objects": keys[start : start + 1000], "Quiet": True}
            )
            if reply.get("Errors"):
                first = reply["Errors"][0]
                raise OSError(f"cannot delete s3://{self.bucket}/{first['Key']}: {first['Code']} {first['Message']}")

    def local(self, name: str) -> Path:
        with self._naming(name):
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

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        from botocore.exceptions import ClientError

        try:
            yield
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404", "NoSuchBucket"):
                raise FileNotFoundError(f"{self.uri}/{name} does not exist") from error
            raise


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
    if "://" in uri and not uri.startswith("file://"):
        raise ValueError(f"{uri!r} has an unknown scheme; use a path, file:, s3:// or package:")
    return FileStorage(_local_path(uri))


def _local_path(uri: str) -> Path:
    path = uri.removeprefix("file://") if uri.startswith("file://") else uri.removeprefix("file:")
    return Path(path).expanduser().absolute()


def has_credentials() -> bool:
    """Whether boto3's chain finds AWS credentials; asks no service but the machine's own metadata."""
    import boto3

    return boto3.Session().get_credentials() is not None


def find(uri: str) -> tuple[Storage, Entries]:
    """The storage and objects that a URI or glob names: an object, everything below a directory, or what matches.

    `*` and `?` stay within a name, `**` crosses directories. A local path that exists is itself, even where it holds
    wildcards.
    """
    parts = uri.split("/")
    literal = next((i for i, part in enumerate(parts) if any(c in part for c in WILDCARDS)), len(parts))
    if literal < len(parts) and not uri.startswith(("s3:", "package:")) and _local_path(uri).exists():
        literal = len(parts)
    if literal < len(parts):
        storage = open_storage(_directory(parts[:literal]))
        pattern = "/".join(parts[literal:])
        return storage, storage.glob(f"{pattern}/*" if pattern.endswith("**") else pattern)
    if uri.startswith("s3://") and len(parts) == 3:  # a whole bucket
        storage = open_storage(uri)
        return storage, storage.list()
    storage = open_storage(_directory(parts[:-1]))
    return storage, storage.list(parts[-1])


def _directory(parts: list[str]) -> str:
    return "/".join(parts) or ("/" if parts else ".")


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _matches(name, pattern[1:]) or (bool(name) and _matches(name[1:], pattern))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
