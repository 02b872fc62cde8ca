"""Saves that fail: what is loadable stays so, all ranks agree, some are tolerated, and none is forgotten."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoints import IDENTITY, FaultyStorage, Loaded, Warnings, caught, die, full, load, make, save, state, values
from ranks import Job, run
from test_trainer import TRAINING, train

from infra.storage import FileStorage, open_storage
from model.checkpoint import Checkpointer


@dataclass
class Fault:
    """Fails the n-th write or removal of one rank."""

    rank: int
    call: int

    def __call__(self) -> None:
        self.call -= 1
        if self.call == 0 and dist.get_rank() == self.rank:
            raise OSError(f"call failed on rank {self.rank}")


def make_faulty(root: Path, fault: Callable[[], None], max_failed_saves: int = 0) -> Checkpointer:
    """Its storage calls `fault` before each write and removal."""
    storage = open_storage(str(root / "checkpoints"))
    write, delete = storage.write, storage.delete

    def faulty_write(name: str, data: bytes | memoryview) -> None:
        fault()
        write(name, data)

    def faulty_delete(name: str) -> None:
        fault()
        delete(name)

    storage.write, storage.delete = faulty_write, faulty_delete  # type: ignore[method-assign]
    return make(root, 1, storage, max_failed_saves)


# These run on ranks.


def fail_each_call(root: Path) -> list[tuple[str, Loaded]]:
    """What each save over a whole one said, and what was loadable after it; until no call is left to fail."""
    seen = []
    for rank in (0, 1):
        for call in range(1, 20):
            run_root = root / f"{rank}-{call}"
            save(run_root, [10])
            fault = Fault(rank, call)
            checkpointer = make_faulty(run_root, fault)
            checkpointer.save(20, state(20), IDENTITY)
            left: list[int | None] = [None, None]
            try:
                checkpointer.wait()
                said = ""
            except RuntimeError as error:
                said = str(error)
            seen.append((said, load(run_root)))
            dist.all_gather_object(left, fault.call)
            if left[rank] > 0:  # type: ignore[operator]
                break
    return seen


def save_twice_where_rank_1_has_no_room(root: Path) -> tuple[str, list[float]]:
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


def save_on_bad_days(root: Path, days: str) -> tuple[list[str], str, Loaded]:
    """A save a day, failing on rank 1 where the day is "x"; the warnings, the error that ended it, what is left."""
    warnings, today = Warnings(), ["."]

    def fail() -> None:
        if today[0] == "x" and dist.get_rank() == 1:
            raise OSError("a bad day")

    checkpointer, error = make_faulty(root, fail, max_failed_saves=2), ""
    for number, today[0] in enumerate(days, start=1):
        try:
            checkpointer.save(number, state(number), IDENTITY)
        except RuntimeError as refused:
            error = f"at {number}: {refused}"
            break
        checkpointer._pending.exception(60)  # type: ignore[union-attr]  # the day ends with its save
    else:
        error = caught(checkpointer.wait) if days.endswith("x") else error
    return list(warnings.messages), error, load(root)


def save_while_rank_1_dies(root: Path) -> None:
    checkpointer = make(root, storage=FaultyStorage(root / "checkpoints", "__1_0.distcp", "before", die))
    checkpointer.max_failed_saves = 9
    checkpointer.save(20, state(20), IDENTITY)
    (root / "message").write_text(caught(lambda: checkpointer.save(30, state(30), IDENTITY)))


def train_on_bad_days(root: Path) -> tuple[int, list[str]]:
    """Checkpoints of steps 5, 10, 15 and 20, of which the first two fail."""
    warnings, failing = Warnings(), {"step-00000005", "step-00000010"}

    class BadStorage(FileStorage):
        def write(self, name: str, data: bytes | memoryview) -> None:
            if name.partition("/")[0] in failing and name.endswith("__1_0.distcp"):
                raise OSError("a bad day")
            super().write(name, data)

    group = dist.new_group(backend="gloo")
    checkpointer = Checkpointer(BadStorage(root / "checkpoints"), 2, group, TRAINING.max_failed_saves)
    return train(root, TRAINING, {"checkpointer": checkpointer}).steps, warnings.messages


# The tests.


def test_whatever_call_fails_what_is_newest_loads(tmp_path: Path) -> None:  # case C2
    first, second = run(fail_each_call, 2, tmp_path)
    assert [loaded[:2] for _, loaded in first] == [loaded[:2] for _, loaded in second]
    for said, (step, content, _) in first:
        assert (step, content) in [(10, values(10)), (20, values(20))]
        assert step == 20 or "call failed on rank" in said
    # Rank 0 removes two names of the step, writes its file, .metadata and the marker, and removes two of the surplus;
    # rank 1 writes its file. Then comes a save in which nothing failed.
    assert [step for _, (step, _, _) in first] == [10, 10, 10, 10, 10, 20, 20, 20, 10, 20]
    assert [said for said, _ in first if not said] == ["", ""]


def test_no_room_on_one_rank_is_told_on_all_at_the_next_save(tmp_path: Path) -> None:
    message = "step-00000020 was not saved: rank 1: OSError: [Errno 28] No space left on device"
    assert run(save_twice_where_rank_1_has_no_room, 2, tmp_path) == [(message, values(40))] * 2


def warned(step: int, in_a_row: int) -> str:
    return (
        f"step-{step:08d} was not saved: rank 1: OSError: a bad day ({in_a_row} in a row; 2 are tolerated, "
        "see training.max_failed_saves)"
    )


@pytest.mark.parametrize(
    ("days", "warnings", "error", "left"),
    [
        (".xx.", [warned(2, 1), warned(3, 2)], "", 4),
        (".x.xx.", [warned(2, 1), warned(4, 1), warned(5, 2)], "", 6),
        (".xxx.", [warned(2, 1), warned(3, 2)], "at 5: step-00000004 was not saved: rank 1: OSError: a bad day", 1),
        (".x", [], "step-00000002 was not saved: rank 1: OSError: a bad day", 1),
    ],
)
def test_some_failures_in_a_row_are_tolerated(  # case C5
    tmp_path: Path, days: str, warnings: list[str], error: str, left: int
) -> None:
    (said, *first), (unsaid, *second) = run(save_on_bad_days, 2, tmp_path, days)
    assert said == warnings
    assert unsaid == []  # rank 0 speaks
    for end, (step, content, _) in (first, second):
        assert end == error
        assert (step, content) == (left, values(left))


def test_training_goes_on_after_failed_saves(tmp_path: Path) -> None:  # case C5
    (steps, warnings), _ = run(train_on_bad_days, 2, tmp_path)
    assert steps == 20
    assert warnings == [warned(5, 1), warned(10, 2)]
    complete = sorted(path.parent.name for path in (tmp_path / "checkpoints").glob("*/complete.json"))
    assert complete == ["step-00000015", "step-00000020"]


def test_a_rank_that_dies_in_a_save_leaves_nobody_waiting(tmp_path: Path) -> None:
    """However many failed saves are tolerated: this is no failure of the storage."""
    job = Job(save_while_rank_1_dies, 2, tmp_path)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 failed:\nit died without a word"):
        job.results()
    assert time.monotonic() - started < 60  # gloo's own timeout is 30 minutes
    assert (tmp_path / "message").read_text().startswith("step-00000020 was not saved: ")
