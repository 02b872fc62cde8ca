"""Killed and continued: SIGKILL anywhere, the same command again, and the run is the one that was never killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sample_text import make_documents
from tiny import TINY, option_list, write_corpus

from flows.preparation import preparation
from flows.presets import preset
from infra import processes
from infra.local import MARKER, LocalProvider, default_state_dir

pytestmark = pytest.mark.usefixtures("prefect_server")

TRAINING = ["--training.steps", "60", "--training.checkpoint-every-steps", "10"]
UNTIMED = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "batch_size", "validation_loss")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def layers(run: Path, corpus: str) -> dict[str, Any]:
    return TINY | {"run_uri": str(run), "data": TINY["data"] | {"sources": [{"uri": corpus, "name": "made-up"}]}}


@pytest.fixture(scope="module")
def prepared(corpus: str, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """Documents, tokenizer and tokens of a run that nothing disturbed."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    preparation(preset("laptop", layers(run, corpus)))
    return run


def content(run: Path) -> dict[str, Any]:
    """Every file of the stages; of manifests, what does not tell the time or place."""
    files: dict[str, Any] = {}
    for path in sorted(p for p in run.rglob("*/*") if p.is_file()):
        name = path.relative_to(run).as_posix()
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            manifest["counts"].pop("encoded_mb_per_second", None)
            files[name] = {k: v for k, v in manifest.items() if k not in ("seconds", "finished", "run_uri")}
        else:
            files[name] = path.read_bytes()
    return files


def kill_preparation(run: Path, corpus: str, number: int) -> bool:
    """Run until the number-th change of the run directory; whether it was killed before it ended."""
    command = [sys.executable, "-m", "killed_flow", str(number), json.dumps(layers(run, corpus))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr.decode()
    return ended.returncode != 0


def finished_work(run: Path) -> dict[str, tuple[int, int]]:
    """Every file of finished pieces and stages, with what tells it from one that was written again."""
    files = [path for path in (run / ".work").rglob("*") if path.is_file()]
    # What is brought together in `out` is links, and a piece that is not whole counts for nothing.
    files = [path for path in files if not any(part == "out" or part.startswith(".partial-") for part in path.parts)]
    status = {path.relative_to(run).as_posix(): path.stat() for path in (*files, *run.glob("*/manifest.json"))}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in status.items()}


def check_nothing_was_done_twice(run: Path, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """What was finished is as it was, or goes with the work of its stage, which is finished; what there is now."""
    after = finished_work(run)
    assert not [name for name in before if name in after and after[name] != before[name]], "was done twice"
    manifests = [json.loads(path.read_text()) for path in run.glob("*/manifest.json")]
    ended = {f"{manifest['stage']}-{manifest['key']}" for manifest in manifests}
    gone = [name for name in before if name not in after and name.split("/")[1] not in ended]
    assert not gone, "was finished, and is not there"
    return after


def check_killed_preparation(corpus: str, prepared: Path, run: Path, number: int, stage: str = "") -> None:
    """`stage`: the one that is killed, whose work must be there until it is known to be done."""
    assert kill_preparation(run, corpus, number)
    assert not stage or any(name.startswith(f".work/{stage}-") for name in finished_work(run))
    finished = {path: path.stat().st_mtime_ns for path in run.rglob("manifest.json")}
    preparation(preset("laptop", layers(run, corpus)))
    assert content(run) == content(prepared)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "a finished stage was done again"


# In each stage: an upload of documents, that of the tokenizer, the manifest that would end the stage, one of tokens.
@pytest.mark.parametrize(("number", "stage"), [(6, "preprocess"), (11, "tokenizer"), (13, "tokenizer"), (17, "tokens")])
def test_a_kill_during_preparation(corpus: str, prepared: Path, tmp_path: Path, number: int, stage: str) -> None:
    check_killed_preparation(corpus, prepared, tmp_path / "run", number, stage)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 27))
def test_a_kill_at_every_change_of_preparation(corpus: str, prepared: Path, tmp_path: Path, number: int) -> None:
    check_killed_preparation(corpus, prepared, tmp_path / "run", number)


def start(run: Path, corpus: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flows", "pretrain", *option_list(run, corpus), *TRAINING]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def finish(run: Path, corpus: str) -> str:
    """Run to the end; what it printed."""
    log = run.parent / f"{run.name}.log"
    log.unlink(missing_ok=True)
    process = start(run, corpus)
    assert process.wait(240) == 0, log.read_text()
    return log.read_text()


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics/train.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def await_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not (lines := metrics(run)) or lines[-1]["step"] < step:
        assert process.poll() is None, (run.parent / f"{run.name}.log").read_text()
        assert time.monotonic() < deadline, "training did not get there in time"
        time.sleep(0.02)


def kill(process: subprocess.Popen[bytes], workers_too: bool) -> None:
    """SIGKILL the flow's process and, with `workers_too`, every process of its cluster at the same moment."""
    victims = {process.pid}
    if workers_too:
        records = (default_state_dir() / "clusters").iterdir()
        victims |= {worker.pid for record in records for worker in processes.marked(MARKER, str(record))}
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.wait(10)


def untimed(run: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in UNTIMED if name in line} for line in metrics(run)]


@pytest.fixture(scope="module")
def unbroken(corpus: str, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run that was never killed."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    shutil.copytree(prepared, run)
    finish(run, corpus)
    assert [line["step"] for line in metrics(run)] == list(range(1, 61))
    return run


def check_killed_training(corpus: str, unbroken: Path, run: Path, kills: list[int], workers_too: bool) -> None:
    for step in kills:
        process = start(run, corpus)
        await_step(run, step, process)
        kill(process, workers_too)
    said = finish(run, corpus)
    for stage in ("preprocess", "tokenizer", "tokens", "validate-scaling"):
        assert f"• {stage:<17}  cached" in said
    assert untimed(run) == untimed(unbroken)
    assert json.loads((run / "evaluation/report.json").read_text()) == json.loads(
        (unbroken / "evaluation/report.json").read_text()
    )
    assert LocalProvider(default_state_dir()).list_clusters() == []
    assert not [line for line in (run / "metrics/train.jsonl").read_text().splitlines() if not line.endswith("}")], (
        "a torn line stayed"
    )


def copy_until_training(unbroken: Path, run: Path) -> None:
    """All that `unbroken` did before it trained, its manifests made for it anew: they do not name the directory."""
    for stage in ("documents", "tokenizer", "tokens", "scaling"):
        shutil.copytree(unbroken / stage, run / stage)


@pytest.mark.slow
def test_a_kill_of_flow_and_workers_during_training(corpus: str, unbroken: Path, tmp_path: Path) -> None:
    copy_until_training(unbroken, tmp_path / "run")
    check_killed_training(corpus, unbroken, tmp_path / "run", [37], workers_too=True)


@pytest.mark.slow
@pytest.mark.parametrize("workers_too", [True, False])
def test_many_kills_during_training(corpus: str, unbroken: Path, tmp_path: Path, workers_too: bool) -> None:
    """At steps that a seed chooses; also of the flow alone, whose orphans the next attempt must end first."""
    copy_until_training(unbroken, tmp_path / "run")
    steps = sorted(random.Random(int(workers_too)).sample(range(1, 58), 4))
    check_killed_training(corpus, unbroken, tmp_path / "run", steps, workers_too)


def prepare(run: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flows", "prepare", "--run-uri", str(run), *options]
    with (run.parent / f"{run.name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_of_preparation_at_random_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 kills of the process and its pool; what was finished is found again, and the result is the unbroken one's."""
    texts = make_documents(3000, sentences=40)
    for number in range(30):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number::30])
        (tmp_path / f"{number:02}.jsonl").write_text("".join(lines))
    sources = json.dumps([{"uri": f"{tmp_path}/*.jsonl", "name": "made-up"}])
    options = ["--data.sources", sources, "--data.shard-bytes", "65536", "--engine.processes", "2"]
    options += ["--tokenizer.vocab-size", "600", "--tokenizer.max-tokens-per-byte", "0.6"]
    options += ["--data.filters.gopher.enabled", "false"]
    started = time.monotonic()
    assert prepare(tmp_path / "unbroken", options).wait(600) == 0, (tmp_path / "unbroken.log").read_text()
    seconds = time.monotonic() - started

    run, chance, kills, said = tmp_path / "run", random.Random(0), 0, []
    before: dict[str, tuple[int, int]] = {}
    while kills < 20:
        process = prepare(run, options)
        try:
            assert process.wait(chance.uniform(0.2, 0.7) * seconds) == 0, (tmp_path / "run.log").read_text()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            kills += 1
        after = check_nothing_was_done_twice(run, before)
        stages = sorted(name.partition("/")[0] for name in after if name.endswith("/manifest.json"))
        reused = sum(name in after for name in before)
        said.append(f"{kills:2}: {len(after):4} files of finished work, {reused:4} of them from before; done: {stages}")
        before = after
        if process.returncode == 0 or chance.random() < 0.25:  # begin again, to be killed in the early stages too
            if process.returncode == 0:
                assert content(run) == content(tmp_path / "unbroken")
            shutil.rmtree(run, ignore_errors=True)
            before = {}
    assert prepare(run, options).wait(600) == 0, (tmp_path / "run.log").read_text()
    check_nothing_was_done_twice(run, before)
    assert content(run) == content(tmp_path / "unbroken")
    with capsys.disabled():
        sys.stdout.write("\nafter each kill:\n" + "\n".join(said) + f"\n{(tmp_path / 'run.log').read_text()}")
