"""Ctrl-C between two training steps instead of inside one, so that what is saved is a state that a run really had."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether Ctrl-C was pressed; `check` raises it at a place of the caller's choice."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    def check(self) -> None:
        if self.requested:
            raise KeyboardInterrupt


@contextmanager
def deferred_interruption() -> Iterator[Interruption]:
    """Holds Ctrl-C back until `check`. Outside the main thread Python delivers none, and nothing is held."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption.request)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
