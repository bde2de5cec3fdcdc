"""`slim serve` that hangs where it is asked to: `python -m tests.serve.hanging_server serve ...`.

A batch with a value above `HANGS` and every load of a model but the first take `LONG` seconds.
"""

import sys
import time
from typing import Any

from slim_scheduler.cli import main
from slim_scheduler.engine.activations import gather
from slim_scheduler.engine.devices.cpu import CpuDevice
from slim_scheduler.engine.engine import SlimEngine

HANGS = 900.0
LONG = 120.0
_run, _from_config = CpuDevice.run, SlimEngine.from_config
_loaded: list[SlimEngine] = []


def _hang() -> None:
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(LONG)


def run(self: CpuDevice, instance: Any, rows: Any, previous_width: Any) -> Any:
    if float(gather(rows, "cpu").max()) > HANGS:
        _hang()
    return _run(self, instance, rows, previous_width)


def from_config(*arguments: Any, **options: Any) -> SlimEngine:
    if _loaded:
        _hang()
    _loaded.append(_from_config(*arguments, **options))
    return _loaded[-1]


if __name__ == "__main__":
    CpuDevice.run = run  # type: ignore[method-assign]
    SlimEngine.from_config = from_config  # type: ignore[method-assign,assignment]
    main()
