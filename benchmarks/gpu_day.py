"""Everything that only a GPU can show, in one run of nine minutes: for the day that there is one.

    python -m benchmarks.gpu_day --out gpu-day                       # on a machine with a GPU
    python -m benchmarks.gpu_day --device cpu --minutes 0.5 --out /tmp/dry    # a dry run of the same steps

Each step has a share of the time and writes its part of OUT/gpu_day.json before the next begins, so that a run that is
cut off keeps what it has. A step that fails is recorded with its error, and the others run. Nothing is downloaded.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slim_scheduler.core.profile import Curve
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.hardware import device_name, versions
from slim_scheduler.engine.measure import measure
from slim_scheduler.engine.probe import open_probe
from slim_scheduler.model import checkpoint
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.model.shape import shape_of
from slim_scheduler.setup.config import config_from
from slim_scheduler.setup.profiles import write_profile

CLONE = Path(__file__).parents[1]
MEMORY = 8 * 2**30
MOST_DIFFERENCE = 1e-2  # of a logit between devices: float32 sums in another order, over four segments
Row = dict[str, Any]


class Day:
    """What every step needs: the device, the network, and where results go."""

    def __init__(self, device: str, model: Path, out: Path, seconds: float) -> None:
        self.device = device
        self.folder = model
        self.model: SlimmableModel = checkpoint.load(model)
        self.shape: ModelShape = shape_of(self.model)
        self.out = out
        self.seconds = seconds

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


def suite(day: Day, seconds: float) -> Row:
    """The tests that ask for a GPU, and those of the device's own logic."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/test_cuda.py"]
    done = subprocess.run(
        command, cwd=CLONE, capture_output=True, text=True, timeout=max(60.0, seconds), check=False, env=os.environ
    )
    return {"exit": done.returncode, "tail": done.stdout.strip().splitlines()[-12:]}


def parity(day: Day, seconds: float) -> Row:
    """The largest difference to the CPU's answers, by segment, over widths, previous widths and batch sizes."""
    device = open_device(day.device, day.model, day.shape, threads=1, max_batch=32, memory_limit=MEMORY)
    generator = torch.Generator().manual_seed(0)
    worst: dict[str, float] = {}
    end, checked = time.monotonic() + seconds, 0
    with device.thread():
        for segment in range(day.shape.segments):
            for width in day.shape.widths:
                instance, reference = device.load(segment, width), day.model.slice(segment, width, "cpu")
                for previous in day.shape.widths if segment else (None,):
                    reference.build_variant(previous)
                    item = (
                        day.shape.item_shape if previous is None else day.model.activation_shape(segment - 1, previous)
                    )
                    x = torch.randn(32, *item, generator=generator)
                    for size in (1, 3, 8, 32):
                        if size > 1 and time.monotonic() > end:
                            break  # every combination is checked at least at one item
                        got = device.to_host(device.run(instance, [(x, row) for row in range(size)], previous))
                        difference = float((got - reference.run(x[:size], previous)).abs().max())
                        worst[str(segment)] = max(worst.get(str(segment), 0.0), difference)
                        checked += 1
                device.unload(instance)
    device.close()
    return {"checked": checked, "worst": worst, "passed": all(v < MOST_DIFFERENCE for v in worst.values())}


def stress(day: Day, seconds: float) -> Row:
    """Two threads replay two instances; every answer is compared. A shared library workspace would corrupt some."""
    device = open_device(day.device, day.model, day.shape, threads=1, max_batch=32, memory_limit=MEMORY)
    last, widths = day.shape.segments - 1, (day.shape.widths[0], day.shape.widths[-1])
    previous = day.shape.widths[-1] if last else None
    item = day.model.activation_shape(last - 1, day.shape.widths[-1]) if last else day.shape.item_shape
    with device.thread():
        instances = [device.load(last, width) for width in widths]
    batches, wrong = [0, 0], [0, 0]

    def compare(i: int) -> None:
        reference = day.model.slice(last, widths[i], "cpu")
        reference.build_variant(previous)
        x = torch.randn(32, *item, generator=torch.Generator().manual_seed(i))
        with device.thread():
            right = reference.run(x, previous)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                got = device.to_host(device.run(instances[i], [(x, row) for row in range(32)], previous))
                batches[i] += 1
                wrong[i] += not torch.allclose(got, right, atol=MOST_DIFFERENCE)

    threads = [threading.Thread(target=compare, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.close()
    return {"batches": sum(batches), "wrong": sum(wrong), "passed": sum(wrong) == 0}


def memory(day: Day, seconds: float) -> Row:
    """What the ledger counts against what torch has allocated, and what is left after everything was unloaded."""
    before = torch.cuda.memory_allocated() if day.cuda else 0
    device = open_device(day.device, day.model, day.shape, threads=1, max_batch=32, memory_limit=MEMORY)
    with device.thread():
        instances = [device.load(s, w) for s in range(day.shape.segments) for w in day.shape.widths]
        counted = device.memory_used
        allocated = torch.cuda.memory_allocated() - before if day.cuda else None
        for instance in instances:
            device.unload(instance)
    left = device.memory_used
    device.close()
    after = torch.cuda.memory_allocated() - before if day.cuda else 0
    return {"counted": counted, "allocated": allocated, "counted_after": left, "allocated_after": after}


def profile(day: Day, seconds: float) -> Row:
    """`slim measure`, one round; the profile is written to OUT."""
    rounds = 1
    taken = measure(day.folder, day.device, rounds=rounds, batches=(1, 8, 32) if seconds < 60 else (1, 2, 4, 8, 16, 32))
    path = day.out / f"profile-{day.device.replace(':', '-')}.json"
    write_profile(taken, path)
    widest = [row for row in taken.latency_rows if row.width == day.shape.widths[-1]]
    return {
        "file": path.name,
        "rows": len(taken.latency_rows),
        "widest_full_batch_s": sum(r.seconds[-1] for r in widest[:1]),
    }


def energy(day: Day, seconds: float) -> Row:
    """Device energy at rest and under load by its own counter, with its source."""
    probe = open_probe(day.device, Curve((0.0, 1.0), (1.25, 3.75)), servers=1)
    rows: Row = {}
    for name, work in (("rest", False), ("load", True)):
        begin, first = time.monotonic(), probe.sample(time.monotonic(), float(work))
        if work:
            stress(day, seconds / 2)
        else:
            time.sleep(seconds / 2)
        took, last = time.monotonic() - begin, probe.sample(time.monotonic(), float(work))
        joules = None if first.energy_j is None or last.energy_j is None else last.energy_j - first.energy_j
        rows[name] = {
            "joules": joules,
            "watts": None if joules is None else joules / took,
            "source": last.energy_source,
        }
    return rows


def throughput(day: Day, seconds: float) -> Row:
    """Items per second through the whole live engine, closed loop, by uniform width."""
    server = {"name": "a", "device": day.device, "vram_budget_gib": MEMORY / 2**30}
    rows: Row = {}
    share = seconds / len(day.shape.widths)
    for width in day.shape.widths:
        tree = {"servers": [server], "model": {"path": str(day.folder)}, "router": {"name": f"jsq:{width:g}"}}
        rows[f"{width:g}"] = round(asyncio.run(_closed_loop(day, tree, share)), 1)
    return {"items_per_s": rows}


async def _closed_loop(day: Day, tree: Row, seconds: float, callers: int = 64) -> float:
    images = np.random.default_rng(0).standard_normal((callers, *day.shape.item_shape), dtype=np.float32)
    done = 0
    async with SlimEngine(config_from(tree), day.model, day.shape) as engine:
        end = time.monotonic() + seconds

        async def call(i: int) -> None:
            nonlocal done
            while time.monotonic() < end:
                await engine.infer(images[i : i + 1])
                done += 1

        await asyncio.gather(*[call(i) for i in range(callers)])
    return done / seconds


# Each step and its share of the time.
STEPS: tuple[tuple[Callable[[Day, float], Row], float], ...] = (
    (suite, 0.15),
    (parity, 0.1),
    (stress, 0.1),
    (memory, 0.05),
    (energy, 0.1),
    (throughput, 0.2),
    (profile, 0.3),
)


def spend(day: Day, skip: frozenset[str] = frozenset()) -> Row:
    """Runs every step; results are on disk after each."""
    results: Row = {
        "device": device_name(day.device),
        "versions": versions(day.device),
        "cuda": torch.version.cuda,
        "steps": {},
    }
    day.out.mkdir(parents=True, exist_ok=True)
    for step, share in STEPS:
        if step.__name__ in skip:
            continue
        began = time.monotonic()
        try:
            row = step(day, share * day.seconds)
        except Exception as error:  # one broken step must not take the others' results with it
            row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-6:]}
        results["steps"][step.__name__] = {**row, "took_s": round(time.monotonic() - began, 1)}
        (day.out / "gpu_day.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{step.__name__}: {json.dumps(results['steps'][step.__name__])}", flush=True)
    return results


def run() -> dict[str, Row]:
    """For `make bench`: nothing, because it is no comparison."""
    return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", type=Path, default=CLONE / "models" / "cifar100")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"gpu_day: torch {torch.__version__} sees no GPU; --device cpu is a dry run", file=sys.stderr)
        return 2
    results = spend(Day(asked.device, asked.model, asked.out, 60 * asked.minutes))
    failed = [name for name, row in results["steps"].items() if "error" in row or row.get("passed") is False]
    print(f"failed: {', '.join(failed)}" if failed else "every step ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
