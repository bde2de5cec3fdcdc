"""One brain: what the machines decided live, fresh machines decide again from the record, to the last command."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from slim_scheduler.core.messages import (
    BatchDone,
    InstanceUnloaded,
    OfferRepeated,
    Reply,
    RequestCancelled,
    RequestOffered,
    WakeAt,
)
from slim_scheduler.core.server.scheduler import RETURN
from slim_scheduler.engine.engine import InferenceResult, SlimEngine
from slim_scheduler.engine.request import RequestLimits
from slim_scheduler.record.recorder import Recorder, RunInfo, read_record, replay_steps
from slim_scheduler.setup.accuracy_files import read_accuracy
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import build_dispatcher, build_server, load_profiles, load_shape

from .live import SHAPE, Watch, config_of, engine_of, images, made_up_profile


@pytest.mark.parametrize(
    ("router", "reentry", "slowdown", "window", "queue"),
    [
        ("random", "back", 2.0, 0.0, "fifo"),
        ("random", "back", 2.0, 3.0, "fifo"),
        ("random", "oldest-item", 30.0, 3.0, "fifo"),
        ("jsq:0.5+1@0.9", "back", 2.0, 0.0, "fifo"),
        ("jsq:0.5+1@0.9", "back", 2.0, 0.0, "shortest"),
        ("jsq:0.5+0.5/1/1/1@0.9", "back", 2.0, 0.0, "shortest"),
        ("random", "back", 2.0, 3.0, "least-slack"),
    ],
)
async def test_record_of_a_live_run_replays_to_the_same_commands(tmp_path, router, reentry, slowdown, window, queue):
    config = config_of(
        (
            {"batch_window_ms": window},
            {"slowdown": slowdown, "max_batch": 8},
            {"slowdown": 4.0, "idle_unload_s": 0.05, "batch_window_ms": window},
        ),
        router={"name": router, "fallback": "jsq:0.5", "groups": [1, 4, 16]},
        telemetry={"period_s": 0.02},
        dispatch={"max_waiting_items": 150, "reentry": reentry, "queue": queue},
    )
    recorder = Recorder("full", lambda item, widths: None)
    watch = Watch()

    class Both:
        def step(self, machine, now, event, commands):
            recorder.step(machine, now, event, commands)
            watch.step(machine, now, event, commands)

    profiles = {server.name: made_up_profile() for server in config.servers}
    async with engine_of(config, seed=7, recorder=Both(), profiles=profiles) as engine:
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
    recorder.write(tmp_path / "record.parquet", RunInfo(mode="live", router=router, seed=7))

    machines = {name: build_server(live, name, SHAPE, profile=profile) for name, profile in profiles.items()}
    machines["dispatcher"] = build_dispatcher(live, SHAPE, router, profiles, 7)
    assert replayed(tmp_path, machines) == len(watch.steps) > 500
    ended = [item for _, _, _, commands in watch.steps for c in commands if isinstance(c, Reply) for item in c.items]
    assert ("+" in router) == any(item.passes == 2 for item in ended)


@pytest.mark.parametrize("router", ["lp", "ppo:examples/demo/policies/balanced"])
async def test_a_router_that_plans_or_has_learned_decides_the_same_in_a_replay(tmp_path, router):
    windows = ('servers.0.batch_window_ms="auto"', "servers.1.batch_window_ms=5")
    config = load_config(Path("examples/demo/cluster.toml"), windows)
    recorder = Recorder("full", lambda item, widths: None)
    digits = np.random.default_rng(1).standard_normal((300, 1, 8, 8), dtype=np.float32)
    async with SlimEngine.from_config(config, router=router, seed=7, recorder=recorder) as engine:
        for i in range(0, 300, 3):
            engine.submit(digits[i : i + 3], deadline_s=30.0)
            await asyncio.sleep(0.002)
        await engine.infer(digits[:1])
        live = engine.config
    recorder.write(tmp_path / "record.parquet", RunInfo(mode="live", router=router, seed=7))
    shape = load_shape(live)
    profiles = load_profiles(live, shape)
    names = [server.name for server in live.servers]
    machines = {name: build_server(live, name, shape, profile=profiles[name]) for name in names}
    machines["dispatcher"] = build_dispatcher(live, shape, router, profiles, 7, read_accuracy(live.model.path))
    assert replayed(tmp_path, machines) > 300


def replayed(folder, machines):
    """How many steps the record has; each is done again by fresh machines, with the same commands."""
    steps = 0
    for machine, now, event, commands in replay_steps(read_record(folder / "record.parquet")):
        assert machines[machine].handle(event, now) == commands, f"step {steps}: {machine} at {now}: {event}"
        steps += 1
    return steps


async def test_a_replay_sees_every_refusal_of_what_a_front_end_had_read(tmp_path):
    """Both queues and all that is refused from them: the machines decide it again from the record."""
    config = config_of(({"slowdown": 20.0},), router={"name": "jsq:0.5"}, dispatch={"max_waiting_items": 60})
    recorder = Recorder("full", lambda item, widths: None)
    results: list[InferenceResult] = []
    async with engine_of(config, seed=7, recorder=recorder) as engine:
        offers, repeated = [], 0
        for turn in range(30):
            for number in range(12):
                limits = RequestLimits((None, 0.05, 5.0)[number % 3])
                offer = engine.offer(1, limits, waited=0.01 * (number % 4))
                if offer.refused is not None:
                    repeated += engine.offer_again(offer)
                elif number % 5 == 4:
                    engine.withdraw(offer)
                else:
                    engine.bring(offer, images(1), results.append)
                    offers.append(offer)
            for offer in offers[:: 7 + turn]:
                engine.cancel(offer)
            await asyncio.sleep(0.001 * (turn % 3))
        live = engine.config
    counts = engine.counts
    assert len(results) == len(offers), "one answer each"
    recorder.write(tmp_path / "record.parquet", RunInfo(mode="live", router="jsq:0.5", seed=7))
    machines = {server.name: build_server(live, server.name, SHAPE) for server in live.servers}
    machines["dispatcher"] = build_dispatcher(live, SHAPE, "jsq:0.5", None, 7)
    refused, seen = 0, 0
    for machine, now, event, commands in replay_steps(read_record(tmp_path / "record.parquet")):
        assert machines[machine].handle(event, now) == commands, f"{machine} at {now}: {event}"
        refused += isinstance(event, RequestOffered) and any(isinstance(command, Reply) for command in commands)
        seen += isinstance(event, OfferRepeated)
    assert refused > 0
    assert seen == repeated > 0
    assert machines["dispatcher"].counts == counts
