"""Pieces of work that are done once: each a folder that is made by a pure function and has its name once it is whole.

What was finished before a kill is found by its name and not done again; a piece that two workers make at once is the
same from both, and the first one counts.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Piece:
    """One piece of work.

    Attributes:
        folder: Where its files are once all of them are written.
        make: Writes them into the empty folder that it is given. Can be sent to another process, and writes the same
            bytes whenever and wherever it runs.
    """

    folder: Path
    make: Callable[[Path], None]

    @property
    def name(self) -> str:
        """What it is called in errors: of which step it is, and which of its pieces."""
        return "/".join(self.folder.parts[-2:])


class Engine(Protocol):
    """What makes pieces: this process, a pool of processes, or machines."""

    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        """Makes every piece that is not there yet, in any order; `what` says in progress reports what they are.

        Raises:
            Exception: what a piece's function raised.
        """


class InProcess:
    """Makes one piece after the other, here."""

    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            finish_piece(piece)


def finish_piece(piece: Piece) -> None:
    """Makes the piece unless it is there."""
    if piece.folder.exists():
        return
    piece.folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{piece.folder.name}-", dir=piece.folder.parent))
    try:
        piece.make(partial)
        partial.chmod(0o755)  # mkdtemp's folders are this user's alone
        try:
            os.rename(partial, piece.folder)
        except OSError:
            if not piece.folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Removes what killed workers left below a folder; nothing may be at work there."""
    for partial in folder.rglob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
