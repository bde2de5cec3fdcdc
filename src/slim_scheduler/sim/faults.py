"""What goes wrong in a simulated run, and when: the configured faults as a timeline, and what happens to messages.

A crash loses the server's queue, batches, instances and activations, without a word; so does an exit, but its broken
connection tells the dispatcher; a hang keeps them and answers late. The host carries the timeline out. All chance comes
from the generator handed in.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from numpy.random import Generator

from slim_scheduler.core.types import Seconds, ServerName
from slim_scheduler.setup.config import FaultConfig, FaultKind

LATEST_DELIVERY: Seconds = 1.0  # a delayed or doubled message comes up to so much later; beyond the heartbeat's 0.8 s
MESSAGE_FAULTS = ("drop-messages", "duplicate-messages", "delay-messages")
_KINDS = tuple([kind for kind in get_args(FaultKind) if kind != "recover"])


class FaultChange(NamedTuple):
    """A fault begins, or ends after its duration."""

    at: Seconds
    begins: bool
    fault: FaultConfig


def timeline(faults: Iterable[FaultConfig]) -> list[FaultChange]:
    """Beginnings and ends in the order of time; at equal times as configured."""
    changes = []
    for fault in faults:
        changes.append(FaultChange(fault.at_s, True, fault))
        if fault.duration_s is not None and fault.kind != "recover":
            changes.append(FaultChange(fault.at_s + fault.duration_s, False, fault))
    return sorted(changes, key=lambda change: change.at)


class ActiveFaults:
    """What befalls one server now. Of several faults of a kind the last that began counts."""

    def __init__(self) -> None:
        self._active: list[FaultConfig] = []  # in the order in which they began

    def change(self, change: FaultChange) -> None:
        """A fault begins or ends; `recover` ends all."""
        if change.fault.kind == "recover":
            self._active.clear()
        elif change.begins:
            self._active.append(change.fault)
        else:
            self._active = [fault for fault in self._active if fault is not change.fault]

    @property
    def dead(self) -> bool:
        return any(fault.kind in ("exit", "crash") for fault in self._active)

    @property
    def hung(self) -> bool:
        return any(fault.kind == "hang" for fault in self._active)

    @property
    def factor(self) -> float:
        """So many times as long as usual a batch takes."""
        return next((fault.factor for fault in reversed(self._active) if fault.kind == "slow"), 1.0)

    @property
    def shares(self) -> dict[str, float]:
        """By kind, the share of the messages that it befalls."""
        return {fault.kind: fault.share for fault in self._active if fault.kind in MESSAGE_FAULTS}


class MessageFaults:
    """The share of one server's messages, both ways, that is lost, doubled or late."""

    def __init__(self, rng: Generator) -> None:
        self._rng = rng
        self.shares: dict[str, float] = {}

    def deliveries(self, arrival: Seconds) -> list[Seconds]:
        """When the copies of a message that would arrive at `arrival` do so: none, one or two."""
        if self._hit("drop-messages"):
            return []
        first = arrival + self._late() if self._hit("delay-messages") else arrival
        return [first, arrival + self._late()] if self._hit("duplicate-messages") else [first]

    def _hit(self, kind: str) -> bool:
        share = self.shares.get(kind)
        return share is not None and self._rng.random() < share

    def _late(self) -> Seconds:
        return float(self._rng.random()) * LATEST_DELIVERY


def random_faults(rng: Generator, servers: Sequence[ServerName], duration: Seconds) -> tuple[FaultConfig, ...]:
    """One to five faults of any kind on any server, all over by `duration`."""
    faults = []
    for _ in range(int(rng.integers(1, 6))):
        begins = float(rng.uniform(0.0, 0.8 * duration))
        faults.append(
            FaultConfig(
                server=servers[int(rng.integers(len(servers)))],
                at_s=begins,
                kind=_KINDS[int(rng.integers(len(_KINDS)))],
                factor=float(rng.uniform(1.5, 8.0)),
                share=float(rng.uniform(0.02, 0.5)),
                duration_s=float(rng.uniform(0.01, duration - begins)),
            )
        )
    return tuple(faults)
