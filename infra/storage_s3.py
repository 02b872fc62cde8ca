"""Storage under a prefix of an S3 bucket."""

import hashlib
import io
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from infra.errors import s3_errors, s3_refusal
from infra.storage_names import PARTIAL, Entries, Entry, name_matches, pattern_parts, whole_range

logger = logging.getLogger(__name__)

S3_ATTEMPTS = 8  # of a request, and to go on with an answer that broke off
MAX_PAUSE_SECONDS = 20  # between them; botocore's own is the same
CONNECT_SECONDS = 10  # longest wait for a connection, and for the server to take SEND_BYTES
READ_SECONDS = 30  # longest wait for a byte of an answer; all tries together stay below the ranks' patience
PART_BYTES = 64 << 20  # what is larger is sent in parts
MAX_PARTS = 10_000  # S3's limit
PART_THREADS = 4
SEND_BYTES = 1 << 20
MAX_CONNECTIONS = 32


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

        config = Config(
            retries={"mode": "standard", "total_max_attempts": S3_ATTEMPTS},  # with jittered pauses
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            max_pool_connections=MAX_CONNECTIONS,
            # What is sent has a checksum, which is signed; a signature of the content would hash it once more.
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        return boto3.Session().client("s3", config=config)  # the default session is not for several threads

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix and name else self.prefix or name

    def _object(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(name)}

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
        return io.BufferedReader(self._stream(name, 0, None), 1 << 20)

    def stream(self, name: str) -> io.RawIOBase:
        return self._stream(name, 0, None)

    def read(self, name: str) -> bytes:
        with self._stream(name, 0, None) as stream:
            return stream.readall()

    def read_range(self, name: str, start: int, length: int) -> bytes:
        if not length:  # a range of HTTP cannot be empty
            return b""
        with self._stream(name, start, start + length) as stream:
            return whole_range(f"{self.uri}/{name}", stream.readall(), start, length)

    def _stream(self, name: str, start: int, stop: int | None) -> "_S3Stream":
        def get(position: int, conditions: dict[str, str]) -> Any:
            if position or stop is not None:
                conditions |= {"Range": f"bytes={position}-{'' if stop is None else stop - 1}"}
            return self._client.get_object(**self._object(name), **conditions)

        return _S3Stream(get, start, self.uri, name)

    def write(self, name: str, data: bytes | memoryview) -> None:
        if len(data) > PART_BYTES:
            self._write_parts(name, memoryview(data))
            return
        with s3_errors(self.uri, name):
            self._client.put_object(**self._object(name), Body=_Body(data), ChecksumAlgorithm="CRC32")

    def _write_parts(self, name: str, data: memoryview) -> None:
        with s3_errors(self.uri, name):
            begun = self._client.create_multipart_upload(**self._object(name), ChecksumAlgorithm="CRC32")
        upload = self._object(name) | {"UploadId": begun["UploadId"]}
        size = max(PART_BYTES, -(-len(data) // MAX_PARTS))

        def send(start: int) -> dict[str, Any]:
            number = {"PartNumber": start // size + 1}
            body = _Body(data[start : start + size])
            sent = self._client.upload_part(**upload, **number, Body=body, ChecksumAlgorithm="CRC32")
            return number | {key: sent[key] for key in ("ETag", "ChecksumCRC32")}

        try:
            with s3_errors(self.uri, name), ThreadPoolExecutor(PART_THREADS, thread_name_prefix="s3-parts") as pool:
                parts = list(pool.map(send, range(0, len(data), size)))
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            try:
                self._abort(**upload)
            except OSError as error:  # `delete_unfinished` will
                logger.warning("the parts of %s/%s are still there: %s", self.uri, name, error)
            raise

    def _abort(self, **upload: str) -> None:
        with s3_errors(f"s3://{self.bucket}", upload["Key"]):
            self._client.abort_multipart_upload(**upload)

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

    def delete_unfinished(self) -> None:
        with s3_errors(self.uri):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=f"{self.prefix}/" if self.prefix else ""
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            self._abort(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def local(self, name: str) -> Path:
        with s3_errors(self.uri, name):
            etag = self._client.head_object(**self._object(name))["ETag"].strip('"')
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


class _S3Stream(io.RawIOBase):
    """An object's bytes as they come.

    botocore retries requests, but not what breaks off or stalls within an answer: the rest is asked for here, of the
    same version of the object.

    Args:
        get: asks for the object from a position on, under conditions.
    """

    def __init__(self, get: Callable[[int, dict[str, str]], Any], position: int, *name: str) -> None:
        self._get, self._position, self._name = get, position, name
        self._left = S3_ATTEMPTS
        with s3_errors(*name):
            reply = get(position, {})
        self._body, self._version = reply["Body"], reply["ETag"]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                with s3_errors(*self._name):
                    count = self._body.readinto(buffer)
                break
            except ConnectionError:
                self._left -= 1
                if not self._left:
                    raise
                self._go_on()
        self._position += count
        return int(count)

    def _go_on(self) -> None:
        self._body.close()
        time.sleep(random.uniform(0, min(MAX_PAUSE_SECONDS, 2 ** (S3_ATTEMPTS - self._left - 1))))
        with s3_errors(*self._name):
            self._body = self._get(self._position, {"IfMatch": self._version})["Body"]

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(1 << 20) or b"", b""))

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()


class _Body(io.RawIOBase):
    """Bytes to send as they stand: the HTTP client asks for 16 KiB at a time, and is given more, none of it copied."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._position = memoryview(data), 0

    def read(self, size: int = -1) -> Any:
        stop = len(self._data) if size < 0 else self._position + max(size, SEND_BYTES)
        data = self._data[self._position : stop]
        self._position += len(data)
        return data

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position
