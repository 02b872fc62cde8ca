"""Functions that make pieces, for the tests of engines; here, because the processes of a pool import where they are."""

import os
import signal
import sys
import time
from pathlib import Path


def write_number(number: int, out: Path) -> None:
    (out / "number").write_text(str(number))


def write_number_or_be_killed(mark: Path, number: int, out: Path) -> None:
    """Whoever comes to number 3 is killed; where the mark is called "once", the first alone."""
    if number == 3 and not mark.exists():
        if mark.name == "once":
            mark.touch()
        (out / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    write_number(number, out)


def refuse(out: Path) -> None:
    (out / "half").touch()
    raise ValueError("data: is not to be had")


class Unsendable(Exception):
    def __init__(self, *, why: str) -> None:
        super().__init__(why)


def refuse_unsendably(out: Path) -> None:
    raise Unsendable(why="not to be had")


def end_by_itself(out: Path) -> None:
    sys.exit(0)


def sleep(out: Path) -> None:
    (out / "started").touch()
    time.sleep(60)
