"""Models that are taken away: their engines end in time, also where nobody waits for that any more."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from threading import Event
from typing import Any

import numpy as np
import pytest

from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.serve.refusal import Refusal
from slim_scheduler.serve.repository import Repository
from slim_scheduler.setup.config import Config, ModelConfig, config_from
from tests.cli.conftest import ROOT

SLOW = 1e6  # times the work of a batch: minutes
LATE = 30.0  # what is asked for here ends long before


def repository(before: Callable[[], Any] = lambda: None) -> Repository:
    """A repository of real engines on one slow CPU server; `before` is called before each is built."""
    server = {"name": "away", "device": "cpu", "slowdown": SLOW}
    tree = {"model": {"path": str(ROOT / "models/digits")}, "servers": [server], "router": {"name": "jsq:0.25"}}

    def build(config: Any, observer: Any) -> SlimEngine:
        before()
        return SlimEngine.from_config(config, recorder=observer)

    return Repository(config_from(tree), build)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("slim-away")]


@contextlib.asynccontextmanager
async def in_flight(engine: SlimEngine, images: np.ndarray) -> AsyncIterator[None]:
    """A request that takes minutes; it is cancelled in the end, because its engine stops."""
    request = asyncio.create_task(engine.infer(images[:1]))
    while not engine.servers or not any(server.outstanding for server in engine.servers.values()):
        await asyncio.sleep(0.01)
    yield
    assert (await request).outcome is Outcome.CANCELLED


async def test_a_model_is_unloaded_to_the_end_though_its_manager_leaves(images):
    models = repository()
    await models.load("digits")
    async with asyncio.timeout(LATE), in_flight(models.find("digits").engine, images):
        unloading = asyncio.create_task(models.unload("digits", grace_s=0.2))
        await asyncio.sleep(0.05)
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        while threads():
            await asyncio.sleep(0.01)


async def test_the_end_does_not_wait_for_the_grace_of_what_was_swapped_before(images):
    models = repository()
    await models.load("digits")
    async with asyncio.timeout(LATE), in_flight(models.find("digits").engine, images):
        await models.set_router("digits", "jsq:1", grace_s=10 * LATE)
        await asyncio.sleep(0.05)
        await models.close(0.1)
        assert not threads()


async def test_a_model_that_is_loaded_while_the_server_ends_is_not_waited_for_nor_kept():
    go_on = Event()
    models = repository(go_on.wait)
    loading = asyncio.create_task(models.load("digits"))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(LATE):
        await models.close(0.1)
        go_on.set()
        with pytest.raises(Refusal, match="stopping"):
            await loading
        with pytest.raises(Refusal, match="stopping"):
            await models.load("digits")
    assert not threads()
    assert not models.served


@pytest.mark.parametrize(
    ("path", "folder", "name"),
    [("link/../mine", "elsewhere", "mine"), ("mine", ".", "mine"), ("link/..", ".", "elsewhere")],
)
def test_models_are_looked_for_where_the_path_leads_and_a_linked_one_keeps_its_name(tmp_path, path, folder, name):
    (tmp_path / "elsewhere/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/inner")
    for beside in (tmp_path, tmp_path / "elsewhere"):
        (beside / "mine").symlink_to(ROOT / "models/digits")
    (tmp_path / "elsewhere/manifest.json").touch()
    models = Repository(Config(model=ModelConfig(path=str(tmp_path / path))), SlimEngine.from_config)
    assert models.first == name
    assert models.folder.samefile(tmp_path / folder)
    assert name in models.names()
