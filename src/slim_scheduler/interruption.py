"""Ctrl-C and SIGTERM as a wish to stop: noticed between events, so that what was recorded stays whole.

Simulated runs and their worker processes use it; the live loop has asyncio's own way, to which SIGTERM is led here.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody asked to stop. Whoever loops calls `check` where stopping is safe."""

    def __init__(self) -> None:
        self.wanted = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if so."""
        if self.wanted:
            raise KeyboardInterrupt

    def watch(self) -> dict[signal.Signals, Any]:
        """From now on signals only note the wish. Returns the handlers they had."""
        return {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, *_: object) -> None:
        self.wanted = True


@contextmanager
def deferred() -> Iterator[Interruption]:
    """Within it, signals are noted and do nothing else."""
    interruption = Interruption()
    before = interruption.watch()
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within it, SIGTERM does what Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
