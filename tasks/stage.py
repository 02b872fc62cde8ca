"""What every stage shares: done before means skipped, work in scratch space, the manifest last, retries for the
transient only."""

import functools
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.states import Completed
from pydantic import ValidationError

from infra.errors import TransientError
from infra.local import default_state_dir
from infra.storage import FileStorage, open_storage
from tasks.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    FileRecord,
    Manifest,
    damaged_files,
    digest,
    inside,
    record_file,
    stage_key,
)

# Heard by the terminal alone: Prefect keeps what its run logger is told, and a run of months would fill its database.
progress_logger = logging.getLogger("tasks.progress")
LOG_EVERY_SECONDS = 60.0


class Stage:
    """One stage of one run: where it lives, what it depends on, whether it is done.

    Args:
        run_uri: The run directory.
        name: The stage's name, as in the UI.
        directory: Where in the run directory its files and manifest are; empty for the run directory itself.
        settings: Everything in the configuration that its output depends on.
        inputs: Fingerprints of what it reads.
    """

    def __init__(
        self, run_uri: str, name: str, directory: str, settings: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> None:
        self.storage = open_storage(run_uri)
        self.run_uri, self.name, self.directory = run_uri, name, directory
        self.inputs = dict(inputs)
        self.key = stage_key(name, settings, inputs)
        if isinstance(self.storage, FileStorage):
            work, scratch = self.storage.root / ".work", self.storage.root / ".scratch"
        else:
            work, scratch = (default_state_dir() / kind / digest(self.storage.uri) for kind in ("work", "scratch"))
        self._workspace, self._scratch = work / f"{name}-{self.key}", scratch / name
        self._started = time.monotonic()
        self._said = ""
        self._logged = self._started

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    def finished(self) -> Manifest | None:
        """The manifest of this very work, if it was finished and its files are what they were."""
        manifest = self._manifest()
        if manifest is None or manifest.key != self.key or damaged_files(self.storage, manifest):
            return None
        return manifest

    def earlier(self) -> Manifest | None:
        """The manifest of what the stage did last, whatever that was made from, with those of its files that are what
        they were; for what can be kept of it."""
        manifest = self._manifest()
        if manifest is None:
            return None
        damaged = set(damaged_files(self.storage, manifest))
        return manifest.model_copy(update={"files": tuple(f for f in manifest.files if f.name not in damaged)})

    def _manifest(self) -> Manifest | None:
        try:
            manifest = Manifest.model_validate_json(self.storage.read(inside(self.directory, MANIFEST)))
        except (FileNotFoundError, ValidationError):  # never finished, or by another version: do it again
            return None
        if manifest.format_version != FORMAT_VERSION:
            return None
        return manifest.model_copy(update={"run_uri": self.run_uri})

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty local directory to work in, on the run's own disk where it has one; removed at the end."""
        _remove(self._scratch)  # left by a killed run
        self._scratch.mkdir(parents=True)
        try:
            yield self._scratch
        finally:
            _remove(self._scratch)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A local directory for this very work, on the run's own disk where it has one. It is removed when the block
        ends well; what a killed or failed run finished in it is there for the next."""
        for other in self._workspaces():
            if other != self._workspace:
                _remove(other)  # what another configuration or other input left
        self._workspace.mkdir(parents=True, exist_ok=True)
        yield self._workspace
        _remove(self._workspace)

    def _workspaces(self) -> list[Path]:
        """What there is of this stage, whatever configuration and input it is of."""
        return list(self._workspace.parent.glob(f"{self.name}-*"))

    def publish(self, scratch: Path, kept: Manifest | None = None) -> list[FileRecord]:
        """Store what is in `scratch` in the stage's directory; its old content goes first, the manifest before all.

        Args:
            scratch: A folder of files.
            kept: What `earlier` gave, with those of its files that stay as they are.
        """
        assert self.directory, "publishing replaces the directory, and the run directory holds every stage"
        records = self._clear(kept)
        for path in sorted(p for p in scratch.rglob("*") if p.is_file()):
            name = path.relative_to(scratch).as_posix()
            self.storage.upload(path, inside(self.directory, name))
            records.append(record_file(path, name))
        return sorted(records, key=lambda record: PurePosixPath(record.name))

    def _clear(self, kept: Manifest | None) -> list[FileRecord]:
        """Remove what the stage's directory holds, but for the files of `kept`; their records."""
        if kept is None or not kept.files:
            self.storage.delete(inside(self.directory, MANIFEST))
            self.storage.delete(self.directory)
            return []
        # Of no key, so that it is no finished work; if this run is killed now, the next knows what the files are.
        unfinished = kept.model_copy(update={"key": ""}).model_dump_json(indent=1).encode()
        self.storage.write(inside(self.directory, MANIFEST), unfinished)
        stay = {inside(self.directory, name) for name in (MANIFEST, *(file.name for file in kept.files))}
        for entry in self.storage.list(self.directory):
            if entry.name not in stay:
                self.storage.delete(entry.name)
        return list(kept.files)

    def complete(
        self, files: Sequence[FileRecord], counts: Mapping[str, Any], summary: str, cost_usd: float = 0.0
    ) -> Manifest:
        """Write the manifest, the last thing a stage does, and say how it went."""
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            stage=self.name,
            run_uri=self.run_uri,
            directory=self.directory,
            key=self.key,
            inputs=self.inputs,
            fingerprint=digest([[file.name, file.sha256] for file in files]),
            files=tuple(files),
            counts=dict(counts),
            summary=summary,
            seconds=round(self.seconds, 3),
            cost_usd=round(cost_usd, 6),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.storage.write(inside(self.directory, MANIFEST), manifest.model_dump_json(indent=1).encode())
        say_outcome(self.name, "done", self.seconds, summary)
        return manifest

    def cached(self, manifest: Manifest, result: Any = None) -> Any:
        """What a task returns when its stage was done before: the UI shows the state Cached, the caller gets `result`,
        or the manifest. What killed runs left is removed: nothing goes on from there."""
        for left in (self._scratch, *self._workspaces()):
            _remove(left)
        say_outcome(self.name, "cached", time.monotonic() - self._started, manifest.summary)
        return Completed(name="Cached", message=f"finished {manifest.finished}", data=result or manifest)

    def say_reuse(self, reused: int, made: int) -> None:
        """Say how much of the work an earlier run, which was killed or failed, had finished."""
        if reused:
            summary = f"{reused} of {reused + made} pieces were finished by an earlier run"
            say_outcome(self.name, "resumed", self.seconds, summary)

    def progress(self, message: str) -> None:
        """Say what is under way: to the terminal at once, to the run's log a line a minute, and none twice."""
        if message == self._said:
            return
        self._said = message
        progress_logger.info("%s", message, extra={"stage": self.name, "outcome": "working"})
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_SECONDS:
            self._logged = now
            get_run_logger().info("%s", message)


def _remove(path: Path) -> None:
    """Removes a folder that may be there, and the one it is in where that is empty then."""
    if path.exists():
        shutil.rmtree(path)
    with suppress(OSError):  # the work of other stages is there, or none was
        path.parent.rmdir()


def say_outcome(stage: str, outcome: str, seconds: float, summary: str) -> None:
    """One line in the run's log: how a stage ended."""
    get_run_logger().info("%s", summary, extra={"stage": stage, "outcome": outcome, "seconds": seconds})


def artifact_key(kind: str, run_uri: str) -> str:
    """A key for one run's artifact of this kind: artifacts with one key are versions of each other in the UI."""
    return f"{kind}-{re.sub('[^a-z0-9]+', '-', run_uri.lower()).strip('-')[-60:].strip('-')}".strip("-")


class StageTask(Task[..., Any]):
    """A Prefect task whose call gives the manifest also when the task answered with the state Cached."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        return result.result() if isinstance(result, State) and not kwargs.get("return_state") else result


def _is_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, TransientError)


def stage_task(name: str, retries: int = 2) -> Callable[[Callable[..., Any]], StageTask]:
    """Make a function a Prefect task that is tried again only after a transient failure."""
    return functools.partial(
        StageTask,
        name=name,
        retries=retries,
        retry_delay_seconds=[2.0, 15.0][:retries],
        retry_jitter_factor=0.5,
        retry_condition_fn=_is_transient,
    )
