"""How long one server's batches take, beside what its profile says: its *pace*.

A profile is measured before, alone and warm; a serving machine shares its caches, its clock and its cores. So each
server compares the batches that it runs with its profile, and routers reckon with the profile times the pace.
"""

from math import exp, inf, log

from slim_scheduler.core.profile import Profile
from slim_scheduler.core.server.window import BatchTime
from slim_scheduler.core.types import Batch, BatchId, Seconds

MEMORY: Seconds = 1.0  # of predicted work, over which batches are averaged
STEP = 1.1  # between the paces that are told: a change of them is looked at at once
STAYS = 0.75  # of a step that the average may be away from what was told
MOST = 40  # steps: 45 times as slow, or as fast
FORGOTTEN: Seconds = 20.0  # without a batch, over which what was seen is forgotten: else who is avoided stays so
STALL = 4.0  # times what is expected that one batch counts at most


class Pace:
    """The pace of one server, in steps; 1 until its batches say otherwise.

    `batch_time` is its profile's, with the server's slowdown. A batch is compared by the share of the device that it
    had (`Profile.share`), at the utilisation of its end (`Profile.slowdown`); one that built something is not.
    """

    def __init__(self, batch_time: BatchTime, profile: Profile) -> None:
        self._batch_time = batch_time
        self._profile = profile
        self._begun: dict[BatchId, Seconds | None] = {}  # of running batches, the share that there had been
        self._shared: Seconds = 0.0  # what a batch would have had of the device had it run all the time
        self._settled: Seconds = 0.0  # up to when that is so
        self._took = self._predicted = MEMORY
        self._slowdown = (0.0, profile.slowdown(0.0))  # a utilisation and what it does: it is sampled now and then
        self._take_steps(0)

    def began(self, batch: Batch, builds: bool, now: Seconds) -> None:
        self._settle(now)
        self._begun[batch.batch_id] = None if builds else self._shared

    def failed(self, batch: Batch, now: Seconds) -> None:
        self._settle(now)
        del self._begun[batch.batch_id]

    def ran(self, batch: Batch, utilization: float | None, now: Seconds) -> None:
        self._settle(now)
        begun = self._begun.pop(batch.batch_id)
        if begun is None:
            return
        predicted = self._batch_time(batch.segment, batch.previous_width, batch.width, len(batch.tasks))
        predicted *= self._slowed(utilization or 0.0)
        left = exp(-predicted / MEMORY)
        self._took = left * self._took + min(self._shared - begun, STALL * self.value * predicted)
        self._predicted = left * self._predicted + predicted
        self._tell()

    def at(self, now: Seconds) -> float:
        """The pace that a report tells."""
        self._settle(now)
        return self.value

    def _settle(self, now: Seconds) -> None:
        passed, self._settled = now - self._settled, now
        if self._begun:
            self._shared += passed * self._profile.share(len(self._begun))
        elif self._took != self._predicted:
            kept = exp(-passed / FORGOTTEN)
            self._took = MEMORY + kept * (self._took - MEMORY)
            self._predicted = MEMORY + kept * (self._predicted - MEMORY)
            self._tell()

    def _slowed(self, utilization: float) -> float:
        if utilization != self._slowdown[0]:
            self._slowdown = utilization, self._profile.slowdown(utilization)
        return self._slowdown[1]

    def _tell(self) -> None:
        average = self._took / self._predicted
        if not self._stays_from <= average <= self._stays_to:
            self._take_steps(min(MOST, round(log(max(STEP**-MOST, average)) / log(STEP))))

    def _take_steps(self, steps: int) -> None:
        self.value = STEP**steps
        self._stays_from = STEP ** (steps - STAYS) if steps > -MOST else 0.0
        self._stays_to = STEP ** (steps + STAYS) if steps < MOST else inf
