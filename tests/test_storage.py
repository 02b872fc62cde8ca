"""Local and S3 storage behave alike; the S3 server is a real one, with signatures and checksums."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.storage import Storage, find, open_storage

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
    storage, entries = find("package:model/data/*.py")
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
