"""A server whose batches fail is taken out, probed and taken back while traffic runs; not even broken ones all go."""

import asyncio

from slim_scheduler.core.messages import Message, ServerChanged
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.devices.cpu import CpuDevice
from slim_scheduler.engine.engine import SlimEngine
from tests.engine.live import NETWORK, SHAPE, Watch, config_of, engine_of, images

AMPLE = 1 << 29


class Breakable(CpuDevice):
    """A device that computes until somebody breaks it."""

    broken = False

    def run(self, instance, rows, previous_width):
        if self.broken:
            raise RuntimeError("the device is broken")
        return super().run(instance, rows, previous_width)


def breakable(names: str) -> dict[str, Breakable]:
    return {name: Breakable(NETWORK, SHAPE, 1, AMPLE) for name in names}


def changed(server: str, up: bool):
    def wanted(_: str, message: Message) -> bool:
        return isinstance(message, ServerChanged) and message.server == server and message.up is up

    return wanted


class Clients:
    """Eight of them, each asking again when answered."""

    def __init__(self, engine: SlimEngine) -> None:
        self.outcomes: list[Outcome] = []
        self._engine = engine
        self._going = True
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(8)]

    async def _ask(self) -> None:
        while self._going:
            self.outcomes.append((await self._engine.infer(images(1))).outcome)

    async def stop(self) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)


async def test_failing_server_is_ejected_and_comes_back_when_it_works_again(caplog):
    watch, devices = Watch(), breakable("abc")
    router = {"name": "round-robin:0.5", "fallback": "jsq:0.5"}
    async with engine_of(config_of(({},) * 3, router=router), recorder=watch, devices=devices) as engine:
        clients = Clients(engine)
        devices["b"].broken = True
        await watch.until(changed("b", up=False))
        devices["b"].broken = False
        await watch.until(changed("b", up=True))
        await clients.stop()
    assert {change.server for change in watch.seen(ServerChanged)} == {"b"}
    assert set(clients.outcomes) == {Outcome.ANSWERED}, "what failed was run again elsewhere"
    (logged,) = [line for line in caplog.records if line.name == "slim_scheduler.engine.executor"]
    assert (logged.getMessage(), logged.exc_info[0]) == ("b: the device is broken", RuntimeError), "the first alone"


async def test_never_all_servers_are_ejected_and_every_request_ends_with_a_reason():
    watch, devices = Watch(), breakable("abc")
    for device in devices.values():
        device.broken = True
    async with engine_of(config_of(({},) * 3), recorder=watch, devices=devices) as engine:
        clients = Clients(engine)
        await watch.until(lambda _, message: isinstance(message, ServerChanged) and not message.up)
        results = await asyncio.gather(*[engine.infer(images(1)) for _ in range(64)])
        await clients.stop()
    out: set[str] = set()
    for change in watch.seen(ServerChanged):
        (out.discard if change.up else out.add)(change.server)
        assert len(out) <= 1, "half of three servers at most"
    assert set(clients.outcomes) == {Outcome.FAILED}
    assert all(result.outcome is Outcome.FAILED and "broken" in result.reason for result in results)
