"""What every benchmark shares: alternating measurements, the memory of a process tree, peers, the table, the JSON."""

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import operator
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENTS = Path(__file__).resolve().parent / "peers"
_PEERS = ROOT / ".peers"
_SAMPLE_SECONDS = 0.05
_ERROR_CHARS = 4000
_GOAL = re.compile(r"(>=|<=|<|>|=) ([\d.]+)")
_COMPARISONS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "=": operator.eq}


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
        what: What was measured.
        unit: The unit of jumbo's and the peers' figures.
        jumbo: This project's figure.
        peers: Every peer's figure for the same work; None where the peer is missing.
        ratio: jumbo / peer, where the goal is about a ratio.
        goal: The bar, such as ">= 0.98", for the ratio where there is one and for jumbo's figure where there is none;
            empty where the row is there to be read.
    """

    what: str
    unit: str
    jumbo: float | None
    peers: dict[str, float | None]
    ratio: float | None
    goal: str


@dataclass(frozen=True)
class Paired:
    """Medians over the rounds; ratios are the medians of jumbo / peer within a round."""

    jumbo: float
    peers: dict[str, float | None]
    ratios: dict[str, float | None]


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and what all its processes used: wall and CPU seconds, and bytes at their peak."""

    output: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def arguments(description: str) -> argparse.Namespace:
    """The options of every benchmark: quick (bool) and json (Path or None)."""
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """For a benchmark with options of its own besides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small inputs: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the rows as JSON")
    return parser


def alternate(works: Mapping[str, Callable[[], T]], rounds: int = 3) -> dict[str, list[T]]:
    """Runs every work once a round, every second round backwards, so that a drift of the machine meets all alike.

    Returns:
        What each work returned, by round.
    """
    results: dict[str, list[T]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            results[name].append(works[name]())
    return results


def paired(jumbo: Callable[[], float], peers: Mapping[str, Callable[[], float] | None], pairs: int = 3) -> Paired:
    """Measures jumbo and its peers in turns; each callable does the same work once and returns its figure.

    Args:
        jumbo: This project's.
        peers: By name; None for a peer that is missing.
        pairs: How often each is measured.
    """
    works = {"jumbo": jumbo} | {name: work for name, work in peers.items() if work is not None}
    return compare(alternate(works, pairs), list(peers))


def compare(figures: Mapping[str, Sequence[float]], peers: Sequence[str]) -> Paired:
    """The medians of "jumbo" and of each peer, by round as alternate gives them; a peer without figures is missing."""
    medians = {name: statistics.median(figures[name]) if name in figures else None for name in peers}
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(figures["jumbo"], figures[name], strict=True))
        if name in figures
        else None
        for name in peers
    }
    return Paired(statistics.median(figures["jumbo"]), medians, ratios)


def peer_python(name: str, dependencies: bool = True) -> Path | None:
    """The interpreter of the peer's own environment, .peers/NAME, made at first use from peers/NAME.txt.

    Args:
        name: The peer.
        dependencies: Whether what the requirements need is installed too; if not, they name all that is used.

    Returns:
        None, and says why, where the peer cannot be installed here.
    """
    requirements = _REQUIREMENTS / f"{name}.txt"
    environment = _PEERS / name
    python, stamp = environment / "bin" / "python", environment / "installed.txt"
    _PEERS.mkdir(exist_ok=True)
    with (_PEERS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks may want it at once
        if stamp.exists() and stamp.read_text() == requirements.read_text():
            return python
        print(f"Installing the peer {name} into {environment}", file=sys.stderr)
        shutil.rmtree(environment, ignore_errors=True)
        try:
            _run([sys.executable, "-m", "venv", "--without-pip", environment])
            pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--quiet"]
            _run([*pip, "install", *([] if dependencies else ["--no-deps"]), "--requirement", requirements])
        except subprocess.CalledProcessError as error:
            print(f"The peer {name} cannot be installed:\n{error.stderr[-_ERROR_CHARS:]}", file=sys.stderr)
            return None
        shutil.copy(requirements, stamp)
    return python


def tree_peak_bytes(
    command: Sequence[str | Path], deadline_seconds: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Runs a command in a session of its own and samples the memory of all its processes every 50 ms.

    Memory is the proportional set size: pages that processes share are counted once in all.

    Args:
        command: The program and its arguments; its standard output is kept, its errors are shown if it fails.
        deadline_seconds: After it the whole tree is killed.
        environment: Variables beside this process's own.

    Raises:
        RuntimeError: The command failed; with the end of its standard error.
        TimeoutError: It was killed at the deadline.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env={**os.environ, **(environment or {})}, start_new_session=True
        )
        peak, cpu = 0, dict[int, float]()
        try:
            while process.poll() is None:
                if time.perf_counter() - start > deadline_seconds:
                    raise TimeoutError(f"{command[0]} was killed after {deadline_seconds} s")
                looked = time.perf_counter()
                processes = _tree(process.pid)
                cpu |= processes
                peak = max(peak, sum(map(_proportional_bytes, processes)))
                # The larger the processes, the longer a look: no more than a tenth of a core is taken from them.
                time.sleep(max(_SAMPLE_SECONDS, 9 * (time.perf_counter() - looked)))
            seconds = time.perf_counter() - start
        finally:
            left = set(_tree(process.pid))
            if process.returncode is not None:
                left.discard(process.pid)  # it was waited for: the number may be another's by now
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command[0]} failed ({process.returncode}):\n{errors.read()[-_ERROR_CHARS:]}")
        return Outcome(output.read(), seconds, sum(cpu.values()), peak)


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Prints the table and writes the JSON, if asked for; a peer that is missing is said."""
    print(_table(rows))
    for name in sorted({name for row in rows for name, figure in row.peers.items() if figure is None}):
        print(f"{name}: not measured here, its figures are missing")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def reached(row: Row) -> bool | None:
    """Whether the row's figure meets its goal; None where there is no goal or nothing to compare."""
    figure = row.jumbo if row.ratio is None else row.ratio
    goal = _GOAL.match(row.goal)
    if goal is None or figure is None:
        return None
    return bool(_COMPARISONS[goal[1]](figure, float(goal[2])))


def describe_machine() -> dict[str, Any]:
    """The CPU, the cores that this process may use, memory, Python and the versions of the project's dependencies."""
    cpu = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    required = [
        re.split(r"[^\w.-]", line)[0] for line in importlib.metadata.requires("jumbo") or () if "extra ==" not in line
    ]
    return {
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jumbo", *sorted(required))},
        "peers": {
            path.parent.name: path.read_text().split("\n")[:-1] for path in sorted(_PEERS.glob("*/installed.txt"))
        },
    }


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _tree(root: int) -> dict[int, float]:
    """The CPU seconds so far of the root's session and of all its descendants, whatever session they are in."""
    parents, seconds, tree = dict[int, int](), dict[int, float](), {root}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, blanks and parentheses too.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if int(fields[3]) == root:
            tree.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return {pid: seconds[pid] for pid in tree & seconds.keys()}


def _proportional_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # ended meanwhile
    size = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return 1024 * int(size[1]) if size else 0


def _table(rows: Sequence[Row]) -> str:
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    lines = [["what", "unit", "jumbo", *peers, "ratio", "goal", "reached"]]
    for row in rows:
        theirs = [_number(row.peers[name]) if name in row.peers else "" for name in peers]
        verdict = {True: "yes", False: "NO", None: ""}[reached(row)]
        ratio = "" if row.ratio is None else _number(row.ratio)
        lines.append([row.what, row.unit, _number(row.jumbo), *theirs, ratio, row.goal, verdict])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _number(figure: float | None) -> str:
    if figure is None:
        return "missing"
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"
