"""Who is turned away before anything is done for the request: what waits already is more than its deadline allows.

Beyond the peak most requests are refused, and what a refusal costs is taken from those that are answered.
"""

from typing import TYPE_CHECKING

from slim_scheduler.core.dispatch.admission import DEADLINE_SHARE
from slim_scheduler.core.types import Seconds
from slim_scheduler.serve.http.intake import Intake

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import SlimEngine

FULL_RETRY_AFTER: Seconds = 1.0


def turned_away(
    engine: "SlimEngine", deadline: Seconds | None, items: int, intake: Intake
) -> tuple[str, Seconds] | None:
    """Why who finds the queue full, or would be late behind those in the intake and the engine, is refused, and when
    to try again. None: it may come in."""
    limit = engine.config.dispatch.max_waiting_items
    if engine.fifo_length + intake.items + items > limit:
        return f"the queue is full: {items} items came and the limit is {limit}", FULL_RETRY_AFTER
    if deadline is None:
        return None
    wait = intake.wait()
    if wait > DEADLINE_SHARE * deadline:
        reason = f"an answer takes {wait * 1e3:.0f} ms at this load and the deadline is in {deadline * 1e3:.0f} ms"
        return reason, wait
    return engine.too_late(deadline, intake.items)
