"""What a caller asks for beyond an answer, and the request that it makes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from slim_scheduler.core.errors import InputError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import ItemId, Request, RequestId, Seconds, TaskConstraints


class RequestLimits(NamedTuple):
    """What a caller asks for beyond an answer. `deadline_s` counts from the request's arrival."""

    deadline_s: Seconds | None = None
    priority: int = 0
    widths: Sequence[float] | None = None
    accuracy_floor: float | None = None
    confidence_floor: float | None = None
    anytime: bool = True

    def checked(self, shape: ModelShape) -> "RequestLimits":
        """The same with the widths as a tuple. Raises InputError for what can never be met."""
        for name in ("accuracy_floor", "confidence_floor"):
            floor = getattr(self, name)
            if floor is not None and not 0 <= floor <= 1:
                raise InputError(f"{name} is {floor}; it must be from 0 to 1")
        if self.deadline_s is not None and math.isnan(self.deadline_s):
            raise InputError("deadline_s is not a number; give seconds from now, or None")
        if not isinstance(self.priority, int) or self.priority < 0:
            raise InputError(f"priority is {self.priority}; it must be a whole number from 0 (most urgent)")
        if self.widths is None:
            return self
        exact = tuple(float(width) for width in self.widths)
        if len(exact) != shape.segments:
            raise InputError(f"{len(exact)} widths are given; {shape.name} has {shape.segments} segments")
        for width in exact:
            shape.index(width)
        return self._replace(widths=exact)

    def request(self, request_id: RequestId, items: Sequence[ItemId], arrival: Seconds) -> Request:
        deadline = None if self.deadline_s is None else arrival + self.deadline_s
        constraints = None
        if self.widths is not None or self.accuracy_floor is not None:
            widths = None if self.widths is None else tuple(self.widths)
            constraints = TaskConstraints(widths, self.accuracy_floor)
        return Request(
            request_id, tuple(items), arrival, deadline, self.priority, constraints, self.confidence_floor, self.anytime
        )
