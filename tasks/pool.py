"""A pool of processes that makes pieces (model/data/pieces.py). Imports no Prefect: its workers start quickly.

Python's own pool of processes breaks as a whole when one of them is killed, cannot end a piece that hangs, and does not
survive its server.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from infra import processes
from infra.errors import WorkersKilled
from model.data.pieces import Piece, finish_piece

MAX_KILLS = 3  # of workers at one piece; of attempts to start a worker
# A piece takes seconds; the longest, a compressed file of 100 GB that cannot be split, takes hours.
PIECE_TIMEOUT_MINUTES = 360.0
_START_SECONDS = 60.0  # for a process, which is forked, to say who it is
_RESTART_SECONDS = 0.5  # until a killed server is known to be dead
_PRELOADED = ["tasks.preload", "tasks.pool"]


class _Process(ForkServerProcess):
    """A process that does not import the program's main module: that may be Prefect's, and takes seconds."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        main = sys.modules["__main__"]
        # Ctrl-C is the pool's to hear. The server that this may start keeps SIGINT blocked, and so do all its workers.
        resource_tracker.ensure_running()  # it would unblock SIGINT
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Context(ForkServerContext):
    Process = _Process


class _Worker:
    """A process of the pool. It outlives the server that it was forked from, which may be killed too.

    Attributes:
        process: Its identity.
        connection: Takes pieces; gives None for each that is made, or what it raised. Ends with the process.
        piece: What it is at; None where it waits.
        deadline: When that must be made, in seconds of time.monotonic().

    Raises:
        OSError, EOFError: It did not start.
    """

    def __init__(self) -> None:
        context = _Context()
        context.set_forkserver_preload(_PRELOADED)
        self.connection, theirs = multiprocessing.Pipe()
        self.piece: Piece | None = None
        self.deadline = 0.0
        # Kept, because the process ends when this is gone.
        self._started = context.Process(target=_work, args=(theirs,), daemon=True)
        try:
            self._started.start()
            theirs.close()
            if not self.connection.poll(_START_SECONDS):
                raise TimeoutError(f"it said nothing within {_START_SECONDS:g} s")
            self.process: processes.Process = self.connection.recv()
        except BaseException:
            if self._started.pid:
                self._started.kill()
            theirs.close()
            self.connection.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether it was killed while it waited: it says nothing of itself then."""
        return self.piece is None and self.connection.poll()

    def give(self, piece: Piece, seconds: float) -> None:
        self.piece, self.deadline = piece, time.monotonic() + seconds
        with suppress(OSError):  # it was killed a moment ago, which `take` finds
            self.connection.send(piece)

    def take(self) -> bool:
        """Whether the piece is made; it is not where the process was killed.

        Raises:
            Exception: What the piece raised.
        """
        try:
            error = self.connection.recv()
        except (EOFError, OSError):
            return False
        if error:
            raise error
        self.piece = None
        return True


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
    """Makes pieces in processes of their own.

    A killed worker costs the piece that it was at, which is made again. When a piece fails or takes too long, all
    workers are killed.

    Args:
        n_processes: How many pieces are made at once.
        say: Hears of progress.
        timeout_minutes: Longest that a piece may take.

    Attributes:
        reused: Pieces that an earlier run had finished.
        made: Pieces that were made.
    """

    def __init__(
        self, n_processes: int, say: Callable[[str], None], timeout_minutes: float = PIECE_TIMEOUT_MINUTES
    ) -> None:
        self._n_processes, self._say, self._timeout_minutes = n_processes, say, timeout_minutes
        self._workers: list[_Worker] = []
        self.reused = self.made = 0

    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        progress = Progress(what, pieces, self._say)
        self.reused += progress.reused
        queue, kills = deque(progress.missing), Counter[Path]()
        try:
            while queue or any(worker.piece for worker in self._workers):
                self._hand_out(queue)
                for worker in self._await(what):
                    piece = worker.piece
                    assert piece
                    if worker.take():
                        progress.add(1)
                        continue
                    self._drop([worker])
                    kills[piece.folder] += 1
                    if kills[piece.folder] == MAX_KILLS:
                        raise WorkersKilled(
                            f"{what}: the process at {piece.name} was killed {MAX_KILLS} times; if there is not enough "
                            f"memory, lower engine.processes ({self._n_processes}) or data.shard_bytes"
                        )
                    queue.appendleft(piece)
        except BaseException:
            self.close()  # what the others are at is not wanted any more
            raise
        self.made += len(progress.missing)

    def close(self) -> None:
        self._drop(self._workers)

    def _hand_out(self, queue: deque[Piece]) -> None:
        self._drop([worker for worker in self._workers if worker.is_lost])
        idle = [worker for worker in self._workers if worker.piece is None]
        while queue and (idle or len(self._workers) < self._n_processes):
            worker = idle.pop() if idle else self._start()
            worker.give(queue.popleft(), 60 * self._timeout_minutes)

    def _start(self) -> _Worker:
        for attempt in range(1, MAX_KILLS + 1):
            try:
                worker = _Worker()
                break
            except (EOFError, OSError) as error:  # the server that forks it was killed; the next attempt has another
                if attempt == MAX_KILLS:
                    raise WorkersKilled(f"no process that makes pieces could be started: {error!r}") from error
                time.sleep(_RESTART_SECONDS)
        self._workers.append(worker)
        return worker

    def _await(self, what: str) -> list[_Worker]:
        """Returns the workers that have ended their piece or were killed, when there are any.

        Raises:
            TimeoutError: A piece takes too long.
        """
        busy = {worker.connection: worker for worker in self._workers if worker.piece}
        first = min(worker.deadline for worker in busy.values())
        ready = wait(list(busy), max(0.0, first - time.monotonic()))
        now = time.monotonic()
        late = [worker.piece for worker in busy.values() if worker.deadline <= now and worker.connection not in ready]
        if late:
            raise too_late(what, [piece for piece in late if piece], self._timeout_minutes)
        return [worker for connection, worker in busy.items() if connection in ready]

    def _drop(self, workers: Sequence[_Worker]) -> None:
        """Ends workers and what they have started."""
        if not workers:
            return
        dropped = list(workers)
        self._workers = [worker for worker in self._workers if worker not in dropped]
        processes.end(lambda: {worker.process for worker in dropped}, grace_seconds=0)
        for worker in dropped:
            worker.connection.close()


def too_late(what: str, pieces: Sequence[Piece], minutes: float) -> TimeoutError:
    names = ", ".join(piece.name for piece in pieces)
    return TimeoutError(
        f"{what}: {names} took more than engine.piece_timeout_minutes ({minutes:g}), so the work was ended; if it only "
        "needs longer, raise that or lower data.shard_bytes"
    )


def _work(connection: Connection) -> None:
    """Makes the pieces that come through the connection, until it ends."""
    _end_with_parent()
    with suppress(EOFError, OSError):  # the pool is gone
        connection.send(processes.this_process())
        while True:
            connection.send(_outcome(connection.recv_bytes()))


def _outcome(pickled: bytes) -> Exception | None:
    """Makes a piece; what it raised, with its traceback as a note: that is lost on the way."""
    try:
        finish_piece(pickle.loads(pickled))  # noqa: S301 - from the pool
    except Exception as error:  # noqa: BLE001 - raised where the pool is
        error.add_note(traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - of a class that cannot be sent
            return RuntimeError(traceback.format_exc())
        return error
    finally:
        # A process that keeps what its largest piece needed would be as large for ever.
        ctypes.CDLL(None).malloc_trim(0)
    return None


def _end_with_parent() -> None:
    """An end when the process that asked is gone: it cannot say so when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
