"""A transport that loses, doubles or delays a share of the messages, both ways."""

import asyncio
from collections import Counter
from collections.abc import Callable

from numpy.random import Generator

LATEST = 1.0  # seconds: beyond the heartbeat's 0.8


class LossyTransport:
    """Each fault befalls `share` of the messages. `done` counts what it did."""

    def __init__(self, rng: Generator, share: float = 0.0) -> None:
        self.share = share
        self.done: Counter[str] = Counter()
        self._rng = rng

    def carry(self, server: str, deliver: Callable[[], None]) -> None:
        chance = self._rng.random() / self.share if self.share else 3.0
        if chance < 1:
            self.done["dropped"] += 1
        elif chance < 2:
            self.done["doubled"] += 1
            deliver()
            self._later(deliver)
        elif chance < 3:
            self.done["delayed"] += 1
            self._later(deliver)
        else:
            self.done["carried"] += 1
            deliver()

    def _later(self, deliver: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self._rng.random() * LATEST, deliver)
