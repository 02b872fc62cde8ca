"""What makes the pieces of data preparation: a pool of processes on this machine, or Ray through Prefect.

The result is the same from each, because a piece is a pure function that leaves a folder (model/data/pieces.py).
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from model.data.pieces import Piece, finish_piece
from tasks.config import EngineConfig
from tasks.pool import ProcessPool, Progress, too_late

RAY_QUEUE_PER_CPU = 4


class RayEngine:
    """Makes pieces on a Ray cluster, each a task run of Prefect. Its machines share the folders that pieces are in.

    Attributes:
        reused: Pieces that an earlier run had finished.
        made: Pieces that were made.
    """

    def __init__(self, config: EngineConfig, say: Callable[[str], None]) -> None:
        import ray

        # One cluster for all that is to be done: the task runner takes what is there.
        if config.ray_address:
            ray.init(config.ray_address, namespace="prefect", log_to_driver=False)
        else:
            ray.init(num_cpus=processes(config), include_dashboard=False, log_to_driver=False)
        self._shutdown = ray.shutdown
        self._timeout_minutes = config.piece_timeout_minutes
        self._limit = RAY_QUEUE_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._say = say
        self.reused = self.made = 0

    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        from prefect_ray import RayTaskRunner

        progress = Progress(what, pieces, self._say)
        self.reused += progress.reused
        if not progress.missing:
            return
        make = Task(finish_piece, name=what, cache_policy=NO_CACHE, persist_result=False)
        waiting: deque[tuple[Piece, PrefectFuture[Any]]] = deque()

        def await_first() -> None:
            # Those before it are made, and they start in order: it has been at work since this wait began, or longer.
            piece, future = waiting.popleft()
            try:
                failure = future.result(60 * self._timeout_minutes, raise_on_failure=False)
            except TimeoutError:
                raise too_late(what, [piece], self._timeout_minutes) from None
            if isinstance(failure, Exception):
                raise failure
            progress.add(1)

        @flow(name=what, task_runner=RayTaskRunner())
        def pieces_on_ray() -> None:
            for piece in progress.missing:
                if len(waiting) == self._limit:
                    await_first()
                waiting.append((piece, make.submit(piece)))
            while waiting:
                await_first()

        pieces_on_ray()
        self.made += len(progress.missing)

    def close(self) -> None:
        self._shutdown()


@contextmanager
def open_engine(config: EngineConfig, say: Callable[[str], None]) -> Iterator["ProcessPool | RayEngine"]:
    """The engine that the configuration names; `say` hears of progress.

    Raises:
        ValueError: Ray is asked for and not installed.
    """
    engine = (
        _ray(config, say) if config.kind == "ray" else ProcessPool(processes(config), say, config.piece_timeout_minutes)
    )
    try:
        yield engine
    finally:
        engine.close()


def processes(config: EngineConfig) -> int:
    return config.processes or len(os.sched_getaffinity(0))


def _ray(config: EngineConfig, say: Callable[[str], None]) -> RayEngine:
    try:
        return RayEngine(config, say)
    except ImportError:
        raise ValueError(
            "engine.kind (ray) needs the extra 'ray', which is not installed: pip install jumbo[ray]"
        ) from None
