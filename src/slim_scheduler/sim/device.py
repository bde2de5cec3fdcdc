"""A simulated device: batches take the time the profile says, share the device, and slow it down when it is busy.

It owns time and energy only. Which batches run, on which instances, within how much memory, is the server's
scheduler's business; the host starts what it says and collects the batch that is due.
"""

from math import exp, log1p, sqrt

from numpy.random import Generator

from slim_scheduler.core.messages import DeviceSampled
from slim_scheduler.core.profile import LatencyTable, Profile
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Batch, BatchId, Joules, Seconds, Width
from slim_scheduler.sim.meter import Meter

DRAWS = 1024  # at a time: one by one they would cost as much as a step of the simulation


class _Running:
    """A batch on the device. `remaining` is the time it would still take alone."""

    __slots__ = ("batch_id", "energy_before", "remaining")

    def __init__(self, batch_id: BatchId, remaining: Seconds, energy_before: Joules) -> None:
        self.batch_id = batch_id
        self.remaining = remaining
        self.energy_before = energy_before


class SimulatedDevice:
    """One device under processor sharing.

    A batch's time alone is the profile's, times `slowdown`, times the profile's slowdown curve at the utilisation of
    the moment it starts. Where the profile says how much the times of equal batches differ, and there is an `rng`, it
    is drawn: log-normal, with the measured mean and deviation. While k batches run, each goes at `profile.share(k)`. A
    batch's energy is the device's over its life, divided evenly among the batches that ran at each moment.
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        max_batch: int,
        slowdown: float = 1.0,
        rng: Generator | None = None,
    ) -> None:
        self._profile = profile
        self._shape = shape
        table = LatencyTable(profile, max_batch)
        self._seconds = table.seconds
        self._variation = table.variation
        self._rng = rng if table.varies else None
        self._normals: list[float] = []
        self._slowdown = slowdown
        self._steady = min(profile.slowdown.y) == max(profile.slowdown.y) == 1.0
        self._meter = Meter(profile.power)
        self._running: list[_Running] = []
        self._frozen = False
        self._factor = 1.0
        self._speed = 1.0  # of each running batch
        self._settled: Seconds = 0.0  # up to when `remaining` and the energies are right
        self._energy: Joules = 0.0  # the device's, at _settled
        self._shared_energy: Joules = 0.0  # what one batch would have got had it run all the time
        self.version = 0  # changes whenever an announced completion no longer holds

    # ---- batches

    def start(self, batch: Batch, build_variant: bool, now: Seconds) -> None:
        work = self._seconds(batch.segment, batch.previous_width, batch.width, len(batch.tasks)) * self._slowdown
        if self._rng is not None:
            work *= self._drawn(self._rng, batch)
        if not self._steady:
            work *= self._profile.slowdown(self._meter.utilization(now))
        if build_variant:
            bytes_built = self._shape.variant(batch.segment, batch.previous_width, batch.width)
            work += bytes_built / self._profile.load_bytes_per_s
        self._settle(now)
        self._running.append(_Running(batch.batch_id, work, self._shared_energy))
        self._set_speed(now)

    def _drawn(self, rng: Generator, batch: Batch) -> float:
        """What this batch's time is of the mean time of its like."""
        variation = self._variation(batch.segment, batch.previous_width, batch.width, len(batch.tasks))
        variance = log1p(variation * variation)
        if not self._normals:
            self._normals = rng.standard_normal(DRAWS).tolist()
        return exp(sqrt(variance) * self._normals.pop() - variance / 2)

    def next_done(self) -> Seconds | None:
        """When the next batch will be done if nothing else happens. None while nothing runs."""
        if not self._running or self._frozen:
            return None
        return self._settled + max(0.0, self._soonest().remaining) / self._speed

    def finish(self, now: Seconds) -> tuple[BatchId, Joules]:
        """Takes the batch that is due off the device, with its share of the energy."""
        self._settle(now)
        due = self._soonest()
        self._running.remove(due)
        self._set_speed(now)
        return due.batch_id, self._shared_energy - due.energy_before

    # ---- instances

    def load_time(self, segment: int, width: Width) -> Seconds:
        return self._profile.load_time(self._weights(segment, width))

    def unload_time(self, segment: int, width: Width) -> Seconds:
        return self._weights(segment, width) / self._profile.load_bytes_per_s

    def _weights(self, segment: int, width: Width) -> int:
        return self._shape.weight_bytes[segment][self._shape.index(width)]

    # ---- telemetry

    def sample(self, now: Seconds) -> DeviceSampled:
        """`energy_j` counts from time 0, as a device's own counter would."""
        return DeviceSampled(
            utilization=self._meter.utilization(now),
            power_w=self._meter.power(now),
            energy_j=self._meter.advance(now),
            energy_source=self._profile.power_source,
        )

    def energy(self, now: Seconds) -> Joules:
        return self._meter.advance(now)

    # ---- faults

    def slow(self, factor: float, now: Seconds) -> None:
        """Everything takes `factor` times as long from now on."""
        self._settle(now)
        self._factor = factor
        self._set_speed(now)

    def freeze(self, now: Seconds) -> None:
        """Stops in mid-batch, and keeps what it has."""
        self._settle(now)
        self._frozen = True
        self._set_speed(now)

    def thaw(self, now: Seconds) -> None:
        self._settle(now)
        self._frozen = False
        self._set_speed(now)

    def clear(self, now: Seconds) -> None:
        """Loses all running batches. The device's own meter goes on."""
        self._settle(now)
        self._running.clear()
        self._frozen = False
        self._set_speed(now)

    # ---- sharing

    def _soonest(self) -> _Running:
        running = self._running
        return running[0] if len(running) == 1 else min(running, key=lambda r: (r.remaining, r.batch_id))

    def _settle(self, now: Seconds) -> None:
        """Brings progress and energy up to `now` at the speed that held until now."""
        energy = self._meter.advance(now)
        if self._running and not self._frozen:
            progress = (now - self._settled) * self._speed
            for running in self._running:
                running.remaining -= progress
            self._shared_energy += (energy - self._energy) / len(self._running)
        self._energy = energy
        self._settled = now

    def _set_speed(self, now: Seconds) -> None:
        concurrent = len(self._running)
        if concurrent:
            self._speed = self._profile.share(concurrent) / self._factor
        self._meter.turn(concurrent > 0 and not self._frozen, now)
        self.version += 1
