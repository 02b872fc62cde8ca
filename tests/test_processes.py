import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra import processes

# A parent that passes nothing on, with a child in a session of its own that hears no SIGTERM and carries no mark.
STUBBORN = """
import subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], env={}, start_new_session=True)
time.sleep(60)
"""


def _wait_dead(process: processes.Process, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while processes.is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes.is_alive(process)


def test_a_stubborn_descendant_without_the_mark_is_ended_too() -> None:
    value = f"mark of {os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], env=os.environ | {"MARK": value}, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        (root,) = processes.marked("MARK", value)
        assert root.pid == parent.pid
        (child,) = processes.descendants([root])
        processes.end(lambda: processes.marked("MARK", value), grace_seconds=0.3)
        assert not processes.is_alive(root)
        assert not processes.is_alive(child)
        assert parent.wait(5) == -signal.SIGTERM


def test_marks_match_whole_values() -> None:
    with subprocess.Popen(["sleep", "60"], env={"MARK": "/state/run-1"}) as process:
        assert processes.marked("MARK", "/state/run") == set()
        assert {found.pid for found in processes.marked("MARK", "/state/run-1")} == {process.pid}
        process.kill()


def test_a_zombie_and_a_reused_pid_are_not_alive() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        this = processes.Process(process.pid, int(stat.split()[21]))
        assert processes.is_alive(this)
        assert not processes.is_alive(processes.Process(this.pid, this.started - 1))
        process.kill()
        assert _wait_dead(this)
        assert Path(f"/proc/{process.pid}").exists()  # a zombie until its parent collects it


def test_a_process_that_survives_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    process = subprocess.Popen(["sleep", "60"], env={"MARK": "survivor"})
    try:
        with pytest.raises(processes.InfraError, match=rf"processes {process.pid} still live"):
            processes.end(lambda: processes.marked("MARK", "survivor"), grace_seconds=0)
    finally:
        monkeypatch.undo()
        process.kill()
        process.wait()
