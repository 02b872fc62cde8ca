"""What makes pieces: the same result from each engine, whatever is killed on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from made_pieces import end_by_itself, refuse, refuse_unsendably, sleep, write_number, write_number_or_be_killed

from infra import processes
from infra.errors import WorkersKilled
from model.data.pieces import InProcess, Piece, finish_piece, remove_partial
from tasks.config import EngineConfig
from tasks.engine import open_engine
from tasks.pool import ProcessPool


def numbers(folder: Path, count: int = 8) -> list[Piece]:
    return [Piece(folder / str(number), partial(write_number, number)) for number in range(count)]


def deadly(folder: Path, how: str) -> list[Piece]:
    """The pieces, of which number 3 kills whoever makes it: once or always."""
    make = partial(write_number_or_be_killed, folder / how)
    return [Piece(folder / "out" / str(number), partial(make, number)) for number in range(8)]


def contents(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def kill_helper(name: str) -> int:
    """Kills what multiprocessing starts processes with; its pid."""
    pid = forkserver._forkserver._forkserver_pid if name == "forkserver" else resource_tracker._resource_tracker._pid
    assert pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


def pool_workers() -> set[processes.Process]:
    """Every process of this session's pools, whoever its parent is now."""
    marked = processes.marked("JUMBO_STATE_DIR", os.environ["JUMBO_STATE_DIR"])
    commands = {process: Path(f"/proc/{process.pid}/cmdline") for process in marked}
    return {
        process
        for process, command in commands.items()
        if process.pid != forkserver._forkserver._forkserver_pid
        and command.exists()
        and b"multiprocessing.forkserver" in command.read_bytes()
    }


EXPECTED = {f"{number}/number": str(number) for number in range(8)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_number_of_processes_leaves_the_same(tmp_path: Path, count: int) -> None:
    said: list[str] = []
    config = EngineConfig(processes=count, piece_timeout_minutes=10_080)  # the longest that can be waited for
    with open_engine(config, said.append) as engine:
        engine.finish("numbers", numbers(tmp_path))
    assert contents(tmp_path) == EXPECTED
    assert said[0] == "numbers: 0 of 8 done"
    assert said[-1] == "numbers: 8 of 8 done"


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    InProcess().finish("numbers", numbers(tmp_path, 3))
    (tmp_path / "1" / "number").write_text("as it was")
    said: list[str] = []
    with open_engine(EngineConfig(processes=2), said.append) as engine:
        engine.finish("numbers", numbers(tmp_path))
        assert (engine.reused, engine.made) == (3, 5)
    assert contents(tmp_path) == EXPECTED | {"1/number": "as it was"}
    assert said[-1] == "numbers: 8 of 8 done, 3 of them by an earlier run"


def test_a_killed_worker_costs_nothing(tmp_path: Path) -> None:
    pieces = deadly(tmp_path, "once")
    with open_engine(EngineConfig(processes=2), lambda _: None) as engine:
        engine.finish("numbers", pieces)
    remove_partial(tmp_path / "out")
    assert contents(tmp_path / "out") == EXPECTED


def test_a_worker_that_is_always_killed_is_an_error_that_names_the_piece(tmp_path: Path) -> None:
    pieces = deadly(tmp_path, "always")
    engine = ProcessPool(2, lambda _: None)
    with pytest.raises(
        WorkersKilled, match=r"numbers: the process at out/3 was killed 3 times; .* lower engine\.processes \(2\) or"
    ):
        engine.finish("numbers", pieces)
    engine.close()
    assert "3/number" not in contents(tmp_path / "out")


@pytest.mark.parametrize("victim", ["forkserver", "resource tracker"])
@pytest.mark.filterwarnings("ignore:resource_tracker. process died unexpectedly:UserWarning")
def test_what_the_pool_starts_processes_with_can_be_killed(tmp_path: Path, victim: str) -> None:
    """Before the first piece, in the middle, and between two steps."""
    deaths: list[int] = []

    def kill(done: str) -> None:
        if "4 of 8" in done or "8 of 8" in done:
            deaths.append(kill_helper(victim))

    with open_engine(EngineConfig(processes=2), lambda _: None) as engine:
        engine.finish("numbers", numbers(tmp_path / "warm"))  # so that there is one to kill
    deaths.append(kill_helper(victim))
    with open_engine(EngineConfig(processes=2), kill) as engine:
        engine.finish("numbers", numbers(tmp_path / "first"))
        engine.finish("numbers", deadly(tmp_path, "once"))  # one worker is started anew
    assert len(set(deaths)) > 1
    remove_partial(tmp_path / "out")
    for folder in ("warm", "first", "out"):
        assert contents(tmp_path / folder) == EXPECTED
    assert pool_workers() == set()
    resource_tracker.ensure_running()  # here, where its warning is expected


def test_the_pool_lives_through_kills_of_all_it_has(tmp_path: Path) -> None:
    """Also of every worker while it waits for the next step."""
    with open_engine(EngineConfig(processes=3), lambda _: None) as engine:
        for step in range(4):
            engine.finish("numbers", numbers(tmp_path / str(step)))
            for worker in pool_workers():
                os.kill(worker.pid, signal.SIGKILL)
    assert [contents(tmp_path / str(step)) for step in range(4)] == [EXPECTED] * 4
    assert pool_workers() == set()


def test_a_server_that_is_killed_over_and_over(tmp_path: Path) -> None:
    """At any moment of a start."""
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.3):
            kill_helper("forkserver")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for step in range(4):
            with open_engine(EngineConfig(processes=2), lambda _: None) as engine, suppress(WorkersKilled):
                engine.finish("numbers", numbers(tmp_path / str(step)))
    finally:
        ended.set()
        killer.join()
    assert pool_workers() == set()
    remove_partial(tmp_path)
    assert all(contents(tmp_path / str(step)).items() <= EXPECTED.items() for step in range(4))


def test_an_error_of_a_piece_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    pieces = [*numbers(tmp_path, 2), Piece(tmp_path / "refused", refuse)]
    with (
        open_engine(EngineConfig(processes=2), lambda _: None) as engine,
        pytest.raises(ValueError, match=r"^data: is not to be had\n") as error,
    ):
        engine.finish("numbers", pieces)
    assert "made_pieces.py" in error.value.__notes__[0]  # where it was raised
    assert not (tmp_path / "refused").exists()
    assert not list(tmp_path.glob(".*"))
    assert pool_workers() == set()


def test_an_error_that_no_process_can_send_is_told(tmp_path: Path) -> None:
    with (
        open_engine(EngineConfig(processes=2), lambda _: None) as engine,
        pytest.raises(RuntimeError, match=r"made_pieces\.Unsendable: not to be had"),
    ):
        engine.finish("numbers", [Piece(tmp_path / "refused", refuse_unsendably)])


def test_a_piece_that_ends_its_process_is_no_end_of_the_run(tmp_path: Path) -> None:
    with (
        open_engine(EngineConfig(processes=2), lambda _: None) as engine,
        pytest.raises(WorkersKilled, match=r"the process at .*/ended was killed 3 times"),
    ):
        engine.finish("numbers", [Piece(tmp_path / "ended", end_by_itself)])


def test_two_makers_of_one_piece_leave_one(tmp_path: Path) -> None:
    inner = Piece(tmp_path / "1", partial(write_number, 1))

    def make_it_twice(out: Path) -> None:
        finish_piece(inner)  # another process was faster
        write_number(1, out)

    finish_piece(Piece(tmp_path / "1", make_it_twice))
    assert contents(tmp_path) == {"1/number": "1"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("count", [1, 2])
def test_a_piece_that_hangs_is_an_error_that_names_it_and_what_to_change(tmp_path: Path, count: int) -> None:
    pieces = [*numbers(tmp_path / "out", 4), Piece(tmp_path / "out/asleep", sleep)]
    config = EngineConfig(processes=count, piece_timeout_minutes=0.02)
    message = r"^numbers: out/asleep took more than engine\.piece_timeout_minutes \(0\.02\), so .* data\.shard_bytes$"
    with open_engine(config, lambda _: None) as engine, pytest.raises(TimeoutError, match=message):
        engine.finish("numbers", pieces)
    assert pool_workers() == set()
    assert not (tmp_path / "out/asleep").exists()
    remove_partial(tmp_path)
    assert contents(tmp_path / "out") == {f"{number}/number": str(number) for number in range(4)}


@pytest.mark.slow
def test_a_piece_that_hangs_on_ray(tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Ray's workers import what pieces are made of
    pieces = [*numbers(tmp_path / "out", 4), Piece(tmp_path / "out/asleep", sleep)]
    config = EngineConfig(kind="ray", processes=2, piece_timeout_minutes=0.5)
    with (
        open_engine(config, lambda _: None) as engine,
        pytest.raises(
            TimeoutError, match=r"^numbers: out/asleep took more than engine\.piece_timeout_minutes \(0\.5\)"
        ),
    ):
        engine.finish("numbers", pieces)
    remove_partial(tmp_path)
    assert contents(tmp_path / "out") == {f"{number}/number": str(number) for number in range(4)}


SLEEPING = """
import sys
from pathlib import Path
from made_pieces import sleep
from model.data.pieces import Piece
from tasks.pool import ProcessPool

ProcessPool(2, lambda _: None).finish("sleep", [Piece(Path(sys.argv[1]) / name, sleep) for name in "ab"])
"""


def test_workers_end_with_the_process_that_asked(tmp_path: Path) -> None:
    environment = os.environ | {"TEST_MARK": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", SLEEPING, str(tmp_path)], env=environment) as parent:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("started"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = processes.marked("TEST_MARK", str(tmp_path))
        parent.kill()
    assert len(family) >= 3  # the parent and its workers
    while any(map(processes.is_alive, family)):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)
