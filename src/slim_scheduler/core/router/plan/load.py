"""The offered load, measured from what arrives: of what came, what counts for the plan.

Who answers to a queue at once goes by what comes now. Who lets a queue stand has room for a rise; what it needs to know
is what comes while a queue is worked off.
"""

import math

from slim_scheduler.core.types import Seconds
from slim_scheduler.core.view import View

LOOK_EVERY: Seconds = 0.1  # as often as servers report: whether more comes, or is there, than usual
MEAN_EVERY: Seconds = 1.0
MEMORY = 0.5  # weight of the seconds before in the mean
CHANCE = 4.0  # standard deviations of Poisson requests; a change beyond them is hardly chance, and counts at once
EXPECTED_HALF_LIFE: Seconds = 3.0  # of a mean that is to hold while a queue is worked off
NOW_HALF_LIFE: Seconds = 0.2  # of one for who can wait: what it misses the queue tells


class PromptLoad:
    """Items per second that come `now`, and are `expected` to: a mean over seconds, which a change by more than chance
    would have it replaces at once. None before anything was measured. Without `falls` only a rise does: for who works
    no queue off, a queue that is there when less comes would be served as if it were not."""

    def __init__(self, falls: bool = True) -> None:
        self._falls = falls
        self.now: float | None = None
        self._measured_at: Seconds = 0.0
        self._seen = (0, 0)  # items that had arrived then, and their requests' squares
        self._known = (0.0, 0.0)  # the same of the seconds before, as far as they count

    @property
    def expected(self) -> float | None:
        return self.now

    def look(self, view: View) -> None:
        """Measures every second, or sooner where the load changes."""
        load, since = self.now, view.now - self._measured_at
        if since < (MEAN_EVERY if load is None else LOOK_EVERY):
            return
        came = view.received - self._seen[0], view.squares - self._seen[1]
        items, squares = self._known[0] + came[0], self._known[1] + came[1]
        rate, size = came[0] / since, squares / items if items else 1.0
        if load is None or self._changed(rate - load, CHANCE * math.sqrt(size * max(load, size / since) / since)):
            self.now = rate
        elif since < MEAN_EVERY:
            return
        else:
            self.now = MEMORY * load + (1 - MEMORY) * rate
        self._measured_at, self._seen = view.now, (view.received, view.squares)
        self._known = MEMORY * items, MEMORY * squares

    def _changed(self, by: float, chance: float) -> bool:
        return by > chance or (self._falls and by < -chance)


class PatientLoad:
    """The same for who lets a queue stand. `expected`: a slow mean, which begins at the `most` that can be carried,
    since nobody knows yet how long what comes will stay; `now`: a quick one."""

    def __init__(self, most: float) -> None:
        self.expected = self.now = most
        self._measured_at: Seconds = 0.0
        self._seen = 0  # items that had arrived then

    def look(self, view: View) -> None:
        """Measures at every look."""
        since = view.now - self._measured_at
        if since < LOOK_EVERY:
            return
        rate = (view.received - self._seen) / since
        self.expected = _moved(self.expected, rate, since / EXPECTED_HALF_LIFE)
        self.now = _moved(self.now, rate, since / NOW_HALF_LIFE)
        self._measured_at, self._seen = view.now, view.received


def _moved(mean: float, rate: float, half_lives: float) -> float:
    kept: float = 0.5**half_lives
    return kept * mean + (1 - kept) * rate
