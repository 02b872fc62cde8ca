"""What ranks run in the tests of clusters: `python -m cluster_worker MODE DIRECTORY ...`; no torch where it can be
helped, so that they start fast."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from infra.bootstrap import die_with_parent

mode, directory = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])


def main() -> None:
    die_with_parent()
    report()
    modes = [succeed, fail, fail_beside_deaf, be_killed_once, sleep]
    {function.__name__: function for function in modes}[mode]()


def report() -> None:
    facts = {"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}
    partial = directory / f".rank-{rank}"
    partial.write_text(json.dumps(facts))
    partial.replace(directory / f"rank-{rank}.json")


def succeed() -> None:
    sys.stdout.write(f"rank {rank} is done\n")


def fail() -> None:
    """Rank 1 fails, and rank 0 because of it; both within a second."""
    if rank == 1:
        (directory / "failed").touch()
        raise KeyError("the real reason")
    deadline = time.monotonic() + 60
    while not (directory / "failed").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    raise ConnectionError("closed by peer")


def fail_beside_deaf() -> None:
    """Rank 1 fails beside a rank that hears no signal, as one that waits in a collective."""
    if rank == 1:
        time.sleep(0.5)
        raise KeyError("the real reason")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def be_killed_once() -> None:
    if rank == 1 and not (directory / "killed").exists():
        (directory / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)


def sleep() -> None:
    time.sleep(120)


if __name__ == "__main__":
    if mode == "fail" and rank == 1:
        # As the trainer does; rank 0's error is then read from its stderr instead.
        from torch.distributed.elastic.multiprocessing.errors import record

        record(main)()
    else:
        main()
