"""What a router is, and what it may know.

A router turns the view into a decision. It does no I/O and draws only from the generator it is handed; state it keeps
must follow from the calls it got, so that a replay decides the same. `RouterFacts` is what stays fixed in a run: the
network's shape, the groups, and each server's profile and link.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from numpy.random import Generator

from slim_scheduler.core.profile import LatencyTable, Profile
from slim_scheduler.core.router.escalation import Choice
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Decision, Seconds, ServerName, WidthTuple
from slim_scheduler.core.view import View


class Router(Protocol):
    """`chooses_full`: its choices are all servers in service, and the head, with all behind it, waits for credit of the
    one it chose (the paper's random router). Others choose among servers with credit."""

    name: str
    chooses_full: bool

    def decide(self, view: View, rng: Generator) -> Decision: ...


class Escalation(Protocol):
    """Says which items run again. Like a router it does no I/O, and what it keeps follows from the calls it got.

    `pairs` are the plans of two passes that it may follow, where their accuracy is known.
    """

    @property
    def pairs(self) -> Sequence[Choice]: ...

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        """The width tuple of a second pass for an item that ran so and whose answer has that margin; None: it is
        answered."""
        ...

    def may_resume(self, ran: WidthTuple) -> bool:
        """Whether a second pass may go on from the activation of an item whose first segments ran so."""
        ...


class ServerFacts(msgspec.Struct, frozen=True):
    """What is fixed about one server. Latencies are the profile's; multiply by `slowdown`.

    `bytes_per_s` is its link's, each way; `link_latency` one way. `max_upgrade`: how much wider than asked for an
    instance may be, None for any.
    """

    name: ServerName
    profile: Profile
    latency: LatencyTable
    slowdown: float
    max_batch: int
    concurrency: int
    vram_budget: Bytes
    link_latency: Seconds
    bytes_per_s: float
    max_upgrade: float | None = None


class RouterFacts(msgspec.Struct, frozen=True):
    """`move_activations`: moving an activation between servers costs its bytes. `shared_link`: one medium for all."""

    shape: ModelShape
    groups: tuple[int, ...]
    servers: dict[ServerName, ServerFacts]
    move_activations: bool
    shared_link: bool = False
