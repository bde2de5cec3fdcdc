"""Routers of a user's own: the one of docs/own-router.md, and some that fail."""

from numpy.random import Generator

from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.types import Decision
from slim_scheduler.core.view import View


class Shortest:
    chooses_full = False

    def __init__(self, facts: RouterFacts) -> None:
        self.group = max(facts.groups)

    def decide(self, view: View, rng: Generator) -> Decision:
        chosen = min(view.choices.values(), key=lambda server: server.outstanding)
        width = view.head.widths[-1] if view.fifo_length < 8 else view.head.widths[0]
        return Decision(chosen.name, width, self.group)


class Broken(Shortest):
    def decide(self, view: View, rng: Generator) -> Decision:
        return Decision(f"{1 / 0}", 1.0, 1)


class Picky(Shortest):
    """Makes a choice that is not allowed for every tenth task or so; it never raises."""

    def decide(self, view: View, rng: Generator) -> Decision:
        decision = super().decide(view, rng)
        return decision if rng.random() > 0.1 else Decision("nowhere", decision.width, decision.group)


class Hungry(Shortest):
    def __init__(self, facts: RouterFacts, weights: str) -> None:
        super().__init__(facts)


class NoRouter:
    pass
