"""Ctrl-C and SIGTERM as a wish to stop: noticed where stopping is safe, so that what was recorded or saved stays whole.

Simulated runs, their worker processes and both kinds of training use it; the live loop has asyncio's own way, to which
SIGTERM is led here.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody asked to stop; whoever loops calls `check` where it is safe to. The next one stops at once."""

    def __init__(self) -> None:
        self.got: int | None = None  # the signal that asked
        self._noted = 0  # how many more signals only note the wish
        self._before: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> bool:
        return self.got is not None

    def check(self) -> None:
        """Raises KeyboardInterrupt if so."""
        if self.wanted:
            raise KeyboardInterrupt

    def watch(self, signals: int = 1) -> None:
        """From now on the first signal only notes the wish, or so many do."""
        self._noted = signals
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def unwatch(self) -> None:
        """Signals do again what they did before."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.got = number
        self._noted -= 1
        if not self._noted:
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
def starting_processes() -> Iterator[None]:
    """Processes that start within it never get SIGINT, not even before they could ignore it: a terminal sends Ctrl-C to
    all, and who started them tells them by SIGTERM. That one waits until they call `let_sigterm_through`, which each of
    them must. A signal to this process waits until they have started.
    """
    resource_tracker.ensure_running()  # which the first process needs, and which ends by unblocking both
    with deferred() as wish:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # of this thread, which they inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if wish.got is not None:
        signal.raise_signal(wish.got)


def let_sigterm_through() -> None:
    """In a process that was started so, once it is ready to be stopped: a SIGTERM that waited comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


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
