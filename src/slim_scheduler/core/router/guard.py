"""The router behind its guard: what raised, is impossible or too slow is replaced for that decision, visibly.

The dispatcher asks here and never the router itself. A router that the host found too slow is suspended; after a
while the next decision is its probe.
"""

from typing import NamedTuple

from numpy.random import Generator

from slim_scheduler.core.router.base import Router
from slim_scheduler.core.types import Decision, Seconds
from slim_scheduler.core.view import View


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
            try:
                decision = self._router.decide(view, self._rng)
                complaint = self._complaint(decision, view)
            except Exception as error:  # a router may be anybody's code; the run goes on without it
                complaint = Complaint(f"{type(error).__name__}: {error}", raised=True)
            if complaint is None:
                return decision, self._router.name, None
        return self._fallback.decide(view, self._rng), self._fallback.name, complaint

    def _complaint(self, decision: Decision, view: View) -> Complaint | None:
        if decision.server in view.choices and decision.width in view.head.widths and decision.group >= 1:
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
        return Complaint(f"chose a group of {decision.group}")
