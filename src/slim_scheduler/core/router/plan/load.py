"""The offered load, measured from what arrives: of what came, what counts for the plan.

Who answers to a queue at once must not miss a rise. Who lets a queue stand has room for a rise, and must not miss a
lull; what it needs to know is what comes while a queue is worked off.
"""

import math

from slim_scheduler.core.types import Seconds
from slim_scheduler.core.view import View

LOOK_EVERY: Seconds = 0.1  # as often as servers report: whether more comes, or is there, than usual
MEAN_EVERY: Seconds = 1.0
MEMORY = 0.5  # weight of the seconds before in the mean
RISE = 4.0  # standard deviations of Poisson requests; a rise beyond them is hardly chance, and counts at once
EXPECTED_HALF_LIFE: Seconds = 3.0  # of a mean that is to hold while a queue is worked off
NOW_HALF_LIFE: Seconds = 0.2


class PromptLoad:
    """Items per second, `expected` to come and coming `now`, which are one: a mean over seconds, which a rise by more
    than chance would have it replaces at once. None before anything was measured."""

    def __init__(self) -> None:
        self.expected: float | None = None
        self._measured_at: Seconds = 0.0
        self._seen = (0, 0)  # items and requests that had arrived then

    @property
    def now(self) -> float | None:
        return self.expected

    def look(self, view: View) -> None:
        """Measures every second, or sooner where more comes."""
        load, since = self.expected, view.now - self._measured_at
        if since < (MEAN_EVERY if load is None else LOOK_EVERY):
            return
        items, requests = view.received - self._seen[0], view.requests - self._seen[1]
        rate, size = items / since, items / requests if requests else 1.0
        if load is None or rate > load + RISE * math.sqrt(size * max(load, size / since) / since):
            self.expected = rate
        elif since < MEAN_EVERY:
            return
        else:
            self.expected = MEMORY * load + (1 - MEMORY) * rate
        self._measured_at, self._seen = view.now, (view.received, view.requests)


class PatientLoad:
    """The same for who lets a queue stand. `expected`: a slow mean, which begins at the `most` that can be carried,
    since what nobody knows yet may stay; `now`: a quick one, where that is less."""

    def __init__(self, most: float) -> None:
        self.expected = most
        self._quick = most
        self._measured_at: Seconds = 0.0
        self._seen = 0  # items that had arrived then

    @property
    def now(self) -> float:
        return min(self._quick, self.expected)

    def look(self, view: View) -> None:
        """Measures at every look."""
        since = view.now - self._measured_at
        if since < LOOK_EVERY:
            return
        rate = (view.received - self._seen) / since
        self.expected = _moved(self.expected, rate, since / EXPECTED_HALF_LIFE)
        self._quick = _moved(self._quick, rate, since / NOW_HALF_LIFE)
        self._measured_at, self._seen = view.now, view.received


def _moved(mean: float, rate: float, half_lives: float) -> float:
    kept: float = 0.5**half_lives
    return kept * mean + (1 - kept) * rate
