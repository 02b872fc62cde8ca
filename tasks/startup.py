"""Where the time goes between the launch of a job and the end of its first step."""

import os
import time

from infra import processes
from infra.bootstrap import LAUNCHED_AT


class Startup:
    """Seconds by part; made when the imports are done.

    Attributes:
        seconds: `torchrun` is from the node's start of it to that of this process, `imports` from there to now.
    """

    def __init__(self) -> None:
        started = processes.this_process().started / os.sysconf("SC_CLK_TCK")
        imports = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        now = time.time()
        self.seconds = {
            "torchrun": now - imports - float(os.environ.get(LAUNCHED_AT, now - imports)),
            "imports": imports,
        }
        self._since = time.monotonic()

    def end(self, part: str) -> None:
        """`part` is what was done since the part before."""
        now = time.monotonic()
        self.seconds[part] = now - self._since
        self._since = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part.replace('_', ' ')} {seconds:.2f}" for part, seconds in self.seconds.items())
        return f"first step {sum(self.seconds.values()):.2f} s after the launch: {parts}"
