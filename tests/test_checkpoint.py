import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import IDENTITY, FaultyStorage, caught, full, load, make, save, state, values
from ranks import Job, run

from infra.storage import FileStorage

# These run on ranks.


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
    message = caught(checkpointer.wait)
    checkpointer.wait()  # once told, it is over
    return message


def save_twice_where_rank_1_has_no_room(root: Path) -> tuple[str, list]:
    """What the second save says of the first, and what a third, with room again, has stored."""
    room = [False]

    def fill() -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpointer = make(root, storage=FaultyStorage(root / "checkpoints", "__1_0.distcp", "before", fill))
    checkpointer.save(20, state(20), IDENTITY)
    message = caught(lambda: checkpointer.save(30, state(30), IDENTITY))
    room[0] = True
    checkpointer.save(40, state(40), IDENTITY)
    target = state(-1)
    assert checkpointer.load_latest(target, IDENTITY) == 40
    return message, full(target)


def save_and_load_where_rank_1_has_no_scratch(root: Path) -> list[str]:
    save(root, [10])
    checkpointer = make(root)
    if dist.get_rank() == 1:
        (root / "file").touch()
        checkpointer.staging = root / "file"
    checkpointer.save(20, state(20), IDENTITY)
    return [caught(checkpointer.wait), caught(lambda: checkpointer.load_latest(state(-1), IDENTITY))]


def save_while_rank_1_dies(root: Path) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    checkpointer = make(root, storage=FaultyStorage(root / "checkpoints", "__1_0.distcp", "before", die))
    checkpointer.save(20, state(20), IDENTITY)
    (root / "message").write_text(caught(checkpointer.wait))


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


def test_the_checkpoint_of_a_step_is_loaded_though_newer_ones_exist(tmp_path: Path) -> None:
    run(save, 2, tmp_path, [10, 20, 30], 3)
    for step in (10, 20, 30):
        assert run(load, 2, tmp_path, IDENTITY, True, step) == [(step, values(step), [])] * 2


def test_a_step_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    """Neither the one before nor the one after will do, and a damaged one is not replaced by another."""
    run(save, 1, tmp_path, [10, 20])
    with pytest.raises(RuntimeError, match=r"CheckpointError: .* none was ever completed at step 15"):
        run(load, 1, tmp_path, IDENTITY, True, 15)
    assert run(load, 1, tmp_path, IDENTITY, False, 15) == [(None, values(-1), [])]
    flip(tmp_path / "checkpoints" / "step-00000020" / "__0_0.distcp")
    with pytest.raises(RuntimeError, match=r"(?s)CheckpointError: no complete .*step-00000020: .* is damaged"):
        run(load, 1, tmp_path, IDENTITY, True, 20)


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


def test_no_room_on_one_rank_is_told_on_all_at_the_next_save(tmp_path: Path) -> None:
    message = "step-00000020 was not saved: rank 1: OSError: [Errno 28] No space left on device"
    assert run(save_twice_where_rank_1_has_no_room, 2, tmp_path) == [(message, values(40))] * 2


def test_no_scratch_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    (saved, loaded), others = run(save_and_load_where_rank_1_has_no_scratch, 2, tmp_path)
    assert [saved, loaded] == others
    assert saved.startswith("step-00000020 was not saved: rank 1: NotADirectoryError")
    assert loaded.startswith("no complete checkpoint can be loaded:\nstep-00000010: rank 1: NotADirectoryError")


def test_a_rank_that_dies_in_a_save_leaves_nobody_waiting(tmp_path: Path) -> None:
    job = Job(save_while_rank_1_dies, 2, tmp_path)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 failed:\nit died without a word"):
        job.results()
    assert time.monotonic() - started < 60  # gloo's own timeout is 30 minutes
    assert (tmp_path / "message").read_text().startswith("step-00000020 was not saved: ")


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
