"""Is the first router of a comparison better than the others?

    slim compare -c examples/reference/below.toml --set workload.rate=6094 --seeds 3 --out runs/below-0.7 \
        --routers ppo:examples/reference/policies/patient,lp@0.1,auto,cost-model:0.25/0.25/0.5/0.5,slackfit
    python examples/reference/verdict.py runs/below-0.7

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
    asked = parser.parse_args()
    for folder in asked.comparisons:
        rows = json.loads((folder / "compare.json").read_text())
        print(f"\n{folder.name}\n")
        print("\n".join(table(rows)))
        print()
        print("\n".join(verdict(rows)))


if __name__ == "__main__":
    main()
