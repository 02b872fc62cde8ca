"""Runs functions on real ranks: processes with a gloo group, forked from a server that has imported torch once."""

import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

_context = multiprocessing.get_context("forkserver")
# DTensor imports torch._dynamo at its first use, which takes longer than most tests.
_context.set_forkserver_preload(["pytest", "model.planning.probe", "torch._dynamo"])

DEADLINE_SECONDS = 120


class Job:
    """`function(*args)` running on every rank of a group of its own."""

    def __init__(self, function: Callable[..., Any], world_size: int, *args: Any) -> None:
        self._directory = tempfile.TemporaryDirectory()
        store = str(Path(self._directory.name) / "store")
        self.processes = []
        self._pipes = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_main, args=(sender, function, rank, world_size, store, args))
            process.start()
            sender.close()
            self.processes.append(process)
            self._pipes.append(receiver)

    def wait_for_a_death(self) -> None:
        """Return when a rank has ended, in whatever way."""
        sentinels = [process.sentinel for process in self.processes]
        assert multiprocessing.connection.wait(sentinels, DEADLINE_SECONDS), "no rank has ended"

    def kill(self) -> None:
        """SIGKILL every rank, and wait until they are gone."""
        for process in self.processes:
            process.kill()
        self._end()

    def results(self) -> list[Any]:
        """What the ranks returned, in order. Raises RuntimeError with the traceback of a rank that failed."""
        try:
            outcomes = [self._receive(pipe) for pipe in self._pipes]
        finally:
            self._end()
        for rank, (failed, value) in enumerate(outcomes):
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
        return [value for _, value in outcomes]

    def _receive(self, pipe: Connection) -> tuple[bool, Any]:
        if not pipe.poll(DEADLINE_SECONDS):
            for process in self.processes:
                process.kill()
            pytest.fail(f"a rank was silent for {DEADLINE_SECONDS} s")
        try:
            return pipe.recv()
        except EOFError:
            return True, "it died without a word"

    def _end(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join(DEADLINE_SECONDS)
            process.close()
            pipe.close()
        self._directory.cleanup()


def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """The results of `function(*args)` on `world_size` ranks."""
    return Job(function, world_size, *args).results()


def _main(pipe: Connection, function: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        outcome = (False, function(*args))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise
    pipe.send(outcome)
    dist.destroy_process_group()
