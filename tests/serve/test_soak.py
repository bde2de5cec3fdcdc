"""Guarantee 29: hours of mixed load and abuse, and memory, descriptors and threads stay flat.

`make accept` runs it for eight hours; SLIM_SOAK_S sets another time.
"""

import asyncio
import contextlib
import os
import time

import numpy as np
import psutil
import pytest

from slim_scheduler.client.client import AsyncSlimClient, Constraints, RefusedError
from tests.serve.conftest import Running, serving
from tests.serve.hostile import malformed
from tests.serve.test_hostile_server import send_all
from tests.serve.test_lifecycle import conserved
from tests.serve.wire import call, infer, metrics

SECONDS = float(os.environ.get("SLIM_SOAK_S", 8 * 3600))
SETTLING = 0.2  # of the time, before the first look: caches fill, the allocator finds its size
MIB = 1 << 20


def taken(server: Running) -> tuple[int, int, int]:
    process = psutil.Process(server.process.pid)
    return process.memory_info().rss, process.num_fds(), process.num_threads()


async def mixed_load(server: Running, until: float) -> None:
    """Callers of all kinds, some of whom leave early; malformed requests; swaps of model and policy; scrapes."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((64, 1, 8, 8), dtype=np.float32)
    wishes = (
        Constraints(),
        Constraints(width=0.25),
        Constraints(deadline_ms=5.0),
        Constraints(accuracy_floor=0.9, priority=3),
        Constraints(width=1.0, deadline_ms=1000.0),
    )

    async def caller(client: AsyncSlimClient, seed: int) -> None:
        own = np.random.default_rng(seed)
        while time.monotonic() < until:
            wish = wishes[int(own.integers(len(wishes)))]
            patience = 0.01 if own.random() < 0.05 else 30.0
            with contextlib.suppress(RefusedError, TimeoutError):
                async with asyncio.timeout(patience):
                    await client.infer(images[: int(own.integers(1, 33))], wish)

    async def abuse() -> None:
        seed = 0
        while time.monotonic() < until:
            statuses = await send_all(server.http, list(malformed(seed, 200)), callers=4)
            assert {status for status in statuses if status >= 500} <= {503}
            seed += 1

    async def manage() -> None:
        routers = ("jsq:0.5", "jsq:random", "random", "round-robin:0.25")
        turn = 0
        while time.monotonic() < until:
            path = "/v2/repository/models/digits/"
            wish = {"router": routers[turn % len(routers)]}
            assert (await asyncio.to_thread(call, server.management, "POST", path + "policy", wish))[0] == 200
            assert (await asyncio.to_thread(call, server.management, "POST", path + "load"))[0] == 200
            conserved(await asyncio.to_thread(metrics, server.http))
            turn += 1
            await asyncio.sleep(min(10.0, SECONDS / 20))

    async with AsyncSlimClient(server.url) as client:
        await asyncio.gather(abuse(), manage(), *(caller(client, seed) for seed in range(16)))


@pytest.mark.accept
@pytest.mark.timeout(SECONDS + 600)
def test_hours_of_mixed_load_leave_the_server_as_it_was(tmp_path, images):
    with serving(tmp_path) as server:
        asyncio.run(mixed_load(server, time.monotonic() + SETTLING * SECONDS))
        memory, descriptors, threads = taken(server)
        asyncio.run(mixed_load(server, time.monotonic() + (1 - SETTLING) * SECONDS))
        assert infer(server.http, images)[0] == 200
        after = taken(server)
        assert after[0] - memory < 64 * MIB
        assert after[1] - descriptors < 32
        assert after[2] - threads < 8
        conserved(metrics(server.http))
        assert server.stop() == 0
