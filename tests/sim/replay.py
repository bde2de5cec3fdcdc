"""Replays one seed of the fault run and prints its last steps: `python -m tests.sim.replay SEED [STEPS]`."""

import sys
import tempfile
import traceback
from pathlib import Path

from tests.sim.fault_run import fault_run


def main(seed: int, steps: int) -> int:
    log: list[str] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            watcher = fault_run(seed, Path(folder), log)
            outcomes = [outcome.value for outcome in watcher.outcomes.values()]
        except Exception:
            failed = True
            traceback.print_exc()
    print(*log[-steps:], sep="\n")
    if not failed:
        print(f"seed {seed} holds:", {name: outcomes.count(name) for name in sorted(set(outcomes))})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20))
