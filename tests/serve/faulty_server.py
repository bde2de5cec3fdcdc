"""`slim serve` whose second server fails now and then: `python -m tests.serve.faulty_server serve ...`.

In every `CYCLE`, that server's device raises for a while, and says for another while that it has no memory for more
than one item. Everything else is as it is shipped.
"""

import time
from typing import Any

from slim_scheduler.cli import main
from slim_scheduler.core.errors import OutOfMemoryError
from slim_scheduler.engine.devices.cpu import CpuDevice

CYCLE, BROKEN, SCARCE = 20.0, (5.0, 8.0), (12.0, 14.0)  # seconds
_opened: list[int] = []
_run = CpuDevice.run


def run(self: CpuDevice, instance: Any, rows: Any, previous_width: Any) -> Any:
    if id(self) not in _opened:
        _opened.append(id(self))
    if _opened.index(id(self)) % 2:
        now = time.monotonic() % CYCLE
        if BROKEN[0] <= now < BROKEN[1]:
            raise RuntimeError("the device is broken")
        if SCARCE[0] <= now < SCARCE[1] and len(rows) > 1:
            raise OutOfMemoryError("the device has no memory for more than one item")
    return _run(self, instance, rows, previous_width)


if __name__ == "__main__":
    CpuDevice.run = run  # type: ignore[method-assign]
    main()
