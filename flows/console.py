"""What a person sees in the terminal: one line a stage with its outcome, and the work under way below it."""

import logging
import time
from contextlib import suppress

from rich.console import Console
from rich.status import Status
from rich.text import Text

_MARKS = {"done": ("✓", "green"), "cached": ("•", "cyan"), "failed": ("✗", "red"), "resumed": ("↻", "cyan")}
_QUIET_SECONDS = 15  # between lines about work under way where the line can't be redrawn


class ConsoleHandler(logging.Handler):
    """Draws what stages say in Prefect's run log; everything else below WARNING is left to the log itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.console = Console(highlight=False)
        self._status: Status | None = None
        self._last_line = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._draw(record)
        except Exception:  # noqa: BLE001 - logging's own contract: report, never raise into the caller
            self.handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # the terminal is gone
            self._working(None)
        super().close()

    def _draw(self, record: logging.LogRecord) -> None:
        outcome = getattr(record, "outcome", None)
        if outcome == "working":
            self._working(f"{record.__dict__['stage']:<17}{record.getMessage()}")
        elif outcome in _MARKS:
            mark, colour = _MARKS[outcome]
            spent = "" if outcome == "cached" else f"{record.__dict__['seconds']:6.1f} s"
            self._working(None)
            line = Text(f"{mark} ", colour).append(f"{record.__dict__['stage']:<17}", "bold")
            self.console.print(
                line.append(f"{spent or outcome:>8}  ", "dim").append(record.getMessage()), soft_wrap=True
            )
        elif record.levelno == logging.ERROR and record.getMessage().startswith("Finished in state Failed("):
            self._working(None)
            self.console.print(
                Text("✗ ", "red").append(f"{record.__dict__.get('task_name', 'flow'):<17}", "bold").append("  failed")
            )
        elif record.levelno == logging.WARNING:
            self._working(None)
            self.console.print(Text(f"! {record.getMessage()}", "yellow"), soft_wrap=True)

    def _working(self, line: str | None) -> None:
        """Show `line` as the work under way; None clears it."""
        if not self.console.is_terminal:
            if line and time.monotonic() - self._last_line > _QUIET_SECONDS:
                self.console.print(Text(f"  {line}"), soft_wrap=True)
                self._last_line = time.monotonic()
        elif line is None:
            if self._status:
                self._status.stop()
                self._status = None
        elif self._status:
            self._status.update(Text(line, "dim"))
        else:
            self._status = self.console.status(Text(line, "dim"))
            self._status.start()


def show_stages() -> ConsoleHandler:
    """Draw the stages of flows that run in this process. Prefect's own console lines are silenced by the caller."""
    handler = ConsoleHandler()
    for name in ("prefect.flow_runs", "prefect.task_runs", "tasks.progress"):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("tasks.progress").setLevel(logging.INFO)
    return handler
