"""One brain: what the machines decided live, fresh machines decide again from the record, to the last command."""

import asyncio

import pytest

from slim_scheduler.core.messages import BatchDone, InstanceUnloaded, RequestCancelled, WakeAt
from slim_scheduler.core.server.scheduler import RETURN
from slim_scheduler.record.recorder import Recorder, RunInfo, read_record, replay_steps
from slim_scheduler.setup.machines import build_dispatcher, build_server

from .live import SHAPE, Watch, config_of, engine_of, images


@pytest.mark.parametrize(
    ("reentry", "slowdown", "window"), [("back", 2.0, 0.0), ("back", 2.0, 3.0), ("oldest-item", 30.0, 3.0)]
)
async def test_record_of_a_live_run_replays_to_the_same_commands(tmp_path, reentry, slowdown, window):
    config = config_of(
        (
            {"batch_window_ms": window},
            {"slowdown": slowdown, "max_batch": 8},
            {"slowdown": 4.0, "idle_unload_s": 0.05, "batch_window_ms": window, "tile": 8},
        ),
        router={"name": "random", "fallback": "jsq:0.5", "groups": [1, 4, 16]},
        telemetry={"period_s": 0.02},
        dispatch={"max_waiting_items": 150, "reentry": reentry},
    )
    recorder = Recorder("full", lambda item, widths: None, tmp_path / "record.parquet")
    watch = Watch()

    class Both:
        def step(self, machine, now, event, commands):
            recorder.step(machine, now, event, commands)
            watch.step(machine, now, event, commands)

    async with engine_of(config, seed=7, recorder=Both()) as engine:
        for burst in range(4):
            futures = [
                engine.submit(images(1 + i % 3), deadline_s=0.05 if i % 5 == 0 else None, priority=i % 2)
                for i in range(60)
            ]
            for future in futures[burst::9]:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        await watch.until(lambda _, message: isinstance(message, InstanceUnloaded))
        live = engine.config
    assert watch.seen(RequestCancelled)
    held = [s for s in watch.steps if isinstance(s[2], BatchDone) and WakeAt(s[1] + RETURN) in s[3]]
    assert bool(held) == (reentry == "oldest-item"), "after a long batch its items come before younger ones"
    recorder.write(tmp_path / "record.parquet", RunInfo(mode="live", router="random", seed=7))

    machines = {server.name: build_server(live, server.name, SHAPE) for server in live.servers}
    machines["dispatcher"] = build_dispatcher(live, SHAPE, "random", None, 7)
    steps = 0
    for machine, now, event, commands in replay_steps(read_record(tmp_path / "record.parquet")):
        assert machines[machine].handle(event, now) == commands, f"step {steps}: {machine} at {now}: {event}"
        steps += 1
    assert steps == len(watch.steps) > 500
