"""A pool of processes that makes pieces (model/data/pieces.py). Imports no Prefect: its workers start quickly."""

import ctypes
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_sentinels
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from infra.errors import WorkersKilled
from model.data.pieces import Piece, finish_piece

MAX_BROKEN_POOLS = 3  # in a row, without a piece finished in between
_PRELOADED = ["tasks.preload"]


class _Worker(ForkServerProcess):
    """A process that does not import the program's main module: that may be Prefect's, and takes seconds."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _Context(ForkServerContext):
    Process = _Worker


class Progress:
    """Says how many pieces are done, and how many an earlier run had finished."""

    def __init__(self, what: str, pieces: Sequence[Piece], say: Callable[[str], None]) -> None:
        self._what, self._say, self._total = what, say, len(pieces)
        self.missing = [piece for piece in pieces if not piece.folder.exists()]
        self.reused = self.done = len(pieces) - len(self.missing)
        self.add(0)

    def add(self, count: int) -> None:
        self.done += count
        before = f", {self.reused} of them by an earlier run" if self.reused else ""
        self._say(f"{self._what}: {self.done} of {self._total} done{before}")


class ProcessPool:
    """Makes pieces in a pool of processes; in this process where one process is asked for or there is one piece.

    A killed worker costs the pieces it was at: they are made again by a new pool.

    Attributes:
        reused: Pieces that an earlier run had finished.
        made: Pieces that were made.
    """

    def __init__(self, processes: int, say: Callable[[str], None]) -> None:
        self._processes, self._say = processes, say
        self._pool: ProcessPoolExecutor | None = None
        self.reused = self.made = 0

    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        progress = Progress(what, pieces, self._say)
        self.reused += progress.reused
        # The pool is not worth its start for one piece.
        if self._processes == 1 or (len(progress.missing) == 1 and self._pool is None):
            for piece in progress.missing:
                finish_piece(piece)
                progress.add(1)
        else:
            self._finish_in_pool(what, progress)
        self.made += len(progress.missing)

    def close(self) -> None:
        if self._pool:
            for worker in list(self._pool._processes.values()):  # what they are at is not wanted any more
                worker.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _finish_in_pool(self, what: str, progress: Progress) -> None:
        missing, broken = progress.missing, 0
        while missing:
            try:
                for _ in self._made(missing):
                    progress.add(1)
                    broken = 0
                return
            except BrokenProcessPool as error:
                self._pool = None
                broken += 1
                missing = [piece for piece in missing if not piece.folder.exists()]
                if broken == MAX_BROKEN_POOLS:
                    raise WorkersKilled(
                        f"{what}: processes of the pool were killed {broken} times in a row, at one of "
                        f"{', '.join(piece.folder.name for piece in missing[: 2 * self._processes])}; if there is not "
                        f"enough memory, lower engine.processes ({self._processes}) or data.shard_bytes"
                    ) from error

    def _made(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """Yields as pieces are made, with a few more in the queue than there are processes."""
        if self._pool is None:
            context = _Context()
            context.set_forkserver_preload(_PRELOADED)
            self._pool = ProcessPoolExecutor(self._processes, context, _start_worker)
        running: set[Future[None]] = set()
        for piece in pieces:
            running.add(self._pool.submit(_make, piece))
            if len(running) >= 2 * self._processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _make(piece: Piece) -> None:
    finish_piece(piece)
    ctypes.CDLL(None).malloc_trim(0)  # a process that keeps what its largest piece needed would be as large for ever


def _start_worker() -> None:
    """An end when the process that asked is gone: it cannot say so when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent

    def watch() -> None:
        wait_for_sentinels([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
