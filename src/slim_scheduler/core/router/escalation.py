"""A router's W with two passes: `0.25+1@0.4` runs at 0.25, and again at 1 where the margin is below 0.4."""

from typing import NamedTuple

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import WidthTuple


class TwoPasses(NamedTuple):
    """The text of both widths or width tuples, and the margin below which the second follows."""

    first: str
    second: str
    threshold: float


def two_passes(text: str) -> TwoPasses | None:
    """Reads `FIRST+SECOND@MARGIN`; None where there is no `+`. Raises ConfigError."""
    first, plus, rest = text.partition("+")
    if not plus:
        return None
    second, _, threshold = rest.partition("@")
    try:
        margin = float(threshold)
    except ValueError:
        margin = -1.0
    if not first or not second or not 0 <= margin <= 1:
        raise ConfigError(f"width {text!r} is no pair of passes; such as 0.25+1@0.4, with a margin from 0 to 1")
    return TwoPasses(first, second, margin)


class FixedEscalation:
    """Items whose margin is below a threshold run again at one width tuple."""

    def __init__(self, second: WidthTuple, threshold: float) -> None:
        self._second = second
        self._threshold = threshold

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        return self._second if margin < self._threshold and ran != self._second else None
