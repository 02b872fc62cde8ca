import hashlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Job, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infra.storage import FileStorage
from model.checkpoint import Checkpointer, CheckpointError

IDENTITY = {"n_layer": 2, "tokens": "abc"}


class FaultyStorage(FileStorage):
    """Calls `fault` before or after the upload of any name that ends in `suffix`."""

    def __init__(self, root: Path, suffix: str, moment: str, fault: Callable[[], None]) -> None:
        super().__init__(root)
        self.suffix, self.moment, self.fault = suffix, moment, fault

    def upload(self, path: Path, name: str) -> None:
        hit = name.endswith(self.suffix)
        if hit and self.moment == "before":
            self.fault()
        super().upload(path, name)
        if hit and self.moment == "after":
            self.fault()


# These run on ranks.


def make(root: Path, keep: int = 2, storage: FileStorage | None = None) -> Checkpointer:
    storage = storage or FileStorage(root / "checkpoints")
    return Checkpointer(storage, root / "staging", keep, dist.new_group(backend="gloo"))


def state(value: float) -> dict[str, Tensor]:
    """A tensor split over the ranks and one that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "weight": distribute_tensor(torch.arange(10.0) + value, mesh, [Shard(0)]),
        "count": torch.tensor(value),
    }


def full(state: dict[str, Tensor]) -> list[float]:
    weight = state["weight"]
    assert isinstance(weight, DTensor)
    return [*weight.full_tensor().tolist(), state["count"].item()]


def values(step: int) -> list[float]:
    return [*(i + step for i in range(10)), step]


def save(root: Path, steps: list[int], keep: int = 2) -> None:
    checkpointer = make(root, keep)
    for step in steps:
        checkpointer.save(step, state(step), IDENTITY)
    checkpointer.wait()


def load(root: Path, identity: dict[str, Any] = IDENTITY, required: bool = False) -> tuple[int | None, list, list[str]]:
    """The step that was loaded, the values, and the warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logging.getLogger("model.checkpoint").addHandler(handler)
    target = state(-1)
    step = make(root).load_latest(target, identity, required)
    return step, full(target), messages


def save_and_change(root: Path) -> list[float]:
    checkpointer, live = make(root), state(5)
    checkpointer.save(10, live, IDENTITY)
    for tensor in live.values():
        tensor.fill_(99)
    checkpointer.wait()
    loaded = state(-1)
    assert checkpointer.load_latest(loaded, IDENTITY) == 10
    return full(loaded)


def save_on_faulty_storage(root: Path, suffix: str) -> str:
    def fail() -> None:
        raise OSError(f"no room for {suffix}")

    checkpointer = make(root, storage=FaultyStorage(root / "checkpoints", suffix, "before", fail))
    checkpointer.save(20, state(20), IDENTITY)
    try:
        checkpointer.wait()
    except CheckpointError as error:
        checkpointer.wait()  # once told, it is over
        return str(error)
    return "saved"


def save_until_killed(root: Path, suffix: str, moment: str) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    save(root, [10])
    checkpointer = make(root, storage=FaultyStorage(root / "checkpoints", suffix, moment, die))
    checkpointer.save(20, state(20), IDENTITY)
    checkpointer.wait()


def save_for_ever(root: Path) -> None:
    checkpointer = make(root)
    for step in range(10, 10**8, 10):
        checkpointer.save(step, state(step), IDENTITY)


# The tests.


def stored(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    assert run(save_and_change, 2, tmp_path) == [values(5), values(5)]
    assert not list((tmp_path / "staging").rglob("*.distcp"))


def test_the_marker_names_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    run(save, 2, tmp_path, [10])
    directory = tmp_path / "checkpoints" / "step-00000010"
    marker = json.loads((directory / "complete.json").read_text())
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in directory.iterdir()
        if path.name != "complete.json"
    }
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert marker == {"format_version": 1, "step": 10, "identity": IDENTITY, "files": files}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    run(save, 2, tmp_path, [10])
    assert run(load, world_size, tmp_path) == [(10, values(10), [])] * world_size


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("__0_0.distcp", flip, "__0_0.distcp is damaged"),
        ("__1_0.distcp", flip, "__1_0.distcp is damaged"),
        (".metadata", flip, ".metadata is damaged"),
        ("__1_0.distcp", truncate, "__1_0.distcp has"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp"),
        ("complete.json", truncate, "complete.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    run(save, 2, tmp_path, [10, 20])
    damage(tmp_path / "checkpoints" / "step-00000020" / name)
    (step, content, (warning,)), (other_step, other_content, _) = run(load, 2, tmp_path)
    assert (step, content) == (other_step, other_content) == (10, values(10))
    assert "skipped step-00000020" in warning
    assert reason in warning


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    directory = tmp_path / "checkpoints" / "step-00000010"
    evil = pickle.dumps(print)
    (directory / ".metadata").write_bytes(evil)
    marker = json.loads((directory / "complete.json").read_text())
    marker["files"][".metadata"] = {"size_bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    (directory / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(RuntimeError, match=r"builtins\.print, which does not belong in a checkpoint"):
        run(load, 1, tmp_path)


def test_a_format_of_the_future_is_not_guessed_at(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    path = tmp_path / "checkpoints" / "step-00000010" / "complete.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(RuntimeError, match=r"format_version \(2\) must be 1"):
        run(load, 1, tmp_path)


def test_nothing_there_is_a_start_and_only_that(tmp_path: Path) -> None:
    assert run(load, 2, tmp_path) == [(None, values(-1), [])] * 2
    with pytest.raises(RuntimeError, match="none was ever completed"):
        run(load, 2, tmp_path, IDENTITY, True)


def test_remains_of_a_first_save_are_named(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    (tmp_path / "checkpoints" / "step-00000010" / "complete.json").unlink()
    ((step, _, messages),) = run(load, 1, tmp_path)
    assert step is None
    assert messages == ["skipped step-00000010: incomplete, it has no complete.json"]


def test_no_loadable_checkpoint_is_an_error_not_a_start(tmp_path: Path) -> None:
    run(save, 2, tmp_path, [10, 20])
    for name in ("step-00000010", "step-00000020"):
        flip(tmp_path / "checkpoints" / name / "__1_0.distcp")
    with pytest.raises(RuntimeError, match=r"(?s)no complete checkpoint can be loaded:.*00020.*00010"):
        run(load, 2, tmp_path)


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"n_layer": 3, "tokens": "abc"}, "its n_layer is 2, not 3"),
        ({"tokens": "other"}, "its tokens is 'abc', not 'other'"),
        ({"seed": 1}, "its seed is None, not 1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, identity: dict[str, Any], message: str) -> None:
    run(save, 1, tmp_path, [10, 20])
    with pytest.raises(RuntimeError, match=f"step-00000020 is of another run: {message}"):
        run(load, 1, tmp_path, identity)


@pytest.mark.parametrize("suffix", ["__0_0.distcp", "__1_0.distcp", ".metadata", "complete.json"])
def test_an_upload_that_fails_fails_the_save_on_every_rank(tmp_path: Path, suffix: str) -> None:
    run(save, 2, tmp_path, [10])
    rank = 1 if suffix.startswith("__1") else 0
    message = f"step-00000020 was not saved: rank {rank}: OSError: no room for {suffix}"
    assert run(save_on_faulty_storage, 2, tmp_path, suffix) == [message] * 2
    assert [step for step, _, _ in run(load, 2, tmp_path)] == [10, 10]


def test_retention_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10, 20, 30, 40])
    assert stored(tmp_path) == ["step-00000030", "step-00000040"]


def test_retention_does_not_count_what_is_incomplete(tmp_path: Path) -> None:
    """Keep-last-1, 10 complete and 20 in flight, then a crash: 10 is resumed; the next save cleans up."""
    run(save, 1, tmp_path, [10], 1)
    shutil.copytree(tmp_path / "checkpoints" / "step-00000010", tmp_path / "checkpoints" / "step-00000020")
    (tmp_path / "checkpoints" / "step-00000020" / "complete.json").unlink()
    ((step, content, messages),) = run(load, 1, tmp_path)
    assert (step, content) == (10, values(10))
    assert messages == ["skipped step-00000020: incomplete, it has no complete.json"]
    run(save, 1, tmp_path, [15], 1)
    assert stored(tmp_path) == ["step-00000015", "step-00000020"]
    run(save, 1, tmp_path, [25], 1)
    assert stored(tmp_path) == ["step-00000025"]


def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10, 20], 2)
    flip(tmp_path / "checkpoints" / "step-00000020" / "__0_0.distcp")
    run(save, 1, tmp_path, [15], 1)
    assert [(step, content) for step, content, _ in run(load, 1, tmp_path)] == [(15, values(15))]


def test_a_step_is_saved_over_its_remains(tmp_path: Path) -> None:
    """Two ranks saved step 20 and were killed before the marker; one rank goes on from 10 and saves it again."""
    run(save, 2, tmp_path, [10, 20])
    remains = tmp_path / "checkpoints" / "step-00000020"
    (remains / "complete.json").unlink()
    flip(remains / "__1_0.distcp")
    assert [step for step, _, _ in run(load, 1, tmp_path)] == [10]
    run(save, 1, tmp_path, [20])
    assert sorted(path.name for path in remains.iterdir()) == [".metadata", "__0_0.distcp", "complete.json"]
    assert run(load, 2, tmp_path) == [(20, values(20), [])] * 2


@pytest.mark.parametrize(
    ("suffix", "moment", "left"),
    [
        ("__0_0.distcp", "before", 10),
        ("__1_0.distcp", "after", 10),
        (".metadata", "after", 10),
        ("complete.json", "before", 10),
        ("complete.json", "after", 20),
    ],
)
def test_killed_in_a_save_the_newest_complete_one_is_loaded(
    tmp_path: Path, suffix: str, moment: str, left: int
) -> None:
    job = Job(save_until_killed, 2, tmp_path, suffix, moment)
    job.wait_for_a_death()
    job.kill()
    for step, content, messages in run(load, 2, tmp_path):
        assert (step, content) == (left, values(left))
        assert all(message.startswith("skipped step-00000020: incomplete") for message in messages)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_any_moment_the_newest_complete_one_is_loaded(tmp_path: Path, seed: int) -> None:
    job = Job(save_for_ever, 2, tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("checkpoints/*/complete.json")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    job.kill()
    names = [entry.name for entry in FileStorage(tmp_path / "checkpoints").list()]
    complete = {int(name[5:13]) for name in names if name.endswith("/complete.json")}
    incomplete = {int(name[5:13]) for name in names} - complete
    (step, content, messages), (other_step, _, _) = run(load, 2, tmp_path)
    assert step == other_step == max(complete)
    assert content == values(step)
    named = {int(message.split(":")[0].removeprefix("skipped step-")) for message in messages}
    assert named == incomplete
