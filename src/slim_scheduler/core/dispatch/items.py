"""Requests and items in flight, and the conservation law over them.

received = answered + rejected + expired + cancelled + failed + in flight, for requests and for items. The dispatcher
moves items through here; every one leaves by exactly one outcome, and the last item's outcome makes the reply.
"""

import msgspec

from slim_scheduler.core.messages import Reply
from slim_scheduler.core.types import (
    Bytes,
    ItemId,
    ItemOutcome,
    Joules,
    Outcome,
    Request,
    RequestId,
    Seconds,
    ServerName,
    Task,
    TaskConstraints,
    WidthTuple,
)


class Pass(msgspec.Struct, frozen=True, gc=False):
    """What a pass through the network came to, and what it cost."""

    widths: WidthTuple
    servers: tuple[ServerName, ...]
    margin: float | None
    compute: Seconds
    energy: Joules | None


class ItemFlight(msgspec.Struct, eq=False):
    """One item on its way. `task` is its current attempt at its current segment; answers to any other are late.

    `compute` is of all passes, `energy` of the one that it is on, None from the first batch on of which nobody knows
    it; `held` are the bytes of activation counted for it. `kept`: the segments that a second pass may go on with, and
    where the activations lie that they read. On its second pass, since `again_since`, it has the first one, and
    `constraints` are the width tuple of that pass.
    """

    item: ItemId
    request: "RequestFlight"
    constraints: TaskConstraints | None
    first: Pass | None = None
    widths: WidthTuple = ()
    servers: tuple[ServerName, ...] = ()
    home: ServerName | None = None
    task: Task | None = None
    compute: Seconds = 0.0
    energy: Joules | None = 0.0
    retries: int = 0
    held: Bytes = 0
    kept: dict[int, ServerName] = {}
    again_since: Seconds = 0.0

    def restart(self) -> None:
        """Its activation is lost: back to the input."""
        self.widths, self.servers, self.home, self.kept = (), (), None, {}

    @property
    def has_answer(self) -> bool:
        """Its first pass is done, and is the answer where the second does not come to its end."""
        return self.first is not None and self.request.request.anytime

    def go_again(self, widths: WidthTuple, margin: float, now: Seconds) -> int:
        """Its first pass is done; once more at another width tuple, from the last activation kept that both share, or
        from the input. Returns the segment that it goes on with."""
        first = self.first = Pass(self.widths, self.servers, margin, self.compute, self.energy)
        self.constraints, self.again_since, self.energy = TaskConstraints(widths=widths), now, 0.0
        segment = max((k for k in self.kept if first.widths[:k] == widths[:k]), default=0)
        home = self.kept.get(segment)
        self.widths, self.servers, self.home, self.kept = first.widths[:segment], first.servers[:segment], home, {}
        return segment


class RequestFlight(msgspec.Struct, eq=False):
    """One request, its items that have not ended, and the outcomes of those that have."""

    request: Request
    items: dict[ItemId, ItemFlight] = {}
    outcomes: list[ItemOutcome] = []
    answers_early: bool = False  # second passes that are not done just before the deadline end with the first's answer


class Ledger:
    """All flights, and how many ended how."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, RequestFlight] = {}
        self.items: dict[ItemId, ItemFlight] = {}
        self.received_requests = 0
        self.received_items = 0
        self.received_squares = 0  # of the requests' items
        self.request_outcomes = dict.fromkeys(Outcome, 0)
        self.item_outcomes = dict.fromkeys(Outcome, 0)

    @property
    def completed(self) -> int:
        return self.item_outcomes[Outcome.ANSWERED]

    def counts(self) -> dict[str, dict[str, int]]:
        """Totals by outcome, with `received` and `in_flight`, for requests and for items."""
        return {
            "requests": {"received": self.received_requests, **_named(self.request_outcomes)}
            | {"in_flight": len(self.requests)},
            "items": {"received": self.received_items, **_named(self.item_outcomes)} | {"in_flight": len(self.items)},
        }

    def refuse(self, request: Request, outcome: Outcome, reason: str, retry_after: Seconds | None) -> Reply:
        """A request that never takes off."""
        self._count_refused(len(request.items), outcome)
        items = tuple(ItemOutcome(item, outcome, (), (), 0.0, 0.0, None, reason) for item in request.items)
        return Reply(request.request_id, outcome, items, reason, retry_after)

    def end_unnamed(self, items: int, outcome: Outcome) -> None:
        """A request that never takes off, and whose front end knows what to reply, or that there is nobody to tell."""
        self._count_refused(items, outcome)

    def _count_refused(self, items: int, outcome: Outcome) -> None:
        self._count_received(items)
        self.request_outcomes[outcome] += 1
        self.item_outcomes[outcome] += items

    def _count_received(self, items: int) -> None:
        self.received_requests += 1
        self.received_items += items
        self.received_squares += items * items

    def admit(self, request: Request) -> list[ItemFlight]:
        owner = RequestFlight(request)
        self._count_received(len(request.items))
        self.requests[request.request_id] = owner
        flights = [ItemFlight(item, owner, request.constraints) for item in request.items]
        for flight in flights:
            self.items[flight.item] = owner.items[flight.item] = flight
        return flights

    def end(
        self, flight: ItemFlight, outcome: Outcome, now: Seconds, reason: str = "", margin: float | None = None
    ) -> Reply | None:
        """Ends one item; the reply if it was its request's last. `margin` is its answer's.

        Whose second pass did not come to its end is answered with the first, unless nobody waits for that.
        """
        owner, item, compute = flight.request, flight.item, flight.compute
        request = owner.request
        queued = now - request.arrival - compute
        if flight.first is None:
            servers, energy = flight.servers, flight.energy
            end = ItemOutcome(item, outcome, flight.widths, servers, queued, compute, energy, reason, 1, margin)
        else:
            end = _of_two_passes(flight, flight.first, outcome, queued, reason, margin)
            outcome = end.outcome
        del self.items[item], owner.items[item]
        self.item_outcomes[outcome] += 1
        ended = owner.outcomes
        ended.append(end)
        if owner.items:
            return None
        del self.requests[request.request_id]
        worst = ended[-1]
        if len(ended) > 1:
            worst = next((end for end in ended if end.outcome is not Outcome.ANSWERED), worst)
            ended.sort(key=_item_id)
        self.request_outcomes[worst.outcome] += 1
        return Reply(request.request_id, worst.outcome, tuple(ended), worst.reason)

    def check_invariants(self) -> None:
        for totals in self.counts().values():
            assert totals["received"] == sum(v for k, v in totals.items() if k != "received"), f"conservation: {totals}"
        assert sum(len(r.items) for r in self.requests.values()) == len(self.items), "an item without its request"


def _of_two_passes(
    flight: ItemFlight, first: Pass, outcome: Outcome, queued: Seconds, reason: str, margin: float | None
) -> ItemOutcome:
    compute, energy = flight.compute - first.compute, flight.energy
    ran, other, passes = Pass(flight.widths, flight.servers, margin, compute, energy), first, 2
    if outcome not in (Outcome.ANSWERED, Outcome.CANCELLED) and flight.has_answer:
        second = ran if compute > 0 else Pass((), (), None, 0.0, energy)  # nothing of it ran beyond what is shared
        outcome, reason, passes, ran, other = Outcome.ANSWERED, "", 1, first, second
    return ItemOutcome(
        flight.item,
        outcome,
        ran.widths,
        ran.servers,
        queued,
        flight.compute,
        None if energy is None or first.energy is None else first.energy + energy,
        reason,
        passes,
        ran.margin,
        other.widths,
        other.compute,
        other.energy,
        other.margin,
    )


def _item_id(outcome: ItemOutcome) -> ItemId:
    return outcome.item


def _named(outcomes: dict[Outcome, int]) -> dict[str, int]:
    return {outcome.value: count for outcome, count in outcomes.items()}
