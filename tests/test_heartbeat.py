import errno
import logging
from pathlib import Path

import pytest

from infra.storage import open_storage
from tasks.heartbeat import HeartbeatReader, HeartbeatWriter


def test_a_sign_is_read_as_it_was_given(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    HeartbeatWriter(storage)({"phase": "training", "step": 3, "steps": 9})
    sign = HeartbeatReader(storage).last()
    assert (sign["phase"], sign["step"], sign["steps"]) == ("training", 3, 9)


def test_a_full_disk_does_not_end_what_the_heartbeat_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(tmp_path))

    def write(name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = HeartbeatWriter(storage)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as full:
        full.setattr(storage, "write", write)
        writer({"phase": "training", "step": 1, "steps": 2})
    assert "the heartbeat could not be written: [Errno 28] No space left on device" in caplog.text
    writer({"phase": "validation", "step": 2, "steps": 2})
    assert HeartbeatReader(storage).last()["step"] == 2
