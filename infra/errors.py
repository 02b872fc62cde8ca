"""What can go wrong with machines.

InfraError
├── ClusterBusy        the cluster is held by another owner that lives
├── WorkerFailed       a rank raised: carries that rank's own traceback
└── TransientError     trying again makes sense; nothing else is retried
    ├── WorkersKilled  ranks or nodes ended without a reason of their own: a signal, a lost machine, a lapsed lease
    └── Stalled        no sign of life within the time allowed
"""

from pathlib import Path


class InfraError(Exception):
    """Base of all errors about machines."""


class ClusterBusy(InfraError):
    """The cluster is held by another owner that lives."""


class WorkerFailed(InfraError):
    """A rank ended with an error of its own; `str()` tells who and why in one line, then the rank's own traceback.

    Attributes:
        rank: global rank.
        node: id of the node that the rank ran on.
        exit_code: of the rank's process.
        traceback: the rank's traceback as Python printed it, or the last lines of its stderr.
        log: the rank's stderr on its node.
    """

    def __init__(self, rank: int, node: str, exit_code: int, traceback: str, log: Path) -> None:
        # All of them as positional arguments, since that is what pickle rebuilds an exception from.
        super().__init__(rank, node, exit_code, traceback, log)
        self.rank = rank
        self.node = node
        self.exit_code = exit_code
        self.traceback = traceback
        self.log = log

    def __str__(self) -> str:
        lines = self.traceback.strip().splitlines()
        why = lines[-1].strip() if lines else "no output"
        return f"rank {self.rank} on {self.node} failed (exit code {self.exit_code}): {why}\n{self.traceback.strip()}"


class TransientError(InfraError):
    """A failure that another attempt may not meet; the only class that is retried."""


class WorkersKilled(TransientError):
    """Ranks or nodes ended without a traceback: to start again from a checkpoint makes sense."""


class Stalled(TransientError):
    """The ranks gave no sign of life within the time allowed."""
