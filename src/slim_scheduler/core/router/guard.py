"""The router behind its guard: what raised, is impossible or too slow is replaced for that decision, visibly.

The dispatcher asks here and never the router itself. A router that the host found too slow is suspended; after a
while the next decision is its probe.
"""

from numbers import Integral
from typing import NamedTuple

from numpy.random import Generator

from slim_scheduler.core.router.base import Router
from slim_scheduler.core.types import Decision, Seconds
from slim_scheduler.core.view import View

LARGEST_GROUP = 2**31 - 1  # that a record holds
LAST_RESORT = "last resort"  # in the record, in place of a router's name


class Complaint(NamedTuple):
    """Why a router's decision was replaced; `raised`: it raised an exception."""

    reason: str
    raised: bool = False


class GuardedRouter:
    """A router, the heuristic that stands in for it, and when it may be asked."""

    def __init__(self, router: Router, fallback: Router, rng: Generator) -> None:
        self._router = router
        self._fallback = fallback
        self._rng = rng
        self._suspended_until = float("-inf")

    def suspend(self, until: Seconds) -> None:
        self._suspended_until = until

    @property
    def chooses_full(self) -> bool:
        return self._router.chooses_full

    def decide(self, view: View) -> tuple[Decision, str, Complaint | None]:
        """The decision, the name of who made it, and why the router did not, if so."""
        complaint = None
        if view.now >= self._suspended_until:
            decision, complaint = self._asked(self._router, view)
            if decision is not None:
                return decision, self._router.name, None
        decision, further = self._asked(self._fallback, view)
        if decision is not None:
            return decision, self._fallback.name, complaint
        complaints = [c for c in (complaint, further) if c is not None]
        reason = f"{'; '.join([c.reason for c in complaints])} (the fallback {self._fallback.name})"
        return _last_resort(view), LAST_RESORT, Complaint(reason, any(c.raised for c in complaints))

    def _asked(self, router: Router, view: View) -> tuple[Decision | None, Complaint | None]:
        """What a router decides, or why that will not do."""
        try:
            decision = router.decide(view, self._rng)
            complaint = _complaint(decision, view)
            return (None, complaint) if complaint is not None else (_plain(decision, view), None)
        except Exception as error:  # a router may be anybody's code; the run goes on without it
            return None, Complaint(f"{type(error).__name__}: {error}", raised=True)


def _complaint(decision: Decision, view: View) -> Complaint | None:
    whole = isinstance(decision.group, Integral)
    if whole and decision.server in view.choices and decision.width in view.head.widths and decision.group >= 1:
        return None
    server = view.servers.get(decision.server)
    if server is None:
        return Complaint(f"chose server {decision.server}, which is unknown")
    if decision.server not in view.choices:
        return Complaint(
            f"chose server {decision.server}, which is {'full' if server.in_service else 'out of service'}"
        )
    if decision.width not in view.head.widths:
        return Complaint(f"chose width {decision.width}, allowed are {view.head.widths}")
    return Complaint(f"chose a group of {decision.group}, which is {'below 1' if whole else 'no whole number'}")


def _plain(decision: Decision, view: View) -> Decision:
    """The same decision in Python's own types, where a router calculated with NumPy's, and with a group that a record
    can hold, where it means all that wait by any number."""
    server, width, group = decision.server, decision.width, decision.group
    plain = type(decision) is Decision and type(server) is str and type(width) is float and type(group) is int
    if plain and group <= LARGEST_GROUP:
        return decision
    widths = view.head.widths
    return Decision(view.choices[server].name, widths[widths.index(width)], min(int(group), LARGEST_GROUP))


def _last_resort(view: View) -> Decision:
    """Where the fallback failed as well: all that fits to whom least was sent, as narrow as may be."""
    server = min(view.choices.values(), key=lambda server: (not server.available, server.outstanding, server.name))
    return Decision(server.name, view.head.widths[0], server.takes(view.head.waiting))
