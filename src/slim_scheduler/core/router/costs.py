"""What a task costs: device time at its best, what it moves over the links, and how long that takes on a free one."""

import math

from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.types import Bytes, Seconds, ServerName, Width, WidthTuple
from slim_scheduler.core.view import Head


def moved_bytes(facts: RouterFacts, head: Head, server: ServerName) -> Bytes:
    """What one of the head's tasks takes to a server: its input, or its activation where that must move."""
    if head.home is None:
        return facts.shape.input_bytes
    if facts.move_activations and head.home != server and head.previous_width is not None:
        return facts.shape.activation(head.segment - 1, head.previous_width)
    return 0


def transfer_time(facts: RouterFacts, head: Head, server: ServerFacts, count: int) -> Seconds:
    """Link time of a block of so many of the head's tasks and of its results, on a link that is free."""
    return 2 * server.link_latency + count * moved_bytes(facts, head, server.name) / server.bytes_per_s


def seconds_per_item(
    server: ServerFacts, segment: int, previous_width: Width | None, width: Width, longest: Seconds = math.inf
) -> float:
    """Device time of an item at the batch size that is best per item, the device shared as well as it can be.

    Of batches that take up to `longest`; infinite where none does.
    """
    sizes = range(1, server.max_batch + 1)
    times = [(b, server.slowdown * server.latency.seconds(segment, previous_width, width, b)) for b in sizes]
    least = min((seconds / b for b, seconds in times if seconds <= longest), default=math.inf)
    sharing = server.profile.sharing[: server.concurrency]
    return least / max(sharing)


def tuple_seconds(server: ServerFacts, widths: WidthTuple) -> Seconds:
    """Device time of an item that runs a whole width tuple there."""
    before: tuple[Width | None, ...] = (None, *widths)
    return sum(seconds_per_item(server, segment, before[segment], width) for segment, width in enumerate(widths))
