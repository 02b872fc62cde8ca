"""The benchmarks' harness, their yardsticks, and what of them needs no peer."""

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for `python benchmarks/X.py`

import documents  # noqa: E402
import measure  # noqa: E402
from measure import Row, alternate, paired, peer_python, reached, report, tree_peak_bytes  # noqa: E402
from planted import edit, jaccard, plant, precision, recall, repeat, shingles  # noqa: E402
from sample_text import make_documents  # noqa: E402

TWO_PROCESSES = """
import multiprocessing, time
def fill(_):
    held = bytearray(b"x") * (60 << 20)
    time.sleep(0.5)
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        pool.map(fill, range(2))
    print("done")
"""


def test_memory_is_that_of_all_processes() -> None:
    outcome = tree_peak_bytes([sys.executable, "-c", TWO_PROCESSES], 60)
    assert outcome.output == "done\n"
    assert 120 << 20 < outcome.peak_bytes < 200 << 20
    assert outcome.seconds > 0.5
    assert 0 < outcome.cpu_seconds < 2 * outcome.seconds


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("sleep", ["sleep 60", "setsid sleep 60"])
def test_the_whole_tree_ends_at_the_deadline(tmp_path: Path, sleep: str) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="was killed after 1 s"):
        tree_peak_bytes(["sh", "-c", f"{sleep} & echo $! > {pid}; wait"], 1)
    time.sleep(0.1)
    assert not is_running(int(pid.read_text()))


def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    outcome = tree_peak_bytes(["sh", "-c", "sleep 60 & echo $!"], 20)
    time.sleep(0.1)
    assert not is_running(int(outcome.output))
    assert outcome.seconds < 20


def test_a_failure_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"failed \(3\):\nout of luck"):
        tree_peak_bytes(["sh", "-c", "echo out of luck >&2; exit 3"], 20)


def test_sides_take_turns() -> None:
    calls: list[str] = []
    figures = iter([4.0, 1.0, 2.0, 6.0, 10.0, 5.0])

    def work(name: str) -> float:
        calls.append(name)
        return next(figures)

    result = paired(lambda: work("jumbo"), {"a": lambda: work("a"), "b": None}, pairs=3)
    assert calls == ["jumbo", "a", "a", "jumbo", "jumbo", "a"]
    # jumbo 4, 6, 10; a 1, 2, 5: ratios 4, 3, 2.
    assert (result.jumbo, result.peers, result.ratios) == (6.0, {"a": 2.0, "b": None}, {"a": 3.0, "b": None})


def test_alternate_keeps_the_rounds() -> None:
    numbers = itertools.count()
    assert alternate({"a": lambda: next(numbers), "b": lambda: next(numbers)}, 2) == {"a": [0, 3], "b": [1, 2]}


@pytest.mark.parametrize(
    ("jumbo", "ratio", "goal", "expected"),
    [
        (5.0, 10.0, ">= 10", True),
        (50.0, 9.9, ">= 10", False),
        (0.99, None, ">= 0.98", True),
        (0.3, None, "< 0.2", False),
        (262_144, None, "= 262144", True),
        (None, None, ">= 1", None),
        (1.0, None, "", None),
    ],
)
def test_goals(jumbo: float | None, ratio: float | None, goal: str, expected: bool | None) -> None:
    assert reached(Row("x", "s", jumbo, {}, ratio, goal)) is expected


def test_report_has_the_contract_s_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("speed", "MB/s", 20.0, {"swift": 10.0, "absent": None}, 2.0, ">= 3"),
        Row("pieces", "", 262_144, {}, None, ""),
    ]
    report(rows, argparse.Namespace(json=tmp_path / "new" / "rows.json"))
    printed = capsys.readouterr().out
    assert [line.split() for line in printed.splitlines()[:3]] == [
        ["what", "unit", "jumbo", "swift", "absent", "ratio", "goal", "reached"],
        ["speed", "MB/s", "20", "10", "missing", "2", ">=", "3", "NO"],
        ["pieces", "262,144"],
    ]
    assert "absent: not measured here" in printed
    content = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert content["rows"][0] == {
        "what": "speed",
        "unit": "MB/s",
        "jumbo": 20.0,
        "peers": {"swift": 10.0, "absent": None},
        "ratio": 2.0,
        "goal": ">= 3",
    }
    assert content["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert content["machine"].keys() == {"cpu", "cores", "memory_gib", "python", "versions", "peers"}
    assert content["machine"]["versions"].keys() > {"jumbo", "numpy", "pyarrow"}


@pytest.fixture
def peers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "_REQUIREMENTS", tmp_path)
    monkeypatch.setattr(measure, "_PEERS", tmp_path / ".peers")
    return tmp_path


def test_a_peer_is_installed_once(peers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (peers_folder / "nothing.txt").write_text("# no requirement\n")
    python = peer_python("nothing")
    assert python == peers_folder / ".peers" / "nothing" / "bin" / "python"
    prefix = tree_peak_bytes([python, "-c", "import sys; print(sys.prefix)"], 20).output
    assert prefix.strip() == str(peers_folder / ".peers" / "nothing")
    assert "Installing the peer nothing" in capsys.readouterr().err
    assert peer_python("nothing") == python
    assert not capsys.readouterr().err


def test_a_peer_that_cannot_be_installed_is_said(peers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (peers_folder / "lost.txt").write_text("./not-there\n")
    assert peer_python("lost") is None
    assert "The peer lost cannot be installed:" in capsys.readouterr().err
    assert not (peers_folder / ".peers" / "lost" / "installed.txt").exists()


def test_shingles_and_jaccard_by_hand() -> None:
    # 6 words give 2 shingles, 1 of them with the last word; the union has 3.
    one, other = shingles("The Cat sat — on “the” mat!"), shingles("the cat\nsat on the rug")
    assert one == {("the", "cat", "sat", "on", "the"), ("cat", "sat", "on", "the", "mat")}
    assert jaccard(one, other) == 1 / 3


def test_edits_are_as_frequent_as_asked() -> None:
    text = " ".join(map(str, range(10_000)))
    assert edit(text, 0, ["new"], random.Random(0)) == text
    words = edit(text, 0.03, ["new"], random.Random(0)).split()
    # Of 300 edits expected, with a deviation of 17, a third replace, a third remove and a third add.
    assert 249 < words.count("new") + (len(set(map(str, range(10_000))) - set(words)) + 10_000 - len(words)) / 2 < 351
    assert 120 < words.count("new") < 280


def test_planted_pairs(tmp_path: Path) -> None:
    planted = plant(make_documents(400, sentences=60), 500_000, tmp_path / "corpus")
    assert planted.megabytes == pytest.approx(0.5, rel=0.1)
    records = {}
    for path in (tmp_path / "corpus").iterdir():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            record = json.loads(line)
            assert record["id"] == f"{path.name}#{number}"
            records[record["id"]] = record["text"]
    assert records == planted.texts
    assert len(planted.pairs) == len(planted.texts) // 5
    similarities = [similarity for *_, similarity in planted.pairs]
    assert similarities[::9] == [1.0] * len(similarities[::9])  # every ninth is not edited
    assert min(similarities) < 0.5
    assert plant(make_documents(400, sentences=60), 500_000, tmp_path / "again") == planted
    with pytest.raises(ValueError, match="and 500000 are asked for"):
        plant(make_documents(10, sentences=60), 500_000, tmp_path / "short")


def test_recall_by_hand() -> None:
    pairs = [("a", "b", 0.9), ("c", "d", 0.85), ("e", "f", 0.8), ("g", "h", 0.79), ("i", "j", 1.0)]
    # a-b is left whole, c-d and e-f are not, g-h is not near enough, and j never came.
    kept = set("abcdefghi")
    assert recall(pairs, kept, kept - {"c", "f"}, 0.8) == 2 / 3


def test_precision_is_that_of_all_pairs() -> None:
    chance = random.Random(0)
    originals = make_documents(30)
    texts = {}
    for number, text in enumerate(originals):
        texts[f"{number}"] = text
        texts[f"{number}+"] = edit(text, chance.uniform(0, 0.06), ["new"], chance)
    removed = {name for name in texts if chance.random() < 0.5}
    survivors = texts.keys() - removed
    near = [
        any(jaccard(shingles(texts[name]), shingles(texts[other])) >= 0.8 for other in survivors) for name in removed
    ]
    assert 0 < sum(near) < len(near)
    assert precision(texts, set(texts), survivors, 0.8) == sum(near) / len(near)


def test_a_repeated_corpus_repeats_no_document() -> None:
    texts = make_documents(20, sentences=40)
    texts.append(edit(texts[0], 0.01, ["new"], random.Random(0)))
    repeated = list(repeat(texts, 3 * sum(map(len, texts))))
    times = [[shingles(text) for text in repeated[start : start + 21]] for start in (0, 21, 42)]
    assert repeated[:21] == texts
    assert list(map(len, repeated)) == 3 * list(map(len, texts))
    for time_ in times[:2]:
        assert jaccard(time_[0], time_[20]) > 0.8
    assert max(jaccard(a, b) for a, b in zip(times[0], times[1], strict=True)) < 0.5


def test_documents_without_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "peer_python", lambda name: None)
    monkeypatch.setattr(documents, "QUICK", documents.Sizes(corpus=1, growing=(1, 2), rounds=1))
    monkeypatch.setattr(sys, "argv", ["documents.py", "--quick", "--json", str(tmp_path / "rows.json")])
    documents.main()
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(rows) == [
        "megabytes per second vs datatrove",
        "peak memory vs datatrove",
        "near-duplicate recall",
        "near-duplicate precision",
        "peak memory of 1 MB",
        "peak memory of 2 MB",
        "peak memory spread 1-2 MB",
    ]
    for row in list(rows.values())[:4]:
        assert row["peers"] == {"datatrove": None}
        assert row["ratio"] is None
        assert row["jumbo"] > 0
    assert rows["near-duplicate recall"]["jumbo"] >= 0.98
    assert rows["near-duplicate precision"]["jumbo"] >= 0.99
    assert "datatrove: not measured here" in capsys.readouterr().out
