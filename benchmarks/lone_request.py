"""What a batch window costs a request that comes alone: `batch_window_ms` "auto" against 0, in turns.

Two engines live side by side, each with the demo's three servers, four times as slow, and the CIFAR-100 network at
width 0.5. One request at a time goes to one of them, the next one to the other, with a pause between; the first of a
pair changes every time. The row says the medians, and the median of the paired differences with its 95 % interval
(bootstrapped): a shared machine is now and then late by more than a window is long, which tells nothing of windows.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.live_window import CLONE, ROUTER, measured, slower, with_window
from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.hardware import device_name
from slim_scheduler.setup.config import load_config

PAIRS = 400
AT_FIRST = 10  # not counted: instances load
PAUSE_S = 0.1  # more than the longest automatic window
DRAWS = 2000


def run() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        settings = (f"model.path={CLONE / 'models' / 'cifar100'}",)
        config = live_config(load_config(CLONE / "examples" / "demo" / "cluster.toml", settings))
        config = measured(slower(config), Path(name) / "cpu.json")
        config = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, name=ROUTER))
        times = asyncio.run(_pairs([with_window(config, window) for window in ("auto", 0.0)]))
    change = times[:, 0] - times[:, 1]
    drawn = np.random.default_rng(0).choice(change, (DRAWS, len(change)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    ours, theirs = np.median(times, axis=0)
    return {
        "lone_request": {
            "ratio": round(float(ours / theirs), 4),
            "ours": round(float(ours), 3),
            "theirs": round(float(theirs), 3),
            "unit": "ms, windows against none",
            "difference": round(float(np.median(change)), 3),
            "difference_from_to": [round(float(low), 3), round(float(high), 3)],
            "mean_difference": round(float(change.mean()), 3),
            "pairs": len(change),
            "versions": {"torch": str(torch.__version__), "machine": device_name("cpu"), "router": ROUTER},
        }
    }


async def _pairs(configs: list[Any]) -> Any:
    """Milliseconds of each request, (pairs, engines)."""
    engines = [SlimEngine.from_config(config) for config in configs]
    image = np.random.default_rng(0).integers(0, 256, (1, *engines[0].shape.item_shape), dtype=np.uint8)
    times = np.zeros((AT_FIRST + PAIRS, len(engines)))
    async with engines[0], engines[1]:
        for pair in range(len(times)):
            for which in (0, 1) if pair % 2 else (1, 0):
                await asyncio.sleep(PAUSE_S)
                began = time.perf_counter()
                await engines[which].infer(image)
                times[pair, which] = 1e3 * (time.perf_counter() - began)
    return times[AT_FIRST:]
