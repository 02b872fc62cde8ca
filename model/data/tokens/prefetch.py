"""Makes what is needed next while what is needed now is being used."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def prefetch(make: Callable[[Key], Value], keys: Iterable[Key], ahead: int) -> Generator[Value, None, None]:
    """Yields make(key) for each key in order, and works on the next `ahead` meanwhile, each in a thread of its own.

    What make raises is raised here, at its key's turn. The threads end with the iterator.
    """
    pending = iter(keys)
    executor = ThreadPoolExecutor(ahead, "prefetch")
    futures: deque[Future[Value]] = deque()
    try:
        futures.extend(executor.submit(make, key) for key in islice(pending, ahead))
        while futures:
            value = futures.popleft().result()
            futures.extend(executor.submit(make, key) for key in islice(pending, 1))
            yield value
    finally:
        executor.shutdown(cancel_futures=True)
