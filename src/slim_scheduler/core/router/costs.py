"""What a task moves over the links, and how long that takes on a link that is free."""

from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.types import Bytes, Seconds, ServerName
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
