"""The learned router: a trained policy that decides with NumPy alone, in training's own encoding.

Each head takes its argmax, of rounded logits, so that every machine decides the same; or, where asked, draws from the
softmax. Exploration (eq. 5) belongs to training and is 0 here. What a policy cannot decide raises RouterError, and the
guard falls back and counts it.
"""

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.random import Generator

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import CheckpointError, RouterError
from slim_scheduler.core.router.base import Escalation, RouterFacts
from slim_scheduler.core.router.learned.encoders import build_encoder, escalation_of
from slim_scheduler.core.router.learned.layout import LAYOUT, Kind
from slim_scheduler.core.router.learned.observation import Encoder, Flags, Floats, Observation
from slim_scheduler.core.router.learned.policy import MASKED, Network, NetworkSizes, build_network, masked, softmax
from slim_scheduler.core.router.learned.situations import Situations
from slim_scheduler.core.router.plan.choices import pairs
from slim_scheduler.core.router.plan.plans import LP_STEPS, RHO, TWICE_PASSES, Plans, lp_plans
from slim_scheduler.core.router.plan.waiting import Waiting
from slim_scheduler.core.types import Decision, Seconds, Width
from slim_scheduler.core.view import View

FORMAT = 1  # of the policy's files
PlanRho = float | Literal["lp"]  # of the plans that a policy sees; "lp": those that `lp` follows
DECIMALS = 4  # float32 products differ between processors in the seventh digit


class PolicyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy was made for. `layout` is the version of the columns it knows; `batch_time` is the unit of its
    times, `plan_rho` and `plan_queue` are of the plans it sees (`Plans`), and where a queue may stand so is `reward`;
    `training` is for readers."""

    format: int = FORMAT
    layout: int = 1  # manifests from before it was counted are of the first
    kind: Kind
    network: str
    segments: int
    widths: tuple[Width, ...]
    groups: tuple[int, ...]
    sizes: NetworkSizes
    batch_time: Seconds
    plan_rho: PlanRho = RHO
    plan_queue: Seconds = 0.0
    sha256: str = ""
    reward: dict[str, Any] = {}
    training: dict[str, Any] = {}

    def waiting(self, name: str) -> Waiting | None:
        """That of its plans. Raises CheckpointError where the weights are not there."""
        if not self.plan_queue:
            return None
        try:
            return msgspec.convert({**self.reward, "queue": self.plan_queue}, Waiting)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{name}: its reward does not say what waiting costs: {error}") from None

    def check_fits(self, facts: RouterFacts, name: str) -> None:
        """Raises CheckpointError where the policy is for another network or other choices."""
        shape = facts.shape
        if self.layout != LAYOUT:
            raise CheckpointError(
                f"{name} knows observations of layout {self.layout}; this version makes layout {LAYOUT}; "
                "train one with `slim train`"
            )
        for what, mine, theirs in (
            ("network", self.network, shape.name),
            ("segments", self.segments, shape.segments),
            ("widths", self.widths, shape.widths),
            ("groups", self.groups, facts.groups),
        ):
            if mine != theirs:
                raise CheckpointError(
                    f"{name} is for {what} {mine}, but this run has {theirs}; train one with `slim train`"
                )


class LearnedRouter:
    """A policy and the encoder of its run. With `situations`, the same one is not looked at twice. `escalation`: which
    items run again, where the policy has learned with second passes."""

    chooses_full = False

    def __init__(
        self,
        name: str,
        network: Network,
        encoder: Encoder,
        widths: Sequence[Width],
        groups: Sequence[int],
        sample: bool = False,
        situations: Situations | None = None,
        escalation: Escalation | None = None,
    ) -> None:
        self.name = name
        self._network = network
        self._encoder = encoder
        self._widths = tuple(widths)
        self._groups = tuple(groups)
        self._sample = sample
        self._situations = situations
        self.escalation = escalation

    def decide(self, view: View, rng: Generator) -> Decision:
        situations = self._situations
        key = None if situations is None else situations.key(view)
        if situations is None or key is None:
            return self._look(view, rng)
        decision = situations.decided(key)
        if decision is None:
            decision = self._look(view, rng)
            situations.keep(key, decision)
        else:
            self._encoder.took(view, decision)
        return decision

    def _look(self, view: View, rng: Generator) -> Decision:
        observation = self._encoder.encode(view)
        heads = self._network.forward(observation)
        _, _, server_mask, width_mask, group_mask = observation
        pick = _draw if self._sample else _argmax
        decision = Decision(
            self._encoder.names[pick(heads.server, server_mask, rng)],
            self._widths[pick(heads.width, width_mask, rng)],
            self._groups[pick(heads.group, group_mask, rng)],
        )
        self._encoder.took(view, decision)
        return decision


def learned_router(
    manifest: PolicyManifest,
    parameters: Mapping[str, Floats],
    facts: RouterFacts,
    accuracy: Callable[[], AccuracyTable],
    name: str,
    sample: bool = False,
) -> LearnedRouter:
    """The router of a trained policy in a run with these facts.

    Raises CheckpointError for a policy of another network. One of kind `paper` that knows another number of servers
    is built, and then raises RouterError at each decision.
    """
    manifest.check_fits(facts, name)
    network = build_network(manifest.kind, parameters)
    encoder = build_encoder(
        manifest.kind,
        facts,
        manifest.batch_time,
        lambda: policy_plans(
            facts, accuracy(), manifest.plan_rho, manifest.kind == "escalating", manifest.waiting(name)
        ),
    )
    if manifest.kind == "paper" and len(facts.servers) != manifest.sizes.servers:
        encoder = _OtherCluster(encoder, manifest)
    # A paper's state counts the completed items and a plan what was sent: no situation of theirs comes twice.
    situations = Situations(facts, manifest.batch_time) if manifest.kind == "extended" and not sample else None
    return LearnedRouter(
        name, network, encoder, manifest.widths, manifest.groups, sample, situations, escalation_of(encoder)
    )


def policy_plans(
    facts: RouterFacts, accuracy: AccuracyTable, rho: PlanRho, escalates: bool, waiting: Waiting | None = None
) -> Plans:
    """The plans that a policy sees. Raises InputError, for second passes of a table without margins."""
    further = pairs(facts, accuracy) if escalates else ()
    if rho == "lp":
        return lp_plans(facts, accuracy, None, further, waiting)
    if not escalates:
        return Plans(facts, accuracy, rho, waiting=waiting)
    return Plans(facts, accuracy, rho, further, LP_STEPS, usual_passes=TWICE_PASSES, waiting=waiting)


class _OtherCluster:
    """Stands for the encoder of a `paper` policy in a cluster of another size."""

    def __init__(self, encoder: Encoder, manifest: PolicyManifest) -> None:
        self.names = encoder.names
        self.layout = encoder.layout
        self._trained_for = manifest.sizes.servers

    def encode(self, view: View) -> Observation:
        raise RouterError(
            f"this policy was trained for {self._trained_for} servers, but there are {len(self.names)}; "
            "an `extended` policy takes any number"
        )

    def took(self, view: View, decision: Decision) -> None: ...


def _argmax(logits: Floats, mask: Flags, rng: Generator) -> int:
    """The first of the largest rounded logits among what may be chosen."""
    values = masked(logits, mask)
    highest = max(values)
    if isnan(sum(values)):
        raise RouterError("the policy gave NaN")
    if highest == MASKED:
        raise RouterError("the policy has nothing it may choose")
    near = highest - 2 * 10**-DECIMALS  # of others, no rounding makes the largest
    close = [i for i, value in enumerate(values) if value >= near]
    return close[0] if len(close) == 1 else max(close, key=lambda i: (round(values[i], DECIMALS), -i))


def _draw(logits: Floats, mask: Flags, rng: Generator) -> int:
    probabilities = softmax(np.round(logits, DECIMALS), mask)
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    if not cumulative[-1] > 0:
        raise RouterError("the policy gave NaN")
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
