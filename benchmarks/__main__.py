"""`make bench`: runs every benchmark, or those named, and merges what they measured into results.json.

python -m benchmarks                 # all
python -m benchmarks core_speed      # one

Each row carries the commit that was measured. Rows from before this was recorded say `stored with COMMIT`: the commit
that brought the row into results.json.
"""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import benchmarks
from slim_scheduler.run.provenance import measured_commit

RESULTS = Path(__file__).parent / "results.json"
CLONE = RESULTS.parents[1]
WRITTEN = ("benchmarks/results.json", "docs/figures")


def main(names: list[str]) -> int:
    known = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    commit = measured_commit(CLONE, *WRITTEN)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in names or known:
        print(f"-- {name}", flush=True)
        for measured, row in importlib.import_module(f"benchmarks.{name}").run().items():
            results[measured] = {**row, "commit": commit}
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
            print(f"{measured}: ratio {ratio}, ours {row['ours']}, theirs {row['theirs']} {row['unit']}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
