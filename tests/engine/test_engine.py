"""The engine as a program sees it: right answers, typed outcomes, nothing lost, bad input refused."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slim_scheduler.core.errors import ConfigError, InputError, ProfileError, SlimError
from slim_scheduler.core.messages import Reply, SendBlock, StartBatch
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.assembly import live_config
from slim_scheduler.engine.engine import InferenceResult, SlimEngine
from slim_scheduler.engine.executor import MOST_LATE
from slim_scheduler.engine.request import RequestLimits
from slim_scheduler.record.recorder import Recorder, RunInfo
from slim_scheduler.setup.config import load_config
from tests.stalls import Stalls

from .live import SHAPE, TOLERANCE, Watch, config_of, engine_of, expected, images, made_up_profile

THREE_UNEQUAL = ({}, {"slowdown": 1.5}, {"slowdown": 3.0, "max_batch": 4})


async def test_answers_are_the_networks_own_at_the_widths_that_ran():
    items = images(64)
    async with engine_of(config_of(THREE_UNEQUAL)) as engine:
        # One after the other: what comes together is decided about together, and on a busy machine that may be all.
        results = [await engine.submit(items[i : i + 1]) for i in range(len(items))]
    tuples = {result.items[0].widths for result in results}
    assert len(tuples) > 4, "the router should have mixed widths"
    for i, result in enumerate(results):
        assert result.outcome is Outcome.ANSWERED
        np.testing.assert_allclose(result.logits, expected(items[i : i + 1], result.items[0].widths), atol=TOLERANCE)


async def test_what_comes_in_one_turn_of_the_loop_is_sent_as_one_block():
    items = images(20)
    watch = Watch()
    async with engine_of(config_of(), recorder=watch) as engine:
        results = await asyncio.gather(*[engine.infer(items[i : i + 1], widths=(1.0,) * 4) for i in range(20)])
    assert len(watch.seen(SendBlock)[0].block.tasks) == 20
    truth = expected(items, (1.0,) * 4)
    np.testing.assert_allclose(np.concatenate([result.logits for result in results]), truth, atol=TOLERANCE)


async def test_two_thousand_concurrent_requests_each_get_their_own_answer():
    items = images(2000, seed=1)
    widths = (0.25, 0.5, 0.75, 1.0)
    truth = expected(items, widths)
    async with engine_of(config_of(THREE_UNEQUAL)) as engine:
        results = await asyncio.gather(*[engine.infer(items[i : i + 1], widths=widths) for i in range(len(items))])
        counts = engine.counts["items"]
    assert counts["received"] == counts["answered"] == 2000
    assert all(result.items[0].widths == widths for result in results)
    np.testing.assert_allclose(np.concatenate([result.logits for result in results]), truth, atol=TOLERANCE)


async def test_items_of_one_request_come_back_in_order():
    items = images(50, seed=2)
    async with engine_of(config_of(THREE_UNEQUAL)) as engine:
        result = await engine.infer(items, widths=(1.0, 0.25, 1.0, 0.25))
    assert [outcome.item for outcome in result.items] == list(range(50))
    np.testing.assert_allclose(result.logits, expected(items, (1.0, 0.25, 1.0, 0.25)), atol=TOLERANCE)


async def test_raw_pixels_are_normalised_by_the_engine():
    from slim_scheduler.engine.inputs import Normalization

    pixels = np.random.default_rng(3).integers(0, 256, (4, *SHAPE.item_shape), dtype=np.uint8)
    normalised = ((pixels / 255 - 0.4) / 0.3).astype(np.float32)
    async with engine_of(config_of(), normalization=Normalization((0.4,), (0.3,))) as engine:
        result = await engine.infer(pixels, widths=(1.0,) * 4)
    np.testing.assert_allclose(result.logits, expected(normalised, (1.0,) * 4), atol=TOLERANCE)


async def test_the_callers_array_may_change_after_submitting():
    items = images(8)
    truth = expected(items, (0.5,) * 4)
    async with engine_of(config_of()) as engine:
        future = engine.submit(items, widths=(0.5,) * 4)
        items[:] = 0
        result = await future
    np.testing.assert_allclose(result.logits, truth, atol=TOLERANCE)


async def test_missed_deadline_expires_within_50_ms_and_never_runs_further():
    watch = Watch()
    async with engine_of(config_of([{"slowdown": 2000.0}]), recorder=watch) as engine:
        stalls, loop = Stalls(), asyncio.get_running_loop()
        begin, submitted = loop.time(), engine.now()
        result = await engine.submit(images(1), deadline_s=0.05, arrival=submitted)
        answered = next(now for _, now, _, commands in watch.steps for c in commands if isinstance(c, Reply))
        assert result.outcome is Outcome.EXPIRED
        assert result.logits is None
        await stalls.settled()
        assert 0.05 <= answered - submitted < 0.1 + stalls.between(begin, loop.time())
        assert {command.batch.segment for command in watch.seen(StartBatch)} <= {0}
        await engine.stop(grace_s=0)
    assert engine.counts["items"]["expired"] == 1


async def test_deadline_in_the_past_expires_at_once():
    async with engine_of(config_of()) as engine:
        future = engine.submit(images(1), deadline_s=-1.0)
        assert future.done()
        assert future.result().outcome is Outcome.EXPIRED


async def test_cancelling_the_awaiting_task_cancels_the_request_and_frees_its_place():
    config = config_of([{"slowdown": 500.0, "max_batch": 1}], dispatch={"max_waiting_items": 4})
    async with engine_of(config) as engine:
        waiting = [asyncio.create_task(engine.infer(images(1))) for _ in range(4)]
        await asyncio.sleep(0)  # let them submit
        assert engine.counts["requests"]["in_flight"] == 4
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert all(task.cancelled() for task in waiting)
        assert engine.counts["requests"] | {"cancelled": 4, "in_flight": 0} == engine.counts["requests"]
        assert not engine.submit(images(1)).done(), "there is room again"
        await engine.stop(grace_s=0)


async def test_full_queue_rejects_at_once_with_retry_after():
    config = config_of([{"slowdown": 500.0, "max_batch": 1, "credit_tasks": 1}], dispatch={"max_waiting_items": 8})
    async with engine_of(config) as engine:
        futures = [engine.submit(images(1)) for _ in range(40)]
        refused = [future.result() for future in futures if future.done()]
        assert len(refused) >= 30
        for result in refused:
            assert result.outcome is Outcome.REJECTED
            assert result.logits is None
            assert result.reason
            assert result.retry_after is not None
            assert result.retry_after > 0
        for _ in range(3):  # the loop goes round once more before it is decided about what came
            await asyncio.sleep(0)
        held = len(engine.fleet.items)
        assert held == engine.counts["items"]["in_flight"] <= 10, "a refused item leaves nothing behind"
        await engine.stop(grace_s=0)


async def test_stop_drains_what_is_in_flight_and_refuses_what_comes_later():
    engine = engine_of(config_of(THREE_UNEQUAL))
    await engine.start()
    futures = [engine.submit(images(1)) for _ in range(100)]
    stopping = asyncio.create_task(engine.stop(grace_s=30))
    await asyncio.sleep(0)
    late = await engine.infer(images(1))
    await stopping
    assert late.outcome is Outcome.REJECTED
    assert {future.result().outcome for future in futures} == {Outcome.ANSWERED}


async def test_stop_cancels_what_the_grace_time_does_not_cover():
    engine = engine_of(config_of([{"slowdown": 5000.0}]))
    await engine.start()
    future = engine.submit(images(1))
    await engine.stop(grace_s=0)
    assert future.result().outcome is Outcome.CANCELLED
    counts = engine.counts["requests"]
    assert counts["received"] == 1 == counts["cancelled"]


@pytest.mark.parametrize(
    "items",
    [
        np.zeros((1, 3, 32, 32), np.float32),
        np.zeros((8, 8), np.float32),
        np.zeros((0, 1, 8, 8), np.float32),
        np.zeros((1, 1, 8, 8), np.float64),
        np.zeros((1, 1, 8, 8), np.int64),
        np.zeros((1, 1, 8, 8), object),
        np.float32(1.0),
        [[0.0]],
    ],
)
async def test_items_of_another_shape_or_type_are_refused_with_one_line(items):
    async with engine_of(config_of()) as engine:
        with pytest.raises(InputError, match=r"items (have|are)") as caught:
            await engine.infer(items)
        assert "\n" not in str(caught.value)
        assert engine.counts["requests"]["received"] == 0


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"widths": (0.6, 0.5, 0.5, 0.5)}, "width 0.6 is not served; available"),
        ({"widths": (0.5,)}, "1 widths are given; tiny has 4 segments"),
        ({"accuracy_floor": 1.5}, "accuracy_floor is 1.5"),
        ({"accuracy_floor": float("nan")}, "accuracy_floor is nan"),
        ({"deadline_s": float("nan")}, "deadline_s is not a number"),
        ({"priority": -1}, "priority is -1"),
    ],
)
async def test_constraints_that_can_never_be_met_are_refused(constraints, message):
    async with engine_of(config_of()) as engine:
        with pytest.raises(InputError, match=message):
            await engine.infer(images(1), **constraints)


async def test_infer_before_start_says_what_to_do():
    with pytest.raises(SlimError, match=r"await engine\.start"):
        await engine_of(config_of()).infer(images(1))


async def test_every_outcome_is_counted_once():
    config = config_of([{"slowdown": 20.0, "max_batch": 4}], dispatch={"max_waiting_items": 60})
    async with engine_of(config) as engine:
        futures = [engine.submit(images(1 + i % 3), deadline_s=0.1 if i % 4 == 0 else None) for i in range(60)]
        for future in futures[::7]:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        for counts in engine.counts.values():
            ended = sum(counts[name] for name in ("answered", "rejected", "expired", "cancelled", "failed"))
            assert counts["received"] == ended + counts["in_flight"]
        assert engine.counts["requests"]["received"] == 60


def test_live_servers_on_one_device_move_activations_for_nothing():
    config = config_of(THREE_UNEQUAL, network={"latency_ms": 5.0, "mbps": 10.0})
    assert not live_config(config).network.activations
    assert live_config(config).network.latency_ms == 0


def test_profiles_are_no_live_devices():
    with pytest.raises(ConfigError, match="device rtx-2080-ti cannot run live"):
        engine_of(config_of([{"device": "rtx-2080-ti"}]))


def test_who_is_to_keep_to_a_profile_needs_one():
    config = config_of([{"slowdown": 20.0, "slowdown_of": "profile"}])
    with pytest.raises(ProfileError, match=r'server a has slowdown_of = "profile", and no profile was loaded for it'):
        engine_of(config)
    profile = made_up_profile()
    short = msgspec.structs.replace(profile, latency_rows=profile.latency_rows[1:])
    with pytest.raises(ProfileError, match="no latency for segment 0"):
        engine_of(config, profiles={"a": short})
    settings = ('servers.0.slowdown_of="profile"', "servers.0.profile=no-such.json")
    config = load_config(Path("examples/demo/cluster.toml"), settings)
    with pytest.raises(ProfileError, match=r"server fast: no profile for no-such.json with digits"):
        SlimEngine.from_config(config)


async def test_a_live_server_keeps_to_its_profile():
    config = config_of([{"slowdown": 20.0, "slowdown_of": "profile"}], router={"name": "jsq:0.5"})
    profile = made_up_profile()
    rows = tuple(msgspec.structs.replace(row, seconds=(0.002,) * len(row.seconds)) for row in profile.latency_rows)
    profile = msgspec.structs.replace(profile, latency_rows=rows)
    recorder = Recorder("blocks", lambda item, widths: None)
    async with engine_of(config, recorder=recorder, profiles={"a": profile}) as engine:
        await asyncio.gather(*(engine.infer(images(2, seed)) for seed in range(20)))
    record = recorder.record(RunInfo(mode="live", router="jsq:0.5", seed=0))
    took = [row["finished_at"] - row["started"] for row in record.of("BatchReported").to_pylist()]
    assert len(took) > 4
    # Timers may be late by MOST_LATE, which the next batch makes up for: together they took their time.
    assert sum(took) >= len(took) * 20.0 * 0.002 - MOST_LATE
    assert min(took) < 2 * 20.0 * 0.002


async def test_what_was_offered_to_an_engine_that_another_replaces_is_finished_there():
    results: list[InferenceResult] = []
    async with engine_of(config_of()) as old:
        offers = [old.offer(1, RequestLimits()) for _ in range(100)]
        for offer in offers:
            old.bring(offer, images(1), results.append)
        assert results == []
        await old.stop()
        assert [result.outcome for result in results] == [Outcome.ANSWERED] * 100
        assert old.offer(1, RequestLimits()).refused == ("the engine is stopping", 1.0)


async def test_an_offer_that_nobody_waits_for_any_more_is_cancelled_wherever_it_is():
    results: list[InferenceResult] = []
    async with engine_of(config_of([{"slowdown": 50.0}])) as engine:
        offers = [engine.offer(1, RequestLimits()) for _ in range(3)]
        for offer in offers:
            engine.bring(offer, images(1), results.append, timeline=True)
        engine.cancel(offers[0])  # before it came in
        counts = engine.counts["requests"]
        assert (counts["received"], counts["cancelled"], counts["in_flight"]) == (1, 1, 0)
        while not engine.counts["requests"]["in_flight"]:
            await asyncio.sleep(0)
        engine.cancel(offers[1])
        engine.cancel(offers[0])  # it has ended
        await asyncio.sleep(0)
        assert [result.outcome for result in results] == [Outcome.CANCELLED] * 2
    assert [result.outcome for result in results] == [Outcome.CANCELLED] * 2 + [Outcome.ANSWERED]
    assert engine.counts["requests"]["cancelled"] == 2
    assert not engine._timelines._followed


async def test_what_an_engine_refused_says_nothing_of_another_engine():
    config = config_of(dispatch={"max_waiting_items": 1})
    async with engine_of(config) as old, engine_of(config) as new:
        old_offers, new_offers = ([engine.offer(1, RequestLimits()) for _ in range(2)] for engine in (old, new))
        assert [offer.refused is None for offer in old_offers + new_offers] == [True, False] * 2
        assert old_offers[1].request_id == new_offers[1].request_id
        assert not new.offer_again(old_offers[1])
        assert new.offer_again(new_offers[1])
        old.withdraw(old_offers[0])
        new.withdraw(new_offers[0])
        assert new.counts["requests"]["rejected"] == 2
