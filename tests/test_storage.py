"""Local and S3 storage behave alike; the S3 server is a real one, with signatures and checksums."""

import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import infra.storage_s3
from infra.errors import StorageUnavailable
from infra.storage import S3Storage, Storage, find, open_storage

ODD_NAMES = ["a b.txt", "a+b/épo=3/✓ 1", "%2F?&#.bin", "deep/er/and/deeper", "[x]*.txt"]


@pytest.fixture(params=["file", "s3"])
def base_uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}"
    else:
        yield str(tmp_path / "storage")


@pytest.fixture
def storage(base_uri: str) -> Storage:
    return open_storage(base_uri)


def test_what_is_written_comes_back_under_odd_names(storage: Storage, tmp_path: Path) -> None:
    for index, name in enumerate(ODD_NAMES):
        storage.write(name, f"content {index}".encode())
    assert [entry.name for entry in storage.list()] == sorted(ODD_NAMES)
    for index, name in enumerate(ODD_NAMES):
        assert storage.read(name) == f"content {index}".encode()
        storage.download(name, tmp_path / "fetched" / "file")
        assert (tmp_path / "fetched" / "file").read_bytes() == f"content {index}".encode()
        assert storage.local(name).read_bytes() == f"content {index}".encode()


def test_a_storage_that_was_used_goes_to_another_process(storage: Storage) -> None:
    storage.write("name", b"content")
    assert pickle.loads(pickle.dumps(storage)).read("name") == b"content"


def test_an_upload_replaces_and_changes_the_version(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(b"x" * 20_000_000)  # several parts
    storage.upload(path, "big")
    before = storage.list("big")
    assert [(entry.name, entry.size_bytes) for entry in before] == [("big", 20_000_000)]
    path.write_bytes(b"y")
    storage.upload(path, "big")
    assert storage.read("big") == b"y"
    assert storage.list("big")[0].version != before[0].version
    assert storage.local("big").read_bytes() == b"y"


def test_a_prefix_is_a_directory_not_a_start_of_names(storage: Storage) -> None:
    for name in ("run/a", "run/b/c", "run2/a", "run.txt"):
        storage.write(name, b"1")
    assert [entry.name for entry in storage.list("run")] == ["run/a", "run/b/c"]
    assert [entry.name for entry in storage.list("run/a")] == ["run/a"]
    assert storage.list("ru") == []
    storage.delete("run")
    assert [entry.name for entry in storage.list()] == ["run.txt", "run2/a"]
    storage.delete("run")  # nothing left is no error


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 70 << 20])  # the last in parts on S3
def test_any_bytes_are_written_as_they_stand(storage: Storage, size: int) -> None:
    data = random.Random(0).randbytes(size)
    storage.write("data", memoryview(bytearray(data)))
    assert storage.read("data") == data
    assert [entry.size_bytes for entry in storage.list()] == [size]


def test_what_is_missing_is_named(storage: Storage, tmp_path: Path) -> None:
    for read in (storage.read, storage.local, lambda name: storage.download(name, tmp_path / "x")):
        with pytest.raises(FileNotFoundError, match="absent"):
            read("absent")


def test_listing_many_objects_follows_the_pages(storage: Storage) -> None:
    """boto3 issue 1927: a page holds 1,000 keys."""
    names = [f"many/{index:05d}" for index in range(1205)]
    for name in names:
        storage.write(name, b"")
    assert [entry.name for entry in storage.list("many")] == names
    storage.delete("many")
    assert storage.list("many") == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.txt", ["a.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("sub", ["sub/c.txt", "sub/deep/d.txt", "sub/e.jsonl"]),
        ("sub/**", ["sub/c.txt", "sub/deep/d.txt", "sub/e.jsonl"]),
        ("*/*.jsonl", ["sub/e.jsonl"]),
        ("none*", []),
        ("s?b/deep/*", ["sub/deep/d.txt"]),
        ("**/deep/**/*.txt", ["sub/deep/d.txt"]),
        ("**/**/d.*", ["sub/deep/d.txt"]),
        ("[ab].txt", []),
    ],
)
def test_globs(base_uri: str, pattern: str, expected: list[str]) -> None:
    storage = open_storage(base_uri)
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt", "sub/e.jsonl"):
        storage.write(name, b"1")
    found_in, entries = find(f"{base_uri}/{pattern}")
    prefix = found_in.uri.removeprefix(base_uri).lstrip("/")
    assert [f"{prefix}/{entry.name}".lstrip("/") for entry in entries] == expected


def test_a_local_path_that_holds_wildcards_is_itself(tmp_path: Path) -> None:
    (tmp_path / "what?.txt").write_bytes(b"1")
    (tmp_path / "whatx.txt").write_bytes(b"2")
    _, entries = find(str(tmp_path / "what?.txt"))
    assert [entry.name for entry in entries] == ["what?.txt"]


def test_files_of_an_installed_package() -> None:
    storage, entries = find("package:model/data/tokens/*.py")
    assert "batches.py" in [entry.name for entry in entries]
    assert storage.read("batches.py")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://", "names no bucket"),
        ("gs://bucket/x", "unknown scheme"),
        ("package:not_there/x", "not installed"),
    ],
)
def test_wrong_uris_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_storage(uri)


def test_names_cannot_leave_the_storage(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "inside"))
    for name in ("../outside", "/etc/x", "a/../../b"):
        with pytest.raises(ValueError, match="must stay below"):
            storage.write(name, b"")


def test_a_failed_upload_leaves_what_was_there(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "storage"))
    storage.write("x", b"old")
    with pytest.raises(FileNotFoundError):
        storage.upload(tmp_path / "absent", "x")
    assert storage.read("x") == b"old"
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["x"]


def names(uri: str) -> list[str]:
    return [entry.name for entry in find(uri)[1]]


@pytest.mark.parametrize("call", ["list", "glob", "open", "read", "write", "upload", "download", "delete", "local"])
@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("bucket", FileNotFoundError, r"s3://absent-\w+/p(/x)? does not exist"),
        ("secret", PermissionError, r"access to s3://test-\w+/p(/x)? is denied: (SignatureDoesNotMatch|403): "),
        ("key", PermissionError, r"access to s3://test-\w+/p(/x)? is denied: (InvalidAccessKeyId|403): "),
        ("credentials", PermissionError, r"access to s3://test-\w+/p(/x)? is denied: Unable to locate credentials"),
        ("server", ConnectionError, r"s3://test-\w+/p(/x)? cannot be reached: .*http://127\.0\.0\.1"),
        ("name", ValueError, r's3://Bad_\(bucket/p(/x)? cannot be: Invalid bucket name "Bad_\(bucket"'),
        ("endpoint", ValueError, r"s3://test-\w+/p(/x)?: Invalid endpoint: nowhere"),
        (
            "profile",
            PermissionError,
            r"access to s3://test-\w+/p(/x)? is denied: The config profile \(none\) could not",
        ),
    ],
)
def test_errors_of_s3_are_those_of_files(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, trouble: str, error: type, message: str
) -> None:
    if trouble == "secret":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    elif trouble == "key":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    elif trouble == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    elif trouble == "server":
        monkeypatch.setattr(infra.storage_s3, "S3_ATTEMPTS", 1)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    elif trouble == "endpoint":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    elif trouble == "profile":
        monkeypatch.setenv("AWS_PROFILE", "none")
    elif trouble == "bucket" and call in ("write", "upload"):
        pytest.skip("SeaweedFS then makes the bucket")
    bucket = {"bucket": f"s3://absent-{uuid.uuid4().hex}", "name": "s3://Bad_(bucket"}.get(trouble, s3_bucket)
    storage = open_storage(f"{bucket}/p")
    (tmp_path / "file").write_bytes(b"1")
    arguments = {"write": ("x", b"1"), "upload": (tmp_path / "file", "x"), "download": ("x", tmp_path / "y")}
    with pytest.raises(error, match=message) as caught:
        getattr(storage, call)(*arguments.get(call, ("x",)))
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("code", "status", "error", "message"),
    [
        ("NoSuchBucket", 404, FileNotFoundError, "s3://b/x does not exist: there is no such bucket"),
        ("AccessDenied", 403, PermissionError, "access to s3://b/x is denied: AccessDenied: why"),
        ("ExpiredToken", 400, PermissionError, "access to s3://b/x is denied: ExpiredToken: why"),
        ("InvalidBucketName", 400, ValueError, "s3://b/x cannot be: InvalidBucketName: why"),
        ("SlowDown", 503, StorageUnavailable, "s3://b/x: SlowDown: why"),
        ("InternalError", 500, StorageUnavailable, "s3://b/x: InternalError: why"),
        ("InvalidRequest", 400, OSError, "s3://b/x: InvalidRequest: why"),
    ],
)
def test_what_s3_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, status: int, error: type[Exception], message: str
) -> None:
    from botocore.exceptions import ClientError

    def answer(*_: object, **__: object) -> None:
        said = {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(said, "PutObject")

    storage = open_storage("s3://b")
    assert isinstance(storage, S3Storage)
    monkeypatch.setattr(storage._client, "_make_api_call", answer)
    (tmp_path / "file").touch()
    calls: list[Callable[[], object]] = [
        lambda: storage.write("x", b""),
        lambda: storage.upload(tmp_path / "file", "x"),
    ]
    for call in calls:  # boto3 itself wraps the error of an upload
        with pytest.raises(error) as caught:
            call()
        assert (type(caught.value), str(caught.value)) == (error, message)


def test_other_refusals_of_s3_give_code_and_message(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(s3_bucket)
    assert isinstance(storage, S3Storage)
    storage.write("x", b"1")
    refusal = {"Key": "x", "Code": "InternalError", "Message": "try later"}
    monkeypatch.setattr(storage._client, "delete_objects", lambda **_: {"Errors": [refusal]})
    with pytest.raises(OSError, match=rf"^{s3_bucket}/x: InternalError: try later$"):
        storage.delete("x")
    refusal["Code"] = "AccessDenied"
    with pytest.raises(PermissionError, match=rf"^access to {s3_bucket}/x is denied: AccessDenied: try later$"):
        storage.delete("x")


def test_an_open_object_is_a_stream_of_lines(storage: Storage) -> None:
    storage.write("x", b"first\nsecond\n" * 200_000)
    with storage.open("x") as lines:
        assert next(iter(lines)) == b"first\n"
        assert lines.read(8) == b"second\nf"
        assert sum(1 for _ in lines) == 399_998
    assert lines.closed


def test_a_storage_is_made_without_asking_anyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert open_storage("s3://bucket/a/b/").uri == "s3://bucket/a/b"


def test_a_directory_that_cannot_be_read_is_an_error(request: pytest.FixtureRequest) -> None:
    """As another user, since root reads everything."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    tmp_path = Path(tempfile.mkdtemp())  # pytest's own is closed to others
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    tmp_path.chmod(0o755)
    (tmp_path / "open" / "closed").mkdir(parents=True)
    (tmp_path / "open" / "x.txt").touch()
    (tmp_path / "open" / "closed" / "y.txt").touch()
    (tmp_path / "open" / "closed").chmod(0o700)
    code = """
import os, sys
from infra.storage import find
os.seteuid(65534)
for pattern in ("", "/**", "/*/*.txt", "/*.txt", "/closed"):
    try:
        print([entry.name for entry in find(sys.argv[1] + pattern)[1]])
    except PermissionError as error:
        print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "open")]
    root = Path(__file__).parent.parent
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    refused = f"[Errno 13] Permission denied: '{tmp_path}/open/closed'"
    assert said == [refused, refused, refused, "['x.txt']", refused]


@pytest.mark.parametrize(
    ("pattern", "read"), [("*.txt", [""]), ("a/*/x", ["a"]), ("*/c/x", [""]), ("a/*/*", ["a", "a/b"])]
)
def test_no_directory_is_read_that_cannot_hold_a_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, read: list[str]
) -> None:
    storage = open_storage(str(tmp_path))
    storage.write("a/b/c/d", b"")
    storage.write("a/b/x", b"")
    storage.write("other/c/x", b"")
    listdir, seen = os.listdir, []

    def watched(path: Path) -> list[str]:
        seen.append(str(path).removeprefix(str(tmp_path)).lstrip("/"))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", watched)
    storage.glob(pattern)
    assert seen == read


def test_links_are_what_they_lead_to_and_loops_end(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    storage = open_storage(str(inside))
    storage.write("a/x.txt", b"1")
    storage.write("b/y.txt", b"1")
    open_storage(str(outside)).write("z.txt", b"1")
    for name, target in {
        "a/file.txt": "x.txt",
        "a/broken.txt": "absent",
        "a/itself.txt": "itself.txt",
        "a/up": "..",
        "a/here": ".",
        "a/top": str(tmp_path),
        "a/to_b": "../b",
        "b/to_a": "../a",
        "far": str(outside),
    }.items():
        (inside / name).symlink_to(target)
    (outside / "back").symlink_to(inside)
    os.mkfifo(inside / "fifo.txt")
    everything = ["a/file.txt", "a/to_b/y.txt", "a/x.txt", "b/to_a/file.txt", "b/to_a/x.txt", "b/y.txt", "far/z.txt"]
    assert names(f"{inside}/") == everything
    assert names(f"{inside}/**") == everything
    assert names(f"{inside}/**/*.txt") == everything
    assert names(f"{inside}/*/*.txt") == ["a/file.txt", "a/x.txt", "b/y.txt", "far/z.txt"]
    storage.delete("far")
    assert (outside / "z.txt").exists()
    assert not (inside / "far").exists()


def test_paths_as_their_users_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.jsonl", "work/y.jsonl", "dir[1]/z.jsonl", "dir1/no.jsonl", "work/~w.jsonl"):
        open_storage(str(tmp_path)).write(name, b"1")
    monkeypatch.chdir(tmp_path / "work")
    assert names("file:y.jsonl") == names("file:*y.jsonl") == names("*y.jsonl") == ["y.jsonl"]
    assert names("./~w.jsonl") == ["~w.jsonl"]
    assert names("file:./~w.jsonl") == ["~w.jsonl"]
    for here in (".", "file:.", str(tmp_path / "work"), f"//{tmp_path}/work/", f"file://{tmp_path}/work"):
        assert [name.rpartition("/")[2] for name in names(here)] == ["y.jsonl", "~w.jsonl"]
    assert names("../x.jsonl") == names("../*.jsonl") == names(f"{tmp_path}/work/../*.jsonl") == ["x.jsonl"]
    for above in ("..", "file:..", f"{tmp_path}/work/.."):
        assert names(above) == ["dir1/no.jsonl", "dir[1]/z.jsonl", "work/y.jsonl", "work/~w.jsonl", "x.jsonl"]
    assert open_storage("../work/../x").uri == f"{tmp_path}/x"
    assert names(f"{tmp_path}/dir[1]/*.jsonl") == names(f"{tmp_path}/dir[1]/z.jsonl")[-1:] == ["z.jsonl"]
    assert names(f"{tmp_path}/di*[1]/*.jsonl") == ["dir[1]/z.jsonl"]
    with pytest.raises(ValueError, match="must stay below"):
        find(f"{tmp_path}/*/../x.jsonl")


@pytest.mark.parametrize("uri", ["~nouser-here/x", "file:~nouser-here/x"])
def test_a_user_that_does_not_exist(uri: str) -> None:
    for opened in (open_storage, find):
        with pytest.raises(ValueError, match=rf"^'{uri}': there is no home directory for '~nouser-here'"):
            opened(uri)


def test_one_directory_has_one_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs")
    monkeypatch.chdir(tmp_path)
    spellings = [
        "runs/x",
        "runs/x/",
        "./runs//x",
        "link/x",
        "link/../runs/x",
        "file:runs/x/",
        f"file://{tmp_path}/runs/x",
    ]
    assert {open_storage(uri).uri for uri in spellings} == {f"{tmp_path}/runs/x"}
