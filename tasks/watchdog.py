"""A thread beside every rank's work. It hears SIGTERM, tells the rank's node that it lives and where it is, and ends it
when its time is over: the main thread may be in a call that does not return."""

import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from infra.rank_files import write_error, write_preemption, write_sign

PERIOD_SECONDS = 1.0
SAME_REQUEST_SECONDS = 2.0
"""A signal to a whole process group arrives several times: from its sender, and from each process that passes it on."""
OWN_SHARE = 0.8
"""Of the time that a rank has to stop. torchrun gives it the whole, and then a SIGKILL."""
SLACK_SECONDS = 5.0
"""Beyond the limit of a wait, in which torch says the better error where it obeys the limit itself."""

_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_PLACES = 3
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Watchdog:
    """Made by the main thread, for the life of the process.

    Args:
        stop_seconds: that a rank has to leave in order once it is asked to.
        wait_seconds: longest time that the main thread may be in one call of torch.distributed. gloo's own timeout of
            point-to-point calls cannot be changed after the start, and no other call's holds for all that can hang.

    Attributes:
        wait_seconds: as above; may be changed.
        can_save: whether there is anything new that a checkpoint would save. Until then, who is asked to stop leaves
            at once.
    """

    def __init__(self, stop_seconds: float, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self.can_save = False
        self._stop_seconds = OWN_SHARE * stop_seconds
        self._phase, self._step = "start", 0
        self._asked: float | None = None
        self._call: tuple[FrameType, int] | None = None  # of torch.distributed, in which the main thread is
        self._since = 0.0
        self._signals = _heard_signals()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def beat(self, phase: str, step: int) -> None:
        """What the rank is doing."""
        self._phase, self._step = phase, step

    def stop_asked(self) -> bool:
        return self._asked is not None

    def _run(self) -> None:
        try:
            while True:
                readable, _, _ = select.select([self._signals], [], [], PERIOD_SECONDS)
                if readable and _STOP & set(os.read(self._signals, 64)):
                    self._hear()
                self._look()
        except Exception:  # noqa: BLE001 - the last frame of the thread: without it nothing would end the rank
            _exit(1, lambda: write_error(traceback.format_exc()))

    def _hear(self) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
        elif now - self._asked > SAME_REQUEST_SECONDS:
            self._leave_unsaved("was asked to stop again")

    def _look(self) -> None:
        now = time.monotonic()
        if self._asked is not None and not self.can_save:
            self._leave_unsaved("was asked to stop, and has nothing to save yet")
        if self._asked is not None and now - self._asked > self._stop_seconds:
            self._leave_unsaved(f"was asked to stop {self._stop_seconds:g} s ago, and has not come to that")
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        waiting = _DISTRIBUTED in frame.f_code.co_filename
        # One and the same call: a function that is called anew has another frame.
        call = (frame, frame.f_lasti) if waiting else None
        if call != self._call or call is None:
            self._call, self._since = call, now
        elif now - self._since > self.wait_seconds + SLACK_SECONDS:
            self._leave_waiting(frame)
        with suppress(OSError):  # a full disk; whether that ends the job is for what needs the disk to say
            write_sign(self._phase, self._step, _place(frame), waiting)

    def _leave_unsaved(self, why: str) -> NoReturn:
        sys.stderr.write(f"the rank {why}: it leaves at once, from\n")
        _exit(os.EX_TEMPFAIL, lambda: write_preemption(None))

    def _leave_waiting(self, frame: FrameType) -> NoReturn:
        stack = "".join(traceback.format_stack(frame))
        why = f"Timed out waiting {self.wait_seconds:g} s for other ranks"
        _exit(1, lambda: write_error(f"Traceback (most recent call last):\n{stack}TimeoutError: {why}"))


def _heard_signals() -> int:
    """A file descriptor that has a byte for every signal that asks this process to stop; it works also where the main
    thread is in a call that does not return."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOP:
        signal.signal(number, lambda *_: None)
    return reader


def _place(frame: FrameType) -> str:
    """The innermost calls, the innermost first: prefetch.py:31 prefetch, trainer.py:185 _step."""
    calls: deque[str] = deque()
    caller: FrameType | None = frame
    while caller is not None and len(calls) < _PLACES:
        calls.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} {caller.f_code.co_name}")
        caller = caller.f_back
    return ", ".join(calls)


def _exit(code: int, tell: Callable[[], None]) -> NoReturn:
    """At once, and with what every thread was doing in the log: a normal exit would wait for some of them."""
    try:
        tell()
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
    finally:
        os._exit(code)
