"""Ctrl-C and SIGTERM as a wish to stop: noticed where stopping is safe, so that what was recorded or saved stays whole.

Simulated runs, their worker processes and both kinds of training use it; the live loop has asyncio's own way, to which
SIGTERM is led here.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody asked to stop; whoever loops calls `check` where it is safe to. A second one stops at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raises KeyboardInterrupt if so."""
        if self.wanted:
            raise KeyboardInterrupt

    def watch(self) -> None:
        """From now on the first signal only notes the wish."""
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def unwatch(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.wanted = True
        self.unwatch()


@contextmanager
def deferred() -> Iterator[Interruption]:
    """Within it, the first signal is only noted. Python gives signals to the main thread: others watch for none."""
    interruption = Interruption()
    if threading.current_thread() is threading.main_thread():
        interruption.watch()
    try:
        yield interruption
    finally:
        interruption.unwatch()


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within it, SIGTERM does what Ctrl-C does, also where SIGINT is ignored, as in a shell script's background."""

    def stop(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
