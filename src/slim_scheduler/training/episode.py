"""One simulated run that stops at every routing decision, with each block's reward credited to its decision.

The simulator and the dispatcher are the real ones; whoever holds the episode plays the router. Rewards are eq. 7's, of
what ran. A block that an episode's end leaves unfinished is charged for its age. It knows nothing of policies.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.random import Generator

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import BlockFinished, Message, SendBlock, ServerReported, StartBatch
from slim_scheduler.core.reward import block_reward, undone_reward
from slim_scheduler.core.router.base import Escalation
from slim_scheduler.core.types import Batch, Block, Decision, Joules, Seconds, ServerName, WidthTuple
from slim_scheduler.core.view import View
from slim_scheduler.setup.config import Config, WorkloadConfig
from slim_scheduler.setup.workload import generate
from slim_scheduler.sim.host import Simulation

MOST_DRAWS = 100  # of episodes with nothing to decide, in a row


class Charges(Protocol):
    """Told what happens, says what each decision cost others."""

    def decided(self, number: int, view: View, decision: Decision) -> None: ...

    def started(self, server: ServerName, batch: Batch) -> None: ...

    def worth(self, number: int, ran: Sequence[WidthTuple]) -> float | None:
        """What counts instead of eq. 7's centred accuracy for tasks that ran so: their mean; None: that counts."""

    def charged(self, number: int, block: Block) -> float:
        """Reward per task of a block that is over, of which it is told last."""


class Credit(NamedTuple):
    """What a decision earned, per task of its block: eq. 7's reward and its terms, what it cost others, and by how much
    eq. 7's accuracy is above what its widths add by the plan (below 0: by how much it is less)."""

    decision: int
    tasks: int
    reward: float
    accuracy: float
    latency: Seconds
    energy: Joules
    variance: float
    charged: float = 0.0
    hoped: float = 0.0

    @property
    def net(self) -> float:
        """What training credits."""
        return self.reward - self.charged - self.hoped


class Episode:
    """`view` is what the next decision is about, None when the run is over. Decisions are numbered from 1.

    `expected`: a last segment's accuracy is its tuple's measured share of right answers, not each item's outcome.
    Arrivals of the first `backlog` seconds wait at the start. `charges`, where they are given, say what a
    decision costs others. With an `escalation` items run again; then only the answer that is given counts, `expected`
    as the confidence that its margin stands for.
    """

    def __init__(
        self,
        config: Config,
        accuracy: AccuracyTable,
        seed: int,
        *,
        expected: bool = False,
        backlog: Seconds = 0.0,
        charges: Charges | None = None,
        escalation: Escalation | None = None,
    ) -> None:
        self._weights = config.reward
        self._accuracy = accuracy
        self._mean_top1 = accuracy.prior(())
        self._shares: dict[WidthTuple, float] = {}
        self._verdicts: dict[WidthTuple, list[bool]] = {}
        self._expected = expected
        self._charges = charges
        self._escalates = escalation is not None
        self._margins: dict[WidthTuple, list[float]] = {}
        arrivals = generate(config.workload, seed, accuracy.items)
        arrivals = arrivals._replace(times=np.maximum(arrivals.times - backlog, 0.0))
        self._samples = arrivals.samples.tolist()
        self._choice = _Choice()
        self.simulation = Simulation(
            config,
            self._choice.name,
            seed,
            recorder=self,
            arrivals=arrivals,
            router=self._choice,
            escalation=escalation,
            margin=self._margin if self._escalates else None,
        )
        self._devices = [server.device for server in self.simulation.servers.values()]
        self._utilization: dict[ServerName, float | None] = dict.fromkeys(self.simulation.servers)
        self._variance = 0.0
        self._sent: dict[int, tuple[Block, Joules]] = {}
        self._number_of: dict[int, int] = {}  # of the decision that became a block
        self._credits: list[Credit] = []
        self.decisions = 0
        self.view: View | None = self.simulation.run_until_decision()

    def decide(self, decision: Decision) -> int:
        """Takes the decision that is due and runs to the next. Returns the decision's number.

        One that is not allowed is replaced by the dispatcher's fallback, as live.
        """
        self._choice.decision = decision
        self.decisions += 1
        # A decision that is held and then dropped, because its server or its tasks went, never becomes a block.
        self._number_of[self.simulation.dispatcher.blocks + 1] = self.decisions
        if self._charges is not None and self.view is not None:
            self._charges.decided(self.decisions, self.view, decision)
        self.simulation.decide()
        self.view = self.simulation.run_until_decision()
        return self.decisions

    def take_credits(self) -> list[Credit]:
        """What was earned since the last call."""
        credits, self._credits = self._credits, []
        return credits

    def end(self) -> None:
        """Charges every unfinished block for its age, at the accuracy that nobody could have influenced."""
        now = self.simulation.agenda.now
        for block, energy_before in self._sent.values():
            age = sum([now - task.entered for task in block.tasks]) / len(block.tasks)
            energy = self._block_energy(energy_before, now - block.sent_at, age)
            self._earn(block, len(block.tasks), 0, self._mean_top1, age, energy)
        self._sent.clear()

    # ---- what the simulation shows its recorder

    def step(self, machine: str, now: Seconds, event: Message, commands: Sequence[Any]) -> None:
        for command in commands:
            kind = type(command)
            if kind is SendBlock:
                block = command.block
                self._sent[block.block_id] = (block, self._energy() if self._weights.gamma else 0.0)
            elif kind is BlockFinished:
                self._finished(command)
            elif kind is StartBatch and self._charges is not None:
                self._charges.started(machine, command.batch)
            elif kind is ServerReported:
                self._utilization[command.report.server] = command.report.utilization
                self._variance = _variance(list(self._utilization.values()))

    def _finished(self, end: BlockFinished) -> None:
        block, energy_before = self._sent.pop(end.block_id)
        done = len(end.ran)
        if not done:
            self._earn(block, 0, end.lost, 0.0, end.finished_at - end.decided_at, 0.0)
            return
        ran = [widths for _, widths in end.ran]
        accuracy = sum([self._right(item, widths) for item, widths in end.ran]) / done
        energy = self._block_energy(energy_before, end.finished_at - end.decided_at, end.latency)
        self._earn(block, done, end.lost, accuracy, end.latency, energy, ran)

    def _earn(
        self,
        block: Block,
        done: int,
        lost: int,
        accuracy: float,
        latency: Seconds,
        energy: Joules,
        ran: Sequence[WidthTuple] = (),
    ) -> None:
        weights, tasks = self._weights, done + lost
        total = 0.0
        if done:
            total += done * block_reward(weights, accuracy, latency, energy, self._variance, self._mean_top1)
        if lost:
            total += lost * undone_reward(weights, 1, latency, self._mean_top1)
        number = self._number_of.pop(block.block_id)
        charged = hoped = 0.0
        if self._charges is not None:
            worth = self._charges.worth(number, ran)
            if worth is not None:
                hoped = done / tasks * weights.alpha * (accuracy - self._mean_top1 - worth)
            charged = self._charges.charged(number, block)
        earned = Credit(number, tasks, total / tasks, accuracy, latency, energy, self._variance, charged, hoped)
        self._credits.append(earned)

    def _right(self, item: int, widths: WidthTuple) -> float:
        """The prior of the widths so far; of a complete tuple its share of right answers, or this item's outcome."""
        if self._escalates and len(widths) == self._accuracy.segments:
            return self._answer(item, widths)
        if self._expected or len(widths) < self._accuracy.segments:
            share = self._shares.get(widths)
            if share is None:
                share = self._shares[widths] = self._accuracy.prior(widths)
            return share
        verdicts = self._verdicts.get(widths)
        if verdicts is None:
            verdicts = self._verdicts[widths] = self._accuracy.correct(widths).tolist()
        return float(verdicts[self._samples[item]])

    def _answer(self, item: int, widths: WidthTuple) -> float:
        """Of a complete pass: nothing that counts, where the item runs again."""
        if self.simulation.dispatcher.runs_again(item):
            return self._mean_top1
        calibration = self._accuracy.calibration
        if self._expected and calibration is not None:
            return calibration.confidence(widths[-1], self._margin(item, widths))
        return float(self._accuracy.correct(widths)[self._samples[item]])

    def _margin(self, item: int, widths: WidthTuple) -> float:
        margins = self._margins.get(widths)
        if margins is None:
            margins = self._margins[widths] = self._accuracy.margin(widths).tolist()
        return float(margins[self._samples[item]])

    def _energy(self) -> Joules:
        now = self.simulation.agenda.now
        return sum([device.energy(now) for device in self._devices])

    def _block_energy(self, before: Joules, life: Seconds, latency: Seconds) -> Joules:
        """Eq. 7's E = P L: P is the mean over servers, and over the block's life, of their power."""
        if not self._weights.gamma or life <= 0:
            return 0.0
        return (self._energy() - before) / life / len(self._devices) * latency


class _Choice:
    """The router that decides what it was told to."""

    name = "training"
    chooses_full = False
    decision: Decision

    def decide(self, view: View, rng: Generator) -> Decision:
        return self.decision


def _variance(utilization: list[float | None]) -> float:
    """Population variance; 0 until every server has said something."""
    known = [u for u in utilization if u is not None]
    if len(known) < len(utilization):
        return 0.0
    mean = sum(known) / len(known)
    return sum([(u - mean) ** 2 for u in known]) / len(known)


def with_arrivals(draw: Callable[[], Episode], workload: WorkloadConfig) -> Episode:
    """The first drawn episode that has something to decide. Raises ConfigError where hardly any has."""
    for _ in range(MOST_DRAWS):
        episode = draw()
        if episode.view is not None:
            return episode
    raise ConfigError(
        f"{MOST_DRAWS} workloads in a row had nothing to decide: no arrivals, or no server in service; raise "
        f"workload.rate ({workload.rate:g}), workload.duration_s ({workload.duration_s:g}) or training.loads, or have "
        "fewer faults"
    )
