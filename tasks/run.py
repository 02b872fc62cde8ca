"""Opens a run directory for one flow at a time: checked, locked, its configuration written down."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from infra.storage import FileStorage, open_storage
from tasks.config import PipelineConfig
from tasks.preflight import check_run


@contextmanager
def open_run(config: PipelineConfig, needs_cluster: bool = True) -> Iterator[None]:
    """Hold the run directory while the block runs.

    Raises:
        ValueError: the configuration is wrong, or another flow holds the directory.
    """
    check_run(config, needs_cluster)
    storage = open_storage(config.run_uri)
    if isinstance(storage, FileStorage):
        with _locked(storage.root):
            _write_config(config)
            yield
    else:
        _write_config(config)
        yield


def _write_config(config: PipelineConfig) -> None:
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    open_storage(config.run_uri).write("config.yaml", text.encode())


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """The kernel lets go of the lock when this process ends, however it ends."""
    path = root / ".lock"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"run_uri ({root}) is in use by another flow (pid {file.read() or 'unknown'})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
