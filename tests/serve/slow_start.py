"""`slim serve` whose engine never finishes starting: `python -m tests.serve.slow_start serve ...`."""

import asyncio
import sys

from slim_scheduler.cli import main
from slim_scheduler.engine.engine import SlimEngine


async def start(self: SlimEngine) -> None:
    print("starting", file=sys.stderr, flush=True)
    await asyncio.sleep(3600.0)


if __name__ == "__main__":
    SlimEngine.start = start  # type: ignore[method-assign]
    main()
