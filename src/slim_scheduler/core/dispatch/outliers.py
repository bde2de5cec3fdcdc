"""Servers that answer but fail: ejected for a while, probed with a few tasks, reinstated when a probe succeeds.

It keeps count of what came back from each server, and of who is ejected; never more than half of them, so never all.
Silent servers are not its business (`fleet.py`), nor what happens to tasks (`dispatcher.py`). The rules are those of
Envoy's outlier detection: a count of failures, a time that doubles, a bound on how many.
"""

from collections import deque
from enum import StrEnum

import msgspec

from slim_scheduler.core.types import Seconds, ServerName

MOST_DOUBLINGS = 30  # beyond it any time would exceed the longest, and a float ends


class Standing(StrEnum):
    """What a server may be given: anything, nothing, or a few tasks to prove itself."""

    TRUSTED = "trusted"
    EJECTED = "ejected"
    PROBED = "probed"


MOVES: dict[Standing, tuple[Standing, ...]] = {
    Standing.TRUSTED: (Standing.EJECTED,),
    Standing.EJECTED: (Standing.PROBED,),
    Standing.PROBED: (Standing.TRUSTED, Standing.EJECTED),
}


class OutlierLimits(msgspec.Struct, frozen=True):
    """A server is ejected when `failures` of its last `window` words were failures, for `base` seconds the first time,
    twice as long each time after, up to `longest`. `share` of the servers may be ejected together."""

    failures: int = 5
    window: int = 10
    base: Seconds = 2.0
    longest: Seconds = 60.0
    share: float = 0.5
    probe_tasks: int = 4


class Conduct:
    """One server's recent words, and how often it was ejected since it last did well for long."""

    __slots__ = ("ejections", "recent", "since", "standing")

    def __init__(self, window: int, now: Seconds) -> None:
        self.standing = Standing.TRUSTED
        self.since = now
        self.recent: deque[bool] = deque(maxlen=window)
        self.ejections = 0

    def move(self, standing: Standing, now: Seconds) -> None:
        assert standing in MOVES[self.standing], f"{self.standing} -> {standing} after {self.ejections} ejections"
        self.standing = standing
        self.since = now
        self.recent.clear()


class Outliers:
    """The conduct of all servers that are in service."""

    def __init__(self, limits: OutlierLimits) -> None:
        self._limits = limits
        self._conduct: dict[ServerName, Conduct] = {}

    def joined(self, server: ServerName, now: Seconds) -> None:
        """A server came into service, for the first time or again: nothing is held against it."""
        self._conduct[server] = Conduct(self._limits.window, now)

    def left(self, server: ServerName, now: Seconds) -> list[ServerName]:
        """A server went out of service. Those that are reinstated because nobody else is left."""
        self._conduct.pop(server, None)
        if any(conduct.standing is Standing.TRUSTED for conduct in self._conduct.values()):
            return []
        for name in self._conduct:
            self.joined(name, now)
        return list(self._conduct)

    def allowance(self, server: ServerName) -> int | None:
        """The most tasks it may have outstanding; None: as many as it has credit for."""
        match self._conduct[server].standing:
            case Standing.TRUSTED:
                return None
            case Standing.PROBED:
                return self._limits.probe_tasks
            case Standing.EJECTED:
                return 0

    def succeeded(self, server: ServerName, now: Seconds) -> bool:
        """A batch of it was done. True if that reinstates the server."""
        conduct = self._conduct[server]
        conduct.recent.append(True)
        if conduct.standing is Standing.PROBED:
            conduct.move(Standing.TRUSTED, now)
            return True
        if conduct.standing is Standing.TRUSTED and now - conduct.since > self._limits.longest:
            conduct.ejections = 0
        return False  # of an ejected server: work from before

    def failed(self, server: ServerName, now: Seconds) -> bool:
        """Tasks came back unrun by its fault, or were lost at it. True if that ejects the server."""
        conduct = self._conduct[server]
        conduct.recent.append(False)
        if conduct.standing is Standing.EJECTED:
            return False
        enough = conduct.standing is Standing.PROBED or conduct.recent.count(False) >= self._limits.failures
        if not enough or not self._room_for_another(conduct):
            return False
        conduct.move(Standing.EJECTED, now)
        conduct.ejections += 1
        return True

    def probe_due(self, now: Seconds) -> list[ServerName]:
        """Ejected servers whose time is over: from now on they may be given a few tasks."""
        due = [name for name, conduct in self._conduct.items() if self._until(conduct) <= now]
        for name in due:
            self._conduct[name].move(Standing.PROBED, now)
        return due

    def next_check(self) -> Seconds:
        """When the next probe is due; infinity when nobody is ejected."""
        return min([self._until(conduct) for conduct in self._conduct.values()], default=float("inf"))

    def _until(self, conduct: Conduct) -> Seconds:
        if conduct.standing is not Standing.EJECTED:
            return float("inf")
        doubled: Seconds = self._limits.base * 2.0 ** min(conduct.ejections - 1, MOST_DOUBLINGS)
        return conduct.since + min(self._limits.longest, doubled)

    def _room_for_another(self, candidate: Conduct) -> bool:
        out = sum(c.standing is not Standing.TRUSTED for c in self._conduct.values() if c is not candidate)
        return out + 1 <= int(self._limits.share * len(self._conduct))

    def check_invariants(self) -> None:
        out = sum(conduct.standing is not Standing.TRUSTED for conduct in self._conduct.values())
        assert not out or out < len(self._conduct), "every server is ejected"
