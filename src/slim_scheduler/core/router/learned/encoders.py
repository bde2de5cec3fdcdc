"""The observations by name."""

from collections.abc import Callable

from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.learned.layout import Kind
from slim_scheduler.core.router.learned.observation import Encoder, ExtendedEncoder, PaperEncoder
from slim_scheduler.core.router.learned.planned import PlannedEncoder
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.types import Seconds


def build_encoder(kind: Kind, facts: RouterFacts, batch_time: Seconds, plans: Callable[[], Plans]) -> Encoder:
    """`paper`, `extended` or `planned`; only the last makes the plans."""
    if kind == "paper":
        return PaperEncoder(facts)
    if kind == "planned":
        return PlannedEncoder(plans(), batch_time)
    return ExtendedEncoder(facts, batch_time)
