"""What a client asked for beyond an answer: the request parameters of ours and of the schedule-policy extension, and
the form of the outputs.

One function turns the parameters of HTTP or gRPC into an `Asked`; it refuses what has no meaning and never guesses.
Whether the ask can be met is the service's question.
"""

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

import msgspec

from slim_scheduler.core.types import Seconds, WidthTuple
from slim_scheduler.serve.metadata import ModelCard
from slim_scheduler.serve.refusal import invalid, quote

# All request parameters that mean something here; any other is refused, because a misspelt limit is no limit.
REQUEST = (
    "accuracy_floor", "anytime", "binary_data_output", "confidence_floor", "deadline_ms", "priority", "sequence_end",
    "sequence_id", "sequence_start", "timeline", "timeout", "unmet", "width", "widths",
)  # fmt: skip
OUTPUT_FORMS = ("binary_data", "classification")
RESERVED = "triton_"  # Triton's own clients may send parameters that begin so; they mean nothing here

Parameter = bool | int | float | str | list[float] | None

LONGEST_DEADLINE_S = 24 * 3600.0
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
LOWEST_PRIORITY = 1000
SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
SHARED_MEMORY = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The constraints of one request.

    `deadline` is a duration from the request's arrival. `unmet` says what to do with a floor or widths that cannot be
    had: refuse, or answer as near as possible and say so. `replaced`: `widths` are the nearest to what was asked.
    `timeline`: the answer says where the time of each item went. `confidence_floor`: items whose answer is less sure
    run again at the widest; where that is not done by the deadline, `anytime` takes the first answer.
    """

    deadline: Seconds | None = None
    accuracy_floor: float | None = None
    widths: WidthTuple | None = None
    priority: int = 0
    unmet: Literal["refuse", "answer"] = "refuse"
    timeline: bool = False
    replaced: bool = False
    confidence_floor: float | None = None
    anytime: bool = True


class OutputForm(msgspec.Struct, frozen=True, gc=False):
    """How one output goes back: `classification` is how many labels instead of logits, 0 for logits; `binary`, after
    the JSON as bytes."""

    classification: int = 0
    binary: bool = False


NOTHING_ASKED = Asked()


def asked_of(parameters: Mapping[str, Parameter], card: ModelCard) -> Asked:
    """The constraints in a request's parameters. Raises Refusal naming the parameter and its range."""
    if not parameters:
        return NOTHING_ASKED
    refuse_unknown(parameters, REQUEST, "parameter")
    for name in SEQUENCES:
        if parameters.get(name):
            raise invalid(f"{name} is set, but {card.name} keeps no state between requests; leave it out")
    unmet = parameters.get("unmet", "refuse")
    if unmet not in ("refuse", "answer"):
        raise invalid(f"unmet is {quote(unmet)}; it must be refuse or answer")
    widths = _widths(parameters, card)
    served = widths if widths is None or unmet == "refuse" else _nearest(widths, card)
    for width in served or ():
        if width not in card.widths:
            available = ", ".join(f"{width:g}" for width in card.widths)
            raise invalid(f"width {width:.10g} is not served; available: {available}")
    return Asked(
        deadline=_deadline(parameters),
        accuracy_floor=_number(parameters, "accuracy_floor", 0.0, 1.0),
        widths=served,
        priority=int(_whole(parameters, "priority", LOWEST_PRIORITY) or 0),
        unmet=unmet,  # type: ignore[arg-type]
        timeline=_flag(parameters, "timeline"),
        replaced=served != widths,
        confidence_floor=_number(parameters, "confidence_floor", 0.0, 1.0),
        anytime=_flag(parameters, "anytime", True),
    )


def refuse_unknown(parameters: Mapping[str, Parameter], known: Sequence[str], what: str) -> None:
    """Raises Refusal, with the nearest name, for a parameter that nobody would look at."""
    for name in parameters:
        if name not in known and not name.startswith(RESERVED):
            near = get_close_matches(name[:64], known, n=1, cutoff=0.0)[0]
            raise invalid(f"{what} {quote(name)} does not exist; nearest: {near}; available: {', '.join(known)}")


def _deadline(parameters: Mapping[str, Parameter]) -> Seconds | None:
    """The nearer of `deadline_ms` and Triton's `timeout` in microseconds (0: none)."""
    found = []
    if (value := parameters.get("deadline_ms")) is not None:
        deadline_ms = _finite("deadline_ms", value)
        if not 0.0 < deadline_ms <= LONGEST_DEADLINE_S * 1e3:
            raise invalid(
                f"deadline_ms is {deadline_ms:.10g}; it must be above 0 and at most {LONGEST_DEADLINE_S * 1e3:.10g}, "
                "or left out for no deadline"
            )
        found.append(deadline_ms * 1e-3)
    timeout_us = _whole(parameters, "timeout", int(LONGEST_DEADLINE_S * 1e6))
    if timeout_us:
        found.append(timeout_us * 1e-6)
    return min(found, default=None)


def _widths(parameters: Mapping[str, Parameter], card: ModelCard) -> WidthTuple | None:
    one, several = parameters.get("width"), parameters.get("widths")
    if one is None and several is None:
        return None
    if one is not None and several is not None:
        raise invalid("width and widths are both set; give width for all segments, or widths with one per segment")
    if one is not None:
        return (_finite("width", one),) * card.segments
    values = several if isinstance(several, list) else str(several)[:1024].replace("/", ",").split(",")
    if len(values) != card.segments:
        raise invalid(f"widths has {len(values)} values; {card.name} has {card.segments} segments and needs one each")
    return tuple(_finite("widths", value) for value in values)


def _nearest(widths: WidthTuple, card: ModelCard) -> WidthTuple:
    def nearest(asked: float) -> float:
        return min(card.widths, key=lambda served: abs(served - asked))

    return tuple([nearest(asked) for asked in widths])


def _flag(parameters: Mapping[str, Parameter], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise invalid(f"{name} is {quote(value)}; it must be true or false")
    return value


def _number(parameters: Mapping[str, Parameter], name: str, low: float, high: float) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    number = _finite(name, value)
    if not low <= number <= high:
        raise invalid(f"{name} is {number:.10g}; it must be from {low:.10g} to {high:.10g}")
    return number


def _whole(parameters: Mapping[str, Parameter], name: str, high: int) -> int | None:
    number = _number(parameters, name, 0, high)
    if number is not None and number != int(number):
        raise invalid(f"{name} is {number:.10g}; it must be a whole number")
    return None if number is None else int(number)


def _finite(name: str, value: object) -> float:
    """A number, or its text (older gRPC stubs can send no floating-point parameter)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise invalid(f"{name} is {quote(value)}; it must be a number")
    if isinstance(value, str) and NUMBER.fullmatch(value.strip(" ")) is None:  # float() takes 5_0 and any script
        raise invalid(f"{name} is {quote(value)}; it must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise invalid(f"{name} is {quote(value)}; it must be a number") from None
    if not math.isfinite(number):
        raise invalid(f"{name} is {number}; it must be finite")
    return number
