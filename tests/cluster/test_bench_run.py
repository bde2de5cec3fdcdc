"""The same commands on a cluster: a benchmark run writes its record there too, and the record replays."""

import asyncio
import json
import signal

import msgspec
import numpy as np
import pytest
import torch

from slim_scheduler.core.messages import ServerDraining
from slim_scheduler.core.types import Outcome
from slim_scheduler.model.calibration import margins_of
from slim_scheduler.record.recorder import Recorder, RunInfo, read_record, replay_steps
from slim_scheduler.run.summary import summarize
from slim_scheduler.setup.config import load_config
from slim_scheduler.setup.machines import build_dispatcher, build_server
from tests.cli.test_commands import interrupted
from tests.engine.live import NETWORK, SHAPE, TOLERANCE, config_of, expected, images

pytest.importorskip("ray")

from pathlib import Path

from slim_scheduler.engine.bench import bench
from slim_scheduler.engine.cluster.fleet import ClusterFleet
from slim_scheduler.engine.engine import SlimEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("router", ["jsq:random", "jsq:0.25+1@0.016"])
async def test_record_of_a_cluster_run_replays_to_the_same_commands(tmp_path, router):
    """A server comes, is drained with work in hand, and goes. The second router lets about half of the items run again:
    from their pixels, wherever their first pass was."""
    servers = ({}, {"slowdown": 2.0, "batch_window_ms": 5.0}, {"slowdown": 4.0, "max_batch": 8}, {"slowdown": 3.0})
    four = config_of(servers, cluster={"address": "local"}, router={"name": router, "fallback": "jsq:0.5"})
    config = msgspec.structs.replace(four, servers=four.servers[:3])
    recorder = Recorder("full", lambda item, widths: None)
    engine = SlimEngine(config, NETWORK, SHAPE, seed=7, recorder=recorder, fleet=ClusterFleet)
    await engine.start()
    items = images(200)
    results = []
    for turn in range(5):
        if turn == 1:
            await engine.add_server(four.servers[3])
            live = engine.config
        futures = [engine.submit(items[i : i + 1], deadline_s=30.0) for i in range(40 * turn, 40 * turn + 40)]
        if turn == 3:
            while not engine.servers["d"].outstanding:
                await asyncio.sleep(0)
            await engine.remove_server("d", grace_s=20.0)
        results += [await future for future in futures]
    engine.stop_recording()
    await engine.stop(grace_s=0)
    recorder.write(tmp_path / "record.parquet", RunInfo(mode="live", router=engine.router_name, seed=7))
    assert {result.outcome for result in results} == {Outcome.ANSWERED}
    again = sum(result.items[0].passes == 2 for result in results)
    assert (50 < again < 150) == ("+" in router)
    for item, result in zip(items, results, strict=True):
        (ended,) = result.items
        assert np.allclose(result.logits, expected(item[None], ended.widths), atol=TOLERANCE)
        assert not ended.other_widths or margin(item, ended.other_widths) < 0.016 + TOLERANCE

    machines = {server.name: build_server(live, server.name, SHAPE) for server in live.servers}
    machines["dispatcher"] = build_dispatcher(live, SHAPE, engine.router_name, None, 7)
    steps, drained, seen = 0, False, set()
    for machine, now, event, commands in replay_steps(read_record(tmp_path / "record.parquet")):
        assert machines[machine].handle(event, now) == commands, f"step {steps}: {machine} at {now}: {event}"
        drained |= isinstance(event, ServerDraining) and machines["dispatcher"].servers["d"].outstanding > 0
        seen.add(machine)
        steps += 1
    assert seen == {"a", "b", "c", "d", "dispatcher"}
    assert drained, "it had work in hand when it was to go"
    assert steps > 200


def margin(item, widths):
    return float(margins_of(torch.from_numpy(expected(item[None], widths)))[0])


def test_the_example_runs_and_every_item_is_answered():
    config = load_config(Path("examples/ray/cluster.toml"))
    workload = msgspec.structs.replace(config.workload, duration_s=4.0, warmup_s=0.5, rate=50.0)
    config = msgspec.structs.replace(config, workload=workload)
    run = bench(config, seed=1)
    summary = summarize(run.recorder.record(run.info), config)
    assert summary["items_arrived"] > 100
    assert summary["items_completed"] == summary["items_arrived"]
    assert summary["accuracy"] > 0.9
    assert summary["energy_source"] in ("estimated", "counter", "none")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_on_a_cluster_leaves_its_record(tmp_path, number):
    example = ("--config", "examples/ray/cluster.toml", "--set", "workload.duration_s=3000")
    # SIGTERM would also end the daemons of a `local` cluster, and Ray may end a program whose daemons died.
    from_terminal = number is signal.SIGINT
    code, said = interrupted(number, "bench", *example, "--out", tmp_path, with_children=from_terminal)
    assert code == 130
    assert "interrupted; what was written so far stays" in said
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]
    assert read_record(tmp_path).info.interrupted
