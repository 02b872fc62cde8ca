"""What makes pieces: the same result from each engine, whatever is killed on the way."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from made_pieces import refuse, write_number, write_number_or_be_killed

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


EXPECTED = {f"{number}/number": str(number) for number in range(8)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_number_of_processes_leaves_the_same(tmp_path: Path, count: int) -> None:
    said: list[str] = []
    with open_engine(EngineConfig(processes=count), said.append) as engine:
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
        WorkersKilled, match=r"numbers: .* killed 3 times in a row, at one of 3.*engine.processes \(2\)"
    ):
        engine.finish("numbers", pieces)
    engine.close()
    assert "3/number" not in contents(tmp_path / "out")


def test_an_error_of_a_piece_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    pieces = [*numbers(tmp_path, 2), Piece(tmp_path / "refused", refuse)]
    with open_engine(EngineConfig(processes=2), lambda _: None) as engine, pytest.raises(ValueError, match="not to be"):
        engine.finish("numbers", pieces)
    assert not (tmp_path / "refused").exists()
    assert not list(tmp_path.glob(".*"))


def test_two_makers_of_one_piece_leave_one(tmp_path: Path) -> None:
    inner = Piece(tmp_path / "1", partial(write_number, 1))

    def make_it_twice(out: Path) -> None:
        finish_piece(inner)  # another process was faster
        write_number(1, out)

    finish_piece(Piece(tmp_path / "1", make_it_twice))
    assert contents(tmp_path) == {"1/number": "1"}
    assert not list(tmp_path.glob(".*"))


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
