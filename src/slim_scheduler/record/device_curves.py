"""Utilisation and energy of every server over a run, as curves from the servers' own reports in a record.

Summary, reward and figures ask these curves for block energy (eq. 7's E), integrated energy and the variance of
utilisation. A figure that no report gave is nan here and becomes None in the summary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.types import Seconds, ServerName
from slim_scheduler.record.recorder import Record

Floats = npt.NDArray[np.float64]

# A run ends between two reports, but a server that is long silent may be off: nothing is known of it.
LAST_POWER_HOLDS: Seconds = 1.0


@dataclass(frozen=True)
class DeviceCurves:
    """Per server a step function of utilisation and a piecewise linear one of cumulated energy.

    `times` (knots,) are the moments at which some server's utilisation changed, `utilization` (servers, knots) holds
    from each of them to the next, nan where it is not known. Energy knots are one pair of arrays per server, None
    for a server that reported neither energy nor power.
    """

    servers: tuple[ServerName, ...]
    times: Floats
    utilization: Floats
    energy_knots: tuple[tuple[Floats, Floats] | None, ...]
    source: str  # counter, integrated, estimated or none; several joined with a plus

    @classmethod
    def of(cls, record: Record, ended: Seconds) -> "DeviceCurves":
        """Curves of all servers that ever reported, up to the run's end."""
        reports, changes = record.of("ServerReported"), record.of("ServerChanged")
        names = tuple(sorted(set(reports["server"].to_pylist())))
        at, owner = reports["time"].to_numpy(), reports["server"].to_numpy()
        columns = {name: reports[name].to_numpy() for name in ("utilization", "power_w", "energy_j")}
        gone_at, gone = changes["time"].to_numpy(), changes["server"].to_numpy()
        is_down = ~np.asarray(changes["up"]).astype(bool)
        times = np.unique(np.concatenate([at, gone_at[is_down]]))
        utilization = np.full((len(names), len(times)), np.nan)
        knots = []
        for i, name in enumerate(names):
            mine = owner == name
            lost = gone_at[is_down & (gone == name)]
            # A server that was taken out of service says nothing more: its utilisation is unknown, not 0.
            heard = np.concatenate([at[mine], lost])
            values = np.concatenate([columns["utilization"][mine], np.full(len(lost), np.nan)])
            order = np.argsort(heard, kind="stable")
            last = np.searchsorted(heard[order], times, side="right") - 1
            utilization[i] = np.where(last >= 0, values[order][last], np.nan)
            knots.append(_energy_knots(at[mine], columns["power_w"][mine], columns["energy_j"][mine], ended))
        sources = sorted(set(reports["energy_source"].to_pylist()) - {"none"})
        return cls(names, times, utilization, tuple(knots), "+".join(sources) or "none")

    def energy(self, since: Seconds, until: Seconds) -> float | None:
        """Joules of all devices between two times, idle included. None where a server gave no energy."""
        total = self._energy_between(np.array([since]), np.array([until]))[0]
        return None if np.isnan(total) else float(total)

    def block_energy(self, decided: Floats, finished: Floats, latency: Floats) -> Floats:
        """eq. 7's E = P L: P is the servers' mean power over the block's life, L the latency of its tasks."""
        if not self.servers:
            return np.full(len(latency), np.nan)
        life = np.maximum(finished - decided, 1e-9)
        power = self._energy_between(finished - life, finished) / life / len(self.servers)
        return power * latency

    def variance_at(self, when: Floats) -> Floats:
        """Population variance over the servers of their utilisation (ratios) at some times.

        Where it is not known, the last known value; before all servers have reported, the first. nan without any.
        """
        variance = self._variances()
        known = np.flatnonzero(~np.isnan(variance))
        if not len(known):
            return np.full(len(when), np.nan)
        knot = np.searchsorted(self.times[known], when, side="right") - 1
        return np.asarray(variance[known[np.maximum(knot, 0)]])

    def variance_over_time(self, since: Seconds, until: Seconds) -> dict[str, float | None]:
        """Mean and standard deviation over time of the variance over servers, where it is known."""
        edges = np.clip(np.append(self.times, until), since, until)
        held, variance = np.diff(edges), self._variances()
        known = (held > 0) & ~np.isnan(variance)
        if not known.any():
            return {"mean": None, "sd": None}
        mean = np.average(variance[known], weights=held[known])
        spread = np.average((variance[known] - mean) ** 2, weights=held[known])
        return {"mean": float(mean), "sd": float(np.sqrt(spread))}

    def _variances(self) -> Floats:
        """(knots,): nan until every server has reported once; afterwards over those whose utilisation is known."""
        known = ~np.isnan(self.utilization)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, self.utilization, 0.0).sum(axis=0) / count
        square = np.where(known, (self.utilization - mean) ** 2, 0.0).sum(axis=0) / count
        heard = np.logical_or.accumulate(known, axis=1).all(axis=0) & known.any(axis=0)
        return np.where(heard, square, np.nan)

    def _energy_between(self, since: Floats, until: Floats) -> Floats:
        total = np.full(len(since), 0.0 if self.servers else np.nan)
        for knots in self.energy_knots:
            total += np.interp(until, *knots) - np.interp(since, *knots) if knots else np.nan
        return total


def _energy_knots(at: Floats, power: Floats, energy: Floats, ended: Seconds) -> tuple[Floats, Floats] | None:
    """Cumulated energy at the times of a server's samples: its counter, or its power integrated where it has none."""
    counted, powered = ~np.isnan(energy), ~np.isnan(power)
    if counted.any():
        # A counter that jumps back was reset: nothing is known to have been used in that gap.
        at, used = at[counted], np.cumsum(np.maximum(np.diff(energy[counted], prepend=energy[counted][0]), 0.0))
        last_power = power[counted][-1]
    elif powered.any():
        at, watts = at[powered], power[powered]
        between = (watts[1:] + watts[:-1]) / 2 * np.diff(at)
        used = np.concatenate([[0.0], np.cumsum(between)])
        last_power = watts[-1]
    else:
        return None
    rest = min(ended - at[-1], LAST_POWER_HOLDS)
    if rest > 0 and not np.isnan(last_power):
        at, used = np.append(at, at[-1] + rest), np.append(used, used[-1] + last_power * rest)
    return at, used
