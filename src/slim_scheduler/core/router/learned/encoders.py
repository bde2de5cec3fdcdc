"""The observations by name."""

from collections.abc import Callable

from slim_scheduler.core.router.base import Escalation, RouterFacts
from slim_scheduler.core.router.learned.layout import Kind
from slim_scheduler.core.router.learned.observation import Encoder, ExtendedEncoder, PaperEncoder
from slim_scheduler.core.router.learned.planned import EscalatingEncoder, PlannedEncoder
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.types import Seconds


def build_encoder(kind: Kind, facts: RouterFacts, batch_time: Seconds, plans: Callable[[], Plans]) -> Encoder:
    """The encoder of a kind; `plans` is asked for by `planned` and `escalating` alone."""
    if kind == "paper":
        return PaperEncoder(facts)
    if kind == "planned":
        return PlannedEncoder(plans(), batch_time)
    if kind == "escalating":
        return EscalatingEncoder(plans(), batch_time)
    return ExtendedEncoder(facts, batch_time)


def escalation_of(encoder: Encoder) -> Escalation | None:
    """Which items run again by the plan that an encoder shows; None where it shows none of two passes."""
    return encoder if isinstance(encoder, EscalatingEncoder) else None
