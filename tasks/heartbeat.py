"""The heartbeat of a cluster's job: a small file in the run directory that rank 0 renews and the Prefect task reads."""

import json
import logging
import time
from typing import Any

from infra.storage import FileStorage, Storage

logger = logging.getLogger(__name__)

HEARTBEAT = "metrics/heartbeat.json"


class HeartbeatWriter:
    """Rank 0's side. Written at most once in `every_seconds`, and at every change of phase."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._every_seconds = _interval(storage)
        self._phase: str | None = None
        self._written = 0.0

    def __call__(self, sign: dict[str, Any]) -> None:
        now = time.monotonic()
        if sign["phase"] == self._phase and now - self._written < self._every_seconds:
            return
        self._phase, self._written = sign["phase"], now
        try:
            self._storage.write(HEARTBEAT, json.dumps(sign | {"time": time.time()}).encode())
        except OSError as error:  # a full disk, say; silence that lasts is met by the reader's deadline
            logger.warning("the heartbeat could not be written: %s", error)


class HeartbeatReader:
    """The task's side; the file is read at most once in `every_seconds`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._every_seconds = _interval(storage)
        self._read = 0.0
        self._last: dict[str, Any] = {}

    def last(self) -> dict[str, Any]:
        """The newest sign of life; empty before the first."""
        now = time.monotonic()
        if now - self._read >= self._every_seconds:
            self._read = now
            try:
                self._last = json.loads(self._storage.read(HEARTBEAT))
            except FileNotFoundError:
                self._last = {}
        return self._last


def _interval(storage: Storage) -> float:
    """Seconds between two signs: a request to S3 costs time and money, a local file neither."""
    return 0.5 if isinstance(storage, FileStorage) else 5.0
