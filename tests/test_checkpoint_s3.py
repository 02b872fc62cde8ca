"""Checkpoints on a real S3 server, under a name that is hard on it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import IDENTITY, Loaded, die, load, make, on_rank_0, state, values
from ranks import Job, run
from test_storage_faults import unfinished

import infra.storage_s3
from infra.storage import S3Storage, Storage, open_storage

NAME = "a+b/épo=3/✓ 1"  # case C8


@pytest.fixture
def place(s3_server: str, s3_bucket: str) -> "Place":
    return Place(s3_server, f"{s3_bucket}/{NAME}/checkpoints")


@dataclass
class Place:
    endpoint: str
    uri: str

    def open(self) -> Storage:
        """For a rank, whose server of processes may be older than that of S3."""
        os.environ["AWS_ENDPOINT_URL"] = self.endpoint
        return open_storage(self.uri)

    def save(self, steps: list[int], storage: Storage | None = None) -> None:
        checkpointer = make(Path("unused"), 2, storage or self.open())
        for step in steps:
            checkpointer.save(step, state(step), IDENTITY)
        checkpointer.wait()

    def load(self) -> Loaded:
        return load(Path("unused"), storage=self.open())


def directories(uri: str) -> list[str]:
    return sorted({entry.name.partition("/")[0] for entry in open_storage(uri).list()})


# These run on ranks.


def save_and_damage(place: Place) -> list[Loaded]:
    """What is loaded of three saves, of which two are kept; and with the newest damaged, and without its marker."""
    place.save([10, 20, 30])
    storage, loaded = place.open(), [place.load()]
    content = storage.read("step-00000030/__1_0.distcp")
    damages: list[Callable[[], None]] = [
        lambda: storage.write("step-00000030/__1_0.distcp", content[:-1] + bytes([content[-1] ^ 1])),
        lambda: storage.write("step-00000030/__1_0.distcp", content[:-1]),
        lambda: storage.delete("step-00000030/__1_0.distcp"),
        lambda: storage.delete("step-00000030/complete.json"),
    ]
    for damage in damages:
        on_rank_0(damage)
        loaded.append(place.load())
    return loaded


def fail_each_put(place: Place) -> list[tuple[bool, int | None, list[float]]]:
    """Whether each save over a whole one failed, and what was loadable after it."""
    seen = []
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "complete.json"):
        place.save([10])
        storage = place.open()
        assert isinstance(storage, S3Storage)
        put = storage._client.put_object

        def refuse(name: str = name, put: Callable[..., Any] = put, **arguments: Any) -> Any:
            if arguments["Key"].endswith(name):
                raise ConnectionError("refused")
            return put(**arguments)

        storage._client.put_object = refuse
        try:
            place.save([20], storage)
        except RuntimeError as error:
            failed = "ConnectionError: refused" in str(error)
        step, content, _ = place.load()
        seen.append((failed, step, content))
    return seen


def many_objects(place: Place) -> tuple[Loaded, Loaded]:
    """What is found of nothing, and of a checkpoint beside 1,205 other objects."""
    nothing = place.load()
    place.save([10])
    storage = place.open()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: storage.write(f"step-00000005/{number:05}", b""), range(1205)))
    return nothing, place.load()


def save_large(place: Place, killed: bool) -> None:
    """Eleven megabytes in parts of five; to be killed is to die at the second part."""
    infra.storage_s3.PART_BYTES = 5 << 20
    storage = place.open()
    assert isinstance(storage, S3Storage)
    send = storage._client.upload_part
    storage._client.upload_part = lambda **part: die() if killed and part["PartNumber"] == 2 else send(**part)
    checkpointer = make(Path("unused"), 2, storage)
    checkpointer.save(20, {"weight": torch.arange(2_800_000.0)}, {})
    checkpointer.wait()


def load_large(place: Place) -> bool:
    loaded = {"weight": torch.zeros(2_800_000)}
    assert make(Path("unused"), storage=place.open()).load_latest(loaded, {}) == 20
    return torch.equal(loaded["weight"], torch.arange(2_800_000.0))


# The tests.


def test_save_load_fall_back_and_prune(place: Place) -> None:  # cases C4, C7, C8
    first, second = run(save_and_damage, 2, place)
    assert [loaded[:2] for loaded in first] == [loaded[:2] for loaded in second]
    assert [(step, content) for step, content, _ in first] == [(30, values(30))] + [(20, values(20))] * 4
    reasons = ["__1_0.distcp is damaged", "__1_0.distcp has", "__1_0.distcp does not exist", "incomplete"]
    for (_, _, (warning,)), reason in zip(first[1:], reasons, strict=True):
        assert warning.startswith("skipped step-00000030: ")
        assert reason in warning
    assert directories(place.uri) == ["step-00000020", "step-00000030"]
    run(place.save, 1, [30])  # over the remains
    assert run(place.load, 2) == [(30, values(30), [])] * 2


def test_whatever_put_fails_what_is_newest_loads(place: Place) -> None:  # case C2
    assert run(fail_each_put, 2, place) == [[(True, 10, values(10))] * 4] * 2


def test_the_newest_is_found_among_many(place: Place) -> None:  # case C9
    ((nothing, found),) = run(many_objects, 1, place)
    assert nothing == (None, values(-1), [])
    assert found[:2] == (10, values(10))
    run(place.save, 1, [20])
    assert directories(place.uri) == ["step-00000010", "step-00000020"]


def test_a_killed_upload_is_removed_by_the_next_save(place: Place, s3_bucket: str) -> None:  # case C12
    job = Job(save_large, 1, place, True)
    job.wait_for_a_death()
    job.kill()
    assert "step-00000020/__0_0.distcp" not in [entry.name for entry in open_storage(place.uri).list()]
    assert unfinished(s3_bucket) == [f"{NAME}/checkpoints/step-00000020/__0_0.distcp"]
    run(save_large, 1, place, False)
    assert unfinished(s3_bucket) == []
    assert run(load_large, 1, place) == [True]
