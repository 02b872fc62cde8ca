"""Ctrl-C, SIGTERM and SIGHUP: the first one ends a run in order, and none that follows disturbs that."""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

_MESSAGE = "jumbo: interrupted; the same command continues where it stopped\n"
END_SECONDS = 30.0
"""Longest time in which a run may end in order: ranks have 15 s to end, and Prefect's server may not answer."""

_AGAIN_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []
_first: queue.SimpleQueue[int] = queue.SimpleQueue()  # which a handler may use, whatever it has interrupted


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt, with the signal's number, at the first signal in the block; ignore the others."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    hook_before = sys.unraisablehook
    sys.unraisablehook = partial(_again, hook_before)
    threading.Thread(target=_bound, daemon=True).start()
    listen()
    try:
        yield
    finally:
        if not _received:  # else the program is ending, in which it is not to be disturbed either
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook_before
            _first.put(0)


def listen(*_: object) -> None:
    """Hear the signals. Also a hook for when a flow has started: Prefect then has a handler of its own for SIGTERM,
    which would raise anew with each."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, and by a shell's "&"
            signal.signal(number, _interrupt)


def end_interrupted(interrupt: KeyboardInterrupt) -> NoReturn:
    """End the program as a shell says it of one that a signal has ended: 130, 143, 129."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, _MESSAGE)):
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # the terminal is gone; Python would stumble over that again, and exit with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise SystemExit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))


def _interrupt(number: int, _: FrameType | None) -> None:
    if not _received:
        _received.append(number)
        _first.put(number)
        raise KeyboardInterrupt(number)


def _again(otherwise: Callable[[Any], object], lost: "sys.UnraisableHookArgs") -> None:
    """Interrupt once more what was interrupted in the collection of garbage: there, Python drops every exception."""
    if isinstance(lost.exc_value, KeyboardInterrupt) and _received:
        threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), _received.pop())).start()
    else:
        otherwise(lost)


def _bound() -> None:
    """End at once what has not ended in time. What runs elsewhere ends by itself: pools and servers with this process,
    ranks with their lease."""
    if number := _first.get():
        time.sleep(END_SECONDS)
        with suppress(OSError):
            sys.stderr.write(_MESSAGE)
        os._exit(128 + number)
