"""Finds slow ranks, and the host they are on.

In synchronous training every step takes as long as the slowest rank, so step times tell that one is slow, not which.
So each rank times a fixed piece of work of its own after every step, and all exchange what they measured, together
with everything else that all have to know: one small collective a step.
"""

import logging
import socket
import time
from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

WINDOW_STEPS = 32
SLOW_RATIO = 1.3
RECOVERED_RATIO = 1.2
"""Below SLOW_RATIO, or a rank at the border would be reported again and again."""

MEASURES = ("matrix product and loader wait", "step time")


class Probe:
    """A fixed amount of matrix products, about a millisecond of them.

    Args:
        dtype: what training computes in.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        side = 4096 if device.type == "cuda" else 256
        generator = torch.Generator(device).manual_seed(0)  # not the generator of dropout
        self._matrix = torch.randn(side, side, generator=generator, dtype=torch.float32, device=device).to(dtype)
        self._product = torch.empty_like(self._matrix)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.work()  # kernels are chosen at first use
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._launch(*self._events)
            torch.cuda.synchronize()

    def seconds(self) -> float:
        """How long the work takes now; on a GPU, how long it took when last asked, so that nothing waits for it.

        The caller waits for the GPU between two calls, as every step does that looks at its loss.
        """
        if self._events is None:
            started = time.perf_counter()
            self.work()
            return time.perf_counter() - started
        start, end = self._events
        seconds = start.elapsed_time(end) / 1000
        self._launch(start, end)
        return seconds

    def work(self) -> None:
        for _ in range(4):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def _launch(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        start.record()
        self.work()
        end.record()


@dataclass(frozen=True)
class Exchanged:
    """What all ranks know after a step."""

    any_stop_asked: bool
    loader_seconds: float
    """Of the rank that waited longest, for which all the others waited."""
    memory_bytes: int
    """Of the fullest rank."""
    slow_ranks: tuple[int, ...]
    """On rank 0 alone, which says so in the log."""


class Exchange:
    """The collective after every step. Every rank makes one; `step` is the rest of it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        self._device = device
        self._probe = Probe(device, dtype)
        self._watch = StragglerWatch(hosts) if dist.get_rank() == 0 else None
        self._left = time.perf_counter()  # the exchange before, which all ranks leave together

    def step(self, *, stop_asked: bool, loader_seconds: float, memory_bytes: int) -> Exchanged:
        """Tell all ranks, and hear from all."""
        own_seconds = self._probe.seconds() + loader_seconds
        told = [stop_asked, loader_seconds, memory_bytes, own_seconds, time.perf_counter() - self._left]
        heard = torch.empty(dist.get_world_size() * len(told), dtype=torch.float64, device=self._device)
        dist.all_gather_single(heard, torch.tensor(told, dtype=torch.float64, device=self._device))
        ranks = heard.view(-1, len(told)).cpu().numpy()
        self._left = time.perf_counter()
        stops, waits, memory = ranks[:, :3].max(axis=0)
        slow = self._watch.judge(ranks[:, 3:]) if self._watch else ()
        return Exchanged(bool(stops), float(waits), int(memory), slow)


class StragglerWatch:
    """Judges ranks by the medians of what they last measured; says once when one becomes slow, and when it recovers.

    Args:
        hosts: of every rank.
    """

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW_STEPS)
        self._slow = np.zeros(len(hosts), dtype=bool)

    def judge(self, seconds: np.ndarray) -> tuple[int, ...]:
        """The ranks that are slow, in order; none before the window is full.

        Args:
            seconds: of every rank, by `MEASURES`: (ranks, 2). Every one above 0.
        """
        self._window.append(seconds)
        if len(self._window) < WINDOW_STEPS:
            return ()
        of_ranks = _lower_median(np.stack(self._window))
        ratios = of_ranks / _lower_median(of_ranks)
        before, worst = self._slow, ratios.max(axis=1)
        self._slow = worst > np.where(before, RECOVERED_RATIO, SLOW_RATIO)
        for host, ranks in self._by_host(self._slow & ~before):
            slowest = ranks[int(worst[ranks].argmax())]
            logger.warning(
                "%s slow: over %d steps, the median %s of rank %d is %.1f x that of the median rank",
                _subject(ranks, host),
                WINDOW_STEPS,
                MEASURES[int(ratios[slowest].argmax())],
                slowest,
                worst[slowest],
            )
        for host, ranks in self._by_host(before & ~self._slow):
            logger.warning("%s no longer slow", _subject(ranks, host))
        return tuple(np.flatnonzero(self._slow).tolist())

    def _by_host(self, chosen: np.ndarray) -> list[tuple[str, list[int]]]:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in np.flatnonzero(chosen).tolist():
            ranks[self._hosts[rank]].append(rank)
        return list(ranks.items())


def _lower_median(values: np.ndarray) -> np.ndarray:
    """Over the first axis. Of two in the middle the lower, so that of two ranks the slower one can be told."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def _subject(ranks: list[int], host: str) -> str:
    one = len(ranks) == 1
    return f"{'rank' if one else 'ranks'} {', '.join(map(str, ranks))} on {host} {'is' if one else 'are'}"
