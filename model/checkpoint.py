"""Checkpoints: written in the background, complete only with their marker, verified on load.

A checkpoint is a directory `step-00000010/` of torch.distributed.checkpoint files. `complete.json` is stored last and
names every file with its size and SHA-256; without it the directory counts for nothing, neither for resuming nor for
retention. So a run that is killed at any moment finds the newest complete checkpoint, whole.
"""

import hashlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from model.config import Section

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT_VERSION = 1
MARKER = "complete.json"
METADATA = ".metadata"
_STEP = re.compile(r"step-(\d{8,})/")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or none could be loaded."""


class _RankError(CheckpointError):
    """Work failed on at least one rank, and is therefore failed on every rank."""


class StoredFile(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


class CheckpointStorage(Protocol):
    """What checkpoints need of a storage. Names are relative to it: `step-00000010/complete.json`."""

    def upload(self, path: Path, name: str) -> None:
        """Store a local file whole or not at all, replacing what was there."""

    def download(self, name: str, path: Path) -> None:
        """Fetch to a local file. Raises FileNotFoundError."""

    def list(self, prefix: str = "") -> Sequence[StoredFile]:
        """Everything below the directory `prefix`."""

    def delete(self, name: str) -> None:
        """Remove the object and everything below it; what is not there is no error."""


class SavedFile(Section, strict=True):
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Marker(Section, strict=True):
    """The content of `complete.json`."""

    step: int
    identity: dict[str, Any]
    # Names become local paths when they are fetched, so nothing but a plain name will do.
    files: dict[Annotated[str, Field(pattern=r"^\.?\w[\w.-]*$")], SavedFile]
    format_version: int

    @classmethod
    def read(cls, path: Path, step: int) -> "Marker":
        """The marker of the checkpoint of `step`.

        Raises:
            ValueError: it is damaged, or of another format or step.
        """
        try:
            marker = cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "content"
            raise ValueError(f"{MARKER} is damaged: {place}: {first['msg']}") from error
        except ValueError as error:
            raise ValueError(f"{MARKER} is damaged: {error}") from error
        if marker.format_version != FORMAT_VERSION:
            raise ValueError(f"{MARKER}: format_version ({marker.format_version}) must be {FORMAT_VERSION}")
        if marker.step != step:
            raise ValueError(f"{MARKER} is damaged: it is of step {marker.step}")
        return marker


class Checkpointer:
    """Saves and loads the state of a run, collectively: every rank of the group makes the same calls.

    Args:
        storage: where checkpoints are kept.
        staging: a local directory for files on their way; ranks may share it.
        keep: complete checkpoints to keep.
        group: a gloo group of all ranks that serves nothing else, because its collectives run in another thread.
    """

    def __init__(self, storage: CheckpointStorage, staging: Path, keep: int, group: dist.ProcessGroup) -> None:
        self.storage = storage
        self.staging = staging
        self.keep = keep
        self.group = group
        self.rank = dist.get_rank(group)
        # Staging buffers are kept and reused; that is safe because at most one save is in flight.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, state: dict[str, Tensor], identity: dict[str, Any]) -> None:
        """Copy `state` to CPU memory and return; the rest happens in the background.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        staged = cast(dict[str, Tensor], self._stager.stage(dict(state)))
        self._pending = self._executor.submit(self._write, step, staged, dict(identity))

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            CheckpointError: the last save failed, on whatever rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint, whole or damaged; None when none was ever completed."""
        self.wait()
        complete, _ = self._on_rank_0(self._survey)
        return complete[-1] if complete else None

    def load_latest(
        self, state: dict[str, Tensor], identity: dict[str, Any], required: bool = False, at_step: int | None = None
    ) -> int | None:
        """Load the newest complete checkpoint that is whole into `state`, in place, on any number of ranks.

        A checkpoint that turns out to be damaged is skipped with a warning, for the one before.

        Args:
            state: tensors to fill; a subset of what was saved is fine.
            identity: fields that must equal what was saved.
            at_step: consider the checkpoint of this step alone.

        Returns:
            The step of the checkpoint, or None when no checkpoint was ever completed.

        Raises:
            CheckpointError: checkpoints were completed but none can be loaded, or one is of something else, or one is
                `required` and there is none. After it, `state` is undefined.
        """
        self.wait()
        complete, incomplete = self._on_rank_0(self._survey)
        complete = [step for step in complete if at_step in (None, step)]
        for step in incomplete:
            self._warn(f"skipped {_directory(step)}: incomplete, it has no {MARKER}")
        if not complete and required:
            wanted = "" if at_step is None else f" at step {at_step}"
            raise CheckpointError(f"a checkpoint is required to resume from, and none was ever completed{wanted}")
        reasons = []
        for step in reversed(complete):
            try:
                self._load(step, state, identity)
            except (_RankError, CheckpointException) as error:
                reasons.append(f"{_directory(step)}: {_reason(error)}")
                self._warn(f"skipped {reasons[-1]}")
            else:
                return step
        if reasons:
            raise CheckpointError("no complete checkpoint can be loaded:\n" + "\n".join(reasons))
        return None

    # Saving, in the background thread

    def _write(self, step: int, state: dict[str, Tensor], identity: dict[str, Any]) -> None:
        directory = _directory(step)
        try:
            with self._scratch() as local:
                self._on_rank_0(lambda: self._remove(step))  # what a save that was killed left behind
                writer = dcp.FileSystemWriter(local, sync_files=False)
                dcp.save(state, storage_writer=writer, process_group=self.group)
                uploads = self._together(lambda: self._upload(local, directory))
                files = {name: file for upload in uploads for name, file in upload.items()}
                self._on_rank_0(lambda: self._complete(local, step, identity, files))
        except Exception as error:
            raise CheckpointError(f"{directory} was not saved: {_reason(error)}") from error

    def _upload(self, local: Path, directory: str) -> dict[str, SavedFile]:
        files = {}
        for path in sorted(local.iterdir()):
            files[path.name] = SavedFile(size_bytes=path.stat().st_size, sha256=_sha256(path))
            self.storage.upload(path, f"{directory}/{path.name}")
        return files

    def _complete(self, local: Path, step: int, identity: dict[str, Any], files: dict[str, SavedFile]) -> None:
        marker = Marker(step=step, identity=identity, files=files, format_version=FORMAT_VERSION)
        path = local / MARKER
        path.write_text(json.dumps(marker.model_dump(), indent=1, sort_keys=True), encoding="utf-8")
        self.storage.upload(path, f"{_directory(step)}/{MARKER}")
        self._retain(step)

    def _retain(self, newest: int) -> None:
        """Keep the newest complete checkpoints up to `newest`, which is now complete, and no remains of older saves.

        Later steps belong to a future that was abandoned; they are overwritten when the run gets there again.
        """
        complete, incomplete = self._survey()
        surplus = [step for step in complete if step <= newest][: -self.keep]
        for step in surplus + [step for step in incomplete if step < newest]:
            self._remove(step)

    def _remove(self, step: int) -> None:
        self.storage.delete(f"{_directory(step)}/{MARKER}")  # first, so that half a checkpoint never looks whole
        self.storage.delete(_directory(step))

    # Loading

    def _survey(self) -> tuple[list[int], list[int]]:
        """The steps of complete and of incomplete checkpoints, ascending."""
        files: dict[int, list[str]] = {}
        for file in self.storage.list():
            if match := _STEP.match(file.name):
                files.setdefault(int(match[1]), []).append(file.name)
        complete = {step for step, names in files.items() if f"{_directory(step)}/{MARKER}" in names}
        return sorted(complete), sorted(files.keys() - complete)

    def _load(self, step: int, state: dict[str, Tensor], identity: dict[str, Any]) -> None:
        directory = _directory(step)
        with self._scratch() as local:
            marker = self._on_rank_0(lambda: self._read_marker(step, local))
            for field, expected in identity.items():
                if marker.identity.get(field) != expected:
                    found = marker.identity.get(field)
                    raise CheckpointError(f"{directory} is of another run: its {field} is {found!r}, not {expected!r}")
            self._together(lambda: self._fetch(marker, local, state))
            dcp.load(state, storage_reader=_Reader(local), process_group=self.group)

    def _read_marker(self, step: int, local: Path) -> Marker:
        self.storage.download(f"{_directory(step)}/{MARKER}", local / MARKER)
        return Marker.read(local / MARKER, step)

    def _fetch(self, marker: Marker, local: Path, state: dict[str, Tensor]) -> None:
        """Download and verify, before anything is loaded, the files that hold this rank's part of the state."""
        self._fetch_file(METADATA, marker, local)
        metadata = _Reader(local).read_metadata()
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=self.rank == 0)
        items = planner.create_local_plan().items
        for name in sorted({metadata.storage_data[item.storage_index].relative_path for item in items}):
            self._fetch_file(name, marker, local)

    def _fetch_file(self, name: str, marker: Marker, local: Path) -> None:
        if name not in marker.files:
            raise ValueError(f"{MARKER} does not list {name}")
        path, expected = local / name, marker.files[name]
        self.storage.download(f"{_directory(marker.step)}/{name}", path)
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            raise ValueError(f"{name} has {size_bytes} bytes, and {expected.size_bytes} were saved")
        if _sha256(path) != expected.sha256:
            raise ValueError(f"{name} is damaged: its SHA-256 is not what was saved")

    # What ranks do together

    def _together(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on every rank, in order. Raises _RankError on all ranks when it failed on any."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # raised below, on every rank
            logger.info("failed on rank %d", self.rank, exc_info=True)
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(outcomes, (result, message), group=self.group)
        failures = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message is not None]
        if failures:
            raise _RankError("; ".join(failures)) from failure
        return [result for result, _ in outcomes]

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        return self._together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """An empty local directory of this rank's own, for as long as a save or a load needs it."""
        path = self.staging / f"rank-{self.rank}"
        self._together(lambda: _make_empty(path))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)  # what resists is met, and told, by the next who needs it empty

    def _warn(self, message: str) -> None:
        if self.rank == 0:
            logger.warning(message)


class _Reader(dcp.FileSystemReader):
    """Reads tensors with weights_only, as DCP does, and the metadata, which is a pickle, as strictly."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            return _MetadataUnpickler(file).load()


class _MetadataUnpickler(pickle.Unpickler):
    """Builds nothing but what DCP puts into its metadata."""

    _ALLOWED = re.compile(
        r"torch\.distributed\.checkpoint\.metadata\.\w+"
        r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
        r"|torch\.serialization\._get_layout"
        r"|torch\.(Size|float64|float32|float16|bfloat16|int64|int32|int16|int8|uint8|bool)"
        r"|pathlib\.(Pure)?PosixPath|collections\.OrderedDict"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not self._ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{METADATA} holds {module}.{name}, which does not belong in a checkpoint")
        return super().find_class(module, name)


def _directory(step: int) -> str:
    return f"step-{step:08d}"


def _make_empty(path: Path) -> None:
    if path.exists():  # left by a run that was killed
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    """What failed, in a line; DCP's own exception would print whole tracebacks of several ranks."""
    if isinstance(error, _RankError):
        return str(error)
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"
