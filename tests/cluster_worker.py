"""What ranks run in the tests of clusters: `python -m cluster_worker MODE DIRECTORY`; no torch, so that it starts fast."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from infra.bootstrap import die_with_parent

mode, directory = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def report() -> None:
    facts = {
        "pid": os.getpid(),
        "time": time.time(),
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
    }
    partial = directory / f".rank-{rank}"
    partial.write_text(json.dumps(facts))
    partial.replace(directory / f"rank-{rank}.json")


def main() -> None:
    die_with_parent()
    report()
    generation = int(os.environ.get("GENERATION", "0"))
    if mode == "sleep":
        time.sleep(120)
    if mode == "stubborn":  # a rank that hangs in a collective hears no signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(120)
    if mode == "killed-once" and rank == 1 and not (directory / "killed").exists():
        (directory / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "killed-once" and rank == 0:
        wait_for(directory / "killed")
        time.sleep(0.5 if generation else 0)
    if mode == "raise" and rank == 1:
        (directory / "raised").touch()
        raise KeyError("the real reason")
    if mode == "raise" and rank == 0:
        wait_for(directory / "raised")
        time.sleep(0.1)
        raise ConnectionError("closed by peer")
    print(f"rank {rank} is done")


if __name__ == "__main__":
    if mode == "raise" and rank == 1:
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)
    main()
