"""A server is added once and removed once, however many ask for it at the same time."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.messages import ServerDraining, ServerLeft
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
    fleet = fleet_of(msgspec.structs.replace(config, servers=(first,)))
    ends = await asyncio.gather(fleet.add(second), fleet.add(second), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), ConfigError]
    assert placed == [second.name]
    assert [server.name for server in fleet.config.servers] == [first.name, second.name]


async def test_a_server_that_is_still_being_added_is_not_removed(monkeypatch):
    config = config_of(({}, {}), cluster={"address": "local"})
    (first, second), go_on = config.servers, asyncio.Event()

    async def place(_fleet, *_servers):
        await go_on.wait()

    monkeypatch.setattr(ClusterFleet, "_place", place)
    fleet = fleet_of(msgspec.structs.replace(config, servers=(first,)))
    adding = asyncio.create_task(fleet.add(second))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match=f"server {second.name} is still being added"):
        await fleet.remove(second.name, 1.0)
    go_on.set()
    await adding


async def test_a_server_that_is_being_removed_is_neither_removed_nor_added_again():
    config = config_of(({}, {}), cluster={"address": "local"})
    leaving, view, told, killed = config.servers[1], SimpleNamespace(outstanding=1), [], []
    name = leaving.name
    fleet = fleet_of(config)
    fleet.servers[name] = SimpleNamespace(kill=lambda: killed.append(name))
    fleet._serving[name] = asyncio.create_task(asyncio.Event().wait())
    dispatcher = SimpleNamespace(servers={name: view})
    fleet.connect(
        SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0), dispatcher=dispatcher, tell_dispatcher=told.append)
    )
    removing = asyncio.create_task(fleet.remove(name, 1.0))
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match=f"server {name} is being removed already"):
        await fleet.remove(name, 1.0)
    with pytest.raises(ConfigError, match=f"server {name} is there already"):
        await fleet.add(leaving)
    view.outstanding = 0
    await removing
    assert [type(event) for event in told] == [ServerDraining, ServerLeft]
    assert killed == [name]
    with pytest.raises(ConfigError, match=f"no server is named {name}"):
        await fleet.remove(name, 1.0)


def fleet_of(config):
    return ClusterFleet(FleetParts(config, NETWORK, SHAPE, None, margins=False, logs=False))
