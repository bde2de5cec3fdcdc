"""Fits the simulated reference cluster to the paper's table III, and prints what it then predicts beside the paper.

Fitted are the arrival rate, the duration and one efficiency-of-peak factor, nothing else, on the mean block latency,
the completions, and their ratio to those of the efficiency policy (stand-in: `jsq:0.25`, or --efficient NAME). Runs
stop at the last arrival, as the paper's did (`end = "cut"`), and have no warm-up.

    python examples/reference/calibrate.py --scale 0.2        # checks the committed values, on shorter runs
    python examples/reference/calibrate.py --rounds 4         # fits, starting from them
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from derive_profiles import CARDS, EFFICIENCY, derive, read_network

from slim_scheduler.core import messages as m
from slim_scheduler.core.types import WidthTuple
from slim_scheduler.core.view import ServerReport
from slim_scheduler.setup.config import Config, load_config
from slim_scheduler.setup.profiles import write_profile
from slim_scheduler.sim.host import simulate

CLUSTER = Path(__file__).with_name("cluster.toml")
BLOCK_LATENCY, COMPLETIONS, RATIO = 8.979, 250_906, 0.597  # table III, and its completions over table IV's
TOLERANCES = {"block latency": 0.10, "completions": 0.10, "ratio": 0.06}  # relative, relative, absolute
PREDICTIONS = {"block latency sd / mean": 7.302 / 8.979, "energy / latency (W)": 219.2, "utilisation variance": 0.0433}

STEEPNESS = 2.3  # how the ratio goes with speed over load, in logarithms; found by varying both


class Parameters(msgspec.Struct, frozen=True):
    """What is fitted."""

    rate: float  # items per second
    duration: float  # seconds
    efficiency: float


class Tally:
    """Sums over one run; all that the tables need, in a fraction of the record's memory."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, int, float, float]] = []  # latency, tasks, decided, finished
        self.reports: dict[str, list[ServerReport]] = {}
        self.tuples: dict[WidthTuple, int] = {}

    def step(self, machine: str, now: float, event: m.Message, commands: Sequence[Any]) -> None:
        for command in commands:
            if isinstance(command, m.BlockFinished):
                self.blocks.append((command.latency, len(command.ran), command.decided_at, command.finished_at))
            elif isinstance(command, m.ServerReported):
                self.reports.setdefault(machine, []).append(command.report)
            elif isinstance(command, m.Reply) and command.outcome == "answered":
                for item in command.items:
                    self.tuples[item.widths] = self.tuples.get(item.widths, 0) + 1

    def measures(self) -> dict[str, float]:
        """Mean and spread of L, E over L, variance of utilisation; blocks weighted by their tasks."""
        latency, tasks, decided, finished = np.array(self.blocks).T
        mean = np.average(latency, weights=tasks)
        spread = np.sqrt(np.average((latency - mean) ** 2, weights=tasks))
        energy = np.zeros(len(latency))
        for reports in self.reports.values():
            at = np.array([r.made_at for r in reports])
            used = np.array([r.energy_j for r in reports], float)
            energy += np.interp(finished, at, used) - np.interp(decided, at, used)
        energy *= latency / np.maximum(finished - decided, 1e-9) / len(self.reports)
        busy = np.array([[r.utilization for r in reports] for reports in self.reports.values()], float)
        return {
            "completions": float(sum(self.tuples.values())),
            "block latency": float(mean),
            "block latency sd / mean": float(spread / mean),
            "block energy (J)": float(np.average(energy, weights=tasks)),
            "energy / latency (W)": float(np.average(energy, weights=tasks) / mean),
            "utilisation variance": float(busy.var(axis=0).mean()),
            **{f"utilisation of {name}": float(busy[i].mean()) for i, name in enumerate(self.reports)},
        }


def run(config: Config, router: str, parameters: Parameters, seed: int, scale: float = 1.0) -> Tally:
    """One run of the cluster. `scale` shortens it: in overload, latencies and completions shrink with the duration."""
    shape, arch = read_network(Path(config.model.path))
    with tempfile.TemporaryDirectory() as folder:
        for card in CARDS:
            write_profile(derive(card, shape, arch, parameters.efficiency), Path(folder, f"{card.name}.json"))
        servers = tuple(
            msgspec.structs.replace(server, profile=str(Path(folder, f"{server.device}.json")))
            for server in config.servers
        )
        workload = msgspec.structs.replace(
            config.workload, rate=parameters.rate, duration_s=parameters.duration * scale, warmup_s=0.0, end="cut"
        )
        tally = Tally()
        simulate(msgspec.structs.replace(config, servers=servers, workload=workload), router, seed, recorder=tally)
    return tally


def measure(
    config: Config, parameters: Parameters, seeds: Sequence[int], efficient: str, scale: float
) -> dict[str, float]:
    """The random router's mean measures and its ratio to the efficient one, brought back to full length.

    Random runs differ by which instances were loaded before the devices were too busy to load others; the efficient
    router answers what arrives, so that its first seed will do.
    """
    runs = [run(config, "random", parameters, seed, scale).measures() for seed in seeds]
    best = run(config, efficient, parameters, seeds[0], scale).measures()
    found = {name: float(np.mean([one[name] for one in runs])) for name in runs[0]}
    found["ratio"] = found["completions"] / best["completions"]
    found["completions"] /= scale
    found["block latency"] /= scale
    found["block energy (J)"] /= scale
    found["efficient: block latency"] = best["block latency"]
    found["efficient: completions"] = best["completions"] / scale
    return found


def improved(parameters: Parameters, found: dict[str, float]) -> Parameters:
    """The next guess, from how overload behaves.

    The queue grows by what arrives and is not carried, so latency goes with the duration times (1 - ratio) / ratio;
    completions are ratio times arrivals. The ratio falls faster than load over speed, because under overload a
    growing share of the work is early segments of items that never finish.
    """
    growth, wanted = 1 / found["ratio"] - 1, 1 / RATIO - 1
    duration = parameters.duration * BLOCK_LATENCY / found["block latency"] * growth / wanted
    rate = COMPLETIONS / RATIO / duration
    faster = (RATIO / found["ratio"]) ** (1 / STEEPNESS) * rate / parameters.rate
    return Parameters(rate, duration, parameters.efficiency * faster)


def table(found: dict[str, float]) -> str:
    lines = [f"{'':28}{'simulated':>12}{'paper':>12}"]
    for name, paper in {"block latency": BLOCK_LATENCY, "completions": COMPLETIONS, "ratio": RATIO}.items():
        allowed = TOLERANCES[name] * (1 if name == "ratio" else paper)
        verdict = "fitted" if abs(found[name] - paper) <= allowed else "NOT within its tolerance"
        lines.append(f"{name:28}{found[name]:12.4g}{paper:12.4g}  {verdict} (tolerance {allowed:.3g})")
    lines += [f"{name:28}{found[name]:12.4g}{paper:12.4g}  predicted" for name, paper in PREDICTIONS.items()]
    known = {*TOLERANCES, *PREDICTIONS}
    return "\n".join(lines + [f"{name:28}{value:12.4g}" for name, value in found.items() if name not in known])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CLUSTER)
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for slim simulate")
    parser.add_argument("--efficient", default="jsq:0.25", help="router that stands in for the efficiency policy")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of the peaks to start from")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of fitting before the check")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the duration that is simulated")
    parser.add_argument("--seeds", type=int, default=4, help="random runs to average over")
    asked = parser.parse_args()
    config = load_config(asked.config, tuple(asked.set))
    parameters = Parameters(config.workload.rate, config.workload.duration_s, asked.efficiency)
    for round_ in range(asked.rounds + 1):
        found = measure(config, parameters, range(asked.seeds), asked.efficient, asked.scale)
        print(f"rate {parameters.rate:.1f} items/s, duration {parameters.duration:.2f} s, ", end="")
        print(f"efficiency {parameters.efficiency:.5f}\n{table(found)}\n", flush=True)
        if round_ < asked.rounds:
            parameters = improved(parameters, found)


if __name__ == "__main__":
    main()
