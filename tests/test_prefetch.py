"""What comes next is made ahead: in order, bounded, its errors raised where it is used."""

import threading
import time
from contextlib import closing

import pytest

from model.data.tokens.prefetch import prefetch


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_values_come_in_order_whatever_is_ready_first() -> None:
    def make(key: int) -> int:
        time.sleep(0.02 if key % 3 == 0 else 0)
        return key * 10

    assert list(prefetch(make, range(20), 4)) == [key * 10 for key in range(20)]
    assert list(prefetch(make, [], 4)) == []
    assert not names()


def test_no_more_is_made_than_asked_for() -> None:
    made: list[int] = []
    with closing(prefetch(made.append, iter(range(1000)), 3)) as values:
        for used in range(1, 11):
            next(values)
            time.sleep(0.01)
            assert used <= len(made) <= used + 3
    assert len(made) <= 13
    assert not names()


def test_it_works_ahead() -> None:
    """The second value is made while the first is used: it waits for nothing that the consumer does."""
    made = threading.Event()

    def make(key: int) -> None:
        if key == 1:
            made.set()

    with closing(prefetch(make, range(2), 2)) as values:
        next(values)
        assert made.wait(10)


def test_an_error_is_raised_at_its_turn_and_ends_the_threads() -> None:
    def make(key: int) -> int:
        if key == 2:
            raise OSError("s3://bucket/tokens/train/a-00000.tokens cannot be reached")
        return key

    values = prefetch(make, range(10), 4)
    assert [next(values), next(values)] == [0, 1]
    with pytest.raises(OSError, match=r"a-00000\.tokens cannot be reached"):
        next(values)
    assert not names()
