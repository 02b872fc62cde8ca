"""Checkpoints: written in the background, complete only with their marker, verified on load.

A checkpoint is a directory `step-00000010/` of torch.distributed.checkpoint's files. `complete.json` is stored last and
names every file with its size and SHA-256; without it the directory counts for nothing, neither for resuming nor for
retention. So a run that is killed at any moment finds the newest complete checkpoint, whole.
"""

import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from model import checkpoint_files
from model.checkpoint_files import StagedFiles, load_files
from model.checkpoint_marker import FORMAT_VERSION, MARKER, Marker, SavedFile

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STEP = re.compile(r"step-(\d{8,})/")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or none could be loaded."""


class _RankError(CheckpointError):
    """Work failed on at least one rank, and is therefore failed on every rank."""


class CheckpointUnavailable(_RankError):
    """A rank cannot reach the storage, which says nothing of what is in it."""


class _SaveFailed(CheckpointError):
    """A save failed, as every rank knows; the ranks themselves are well."""


class StoredFile(Protocol):
    @property
    def name(self) -> str: ...


class CheckpointStorage(checkpoint_files.Storage, Protocol):
    """What checkpoints need of a storage. Names are relative to it: `step-00000010/complete.json`."""

    def read(self, name: str) -> bytes:
        """The whole object, for small ones. Raises FileNotFoundError."""

    def list(self, prefix: str = "") -> Sequence[StoredFile]:
        """Everything below the directory `prefix`."""

    def delete(self, name: str) -> None:
        """Remove the object and everything below it; what is not there is no error."""

    def delete_unfinished(self) -> None:
        """Remove what writers that were killed have left behind; nobody may be writing."""


class Checkpointer:
    """Saves and loads the state of a run, collectively: every rank of the group makes the same calls.

    Args:
        storage: where checkpoints are kept.
        keep: complete checkpoints to keep.
        group: a gloo group of all ranks that serves nothing else, because its collectives run in another thread.
        max_failed_saves: saves in a row that may fail with a warning; one more is an error.
    """

    def __init__(
        self, storage: CheckpointStorage, keep: int, group: dist.ProcessGroup, max_failed_saves: int = 0
    ) -> None:
        self.storage = storage
        self.keep = keep
        self.group = group
        self.max_failed_saves = max_failed_saves
        self.rank = dist.get_rank(group)
        # One copy of the state is reused by all saves; that is safe because at most one is in flight.
        self._staged: StagedFiles | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._failed_saves = 0  # in a row until now

    def save(self, step: int, state: dict[str, Tensor], identity: dict[str, Any]) -> None:
        """Copy `state` to CPU memory and return; the rest happens in the background.

        Raises:
            CheckpointError: the save before this one failed, and so did more than `max_failed_saves` in a row.
        """
        try:
            self.wait()
        except _SaveFailed as error:
            if self._failed_saves > self.max_failed_saves:
                raise
            self._warn(
                f"{error} ({self._failed_saves} in a row; {self.max_failed_saves} are tolerated, "
                "see training.max_failed_saves)"
            )
        if self._staged is None:
            self._staged = StagedFiles(state, self.group)
        self._staged.copy(state)
        self._pending = self._executor.submit(self._write, self._staged, step, dict(identity))

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            CheckpointError: the last save failed, on whatever rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except _SaveFailed:
            self._failed_saves += 1
            raise
        self._failed_saves = 0

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
            CheckpointUnavailable: the storage cannot be reached; an older checkpoint is not taken for that.
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
            except CheckpointUnavailable:
                raise
            except _RankError as error:
                reasons.append(f"{_directory(step)}: {error}")
                self._warn(f"skipped {reasons[-1]}")
            else:
                return step
        if reasons:
            raise CheckpointError("no complete checkpoint can be loaded:\n" + "\n".join(reasons))
        return None

    # Saving, in the background thread

    def _write(self, staged: StagedFiles, step: int, identity: dict[str, Any]) -> None:
        directory = _directory(step)
        try:
            self._on_rank_0(lambda: self._clear(step))
            stored = self._together(lambda: staged.store(self.storage, directory))
            files = {name: file for of_rank in stored for name, file in of_rank.items()}
            self._on_rank_0(lambda: self._complete(step, identity, files))
        except _RankError as error:
            raise _SaveFailed(f"{directory} was not saved: {error}") from error
        except Exception as error:  # a rank is gone
            raise CheckpointError(f"{directory} was not saved: {type(error).__name__}: {error}") from error

    def _clear(self, step: int) -> None:
        """Remove what saves that failed or were killed have left, which may be what fills the disk."""
        _, incomplete = self._survey()
        for remains in {step, *incomplete}:
            self._remove(remains)
        self.storage.delete_unfinished()

    def _complete(self, step: int, identity: dict[str, Any], files: dict[str, SavedFile]) -> None:
        marker = Marker(step=step, identity=identity, files=files, format_version=FORMAT_VERSION)
        self.storage.write(f"{_directory(step)}/{MARKER}", marker.encode())
        # Later steps belong to a future that was abandoned; they are overwritten when the run gets there again.
        complete, _ = self._survey()
        for surplus in [other for other in complete if other <= step][: -self.keep]:
            self._remove(surplus)

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
        marker = self._on_rank_0(lambda: Marker.decode(self.storage.read(f"{directory}/{MARKER}"), step))
        for field, expected in identity.items():
            if marker.identity.get(field) != expected:
                found = marker.identity.get(field)
                raise CheckpointError(f"{directory} is of another run: its {field} is {found!r}, not {expected!r}")
        self._together(lambda: load_files(self.storage, directory, marker.files, state, coordinator=self.rank == 0))

    # What ranks do together

    def _together(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on every rank, in order. Raises _RankError on all ranks where it failed on any."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # raised below, on every rank
            logger.info("failed on rank %d", self.rank, exc_info=True)
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        mine = (result, message, isinstance(failure, ConnectionError))
        outcomes: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(outcomes, mine, group=self.group)
        failures = [f"rank {rank}: {message}" for rank, (_, message, _) in enumerate(outcomes) if message is not None]
        if failures:
            kind = CheckpointUnavailable if any(unreached for *_, unreached in outcomes) else _RankError
            raise kind("; ".join(failures)) from failure
        return [result for result, *_ in outcomes]

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        return self._together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _warn(self, message: str) -> None:
        if self.rank == 0:
            logger.warning(message)


def _directory(step: int) -> str:
    return f"step-{step:08d}"
