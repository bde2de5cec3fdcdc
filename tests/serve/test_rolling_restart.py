"""Guarantee 21 over a restart: one server follows another under load, and no request is left without an answer."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slim_scheduler.client.client import infer_body
from slim_scheduler.client.wire import ConnectionLostError, HttpConnection, request_head
from slim_scheduler.serve.http.listener import QUIET_S
from tests.serve.conftest import Running, serving

CLOSED_LOOP = 48
RATE = 60.0  # requests per second in open loop, beside them
REUSED_S = QUIET_S / 2  # a kept connection that rests longer may be closed by the server while a request is under way


class Fleet(msgspec.Struct):
    """Who balances load: new connections go to `port`; kept ones are used for as long as they are open."""

    port: int
    request: bytes
    answered: int = 0
    statuses: set[int] = msgspec.field(default_factory=set)
    lost: list[str] = msgspec.field(default_factory=list)

    async def ask(self, connection: HttpConnection | None) -> HttpConnection:
        """One request, on a kept connection where that is open; returns the connection."""
        if connection is None or not connection.open_for_more:
            connection = await HttpConnection.open("127.0.0.1", self.port)
        try:
            status, _, _ = await connection.send(self.request)
        except ConnectionLostError as error:
            self.lost.append(str(error))
        else:
            self.statuses.add(status)
            self.answered += 1
        return connection


@contextlib.asynccontextmanager
async def under_load(fleet: Fleet) -> AsyncIterator[None]:
    """48 callers that ask again when they are answered, and arrivals that do not wait for answers."""
    stop = asyncio.Event()

    async def caller() -> None:
        connection = None
        while not stop.is_set():
            connection = await fleet.ask(connection)
        if connection is not None:
            connection.close()

    async def arrivals() -> None:
        rng = np.random.default_rng(0)
        idle: list[tuple[float, HttpConnection]] = []

        async def one() -> None:
            since, connection = idle.pop() if idle else (0.0, None)
            if connection is not None and time.monotonic() - since > REUSED_S:
                connection.close()
                connection = None
            connection = await fleet.ask(connection)
            idle.append((time.monotonic(), connection))

        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                await asyncio.sleep(rng.exponential(1 / RATE))
                group.create_task(one())
        for _, connection in idle:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CLOSED_LOOP):
            group.create_task(caller())
        group.create_task(arrivals())
        try:
            yield
        finally:
            stop.set()


async def restarts(folder: Path, count: int, *options: str) -> Fleet:
    """So many servers after the first, each under load of all kinds; every one must end with 0."""
    image = np.random.default_rng(0).standard_normal((1, 1, 8, 8), dtype=np.float32)
    body, length = infer_body(image)
    fields = {"inference-header-content-length": str(length)}
    head = request_head("POST", "/v2/models/digits/infer", "localhost", len(body), fields)
    async with contextlib.AsyncExitStack() as stack:

        async def started(number: int) -> Running:
            place = folder / str(number)
            place.mkdir()
            made = serving(place, *options)
            stack.callback(made.__exit__, None, None, None)
            return await asyncio.to_thread(made.__enter__)

        server = await started(0)
        fleet = Fleet(server.http, head + body)
        async with under_load(fleet):
            for number in range(1, count + 1):
                follower = await started(number)
                before = fleet.answered
                fleet.port = follower.http
                server.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.process.wait, 60) == 0
                assert fleet.answered > before
                server = follower
    return fleet


@pytest.mark.timeout(300)
async def test_a_restart_leaves_no_request_unanswered(tmp_path):
    fleet = await restarts(tmp_path, 1, "--drain-delay-s", "0.5")
    assert fleet.lost == []
    assert fleet.statuses == {200}


@pytest.mark.accept
@pytest.mark.timeout(3600)
async def test_twenty_restarts_leave_no_request_unanswered(tmp_path):
    fleet = await restarts(tmp_path, 20)
    print(f"{fleet.answered} requests answered over 20 restarts, {len(fleet.lost)} lost")
    assert fleet.lost == []
    assert fleet.statuses == {200}
