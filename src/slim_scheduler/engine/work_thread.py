"""Threads that run what may hang: a batch on a device, the load of a model.

The process does not wait for them at its end. Who ends it asks here which of them still run.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class WorkThread(threading.Thread):
    """A daemon thread, started when it is made."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.start()


def still_running() -> list[str]:
    """The names of the threads whose work has not ended."""
    return [thread.name for thread in threading.enumerate() if isinstance(thread, WorkThread)]


async def in_work_thread(name: str, work: Callable[[], Result]) -> Result:
    """What `work` returns. Raises what it raises; who is cancelled leaves it running."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    WorkThread(name, run)
    return await asyncio.wrap_future(future)
