"""Time in a live run is monotonic: setting the machine's clock changes nothing, and timers are never early."""

import asyncio
import re
import time
from pathlib import Path

from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.clock import MonotonicClock, Timers

from .live import config_of, engine_of, images

SOURCE = Path(__file__).parents[2] / "src" / "slim_scheduler"


async def test_a_clock_set_forward_and_back_by_an_hour_changes_nothing(monkeypatch):
    wall = time.time
    async with engine_of(config_of(({}, {}))) as engine:
        before = engine.now()
        for jump in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
            result = await engine.infer(images(4), deadline_s=30.0)
            assert result.outcome is Outcome.ANSWERED
        assert 0 <= engine.now() - before < 30
        assert all(server.up for server in engine.servers.values())


def test_nothing_that_decides_or_serves_reads_wall_time():
    wall_time = re.compile(r"\btime\.time\(|datetime\.(now|utcnow|today)|time\.localtime|time\.gmtime")
    files = [*SOURCE.glob("core/**/*.py"), *SOURCE.glob("engine/**/*.py")]
    assert len(files) > 20
    assert [file.name for file in files if wall_time.search(file.read_text())] == []


async def test_timers_fire_in_order_and_never_early():
    clock = MonotonicClock()
    fired: list[tuple[str, float]] = []
    all_done = asyncio.Event()

    def fire(name: str) -> None:
        fired.append((name, clock.now()))
        if len(fired) == 3:
            all_done.set()

    timers = Timers(clock, fire)
    wanted = {"late": 0.03, "soon": 0.01, "between": 0.02}
    for name, at in wanted.items():
        timers.wake(name, at)
    await asyncio.wait_for(all_done.wait(), 10)
    assert [name for name, _ in fired] == ["soon", "between", "late"]
    assert all(at >= wanted[name] for name, at in fired)


async def test_the_same_time_asked_for_twice_fires_once():
    clock = MonotonicClock()
    fired: list[str] = []
    last = asyncio.Event()
    timers = Timers(clock, lambda name: (fired.append(name), last.set() if name == "b" else None))
    timers.wake("a", 0.01)
    timers.wake("a", 0.01)
    timers.wake("b", 0.011)
    await asyncio.wait_for(last.wait(), 10)
    assert fired == ["a", "b"]
