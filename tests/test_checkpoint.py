"""What is saved comes back, whole, from the newest checkpoint that is; how many are kept."""

import io
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import (
    IDENTITY,
    FaultyStorage,
    Loaded,
    caught,
    copy,
    die,
    empty,
    flip,
    full,
    grow,
    load,
    make,
    on_rank_0,
    save,
    state,
    stored,
    truncate,
    values,
)
from ranks import Job, run

from infra.errors import StorageUnavailable
from infra.storage import FileStorage
from model.checkpoint import CheckpointUnavailable

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json")

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


def load_each_damaged(root: Path) -> dict[str, Loaded]:
    save(root, [10, 20])
    damages: list[Callable[[Path], None]] = [flip, truncate, grow, empty, Path.unlink]
    loaded = {}
    for name in FILES:
        for damage in damages:
            if name == "complete.json" and damage is Path.unlink:
                continue  # that is an incomplete one
            case = f"{name} {damage.__name__}"
            damaged = copy(root, case)
            on_rank_0(lambda name=name, damage=damage, root=damaged: damage(root / "checkpoints/step-00000020" / name))
            loaded[case] = load(damaged)
    return loaded


def load_from_nothing(root: Path) -> tuple[Loaded, str, str, Loaded]:
    before = load(root)
    refused = caught(lambda: load(root, IDENTITY, True))
    save(root, [10])
    on_rank_0((root / "checkpoints/step-00000010/complete.json").unlink)
    return before, refused, caught(lambda: load(root, IDENTITY, True)), load(root)


def load_while_the_storage_is_away(root: Path) -> list[str]:
    """What is said where one rank cannot reach what it needs of the newest checkpoint: the marker, or a file."""
    save(root, [10, 20])
    said = []
    for rank, name in ((0, "complete.json"), (1, "__1_0.distcp")):
        storage = AwayStorage(root / "checkpoints", rank, f"step-00000020/{name}")
        with pytest.raises(CheckpointUnavailable) as error:
            load(root, storage=storage)
        said.append(str(error.value))
    assert load(root)[0] == 20
    return said


class AwayStorage(FileStorage):
    """Has one object that one rank cannot reach."""

    def __init__(self, root: Path, rank: int, name: str) -> None:
        super().__init__(root)
        self.away = name if dist.get_rank() == rank else None

    def read(self, name: str) -> bytes:
        self.reach(name)
        return super().read(name)

    def stream(self, name: str) -> io.RawIOBase:
        self.reach(name)
        return super().stream(name)

    def reach(self, name: str) -> None:
        if name == self.away:
            raise StorageUnavailable("s3://b/run cannot be reached: no route")


def load_at_steps(root: Path) -> tuple[list[Loaded], str, Loaded, str]:
    save(root, [10, 20, 30], 3)
    exact = [load(root, IDENTITY, True, step) for step in (10, 20, 30)]
    absent = caught(lambda: load(root, IDENTITY, True, 15))
    not_required = load(root, IDENTITY, False, 15)
    on_rank_0(lambda: flip(root / "checkpoints/step-00000020/__0_0.distcp"))
    return exact, absent, not_required, caught(lambda: load(root, IDENTITY, True, 20))


def load_where_all_are_damaged(root: Path) -> str:
    save(root, [10, 20])
    for step in ("step-00000010", "step-00000020"):
        on_rank_0(lambda step=step: flip(root / "checkpoints" / step / "__1_0.distcp"))
    return caught(lambda: load(root))


def load_with_identities(root: Path, identities: list[dict[str, Any]]) -> list[str]:
    save(root, [10, 20])
    return [caught(lambda identity=identity: load(root, identity)) for identity in identities]


def save_until_killed(root: Path, suffix: str, moment: str) -> None:
    save(root, [10])
    checkpointer = make(root, storage=FaultyStorage(root / "checkpoints", suffix, moment, die))
    checkpointer.save(20, state(20), IDENTITY)
    checkpointer.wait()


def save_for_ever(root: Path) -> None:
    checkpointer = make(root)
    for step in range(10, 10**8, 10):
        checkpointer.save(step, state(step), IDENTITY)


# The tests.


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:  # case C3
    assert run(save_and_change, 2, tmp_path) == [values(5), values(5)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    run(save, 2, tmp_path, [10])
    assert run(load, world_size, tmp_path) == [(10, values(10), [])] * world_size


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(tmp_path: Path) -> None:  # case C4
    first, second = run(load_each_damaged, 2, tmp_path)
    assert len(first) == 19
    for case, (step, content, warnings) in first.items():
        assert (step, content) == second[case][:2] == (10, values(10)), case
        assert len(warnings) == 1
        assert warnings[0].startswith("skipped step-00000020: rank "), case
        assert case.split()[0] in warnings[0], case


def test_the_checkpoint_of_a_step_is_loaded_and_no_other(tmp_path: Path) -> None:
    """Though newer ones exist; neither the one before nor the one after will do."""
    ((exact, absent, not_required, damaged),) = run(load_at_steps, 1, tmp_path)
    assert exact == [(step, values(step), []) for step in (10, 20, 30)]
    assert absent == "a checkpoint is required to resume from, and none was ever completed at step 15"
    assert not_required == (None, values(-1), [])
    assert damaged.startswith("no complete checkpoint can be loaded:\nstep-00000020: rank 0: ValueError: ")
    assert "step-00000020/__0_0.distcp is damaged" in damaged


def test_nothing_there_is_a_start_and_only_that(tmp_path: Path) -> None:  # case C10
    for before, refused, refused_again, with_remains in run(load_from_nothing, 2, tmp_path):
        assert before == (None, values(-1), [])
        assert refused == refused_again == "a checkpoint is required to resume from, and none was ever completed"
        assert with_remains[:2] == (None, values(-1))
    warnings = run(load, 1, tmp_path)[0][2]
    assert warnings == ["skipped step-00000010: incomplete, it has no complete.json"]


def test_no_loadable_checkpoint_is_an_error_not_a_start(tmp_path: Path) -> None:  # case C10
    first, second = run(load_where_all_are_damaged, 2, tmp_path)
    head, newest, before = first.splitlines()
    assert head == "no complete checkpoint can be loaded:"
    assert newest.startswith("step-00000020: rank ")
    assert before.startswith("step-00000010: rank ")
    assert first == second


def test_no_older_checkpoint_is_taken_for_one_that_cannot_be_reached(tmp_path: Path) -> None:
    away = "StorageUnavailable: s3://b/run cannot be reached: no route"
    for of_marker, of_file in run(load_while_the_storage_is_away, 2, tmp_path):
        assert of_marker == f"rank 0: {away}"
        assert of_file == f"rank 1: {away}"


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    cases = {
        "n_layer is 2, not 3": {"n_layer": 3, "tokens": "abc"},
        "tokens is 'abc', not 'other'": {"tokens": "other"},
        "seed is None, not 1": {"seed": 1},
    }
    (said,) = run(load_with_identities, 1, tmp_path, list(cases.values()))
    assert said == [f"step-00000020 is of another run: its {difference}" for difference in cases]


def keep_and_resume(root: Path) -> list[tuple[list[str], Loaded]]:
    """What is stored and what is loaded after each of a run's misfortunes."""
    seen = []

    def look() -> None:
        dist.barrier()
        seen.append((stored(root), load(root)))

    save(root, [10], 1)
    shutil.copytree(root / "checkpoints/step-00000010", root / "checkpoints/step-00000020")
    (root / "checkpoints/step-00000020/complete.json").unlink()  # in flight, then a crash
    look()
    save(root, [15], 1)
    look()
    save(root, [20, 30, 40], 2)
    look()
    flip(root / "checkpoints/step-00000040/__0_0.distcp")  # so it goes on from 30, and the 40 is of no use
    save(root, [35], 1)
    look()
    return seen


def test_retention_keeps_the_newest_complete_ones(tmp_path: Path) -> None:  # case C6
    (seen,) = run(keep_and_resume, 1, tmp_path)
    in_flight = "skipped step-00000020: incomplete, it has no complete.json"
    assert seen[0] == (["step-00000010", "step-00000020"], (10, values(10), [in_flight]))
    assert seen[1] == (["step-00000015"], (15, values(15), []))
    assert seen[2] == (["step-00000030", "step-00000040"], (40, values(40), []))
    names, (step, content, _) = seen[3]
    assert (names, step, content) == (["step-00000035", "step-00000040"], 35, values(35))


def test_a_step_is_saved_over_its_remains(tmp_path: Path) -> None:  # case C7
    """Two ranks saved step 20 and were killed before the marker; one rank goes on from 10 and saves it again."""
    run(save, 2, tmp_path, [10, 20])
    remains = tmp_path / "checkpoints" / "step-00000020"
    (remains / "complete.json").unlink()
    flip(remains / "__1_0.distcp")
    (remains / ".partial-x").touch()
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
def test_killed_in_a_save_the_newest_complete_one_is_loaded(  # case C1
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
def test_killed_at_any_moment_the_newest_complete_one_is_loaded(tmp_path: Path, seed: int) -> None:  # case C1
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
