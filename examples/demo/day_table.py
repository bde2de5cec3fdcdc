"""README's table of the demo's day, from runs that are stored by seed in results/day.json.

    slim demo --seeds 3 --out runs/demo
    P=runs/demo/profile.json
    slim compare -c examples/demo/day.toml --seeds 3 --out runs/demo-simulated \\
        --routers cost-model:1,cost-model:0.25,lp,ppo:examples/demo/policies/adaptive \\
        --set servers.0.profile=$P --set servers.1.profile=$P --set servers.2.profile=$P
    python examples/demo/day_table.py --store runs/demo runs/demo-simulated    # and README's table from them
    python examples/demo/day_table.py                                          # README's table from what is stored

The profile that the live runs had is kept beside them, in results/profile.json.
"""

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slim_scheduler.report.measures import Measure, estimate, flatten
from slim_scheduler.run.provenance import measured_commit, versions
from slim_scheduler.run.runs import write_json

HERE = Path(__file__).parent
CLONE = HERE.parents[1]
STORED = HERE / "results"
README = CLONE / "README.md"
MARKED = re.compile(r"(<!-- day -->\n).*?(<!-- /day -->)", re.DOTALL)

ROUTERS = {
    "cost-model:1": "`cost-model:1`, fixed and wide",
    "cost-model:0.25": "`cost-model:0.25`, fixed and narrow",
    "lp": "`lp`, a heuristic that plans",
    "ppo:examples/demo/policies/adaptive": "learned (PPO, trained in simulation)",
}
SHOWN = (
    Measure("accuracy_arrived", "accuracy", "%", 100, 2),
    Measure("latency_s.p99", "p99", "ms", 1000, 0),
)
KEPT = (*[m.key for m in SHOWN], "latency_s.mean", "latency_s.p50", "throughput_items_s", "generator_lag_s.p99")
MODES = ("live", "simulated")


def rows(folder: Path, commit: str) -> list[dict[str, Any]]:
    """The runs in the folder of a comparison, by router and seed."""
    found = [json.loads(path.read_text()) for path in folder.glob("*/seed-*/summary.json")]
    if not found:
        raise SystemExit(f"{folder} has no runs; `slim demo --out` and `slim compare --out` write them")
    if others := sorted({run["router"] for run in found} ^ set(ROUTERS)):
        raise SystemExit(f"{folder} and the table differ in routers: {', '.join(others)}")
    kept = [
        {
            "mode": "live" if run["mode"] == "live" else "simulated",
            "router": run["router"],
            "seed": run["seed"],
            "commit": commit,
            "metrics": {key: flatten(run).get(key) for key in KEPT},
        }
        for run in found
    ]
    return sorted(kept, key=lambda row: (list(ROUTERS).index(row["router"]), row["seed"]))


def table(stored: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line per router, means with their 95 % intervals."""
    heads = [f"{mode}: {measure.title} ({measure.unit})" for mode in MODES for measure in SHOWN]
    lines = ["| " + " | ".join(["router", *heads]) + " |", "|---" * (len(heads) + 1) + "|"]
    for router, said in ROUTERS.items():
        cells = [said]
        for mode in MODES:
            runs = [row["metrics"] for row in stored if (row["mode"], row["router"]) == (mode, router)]
            for measure in SHOWN:
                value = estimate([run[measure.key] for run in runs])
                cells.append(measure.show(value.mean, value.ci95))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str, stored: Path = STORED) -> str:
    """README with the table of what is stored."""
    made = table(json.loads((stored / "day.json").read_text())["runs"])
    return MARKED.sub(lambda found: f"{found[1]}{made}{found[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", nargs=2, type=Path, metavar=("LIVE", "SIMULATED"), help="folders with the runs")
    parser.add_argument("--commits", nargs=2, help="those of the two, where they are not what is checked out here")
    asked = parser.parse_args()
    if asked.store:
        live, simulated = asked.store
        commits = asked.commits or [measured_commit(CLONE)] * 2
        runs = [*rows(live, commits[0]), *rows(simulated, commits[1])]
        command = "slim demo --seeds 3, and slim compare with its profile (day_table.py)"
        made_with = versions("slim-scheduler", "numpy", "torch")
        STORED.mkdir(exist_ok=True)
        write_json(STORED / "day.json", {"command": command, "versions": made_with, "runs": runs})
        shutil.copy(live / "profile.json", STORED / "profile.json")
    README.write_text(page(README.read_text()))


if __name__ == "__main__":
    main()
