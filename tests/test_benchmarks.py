"""The benchmarks' harness, their yardsticks, and what of them needs no peer."""

import argparse
import itertools
import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for `python benchmarks/X.py`

import documents  # noqa: E402
import gpu  # noqa: E402
import measure  # noqa: E402
import training  # noqa: E402
from measure import Row, alternate, paired, peer_python, reached, report, tree_peak_bytes  # noqa: E402
from peers.nanogpt import NanoGPT  # noqa: E402
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


@pytest.mark.slow
def test_training_without_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_sequences(folder: Path, sizes: training.Sizes) -> Path:
        path = folder / "sequences.npy"
        np.save(path, np.random.default_rng(0).integers(0, 512, (40, sizes.laptop.seq_len + 1), np.int32))
        return path

    quick = replace(training.QUICK, larger=replace(training.QUICK.larger, n_layer=1))
    monkeypatch.setattr(training, "peer_python", lambda name, dependencies: None)
    monkeypatch.setattr(training, "write_sequences", write_sequences)
    monkeypatch.setattr(training, "QUICK", quick)
    monkeypatch.setattr(sys, "argv", ["training.py", "--quick", "--json", str(tmp_path / "rows.json")])
    training.main()
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(rows)[:9] == [
        "tokens per second vs hugging face",
        "tokens per second vs nanogpt",
        "fp32 MFU",
        "bf16 tokens per second vs hugging face",
        "bf16 tokens per second vs nanogpt",
        "bf16 MFU",
        "loss vs hugging face",
        "large-vocabulary loss memory vs plain",
        "large-vocabulary loss time vs plain",
    ]
    for what, row in rows.items():
        assert row["jumbo"] is not None, what
        assert (row["ratio"] is None) == ("hugging face" in what or "MFU" in what), what
    assert rows["loss vs hugging face"]["jumbo"] == pytest.approx(np.log(512), rel=0.05)  # random ids
    assert "hugging face: not measured here" in capsys.readouterr().out


def test_the_plain_model_is_nanogpt(tmp_path: Path) -> None:
    """The sum of its parts by hand: one layer, one head."""
    torch.manual_seed(0)
    model = NanoGPT(n_layer=1, n_head=1, d_model=8, seq_len=4, vocab_size=16)
    tokens, targets = torch.randint(16, (2, 2, 4))
    block = model.h[0]
    x = model.wte.weight[tokens] + model.wpe.weight
    query, key, value = block.attn.c_attn(block.ln_1(x)).split(8, 2)
    scores = (query @ key.transpose(1, 2) / 8**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    x = x + block.attn.c_proj(scores.softmax(-1) @ value)
    x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x))))
    loss = F.cross_entropy((model.ln_f(x) @ model.wte.weight.t()).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), loss)


def test_every_side_is_given_the_same_batches(tmp_path: Path) -> None:
    sequences = np.arange(10 * 5, dtype=np.int32).reshape(10, 5)
    np.save(tmp_path / "sequences.npy", sequences)
    job = replace(
        training.QUICK.laptop,
        sequences=str(tmp_path / "sequences.npy"),
        held_out=2,
        batch_size=4,
        micro_batch_size=2,
        seed=7,
    )
    steps = [next(batches) for batches in [job.training_batches()] for _ in range(2)]
    inputs = torch.cat([inputs for step in steps for inputs, _ in step])
    targets = torch.cat([targets for step in steps for _, targets in step])
    assert [len(step) for step in steps] == [2, 2]
    assert sorted(inputs[:, 0].tolist()) == [0, 5, 10, 15, 20, 25, 30, 35]  # each of the eight once
    torch.testing.assert_close(targets, inputs + 1)
    torch.testing.assert_close(job.held_out_batches()[0][0][:, 0], torch.tensor([40, 45]))
    torch.testing.assert_close(next(job.training_batches())[0][0], steps[0][0][0])


def test_gpu_says_that_none_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(tmp_path / "rows.json")])
    gpu.main()
    assert capsys.readouterr().out.startswith("No GPU is here: nothing is measured.\n")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"] for row in rows] == list(gpu.WHATS)
    assert all(row["jumbo"] is None and row["ratio"] is None for row in rows)


@pytest.mark.slow
def test_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    """In a process of its own, since it makes a process group."""
    command = [sys.executable, BENCHMARKS / "gpu.py", "--quick", "--device", "cpu", "--json", tmp_path / "rows.json"]
    tree_peak_bytes(command, 120, {"PYTHONPATH": str(BENCHMARKS.parent)})
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert set(rows) == set(gpu.WHATS)
    assert {what for what, row in rows.items() if row["jumbo"] is None} == {
        "peak memory vs nanogpt",
        "large-vocabulary loss memory vs plain",
    }
    assert rows["micro-batch vs nanogpt"]["jumbo"] == gpu.QUICK.largest


def test_the_micro_batch_is_the_largest_that_fits() -> None:
    sizes = replace(gpu.QUICK, largest=16)
    made: list[bool] = []

    def build(compiled: bool) -> gpu.Take:
        made.append(compiled)

        def take(step: int, batches: gpu.Batches) -> None:
            if len(batches[0][0]) > 4:
                raise torch.OutOfMemoryError("no room")

        return take

    assert gpu.train(build, lambda: None, sizes, "cpu").micro_batch == 4
    assert len(made) == 2
    with pytest.raises(RuntimeError, match="not even one sequence fits"):
        gpu.train(lambda compiled: fail, lambda: None, sizes, "cpu")


def fail(step: int, batches: gpu.Batches) -> None:
    raise torch.OutOfMemoryError("no room")
