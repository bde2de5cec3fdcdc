"""How busy a simulated device was lately, and the energy that follows from it.

Utilisation is the fraction of the last 0.5 s in which at least one batch ran; power is a curve over it. Both are
piecewise linear in time, so energy is integrated exactly from one edge to the next. Nothing here knows what runs.
"""

from collections import deque

from slim_scheduler.core.profile import Curve
from slim_scheduler.core.types import Joules, Seconds, Watts

WINDOW: Seconds = 0.5  # docs/method.md, section 2


class Meter:
    """Told when the device turns busy or idle; asked for utilisation, power and the energy used so far."""

    __slots__ = ("_at", "_busy", "_busy_s", "_edges", "_energy", "_knots", "_power", "_tail_busy", "_watts")

    def __init__(self, power: Curve) -> None:
        self._power = power
        self._knots = [x for x in power.x if 0 < x < 1]
        self._at: Seconds = 0.0
        self._busy = False  # at the window's front, which is now
        self._tail_busy = False  # at its end, 0.5 s ago
        self._busy_s: Seconds = 0.0  # busy time within the window
        self._watts = power(0.0)  # at this busy time
        self._edges: deque[Seconds] = deque()  # changes of busy within the window
        self._energy: Joules = 0.0

    def turn(self, busy: bool, now: Seconds) -> None:
        """The device is busy (or idle) from `now` on."""
        if busy is self._busy:
            return
        self.advance(now)
        self._busy = busy
        if self._edges and self._edges[-1] == now:
            self._edges.pop()  # one batch ended and the next began in the same instant: no edge
        else:
            self._edges.append(now)

    def advance(self, now: Seconds) -> Joules:
        """The energy used from time 0 until `now`."""
        if now <= self._at:
            return self._energy
        edges = self._edges
        while edges and edges[0] + WINDOW <= now:
            self._slide(edges.popleft() + WINDOW)
            self._tail_busy = not self._tail_busy
            if not edges:  # exact again, whatever rounding has gathered
                self._busy_s = WINDOW if self._busy else 0.0
                self._watts = self._power(self._busy_s / WINDOW)
        self._slide(now)
        return self._energy

    def utilization(self, now: Seconds) -> float:
        self.advance(now)
        return self._busy_s / WINDOW

    def power(self, now: Seconds) -> Watts:
        self.advance(now)
        return self._watts

    def _slide(self, until: Seconds) -> None:
        """Moves the window to `until`; no edge enters or leaves it on the way."""
        took = until - self._at
        if took <= 0:
            return
        self._at = until
        if self._busy is self._tail_busy:
            self._energy += took * self._watts
            return
        before, watts = self._busy_s, self._watts
        self._busy_s = after = min(before + took, WINDOW) if self._busy else max(before - took, 0.0)
        self._watts = self._power(after / WINDOW)
        if self._knots:
            self._energy += took * self._mean_power(before / WINDOW, after / WINDOW)
        else:
            self._energy += took * (watts + self._watts) / 2

    def _mean_power(self, start: float, end: float) -> Watts:
        """Mean of the power curve while utilisation goes evenly from `start` to `end`, across its bends."""
        low, high = (start, end) if start < end else (end, start)
        points = [low, *[x for x in self._knots if low < x < high], high]
        watts = [self._power(x) for x in points]
        if len(points) == 2 or low == high:
            return (watts[0] + watts[-1]) / 2
        area = sum([(points[i + 1] - points[i]) * (watts[i] + watts[i + 1]) / 2 for i in range(len(points) - 1)])
        return area / (high - low)
