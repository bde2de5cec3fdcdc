"""How far the simulated gain of batch windows rests on the curves that the profiles assume.

    python examples/reference/sensitivity.py                        # half of the bound, 3 seeds, minutes
    python examples/reference/sensitivity.py --rate 7400 --seeds 5

Beyond the best utilisation of a device (0.92) its power and its slowdown rise with assumed slopes. Both are halved and
doubled here, and every router runs with windows (`batch_window_ms = "auto"`) and without (0) on the same arrivals.
"""

import argparse
from itertools import product
from pathlib import Path

import msgspec

from slim_scheduler.core.profile import Curve, Profile
from slim_scheduler.report.measures import estimate, flatten
from slim_scheduler.report.notes import refuse_raising
from slim_scheduler.run.compare import run_simulated, trials
from slim_scheduler.setup.config import Config, load_config
from slim_scheduler.setup.machines import load_profiles, load_shape
from slim_scheduler.setup.profiles import write_profile

HERE = Path(__file__).parent
SLOPES = (0.5, 1.0, 2.0)
WINDOWS = ("0", '"auto"')
FIGURES = (("energy_per_item_j", "energy"), ("latency_s.p99", "p99"), ("latency_s.mean", "mean latency"))


def steeper(curve: Curve, beyond: float, factor: float) -> Curve:
    """The curve with its slope times `factor` where x is above `beyond`, one of its knots."""
    y = [curve(x) if x <= beyond else curve(beyond) + factor * (curve(x) - curve(beyond)) for x in curve.x]
    return Curve(curve.x, tuple(y))


def with_slopes(profile: Profile, factor: float) -> Profile:
    best = profile.best_utilization
    return msgspec.structs.replace(
        profile, power=steeper(profile.power, best, factor), slowdown=steeper(profile.slowdown, best, factor)
    )


def configured(base: Path, settings: list[str], factor: float, window: str, out: Path) -> Config:
    """The configuration with every server's profile at these slopes, and this window."""
    config = load_config(base, tuple(settings))
    for i, (name, profile) in enumerate(load_profiles(config, load_shape(config)).items()):
        path = out / f"{name}-{factor:g}.json"
        write_profile(with_slopes(profile, factor), path)
        settings = [*settings, f'servers.{i}.profile="{path.resolve()}"', f"servers.{i}.batch_window_ms={window}"]
    return load_config(base, tuple(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=4353.0, help="items/s of below.toml (default: half of the bound)")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of each run, simulated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--routers", default="lp:0.85,cost-model:0.25")
    parser.add_argument("--out", type=Path, default=Path("runs/sensitivity"))
    parser.add_argument("--workers", type=int, default=None)
    asked = parser.parse_args()
    routers = asked.routers.split(",")
    asked.out.mkdir(parents=True, exist_ok=True)
    settings = [f"workload.rate={asked.rate}", f"workload.duration_s={asked.duration}"]
    found: dict[tuple[float, str, str], list[dict[str, float]]] = {}
    for factor, window in product(SLOPES, WINDOWS):
        config = configured(HERE / "below.toml", settings, factor, window, asked.out)
        plan = trials(routers, range(asked.seeds), asked.out / f"{factor:g}-{window.strip(chr(34))}")
        for done in sorted(run_simulated(config, plan, asked.workers), key=lambda done: done.trial.seed):
            refuse_raising(done.summary)
            found.setdefault((factor, window, done.trial.router), []).append(flatten(done.summary))
    print("| slopes beyond the best utilisation | router |", " | ".join(f"{name}, %" for _, name in FIGURES), "|")
    print("|---|---|" + "---|" * len(FIGURES))
    for factor, router in product(SLOPES, routers):
        without, with_window = (found[factor, window, router] for window in WINDOWS)
        cells = []
        for key, _ in FIGURES:
            change = estimate([100 * (b[key] / a[key] - 1) for a, b in zip(without, with_window, strict=True)])
            cells.append(f"{change.mean:+.1f} ± {change.ci95:.1f}")
        print(f"| x {factor:g} | `{router}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
