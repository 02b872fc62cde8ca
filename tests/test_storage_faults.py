"""S3 as it is on a bad day: errors that pass, answers that stall or break off, uploads whose writer was killed."""

import errno
import io
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import infra.storage_s3
from infra.storage import FileStorage, S3Storage, open_storage

CONTENT = random.Random(1).randbytes(1_000_000)
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"

Answer = Callable[["Server", BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Answers requests by a script, and with the last of it for ever."""

    def __init__(self, *script: Answer) -> None:
        self.script = list(script)
        self.requests: list[str] = []
        self.stored = b""
        self.over = Event()
        super().__init__(("127.0.0.1", 0), Handler)
        Thread(target=self.serve_forever, args=(0.05,)).start()

    def next(self) -> Answer:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def stop(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # with it, a client that asks first is told to go on

    def do_GET(self) -> None:
        condition = f" if {self.headers['If-Match']}" if "If-Match" in self.headers else ""
        self.server.requests.append(f"{self.command} {self.headers.get('Range', 'all')}{condition}")
        self.server.next()(self.server, self)

    def do_PUT(self) -> None:
        self.server.stored = self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def reply(self, status: int, body: bytes, send: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"v1"')
        self.end_headers()
        self.wfile.write(body[:send])

    def log_message(self, *_: object) -> None:
        pass


def works(server: Server, handler: Any) -> None:
    start = int((handler.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
    handler.reply(206 if start else 200, CONTENT[start:] if handler.command == "GET" else b"")


def refuses(server: Server, handler: Any) -> None:
    handler.reply(503, SLOW_DOWN)


def breaks_off(server: Server, handler: Any) -> None:
    """After 300,000 bytes of what was asked for."""
    start = int((handler.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
    handler.reply(206 if start else 200, CONTENT[start:], 300_000)
    handler.close_connection = True


def stalls(server: Server, handler: Any) -> None:
    start = int((handler.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
    handler.reply(206 if start else 200, CONTENT[start:], 500_000)
    server.over.wait(30)
    handler.close_connection = True


def says_nothing(server: Server, handler: Any) -> None:
    server.over.wait(30)
    handler.close_connection = True


def has_changed(server: Server, handler: Any) -> None:
    handler.reply(412, b"<Error><Code>PreconditionFailed</Code><Message>it has changed</Message></Error>")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept, all of it in no time."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(infra.storage_s3, "READ_SECONDS", 1)
    return slept


@pytest.fixture
def serve(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Server, S3Storage]]]:
    servers = []

    def serve(*script: Answer) -> tuple[Server, S3Storage]:
        servers.append(Server(*script))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{servers[-1].server_address[1]}")
        return servers[-1], S3Storage("bucket", "run")

    yield serve
    for server in servers:
        server.stop()


@pytest.mark.parametrize("fault", [refuses, says_nothing])
@pytest.mark.parametrize("call", ["read", "write"])
def test_an_error_that_passes_is_waited_for(serve: Any, pauses: list[float], fault: Answer, call: str) -> None:
    server, storage = serve(fault, fault, works)
    if call == "read":
        assert storage.read("x") == CONTENT
    else:
        storage.write("x", memoryview(CONTENT))
        assert server.stored == CONTENT  # all of it, though it was sent three times
    assert len(server.requests) == 3
    assert len(pauses) == 2


@pytest.mark.parametrize("call", ["read", "write", "list", "delete_unfinished"])
def test_tries_are_bounded_and_their_pauses_differ(serve: Any, pauses: list[float], call: str) -> None:
    server, storage = serve(refuses)
    arguments = {"read": ("x",), "write": ("x", CONTENT)}
    with pytest.raises(OSError, match=r"^s3://bucket/run(/x)?: (SlowDown|503): "):
        getattr(storage, call)(*arguments.get(call, ()))
    assert len(server.requests) == 8
    assert len(set(pauses)) == 7
    assert all(0 <= pause <= min(20, 2**number) for number, pause in enumerate(pauses))


@pytest.mark.parametrize("fault", [breaks_off, stalls])
def test_what_breaks_off_goes_on_where_it_was(serve: Any, fault: Answer) -> None:
    server, storage = serve(fault, works)
    with storage.stream("x") as stream:
        assert b"".join(iter(lambda: stream.read(70_000), b"")) == CONTENT
    first, second = server.requests
    # Of the same version, from about where it broke off: what the client had not handed on yet comes again.
    assert first == "GET all"
    assert second.endswith('- if "v1"')
    assert 0 <= int(second.removeprefix("GET bytes=").partition("-")[0]) <= 500_000


def test_what_always_breaks_off_is_an_error(serve: Any) -> None:
    server, storage = serve(lambda server, handler: handler.reply(200, CONTENT, 0) or handler.finish())
    with pytest.raises(ConnectionError, match=r"^s3://bucket/run/x cannot be reached: "):
        storage.read("x")
    assert len(server.requests) == 8


def test_an_object_replaced_meanwhile_is_not_mixed(serve: Any) -> None:
    _, storage = serve(breaks_off, has_changed)
    with pytest.raises(OSError, match=r"^s3://bucket/run/x: PreconditionFailed: it has changed$"):
        storage.read("x")


def begin_upload(uri: str, name: str) -> None:
    """What a writer that is killed leaves: one part, and nothing to see."""
    storage = open_storage(uri)
    assert isinstance(storage, S3Storage)
    place = storage._object(name)
    upload = storage._client.create_multipart_upload(**place)["UploadId"]
    storage._client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"part")


def unfinished(uri: str) -> list[str]:
    storage = open_storage(uri)
    assert isinstance(storage, S3Storage)
    reply = storage._client.list_multipart_uploads(Bucket=storage.bucket)
    return sorted(upload["Key"] for upload in reply.get("Uploads", ()))


def test_unfinished_uploads_are_removed_in_the_storage_alone(s3_bucket: str) -> None:
    for run in ("run", "run2", "run/checkpoints"):
        begin_upload(f"{s3_bucket}/{run}", "step-1/a+b/épo=3/✓ 1")
    assert open_storage(f"{s3_bucket}/run").list() == []
    open_storage(f"{s3_bucket}/run").delete_unfinished()
    assert unfinished(s3_bucket) == ["run2/step-1/a+b/épo=3/✓ 1"]


def test_unfinished_files_are_removed(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("deep/whole", b"1")
    (tmp_path / "deep" / ".partial-x1").write_bytes(b"half")
    storage.delete_unfinished()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["whole"]
    open_storage(str(tmp_path / "absent")).delete_unfinished()


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("size", [1 << 20, (3 << 20) + 4096, (3 << 20) + 5])
def test_what_the_disk_takes_directly_is_the_same(tmp_path: Path, place: str, start: int, size: int) -> None:
    """From memory that starts at a page or not, in sizes that are whole blocks or not, on disks that can or not."""
    root = tmp_path if place == "disk" else Path(tempfile.mkdtemp(dir="/dev/shm"))
    memory = mmap.mmap(-1, start + size)
    memory[start:] = random.Random(size).randbytes(size)
    storage = FileStorage(root)
    storage.write("x", memoryview(memory)[start:])
    assert (root / "x").read_bytes() == memory[start:]
    with storage.stream("x") as stream:
        pages = memoryview(mmap.mmap(-1, start + 65_536))[start:]
        assert b"".join(iter(lambda: bytes(pages[: stream.readinto(pages)]), b"")) == memory[start:]
    storage.delete("x")
    root.rmdir()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        FileStorage(tmp_path).write("x", memoryview(mmap.mmap(-1, 1 << 20)))
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_fails_leaves_nothing(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second part is refused: no object, no parts, and the object from before as it was."""
    storage = open_storage(s3_bucket)
    assert isinstance(storage, S3Storage)
    storage.write("x", b"before")
    monkeypatch.setattr(infra.storage_s3, "PART_BYTES", 5 << 20)
    send = storage._client.upload_part

    def refuse(**arguments: Any) -> Any:
        if arguments["PartNumber"] == 2:
            raise storage._client.exceptions.ClientError({"Error": {"Code": "InternalError"}}, "UploadPart")
        return send(**arguments)

    monkeypatch.setattr(storage._client, "upload_part", refuse)
    with pytest.raises(OSError, match=f"^{s3_bucket}/x: InternalError: "):
        storage.write("x", bytes(11 << 20))
    assert storage.read("x") == b"before"
    assert unfinished(s3_bucket) == []


def test_what_is_sent_is_a_file_of_the_bytes() -> None:
    """As botocore uses one: it reads to the end for a checksum, and again from the start to send, and to send again."""
    body = infra.storage_s3._Body(memoryview(CONTENT))
    for _ in range(2):
        assert body.seek(0, io.SEEK_END) == body.tell() == len(CONTENT)
        assert body.seek(0) == 0
        assert b"".join(iter(lambda: bytes(body.read(16_384)), b"")) == CONTENT
    body.seek(10)
    assert body.read() == CONTENT[10:]
