"""How long the router takes, measured by the host: the pure dispatcher has no clock."""

import time
from collections import deque

import numpy as np
from numpy.random import Generator

from slim_scheduler.core.router.base import Router
from slim_scheduler.core.types import Decision, Seconds
from slim_scheduler.core.view import View

REMEMBERED = 100_000  # decisions that mean and p99 are taken over
WARM_UP = 20  # decisions that may take longer: first calls compile and fill caches
MICRO = 1e-6


class TimedRouter:
    """The router itself, with a stopwatch. `take_slow` says whether a decision since the last call was too slow."""

    def __init__(self, router: Router, limit: Seconds) -> None:
        self.name = router.name
        self.chooses_full = router.chooses_full
        self._router = router
        self._limit = limit
        self._seconds: deque[Seconds] = deque(maxlen=REMEMBERED)
        self._decided = 0
        self._slow: Seconds | None = None

    def decide(self, view: View, rng: Generator) -> Decision:
        begin = time.perf_counter()
        try:
            return self._router.decide(view, rng)
        finally:
            seconds = time.perf_counter() - begin
            self._seconds.append(seconds)
            self._decided += 1
            if seconds > self._limit and self._decided > WARM_UP:
                self._slow = seconds

    def take_slow(self) -> Seconds | None:
        slow, self._slow = self._slow, None
        return slow

    def decision_us(self) -> dict[str, float] | None:
        """Mean and 99th percentile in microseconds; None before the first decision."""
        if not self._seconds:
            return None
        times = np.array(self._seconds) / MICRO
        return {"mean": float(times.mean()), "p99": float(np.percentile(times, 99))}
