"""The routers by name: one table of what a name looks like and what builds it.

Configuration, command line, training and management interface read names with `parse_router`, so all of them take and
refuse the same. `machines.py` gathers what a builder needs.
"""

import math
import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError, DataError
from slim_scheduler.core.reward import RewardWeights
from slim_scheduler.core.router.base import Escalation, Router, RouterFacts
from slim_scheduler.core.router.escalation import Choice, FixedEscalation, TwoPasses, is_wider, two_passes
from slim_scheduler.core.router.heuristics import (
    CostModel,
    JoinShortestQueue,
    PowerOfTwo,
    RandomRouter,
    RoundRobin,
    WidthRule,
    read_widths,
    width_rule,
    width_shares,
    width_tuple,
)
from slim_scheduler.core.router.learned.router import LearnedRouter
from slim_scheduler.core.router.plan.choices import pair_of, pairs
from slim_scheduler.core.router.plan.follower import PlanFollower
from slim_scheduler.core.router.plan.plans import check_rho, lp_plans
from slim_scheduler.core.router.plan.program import MOST_TUPLES
from slim_scheduler.core.router.plan.waiting import waiting
from slim_scheduler.core.router.reward_greedy import RewardGreedy
from slim_scheduler.core.router.slackfit import SlackFit
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds
from slim_scheduler.setup.plugins import find_class, is_class_name
from slim_scheduler.setup.policy_files import MANIFEST, WEIGHTS, load_router

ENTRY_POINTS = "slim_scheduler.routers"  # the group through which a package offers a router
LONGEST_NAME = 4096  # a path may stand in it
NAME = re.compile(r"(?P<kind>[a-z0-9-]+)(?:(?P<mark>[:@])(?P<argument>.*))?", re.DOTALL)


class RouterInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What routers are built from. `facts` is None where profiles are missing.

    `accuracy` reads the measured accuracies and raises DataError without them, which `measured` tells beforehand;
    `deadline` is an item's time where its request names none; `fallback` is the name of the router that stands in.
    """

    shape: ModelShape
    facts: RouterFacts | None
    groups: tuple[int, ...]
    accuracy: Callable[[], AccuracyTable]
    measured: bool
    reward: RewardWeights
    deadline: Seconds
    sample: bool
    escalates: bool
    fallback: str


class RouterName(NamedTuple):
    """A name that was read: its kind, a row of `ROUTERS` or none for a user's class, and what its argument says."""

    text: str
    kind: str | None
    argument: Any = None

    @property
    def needs_files(self) -> bool:
        """Whether it names files or code of the operator's."""
        return self.kind is None or ROUTERS[self.kind].needs_files

    @property
    def files(self) -> list[Path]:
        """Those that its argument names, as far as they are there."""
        folder = self.argument
        if self.kind is None or not isinstance(folder, Path):
            return []
        named = [folder / name for name in ROUTERS[self.kind].files] if folder.is_dir() else [folder]
        return [file for file in named if file.is_file()]


class RouterKind(NamedTuple):
    """A row of the table. `usage` is how errors and documents write it; `parse` raises InputError.

    `files` are what it reads of the folder in its argument.
    """

    usage: tuple[str, ...]
    parse: Callable[[str], Any]
    build: Callable[[RouterName, RouterInputs], Router]
    files: tuple[str, ...] = ()

    @property
    def needs_files(self) -> bool:
        return bool(self.files)


class WidthArgument(NamedTuple):
    """W: the widths of the first pass as they were written, and both passes where there are two."""

    first: str
    passes: TwoPasses | None


class PlanArgument(NamedTuple):
    """How busy plans let each device and link be, where that is said, and so long a queue may stand."""

    rho: float | None = None
    queue: Seconds = 0.0


def parse_router(text: str) -> RouterName:
    """Reads a router's name without building it. Raises ConfigError that lists the names, InputError."""
    found = NAME.fullmatch(text) if len(text) <= LONGEST_NAME else None
    if found is not None:
        kind = f"{found['kind']}@" if found["mark"] == "@" else found["kind"]
        if kind in ROUTERS:
            row = ROUTERS[kind]
            if not found["argument"] and row.parse in (_widths, _path):
                such_as = f", such as {kind}:0.5" if row.parse is _widths else ""
                raise ConfigError(f"router {text} is incomplete: {row.usage[0]}{such_as}")
            return RouterName(text, kind, row.parse(found["argument"] or ""))
    if not is_class_name(text, ENTRY_POINTS):
        raise ConfigError(f"router {text!r} is unknown; available: {usages()}")
    return RouterName(text, None)


def build_router(text: str, inputs: RouterInputs) -> Router:
    """The router of a name. Raises InputError."""
    name = parse_router(text)
    return _own(name, inputs) if name.kind is None else ROUTERS[name.kind].build(name, inputs)


def build_escalation(router: Router, inputs: RouterInputs) -> Escalation | None:
    """Which items run again under a router: as its W says, or its plan. None: none does. Raises InputError."""
    if isinstance(router, PlanFollower):
        return router if inputs.escalates else None
    if isinstance(router, LearnedRouter):
        return router.escalation
    argument = parse_router(router.name).argument
    passes = argument.passes if isinstance(argument, WidthArgument) else None
    if passes is None:
        return None
    second = width_tuple(passes.second, inputs.shape)
    return FixedEscalation(second, passes.threshold, _as_choice(passes, inputs))


def usages() -> str:
    """How all names are written, for messages; those of installed packages too."""
    ours = [usage for kind in ROUTERS.values() for usage in kind.usage]
    return ", ".join([*ours, *sorted(entry_points(group=ENTRY_POINTS).names), "module:Class"])


# ---- arguments


def _nothing(text: str) -> None:
    if text:
        raise ConfigError(f"argument {text!r} is one too many: this router takes none; routers: {usages()}")


def _widths(text: str) -> WidthArgument:
    passes = two_passes(text)
    first = passes.first if passes else text
    ran = () if first == "random" else read_widths(first)
    second = read_widths(passes.second) if passes else ()
    if ran and second:
        segments = max(len(ran), len(second))
        ran, second = (widths * segments if len(widths) == 1 else widths for widths in (ran, second))
        if len(ran) == len(second) and not is_wider(second, ran):
            raise ConfigError(f"argument {text!r}: the second pass is nowhere wider than the first, so none would run")
    return WidthArgument(first, passes)


def _second_pass(text: str) -> WidthArgument | None:
    """The second pass of a router that chooses the widths of the first."""
    if not text:
        return None
    if not text.startswith("+"):
        raise ConfigError(f"argument {text!r} is no second pass, and the first one's widths are chosen; such as +1@0.4")
    return _widths(f"random{text}")


def _rho(text: str) -> PlanArgument:
    if not text:
        return PlanArgument()
    try:
        rho = float(text)
    except ValueError:
        raise ConfigError(f"router lp: {text!r} is no share of a device's time; such as lp:0.95") from None
    check_rho(rho)
    return PlanArgument(rho)


def _queue(text: str) -> PlanArgument:
    try:
        queue = float(text)
    except ValueError:
        raise ConfigError(f"router lp@: {text!r} is no number of seconds; such as lp@0.1") from None
    if not 0 <= queue < math.inf:
        raise ConfigError(f"router lp@{text}: a queue that may stand has 0 or more seconds; such as lp@0.1")
    return PlanArgument(queue=queue)


def _path(text: str) -> Path:
    if not text:
        raise ConfigError(f"the router needs a folder behind its name; routers: {usages()}")
    return Path(text)


# ---- builders


def _auto(name: RouterName, inputs: RouterInputs) -> Router:
    """The plan, where profiles and accuracies were measured and the network has not too many width tuples for one, else
    the fallback."""
    few = len(inputs.shape.widths) ** inputs.shape.segments <= MOST_TUPLES
    return build_router("lp" if few and inputs.measured and inputs.facts is not None else inputs.fallback, inputs)


def _cost_model(name: RouterName, inputs: RouterInputs) -> Router:
    return CostModel(name.text, _rule(name, inputs), _facts(name, inputs))


def _plan(name: RouterName, inputs: RouterInputs) -> Router:
    facts, accuracy = _facts(name, inputs), inputs.accuracy()
    further = pairs(facts, accuracy) if inputs.escalates else ()
    rho, queue = name.argument or PlanArgument()
    return PlanFollower(lp_plans(facts, accuracy, rho, further, waiting(queue, inputs.reward)), name.text)


def _learned(name: RouterName, inputs: RouterInputs) -> Router:
    return load_router(name.argument, _facts(name, inputs), inputs.accuracy, name.text, inputs.sample)


def _shares_of_run(name: RouterName, inputs: RouterInputs) -> Router:
    from slim_scheduler.record.recorder import read_width_shares  # the record needs pyarrow, which most routers do not

    return JoinShortestQueue(name.text, width_shares(read_width_shares(name.argument)))


def _own(name: RouterName, inputs: RouterInputs) -> Router:
    """A user's router: its class is given the facts, and gets the name under which it was asked for."""
    kind = find_class(name.text, ENTRY_POINTS, {}, ("decide", "chooses_full"))
    facts = _facts(name, inputs)
    try:
        router: Router = kind(facts)
    except Exception as error:  # a router may be anybody's code
        raise ConfigError(f"router {name.text} cannot be made: {type(error).__name__}: {error}") from error
    router.name = name.text
    return router


def _rule(name: RouterName, inputs: RouterInputs) -> WidthRule:
    return width_rule(name.argument.first, inputs.shape)


def _facts(name: RouterName, inputs: RouterInputs) -> RouterFacts:
    if inputs.facts is None:
        raise ConfigError(f"router {name.text} needs every server's profile; make the missing ones with `slim measure`")
    return inputs.facts


def _as_choice(passes: TwoPasses, inputs: RouterInputs) -> Sequence[Choice]:
    """A W of two passes with its measured accuracy, which floors may count on; nothing where that is not known."""
    if passes.first == "random":
        return ()
    first, second = (width_tuple(widths, inputs.shape) for widths in (passes.first, passes.second))
    try:
        return (pair_of(inputs.accuracy(), first, second, passes.threshold),)
    except DataError:
        return ()


ROUTERS = {
    "auto": RouterKind(("auto",), _nothing, _auto),
    "random": RouterKind(("random",), _nothing, lambda name, inputs: RandomRouter(inputs.groups)),
    "round-robin": RouterKind(
        ("round-robin:W",), _widths, lambda name, inputs: RoundRobin(name.text, _rule(name, inputs))
    ),
    "jsq": RouterKind(("jsq:W",), _widths, lambda name, inputs: JoinShortestQueue(name.text, _rule(name, inputs))),
    "jsq@": RouterKind(("jsq@RUN_DIR",), _path, _shares_of_run, ("record.parquet",)),
    "p2c": RouterKind(("p2c:W",), _widths, lambda name, inputs: PowerOfTwo(name.text, _rule(name, inputs))),
    "cost-model": RouterKind(("cost-model:W",), _widths, _cost_model),
    "slackfit": RouterKind(
        ("slackfit", "slackfit:+W@MARGIN"),
        _second_pass,
        lambda name, inputs: SlackFit(_facts(name, inputs), inputs.accuracy(), inputs.deadline, name.text),
    ),
    "reward-greedy": RouterKind(
        ("reward-greedy",),
        _nothing,
        lambda name, inputs: RewardGreedy(_facts(name, inputs), inputs.accuracy(), inputs.reward),
    ),
    "lp": RouterKind(("lp", "lp:RHO"), _rho, _plan),
    "lp@": RouterKind(("lp@SECONDS",), _queue, _plan),
    "ppo": RouterKind(("ppo:POLICY_DIR",), _path, _learned, (MANIFEST, WEIGHTS)),
}
