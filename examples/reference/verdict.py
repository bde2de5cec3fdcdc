"""Is the first router of a comparison better than the others? Prints the tables of docs/reference-cluster.md.

    slim compare -c examples/reference/below-256.toml --set workload.rate=6094 --seeds 10 --seed 100 \
        --out runs/below-0.7 \
        --routers ppo:examples/reference/policies/responsive,lp,cost-model:0.25,cost-model:0.5,slackfit,reward-greedy
    python examples/reference/verdict.py runs/below-0.7

Heuristics take an hour and change seldom. `--against` adds rows that were computed before, on the same seeds and by the
same rules: those of results/ are of the seeds 100 to 109, runs of 10 s at 0.5 and 0.7 and of 60 s elsewhere.

    slim compare -c examples/reference/below-256.toml --set workload.rate=8271 --set reward.beta=0.05 \
        --seeds 10 --seed 100 --out runs/below-0.95 --routers ppo:examples/reference/policies/responsive
    python examples/reference/verdict.py runs/below-0.95 --against examples/reference/results/below-0.95.json

For item p99 and device energy per item it takes the best of the others that are at least as accurate; for the reward
the best of all. Differences are paired by seed, relative to the other's mean, with their 95 % interval.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from slim_scheduler.report.measures import Estimate, Measure, estimate

SHOWN = (
    Measure("accuracy_arrived", "accuracy", "%", 100, 2),
    Measure("latency_s.mean", "mean", "ms", 1000, 0),
    Measure("latency_s.p99", "p99", "ms", 1000, 0),
    Measure("energy_per_item_j", "energy", "mJ", 1000, 1),
    Measure("reward.mean", "reward", digits=4),
)
LOWER_IS_BETTER = ("latency_s.p99", "energy_per_item_j")
FAILED = float("inf")


def runs(row: dict[str, Any], metric: str) -> list[float | None]:
    return list(row["metrics"][metric]["runs"])


def mean(row: dict[str, Any], metric: str) -> float:
    """Of all runs; a router that answered nothing has no latency, which is infinite."""
    values = runs(row, metric)
    return FAILED if None in values else sum(v for v in values if v is not None) / len(values)


def relative(first: dict[str, Any], other: dict[str, Any], metric: str) -> Estimate:
    """Paired difference as a share of the other's mean."""
    scale = abs(mean(other, metric))
    pairs = zip(runs(first, metric), runs(other, metric), strict=True)
    return estimate([(a - b) / scale for a, b in pairs if a is not None and b is not None])


def percent(difference: Estimate) -> str:
    spread = "" if difference.ci95 is None else f" ± {100 * difference.ci95:.1f}"
    return f"{100 * difference.mean:+.1f}{spread} %"


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    first, others = rows[0], rows[1:]
    accurate = [row for row in others if mean(row, "accuracy_arrived") >= mean(first, "accuracy_arrived")]
    lines = []
    for metric in LOWER_IS_BETTER:
        best = min(accurate, key=lambda row: mean(row, metric), default=None)
        name = next(measure.title for measure in SHOWN if measure.key == metric)
        if best is None:
            lines.append(f"{name}: nobody else is as accurate")
        elif mean(best, metric) == FAILED:
            lines.append(f"{name}: who is as accurate did not keep up")
        else:
            lines.append(f"{name}: {percent(relative(first, best, metric))} against {best['router']}")
    best = max(others, key=lambda row: mean(row, "reward.mean"))
    lines.append(f"reward: {percent(relative(first, best, 'reward.mean'))} against {best['router']}")
    return lines


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| router | " + " | ".join(measure.heading for measure in SHOWN) + " |"]
    lines.append("|---" * (len(SHOWN) + 1) + "|")
    for row in rows:
        values = [(measure, mean(row, measure.key)) for measure in SHOWN]
        cells = [measure.show(None if value == FAILED else value) for measure, value in values]
        lines.append(f"| {row['router']} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="+", type=Path, help="folders that `slim compare` wrote")
    parser.add_argument("--against", type=Path, help="more rows, of the same seeds: a file like those in results/")
    asked = parser.parse_args()
    more = json.loads(asked.against.read_text()) if asked.against else []
    for folder in asked.comparisons:
        rows = json.loads((folder / "compare.json").read_text()) + more
        if len(counts := {len(runs(row, "reward.mean")) for row in rows}) > 1:
            raise SystemExit(f"{folder}: rows of {sorted(counts)} seeds cannot be paired; run the same seeds for all")
        print(f"\n{folder.name}\n")
        print("\n".join(table(rows)))
        print()
        print("\n".join(verdict(rows)))


if __name__ == "__main__":
    main()
