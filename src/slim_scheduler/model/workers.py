"""A few threads that each compute alone, instead of one computation spread over threads.

The convolution library's threads spin where they wait for each other: on a CPU that is shared with anything else, a
training step took up to three times as long with them (docs/lab/2026-11-network-design.md). Threads that only meet
once per step lose nothing.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """`count` threads, each with one compute thread; with one worker everything runs in the caller's thread.

    A context manager, because the number of compute threads belongs to the whole process: it is 1 inside and what it
    was before afterwards. Gradient mode and autocast belong to a thread: functions handed to `map` set their own.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._before = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self.count > 1:
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            torch.set_num_threads(self._before)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Results in the order of the items, whichever thread was first."""
        if self._pool is None:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))
