"""Plans of one pass and of two, and a router's W that is one: `0.25+1@0.4` runs at 0.25, and again at 1 where the
margin is below 0.4."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import WidthTuple


class Choice(msgspec.Struct, frozen=True, order=True):
    """One width tuple, or a second one for items whose margin after the first is below `threshold`.

    `again`: the share of items that go again. `accuracy`: of the answer that is given, in [0, 1].
    """

    first: WidthTuple
    accuracy: float
    second: WidthTuple | None = None
    threshold: float = 0.0
    again: float = 0.0

    @property
    def shared(self) -> int:
        """The first segments at which both tuples are alike: the second pass goes on after these."""
        return 0 if self.second is None else shared_segments(self.first, self.second)

    @property
    def name(self) -> str:
        """As a router's W has it: `0.25`, `0.25/0.5/0.5/1`, `0.25+1@0.4`."""
        if self.second is None:
            return short(self.first)
        return f"{short(self.first)}+{short(self.second)}@{self.threshold:.4g}"


def shared_segments(first: WidthTuple, second: WidthTuple) -> int:
    """How many segments two tuples begin alike with, the last one excluded: somebody has to give another answer."""
    alike = (i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return min(next(alike, len(first)), len(first) - 1)


def is_wider(second: WidthTuple, ran: WidthTuple) -> bool:
    """Whether a second pass has anything to add to what ran: some segment of it is wider."""
    return any(b > a for a, b in zip(ran, second, strict=True))


def short(widths: WidthTuple) -> str:
    """A uniform tuple as its width."""
    return "/".join(f"{width:g}" for width in (widths[:1] if len(set(widths)) == 1 else widths))


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
    """Items whose margin is below a threshold run again at one width tuple. `pairs`: the same as choices."""

    def __init__(self, second: WidthTuple, threshold: float, pairs: Sequence[Choice] = ()) -> None:
        self._second = second
        self._threshold = threshold
        self.pairs = pairs

    def second(self, ran: WidthTuple, margin: float) -> WidthTuple | None:
        return self._second if margin < self._threshold and is_wider(self._second, ran) else None

    def may_resume(self, ran: WidthTuple) -> bool:
        return self._second[: len(ran)] == ran
