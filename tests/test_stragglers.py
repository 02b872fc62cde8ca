import logging
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run

from model.stragglers import Exchange, Exchanged, Probe, StragglerWatch

HOSTS = ["a", "a", "b", "b"]


def judge(watch: StragglerWatch, steps: int, own: list[float], step: float | list[float] = 1.0) -> list[tuple]:
    """What is said of ranks that take so long, for so many steps."""
    seconds = np.stack([np.array(own), np.broadcast_to(step, len(own))], axis=1)
    return [watch.judge(seconds) for _ in range(steps)]


def test_no_rank_is_slow_before_the_window_is_full() -> None:
    said = judge(StragglerWatch(HOSTS), 33, [1.0, 1.0, 9.0, 1.0])
    assert said == [()] * 31 + [(2,)] * 2


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ([1.0, 1.0, 1.0, 1.31], (3,)),
        ([1.0, 1.0, 1.0, 1.29], ()),
        # Of four the lower one in the middle is the second: 2 and 3 are 1.4 x that, not 1 x the third.
        ([1.0, 1.0, 1.4, 1.4], (2, 3)),
        ([0.1, 1.0, 1.0, 1.0], ()),  # a fast rank makes none slow
        ([1.0, 1.4], (1,)),
        ([1.4, 1.0], (0,)),
        ([7.0], ()),
        ([1.0, 1.0, 5.0], (2,)),
    ],
)
def test_slow_is_more_than_1_3_times_the_lower_median(own: list[float], slow: tuple[int, ...]) -> None:
    assert judge(StragglerWatch(["a"] * len(own)), 32, own)[-1] == slow


def test_a_rank_that_comes_late_is_slow_whatever_it_measures() -> None:
    watch = StragglerWatch(HOSTS)
    assert judge(watch, 32, [1.0] * 4, [2.0, 2.7, 2.0, 2.0])[-1] == (1,)


def test_hiccups_are_no_slowness() -> None:
    """16 of 32 measurements do not move the lower median, 17 do."""
    watch = StragglerWatch(HOSTS)
    judge(watch, 16, [1.0] * 4)
    assert judge(watch, 17, [1.0, 9.0, 1.0, 1.0])[-2:] == [(), (1,)]


def test_it_is_said_once_and_once_more_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    watch = StragglerWatch(HOSTS)
    judge(watch, 100, [1.0, 1.0, 1.0, 2.5])
    assert caplog.messages == [
        "rank 3 on b is slow: over 32 steps, the median matrix product and loader wait of rank 3 is "
        "2.5 x that of the median rank"
    ]
    caplog.clear()
    judge(watch, 100, [1.0] * 4)
    assert caplog.messages == ["rank 3 on b is no longer slow"]


def test_at_the_border_a_rank_stays_what_it_was(caplog: pytest.LogCaptureFixture) -> None:
    watch = StragglerWatch(HOSTS)
    assert judge(watch, 40, [1.0, 1.0, 1.0, 1.25])[-1] == ()
    assert judge(watch, 40, [1.0, 1.0, 1.0, 1.35])[-1] == (3,)
    assert judge(watch, 40, [1.0, 1.0, 1.0, 1.25])[-1] == (3,)
    assert judge(watch, 40, [1.0, 1.0, 1.0, 1.15])[-1] == ()
    assert len(caplog.messages) == 2


def test_a_slow_node_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = StragglerWatch(["a", "a", "a", "b", "b", "c"])
    judge(watch, 32, [1.0, 1.0, 1.0, 2.0, 4.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0, 6.0])
    assert caplog.messages == [
        "ranks 3, 4 on b are slow: over 32 steps, the median matrix product and loader wait of rank 4 is "
        "4.0 x that of the median rank",
        "rank 5 on c is slow: over 32 steps, the median step time of rank 5 is 2.0 x that of the median rank",
    ]


def test_the_probe_leaves_the_random_numbers_of_training_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert Probe(torch.device("cpu"), torch.bfloat16).seconds() > 0
    assert torch.equal(torch.rand(3), expected)


def exchange(slow_rank: int, slow_steps: int, steps: int) -> tuple[list[Exchanged], list[str]]:
    """With a rank whose work takes four times as long as that of the others at first.

    What it takes is slept, not computed: on a busy machine any rank may be slow in earnest.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("model.stragglers").addHandler(handler)
    rank = dist.get_rank()
    left = slow_steps + 1  # one when it is made

    def work(probe: Probe) -> None:
        nonlocal left
        left -= 1
        time.sleep(0.08 if rank == slow_rank and left >= 0 else 0.02)

    Probe.work = work  # type: ignore[method-assign]
    exchanging = Exchange(torch.device("cpu"), torch.float32)
    last = steps - 1
    heard = [
        exchanging.step(stop_asked=step == last and rank == 1, loader_seconds=rank / 1e6, memory_bytes=rank)
        for step in range(steps)
    ]
    return heard, said


def test_a_rank_that_is_slowed_is_found_and_recovers() -> None:
    (heard, said), *others = run(exchange, 3, 2, 34, 70)
    slow = [exchanged.slow_ranks for exchanged in heard]
    assert slow[30:34] == [(), (2,), (2,), (2,)]
    assert slow[-1] == ()
    assert [message.partition(":")[0].partition(" on ")[0] for message in said] == ["rank 2", "rank 2"]
    assert "is slow: over 32 steps, the median matrix product and loader wait of rank 2 is" in said[0]
    assert said[1].endswith(" is no longer slow")
    for exchanged, quiet in [(heard, False), *((of_rank, True) for of_rank, _ in others)]:
        assert [known.any_stop_asked for known in exchanged] == [False] * 69 + [True]
        assert {(known.loader_seconds, known.memory_bytes) for known in exchanged} == {(2e-6, 2)}
        assert not quiet or {known.slow_ranks for known in exchanged} == {()}
    assert [said for _, said in others] == [[], []]
