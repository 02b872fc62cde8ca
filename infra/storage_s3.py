"""Storage under a prefix of an S3 bucket."""

import hashlib
import io
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from infra.errors import s3_errors, s3_refusal
from infra.storage_names import PARTIAL, Entries, Entry, name_matches, pattern_parts, whole_range

S3_ATTEMPTS = 8


class S3Storage:
    """A prefix in an S3 bucket. Credentials, region and endpoint come from boto3's own chain (AWS_ENDPOINT_URL …),
    which is asked at the first use."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes to another process without its client, which has threads and sockets."""
        return S3Storage, (self.bucket, self.prefix)

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
        parts = pattern_parts(pattern)
        return [entry for entry in self.list() if name_matches(entry.name.split("/"), parts)]

    def open(self, name: str) -> BinaryIO:
        with s3_errors(self.uri, name):
            body = self._client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"]
            return io.BufferedReader(_S3Body(body, self.uri, name), 1 << 20)

    def read(self, name: str) -> bytes:
        with self.open(name) as body:
            return body.read()

    def read_range(self, name: str, start: int, length: int) -> bytes:
        if not length:  # a range of HTTP cannot be empty
            return b""
        wanted = f"bytes={start}-{start + length - 1}"
        with s3_errors(self.uri, name):
            reply = self._client.get_object(Bucket=self.bucket, Key=self._key(name), Range=wanted)
            data = reply["Body"].read()
        return whole_range(f"{self.uri}/{name}", data, start, length)

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
        version = path.with_name(f"{PARTIAL}{path.name}.version")  # written after the file that it speaks of
        if not (path.exists() and version.exists() and version.read_text() == etag):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=PARTIAL) as scratch:
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
