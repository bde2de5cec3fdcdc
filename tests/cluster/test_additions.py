"""A server is added once, however many ask for it at the same time."""

import asyncio

import msgspec
import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.engine.host import FleetParts
from tests.engine.live import NETWORK, SHAPE, config_of

pytest.importorskip("ray")

from slim_scheduler.engine.cluster.fleet import ClusterFleet


async def test_of_two_that_add_a_server_at_once_one_is_refused_and_the_server_stays(monkeypatch):
    config = config_of(({}, {}), cluster={"address": "local"})
    (first, second), placed = config.servers, []

    async def place(_fleet, *servers):
        await asyncio.sleep(0.01)  # as long as another may ask
        placed.extend(server.name for server in servers)

    monkeypatch.setattr(ClusterFleet, "_place", place)
    one = msgspec.structs.replace(config, servers=(first,))
    fleet = ClusterFleet(FleetParts(one, NETWORK, SHAPE, None, margins=False, logs=False))
    ends = await asyncio.gather(fleet.add(second), fleet.add(second), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), ConfigError]
    assert placed == [second.name]
    assert [server.name for server in fleet.config.servers] == [first.name, second.name]
