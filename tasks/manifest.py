"""Manifest: what a finished stage left behind. Written last, and a manifest that matches means done.

It lives in the run directory and is the truth, not the orchestrator's database: a run that was killed anywhere
continues where it stopped, from another machine too. Imports no Prefect, so that workers can read it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.storage import FileStorage, Storage, open_storage
from model.config import Section

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
VERIFIED_BYTES = 1 << 30


class FileRecord(Section):
    """One file of a stage's output; its name is relative to the stage's directory."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(Section):
    """What a finished stage left: small enough to pass between tasks. `fingerprint` names the content of its files."""

    format_version: int
    stage: str
    run_uri: str
    directory: str
    key: str
    inputs: dict[str, str]
    fingerprint: str
    files: tuple[FileRecord, ...]
    counts: dict[str, Any]
    summary: str
    seconds: float
    cost_usd: float
    finished: str

    def local_files(self, suffix: str, below: str = "") -> list[Path]:
        """The files with this suffix in a subdirectory, in order, as local paths; fetched from remote storage."""
        storage = open_storage(self.run_uri)
        names = [file.name for file in self.files if file.name.startswith(below) and file.name.endswith(suffix)]
        return [storage.local(inside(self.directory, name)) for name in names]


def read_manifest(run_uri: str, directory: str) -> Manifest:
    """The manifest of a finished stage.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    name = inside(directory, MANIFEST)
    try:
        manifest = Manifest.model_validate_json(open_storage(run_uri).read(name))
    except ValidationError:
        raise ValueError(f"{run_uri}/{name} is damaged, or of another version; make {directory}/ again") from None
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{run_uri} holds no finished {directory}/ ({name} is missing); run that stage first"
        ) from None
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{run_uri}/{name} has format_version {manifest.format_version}; this version reads {FORMAT_VERSION}"
        )
    return manifest.model_copy(update={"run_uri": run_uri})


def inside(directory: str, name: str) -> str:
    """`name` in `directory`; an empty directory is the run directory itself."""
    return f"{directory}/{name}" if directory else name


def digest(value: Any) -> str:
    """A hash of anything that JSON can hold, the same in every process."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stage_key(stage: str, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """What a stage's output depends on, as one hash."""
    return digest({"version": FORMAT_VERSION, "stage": stage, "settings": settings, "inputs": dict(inputs)})


def record_file(path: Path, name: str) -> FileRecord:
    """The record of a local file that is stored under `name`."""
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=_sha256(path))


def record_bytes(name: str, data: bytes) -> FileRecord:
    """The record of a small file by its content."""
    return FileRecord(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def damaged_files(storage: Storage, manifest: Manifest) -> list[str]:
    """The files of a manifest that are missing or not what they were.

    Sizes are compared for all; checksums for local files up to VERIFIED_BYTES in all, so that a look at a finished
    stage stays quick. S3 keeps its own checksums.
    """
    there = {entry.name: entry.size_bytes for entry in storage.list(manifest.directory)}
    budget = VERIFIED_BYTES if isinstance(storage, FileStorage) else 0
    damaged = []
    for file in manifest.files:
        name = inside(manifest.directory, file.name)
        budget -= file.size_bytes
        if there.get(name) != file.size_bytes or (budget >= 0 and _sha256(storage.local(name)) != file.sha256):
            damaged.append(file.name)
    return damaged


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
