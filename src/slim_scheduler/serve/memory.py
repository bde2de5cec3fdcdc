"""How many bytes the requests of all listeners together may take: their bodies, tensors and answers.

Whoever takes memory for a client reserves it first and releases it when the client has its answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from slim_scheduler.serve.refusal import Kind, Refusal


class MemoryBudget:
    """Bytes that are reserved, of `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, size: int) -> None:
        """Raises Refusal when all requests together would pass the limit."""
        if self.used + size > self.limit:
            raise Refusal(
                Kind.UNAVAILABLE,
                f"this request needs {size} bytes, and requests in progress hold {self.used} of {self.limit}; "
                "try again",
                1.0,
            )
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size

    @contextmanager
    def reservation(self) -> Iterator["Reservation"]:
        """What one request reserves; all of it is released at the end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            reservation.release()


class Reservation:
    """One request's part of a budget; it grows as the request goes on."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.size = 0

    def add(self, size: int) -> None:
        """Raises Refusal when all requests together would pass the limit."""
        self._budget.reserve(size)
        self.size += size

    def release(self) -> None:
        """Releases all of it; more than once does no harm."""
        self._budget.release(self.size)
        self.size = 0
