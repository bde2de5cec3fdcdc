"""The observations by name."""

from collections.abc import Callable

from slim_scheduler.core.admission import AccuracyPrior
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.observation import Encoder, ExtendedEncoder, PaperEncoder
from slim_scheduler.core.router.planned import PlannedEncoder
from slim_scheduler.core.types import Seconds

Accuracy = Callable[[], AccuracyPrior]  # reads it where it is needed


def build_encoder(kind: str, facts: RouterFacts, batch_time: Seconds, accuracy: Accuracy) -> Encoder:
    """`paper`, `extended` or `planned`; only the last needs the accuracy, which its plans are made from."""
    if kind == "paper":
        return PaperEncoder(facts)
    return PlannedEncoder(facts, batch_time, accuracy()) if kind == "planned" else ExtendedEncoder(facts, batch_time)
