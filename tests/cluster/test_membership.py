"""Servers join and leave a running cluster: more throughput, no error, and nothing lost with the one that goes."""

import asyncio

import msgspec
import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import ServerChanged, TasksReturned
from slim_scheduler.core.types import Outcome
from tests.engine.live import NETWORK, SHAPE, Watch, config_of, images

ray = pytest.importorskip("ray")

from slim_scheduler.engine.cluster.fleet import ClusterFleet  # noqa: E402
from slim_scheduler.engine.engine import SlimEngine  # noqa: E402

pytestmark = [pytest.mark.accept, pytest.mark.timeout(300)]

# They wait instead of computing, so that the cores are not the limit.
WAITING = {"slowdown": 60.0, "max_batch": 8}
SEEN = 5.0  # seconds that throughput is taken over


async def test_fourth_server_raises_throughput_by_its_share_and_leaves_without_an_error():
    router = {"name": "jsq:0.5", "fallback": "jsq:0.5"}
    config = config_of((WAITING,) * 4, cluster={"address": "local"}, router=router)
    three, fourth = config.servers[:3], config.servers[3]
    watch = Watch()
    engine = SlimEngine(
        msgspec.structs.replace(config, servers=three), NETWORK, SHAPE, recorder=watch, fleet=ClusterFleet
    )
    await engine.start()
    crowd = Crowd(engine, clients=480)
    before = await crowd.throughput()
    await engine.add_server(fourth)
    await crowd.throughput(1.0)  # it loads its instances
    after = await crowd.throughput()
    with pytest.raises(ConfigError, match="server d is there already"):
        await engine.add_server(fourth)
    await engine.remove_server("d", grace_s=20.0)
    assert set(engine.servers) == {"a", "b", "c"}
    before = (before + await crowd.throughput()) / 2  # from both sides, for a machine whose load changes
    returned = watch.seen(TasksReturned)
    await crowd.stop()
    outcomes = set(crowd.outcomes)
    await engine.stop(grace_s=0)
    assert outcomes == {Outcome.ANSWERED}
    assert not returned, "a server that drains gives nothing back"
    assert [change.reason for change in watch.seen(ServerChanged)] == ["removed"]
    assert after >= before * (1 + 0.8 / 3), f"{before:.0f} items/s with three servers, {after:.0f} with four"


class Crowd:
    """Clients that each send the next item when the last is answered."""

    def __init__(self, engine: SlimEngine, clients: int) -> None:
        self.outcomes: list[Outcome] = []
        self._engine = engine
        self._item = images(1)
        self._stopping = False
        self._clients = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        while not self._stopping:
            result = await self._engine.infer(self._item)
            self.outcomes.append(result.outcome)

    async def throughput(self, seconds: float = SEEN) -> float:
        begin, counted = self._engine.now(), len(self.outcomes)
        await asyncio.sleep(seconds)
        return (len(self.outcomes) - counted) / (self._engine.now() - begin)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._clients)
