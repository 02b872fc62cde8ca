"""The flow as a process of its own: started by its command, ended by signals, started again by the same command."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from infra.bootstrap import die_with_parent

_MESSAGE_CHARACTERS = 300


def start_flow(
    command: str, run_uri: str, state_dir: Path, variables: dict[str, str], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """`jumbo COMMAND` of a run whose configuration is in its directory already.

    Args:
        variables: added to the environment that it inherits, of which it gets no JUMBO_… configuration.
        output: for all that it prints; this process's own if not given.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JUMBO_")}
    return subprocess.Popen(
        [sys.executable, "-m", "flows", command, "--run-uri", run_uri],
        env=inherited | {"JUMBO_STATE_DIR": str(state_dir)} | variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


class FlowAttempts:
    """`jumbo pretrain` of one run, as often as it takes; what it prints and its ranks log is kept by attempt."""

    def __init__(self, run_uri: str, state_dir: Path, directory: Path, variables: dict[str, str]) -> None:
        self.state_dir = state_dir
        self.number = 0
        self._started = 0.0
        self._run_uri, self._directory, self._variables = run_uri, directory, variables
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What the newest attempt prints."""
        return self._directory / f"{self.number:03}" / "flow.log"

    def start(self) -> None:
        self.number += 1
        self._started = time.time()
        self.log.parent.mkdir(parents=True)
        with self.log.open("wb") as output:
            self._process = start_flow("pretrain", self._run_uri, self.state_dir, self._variables, output)

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        assert self._process
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """The signal, unless it has ended."""
        assert self._process
        self._process.send_signal(number)

    def end(self) -> None:
        """SIGKILL, where it runs."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def keep_logs(self) -> None:
        """Copy what the ranks have logged in this attempt, before the next makes room for its own."""
        for path in (self.state_dir / "logs").rglob("*"):
            if path.is_file() and path.stat().st_mtime >= self._started:
                kept = self.log.parent / path.relative_to(self.state_dir)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, kept)

    def last_words(self) -> str:
        """How it ended, in a line."""
        code = self.poll()
        assert code is not None
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        said = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("jumbo: ")]
        return f"{how}: {said[-1].removeprefix('jumbo: ')}"[:_MESSAGE_CHARACTERS] if said else how
