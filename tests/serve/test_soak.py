"""Guarantee 29: mixed load, abuse and faults over HTTP and gRPC, and memory, descriptors and threads stay flat.

`make accept` runs it for ten minutes; SLIM_SOAK_S sets another time. The server is as shipped, but for the faults of
one of its servers.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from slim_scheduler.client import AsyncSlimClient, Constraints, RefusedError
from tests.serve import test_hostile_rpc, test_rpc_memory
from tests.serve.conftest import Running, serving
from tests.serve.hostile import malformed
from tests.serve.test_hostile_server import send_all
from tests.serve.test_lifecycle import conserved
from tests.serve.wire import call, infer, metrics

SECONDS = float(os.environ.get("SLIM_SOAK_S", 600))
SETTLING = 0.25  # of the time, before the first look: caches fill, the allocator finds its size
LOOKS = 8
QUIET = 5.0  # seconds without load before every look
MIB = 1 << 20


class Taken:
    """What a process has at one look."""

    def __init__(self, server: Running) -> None:
        process = psutil.Process(server.process.pid)
        self.memory, self.descriptors = process.memory_info().rss / MIB, process.num_fds()
        self.threads = process.num_threads()

    def __str__(self) -> str:
        return f"{self.memory:.0f} MiB, {self.descriptors} descriptors, {self.threads} threads"


async def mixed_load(server: Running, until: float) -> Counter[str]:
    """Callers of all kinds, some of whom leave early; malformed requests; large messages; swaps; scrapes."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((64, 1, 8, 8), dtype=np.float32)
    large = rng.standard_normal((4096, 1, 8, 8), dtype=np.float32)
    ends: Counter[str] = Counter()
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
            chosen = large if own.random() < 0.01 else images[: int(own.integers(1, 33))]
            try:
                async with asyncio.timeout(patience):
                    await client.infer(chosen, wish)
                ends["http answered"] += 1
            except RefusedError as refused:
                ends[f"http {refused.status}"] += 1
            except TimeoutError:
                ends["http left"] += 1

    def request(chosen: np.ndarray) -> object:
        made = pb.ModelInferRequest(model_name="digits")
        made.inputs.add(name="image", datatype="FP32", shape=chosen.shape)
        made.raw_input_contents.append(chosen.tobytes())
        return made

    async def rpc_caller(seed: int) -> None:
        own = np.random.default_rng(seed)
        while time.monotonic() < until:
            packed = grpc.Compression.Gzip if own.random() < 0.2 else None
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}", compression=packed) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                for _ in range(200):
                    if time.monotonic() >= until:
                        break
                    chosen = large if own.random() < 0.02 else images[: int(own.integers(1, 33))]
                    try:
                        await stub.ModelInfer(request(chosen), timeout=0.01 if own.random() < 0.05 else 30.0)
                        ends["grpc answered"] += 1
                    except grpc.aio.AioRpcError as error:
                        ends[f"grpc {error.code().name}"] += 1
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in stub.ModelStreamInfer(iter([request(images[:2])] * 20), timeout=30.0):
                        ends["grpc streamed"] += 1

    async def abuse() -> None:
        seed = 0
        while time.monotonic() < until:
            statuses = await send_all(server.http, list(malformed(seed, 200)), callers=4)
            assert {status for status in statuses if status >= 500} <= {503}
            found = await test_hostile_rpc.send_all(server.grpc, list(test_hostile_rpc.malformed(seed, 100)), callers=4)
            assert set(found) <= test_hostile_rpc.ALLOWED, (seed, found, server.errors[-20:])
            seed += 1

    async def large_messages() -> None:
        body = test_rpc_memory.message(60)
        while time.monotonic() < until:
            found = await asyncio.to_thread(test_rpc_memory.send, server, body, 4, 2, at_once=4)
            ends.update({f"60 MiB {name}": count for name, count in found.items()})
            await asyncio.sleep(5.0)

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
        await asyncio.gather(
            abuse(),
            large_messages(),
            manage(),
            *(caller(client, seed) for seed in range(12)),
            *(rpc_caller(100 + seed) for seed in range(4)),
        )
    return ends


@pytest.mark.accept
@pytest.mark.timeout(SECONDS + 600)
def test_mixed_load_and_faults_leave_the_server_as_it_was(tmp_path, images):
    with serving(tmp_path, module="tests.serve.faulty_server") as server:
        began, ends, looks = time.monotonic(), Counter[str](), []
        for look in range(LOOKS + 1):
            share = SETTLING + (1 - SETTLING) * look / LOOKS
            ends += asyncio.run(mixed_load(server, began + share * SECONDS))
            time.sleep(QUIET)
            looks.append(Taken(server))
            print(f"after {time.monotonic() - began:.0f} s: {looks[-1]}", flush=True)
        print(dict(ends))
        found = metrics(server.http)
        assert sum(value for name, value in found.items() if name.startswith("slim_server_outages_total{")) > 0
        assert ends["http answered"] > 0
        assert ends["grpc answered"] > 0
        assert infer(server.http, images)[0] == 200
        first, last = looks[0], looks[-1]
        assert last.memory - first.memory < 64
        assert last.descriptors - first.descriptors < 32
        assert last.threads - first.threads < 8
        conserved(found)
        assert server.stop() == 0
