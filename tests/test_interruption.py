"""Ended by a signal at any stage: the exit code says by which, and nothing that the command had started is left."""

import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tiny import option_list, write_corpus

from infra import processes
from infra.local import LocalProvider, default_state_dir

MARKER = "INTERRUPTION_TEST"  # in the environment of all that a test starts
INTERRUPTED = "jumbo: interrupted; the same command continues where it stopped"
# An end in order takes a few seconds. Without the server that Ctrl-C once ended first, it took more than a minute.
END_SECONDS = 45

# A group that was started in the background by a shell without job control ignores SIGINT, which is inherited.
HEARD = ["env", "--default-signal=INT,TERM,HUP"]
ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of all that a test starts; what a failed test leaves of it is ended."""
    value = uuid.uuid4().hex
    yield os.environ | {MARKER: value}
    processes.end(lambda: processes.marked(MARKER, value), 0)


@pytest.fixture
def no_api(environment: dict[str, str], prefect_server: str) -> dict[str, str]:
    """An environment without a Prefect API; a temporary server finds a database that is there."""
    from prefect.settings import get_current_settings

    url = get_current_settings().server.database.connection_url
    assert url
    environment["PREFECT_API_DATABASE_CONNECTION_URL"] = url.get_secret_value()
    del environment["PREFECT_API_URL"]
    return environment


def left(environment: dict[str, str]) -> set[processes.Process]:
    return processes.marked(MARKER, environment[MARKER])


def await_(what: Callable[[], object], process: subprocess.Popen[bytes] | None = None, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process is None or process.poll() is None, "ended too early"
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def command_line(process: processes.Process) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace")
    return ""


# ---- The first signal and those after it, without a flow


PROGRAM = """
import sys, time
from flows.interruption import end_interrupted, one_interrupt
with one_interrupt():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt as interrupt:
        print("ending", flush=True)
        time.sleep(0.5)
        end_interrupted(interrupt)
"""


def start_program(environment: dict[str, str], *before: str) -> subprocess.Popen[str]:
    command = [*HEARD, *before, sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


# 128 + the signal's number, as a shell says it: 2 + 128, 15 + 128, 1 + 128.
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_counts_and_the_others_do_no_harm(
    number: signal.Signals, code: int, environment: dict[str, str]
) -> None:
    with start_program(environment) as process:
        process.send_signal(number)
        assert process.stdout
        assert process.stdout.readline() == "ending\n"
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(other)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (code, f"{INTERRUPTED}\n")


def test_a_signal_that_was_ignored_stays_ignored(environment: dict[str, str]) -> None:
    """As under nohup."""
    with start_program(environment, "env", "--ignore-signal=HUP") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 143


def test_an_end_that_takes_too_long_is_cut_short(environment: dict[str, str]) -> None:
    program = "import flows.interruption as i; i.END_SECONDS = 0.2\n" + PROGRAM.replace("sleep(0.5)", "sleep(60)")
    command = [*HEARD, sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said.decode()) == (130, f"{INTERRUPTED}\n")


# ---- The temporary server


SERVED = """
import os, time
from flows.temporary_server import start_server
start_server()()
print(os.environ.get("PREFECT_API_URL"), flush=True)
time.sleep(60)
"""


def test_the_server_ends_with_a_killed_command(no_api: dict[str, str]) -> None:
    command = [sys.executable, "-c", SERVED]
    with subprocess.Popen(command, env=no_api, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        servers = {found for found in left(no_api) if "temporary_server.py" in command_line(found)}
        assert len(servers) == 1
        # What ends the other processes must not end the server before them: they still report to it.
        for server in servers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(server.pid, number)
        time.sleep(0.3)
        assert all(processes.is_alive(server) for server in servers)
        process.kill()
    await_(lambda: not left(no_api), seconds=30)


def test_a_configured_api_is_taken(environment: dict[str, str], prefect_server: str) -> None:
    program = SERVED.replace("time.sleep(60)", "")
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60, check=True
    )
    assert ended.stdout.decode().strip() == prefect_server


def test_a_server_that_cannot_start_is_reported(no_api: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('this uvicorn is broken')")
    no_api["PYTHONPATH"] = str(tmp_path)
    ended = subprocess.run([sys.executable, "-c", SERVED], env=no_api, capture_output=True, timeout=60, check=False)
    said = ended.stderr.decode()
    assert ended.returncode == 1
    assert "RuntimeError: Prefect's temporary server did not start: it ended" in said
    assert said.endswith("ImportError: this uvicorn is broken\n")
    assert not left(no_api)


# ---- Whole commands


class Terminal:
    """A terminal in which a command runs, as in a person's."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        command = [*HEARD, sys.executable, "-c", ON_TERMINAL, sys.executable, "-m", "flows", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.said = ""

    def read(self) -> bool:
        """Take what was printed, since the command waits when no one does; whether it has ended."""
        with suppress(OSError):  # nothing is there, or no one has the terminal any more
            self.said += os.read(self._master, 1 << 16).decode(errors="replace")
        return self.process.poll() is not None

    def await_(self, what: Callable[[], object]) -> None:
        def happened() -> object:
            assert not self.read(), self.said
            return what()

        await_(happened)

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def close(self) -> None:
        os.close(self._master)


# When the server that forks the pool's workers has just been started, and when they work.
@pytest.mark.parametrize("n_processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ctrl_c_twice_while_the_pool_works(
    n_processes: int, no_api: dict[str, str], corpus: str, tmp_path: Path
) -> None:
    terminal = Terminal(["prepare", *option_list(tmp_path / "run", corpus), "--engine.processes", "2"], no_api)
    terminal.await_(lambda: sum("forkserver" in command_line(found) for found in left(no_api)) >= n_processes)
    terminal.type(b"\x03\x03")
    await_(terminal.read, seconds=END_SECONDS)
    assert terminal.process.returncode == 130
    terminal.read()
    terminal.close()
    assert terminal.said.endswith(f"{INTERRUPTED}\r\n")
    assert "Traceback" not in terminal.said
    await_(lambda: not left(no_api), seconds=10)


@pytest.mark.slow
def test_ctrl_c_while_the_server_starts(no_api: dict[str, str], corpus: str, tmp_path: Path) -> None:
    terminal = Terminal(["prepare", *option_list(tmp_path / "run", corpus)], no_api)
    terminal.await_(lambda: any("temporary_server.py" in command_line(found) for found in left(no_api)))
    terminal.type(b"\x03")
    await_(terminal.read, seconds=END_SECONDS)
    assert terminal.process.returncode == 130
    terminal.read()
    terminal.close()
    assert terminal.said.replace("^C", "").strip() == INTERRUPTED
    await_(lambda: not left(no_api), seconds=10)


@pytest.mark.slow
def test_a_terminal_that_is_closed(no_api: dict[str, str], corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    terminal = Terminal(["prepare", *option_list(run, corpus)], no_api)
    terminal.await_(lambda: any(run.glob(".work/preprocess-*")))
    terminal.close()
    assert terminal.process.wait(END_SECONDS) == 129
    await_(lambda: not left(no_api), seconds=10)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("stage", ["tokenizer", "training"])
def test_a_signal_to_the_whole_group(
    stage: str, number: signal.Signals, code: int, no_api: dict[str, str], corpus: str, tmp_path: Path
) -> None:
    """While SentencePiece's trainer runs in a child of its own, and while ranks train; twice, as `timeout` does."""
    run = tmp_path / "run"
    options = [*option_list(run, corpus), "--training.steps", "5000", "--tokens.max-epochs", "10000"]
    process = subprocess.Popen(
        [*HEARD, sys.executable, "-m", "flows", "pretrain", *options],
        env=no_api,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    if stage == "tokenizer":
        await_(lambda: any("SentencePieceTrainer" in command_line(found) for found in left(no_api)), process)
    else:
        await_((run / "metrics/train.jsonl").exists, process)
    os.killpg(process.pid, number)
    time.sleep(0.2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    _, said = process.communicate(timeout=END_SECONDS)
    assert (process.returncode, said.decode()) == (code, f"{INTERRUPTED}\n")
    assert LocalProvider(default_state_dir()).list_clusters() == []
    await_(lambda: not left(no_api), seconds=10)


def test_an_interrupt_in_the_collection_of_garbage_is_not_lost() -> None:
    """Python drops what is raised in __del__."""
    code = """
import os, signal, time
from flows.interruption import end_interrupted, one_interrupt
class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
with one_interrupt():
    try:
        Interrupted()
        time.sleep(20)
        print("it went on")
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt)
"""
    ended = subprocess.run(
        [*HEARD, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, "", f"{INTERRUPTED}\n")
