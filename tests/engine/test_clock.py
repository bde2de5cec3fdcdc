"""Timers of a live run are never early, and fire in order. Jumps of the system clock: serve/test_clock_jumps.py."""

import asyncio

from slim_scheduler.engine.clock import MonotonicClock, Timers


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
