"""The choice with the highest predicted eq. 7: the one-step optimum of the model that a router can know.

The model: latency is age, link, backlog, load and run time from the profile; power and utilisation are the reported
ones, moved on to the block's end by what is known to be queued; a wider instance that is loaded runs instead of the
width asked for, as Algorithm 1 has it. It sees one block and nothing of what comes after.
"""

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from slim_scheduler.core.accuracy import AccuracyPrior, Expectation
from slim_scheduler.core.reward import RewardWeights, block_reward
from slim_scheduler.core.router.base import RouterFacts
from slim_scheduler.core.router.costs import choices_of, least_outstanding, server_costs
from slim_scheduler.core.types import Decision, Seconds, Width
from slim_scheduler.core.view import Head, ServerView, View

UTILIZATION_WINDOW: Seconds = 0.5  # what a device's utilisation looks back on (method, section 3)

Floats = npt.NDArray[np.float64]


class RewardGreedy:
    """Scores every (server, width, group) at once; ties go to the larger group, then the earlier server, narrower."""

    chooses_full = False

    def __init__(self, facts: RouterFacts, accuracy: AccuracyPrior, weights: RewardWeights) -> None:
        self.name = "reward-greedy"
        shape = facts.shape
        self._shape = shape
        self._weights = weights
        self._costs = server_costs(facts)
        self._power = {name: server.profile.power for name, server in facts.servers.items()}
        self._groups = tuple(sorted(set(facts.groups), reverse=True))
        expectation = Expectation(shape, accuracy)
        self._mean_top1 = expectation.mean
        self._top1: dict[tuple[int, Width | None], Floats] = {}
        self._run: dict[tuple[str, int, Width | None], Floats] = {}  # (widths, batch)
        for segment in range(shape.segments):
            for previous in shape.widths if segment else (None,):
                self._top1[segment, previous] = np.array(
                    [expectation.top1(segment, previous, (width,)) for width in shape.widths]
                )
                for name, cost in self._costs.items():
                    self._run[name, segment, previous] = np.array(cost.runs(segment, previous)[1:]).T

    def decide(self, view: View, rng: Generator) -> Decision:
        choices = choices_of(self._costs, view)
        if not choices:
            return Decision(least_outstanding(view), view.head.widths[0], view.head.waiting)
        rewards, widths = self.rewards(view, choices)  # (groups, servers, widths)
        group, server, width = np.unravel_index(int(np.argmax(rewards)), rewards.shape)
        return Decision(choices[server].name, widths[width], self._groups[group])

    def rewards(self, view: View, choices: list[ServerView]) -> tuple[Floats, tuple[Width, ...]]:
        """Predicted eq. 7 per task for every group, server of `choices` and allowed width."""
        head, segment, previous = view.head, view.head.segment, view.head.previous_width
        up = [server for server in view.servers.values() if server.up and server.name in self._costs]
        backlog = {server.name: self._costs[server.name].backlog(server) for server in up}
        own = np.zeros((len(self._groups), len(choices), len(head.widths)))  # device time of the block itself
        wait = np.zeros_like(own)  # until it is back, from now
        top1 = np.zeros(own.shape[1:])
        for i, server in enumerate(choices):
            cost = self._costs[server.name]
            most = server.takes(min(head.waiting, cost.server.max_batch))
            counts = [min(group, most) for group in self._groups]
            runs = [self._runs_at(server, head, width) for width in head.widths]
            columns = [self._shape.index(width) for width in runs]
            loads = cost.loads(server.report, segment)
            load = np.array([loads[column] for column in columns])
            link = np.array([cost.transfer(head, count) for count in counts])
            top1[i] = self._top1[segment, previous][columns]
            run = self._run[server.name, segment, previous][np.ix_(columns, [count - 1 for count in counts])]
            run = server.pace * run
            own[:, i] = run.T
            wait[:, i] = run.T + link[:, None] + load + backlog[server.name]
        latency = head.age + wait
        chosen = np.array([[server.name == choice.name for server in up] for choice in choices])
        busy = np.array([backlog[server.name] for server in up]) + own[..., None] * chosen[:, None, :]
        now = np.array([_utilization(server, backlog[server.name]) for server in up])
        then = _utilization_at_end(now, busy, wait[..., None])
        watts = [self._watts(server, (now[j] + then[..., j]) / 2) for j, server in enumerate(up)]
        power = np.mean(watts, axis=0)
        return block_reward(
            self._weights,
            np.broadcast_to(top1, latency.shape),
            latency,
            power * latency,
            then.var(axis=-1),
            self._mean_top1,
        ), head.widths

    def _runs_at(self, server: ServerView, head: Head, width: Width) -> Width:
        """The width of the instance that will serve: the narrowest loaded one that may, else one to be loaded."""
        exact = head.constraints is not None and head.constraints.widths is not None
        upgrade = 0.0 if exact else self._costs[server.name].server.max_upgrade
        widest = self._shape.widest(width, upgrade)
        loaded = server.report.instances if server.report is not None else ()
        there = (i.width for i in loaded if i.segment == head.segment and i.count)
        return min((w for w in there if width <= w <= widest), default=width)

    def _watts(self, server: ServerView, utilization: Floats) -> Floats:
        curve = self._power[server.name]
        return np.asarray(np.interp(utilization, curve.x, curve.y))


def _utilization(server: ServerView, backlog: Seconds) -> float:
    """The reported figure; a server that has said nothing is taken for busy if it has work."""
    if server.report is not None and server.report.utilization is not None:
        return server.report.utilization
    return 1.0 if backlog > 0 else 0.0


def _utilization_at_end(now: Floats, busy: Floats, wait: Floats) -> Floats:
    """Utilisation when the block is back: what the window still holds of the past, and the queued work in it."""
    past = np.maximum(UTILIZATION_WINDOW - wait, 0.0) * now
    future = np.maximum(np.minimum(busy, wait) - np.maximum(wait - UTILIZATION_WINDOW, 0.0), 0.0)
    return np.asarray((past + future) / UTILIZATION_WINDOW)
