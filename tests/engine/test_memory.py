"""Memory is real: loaded instances take it, unloaded ones give it back, a device that refuses it splits the batch."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch

from slim_scheduler.core.errors import OutOfMemoryError
from slim_scheduler.core.messages import BatchFailed, InstanceReady, InstanceUnloaded, LoadInstance, StartBatch
from slim_scheduler.core.types import Outcome
from slim_scheduler.engine.devices.base import MemoryLedger
from slim_scheduler.engine.devices.cpu import CpuDevice, cpu_memory_errors
from slim_scheduler.engine.engine import SlimEngine
from slim_scheduler.engine.measure import measure_model
from slim_scheduler.model.presets import preset_named
from slim_scheduler.model.shape import shape_of
from slim_scheduler.model.slim_resnet import SlimResNet

from .live import NETWORK, SHAPE, TOLERANCE, Watch, config_of, engine_of, expected, images

WIDE = (1.0,) * 4
AMPLE = 1 << 30


class WatchedCpu(CpuDevice):
    """A CPU that remembers every slice it made and its weights, without keeping them alive."""

    def __init__(self, limit: int = AMPLE) -> None:
        super().__init__(NETWORK, SHAPE, 1, limit)
        self.made: list[weakref.ref] = []
        self.weights: list[weakref.ref] = []
        self.peak = 0

    def load(self, segment, width):
        instance = super().load(segment, width)
        self.made.append(weakref.ref(instance))
        self.weights += [weakref.ref(weight) for weight in instance._own.values()]
        return instance

    def run(self, instance, rows, previous_width):
        output = super().run(instance, rows, previous_width)
        self.peak = max(self.peak, self.memory_used)
        return output


def test_the_ledger_knows_the_bytes_that_slices_really_take():
    device = CpuDevice(NETWORK, SHAPE, 1, AMPLE)
    slices = [device.load(segment, width) for segment in range(SHAPE.segments) for width in SHAPE.widths]
    for instance in slices:
        if instance.segment:
            x = torch.zeros(2, *NETWORK.activation_shape(instance.segment - 1, 0.5))
            device.run(instance, [(x, 0), (x, 1)], 0.5)
    assert device.memory_used == sum(s.weight_bytes + s.variant_bytes for s in slices)
    for instance in slices:
        device.unload(instance)
    assert device.memory_used == 0


async def test_an_idle_instance_is_unloaded_its_memory_is_freed_and_it_comes_back():
    watch, device = Watch(), WatchedCpu()
    config = config_of([{"idle_unload_s": 0.05}])
    async with engine_of(config, recorder=watch, devices={"a": device}) as engine:
        await engine.infer(images(3), widths=WIDE)
        assert engine.memory_used["a"] > 0
        while engine.memory_used["a"] or len(watch.seen(InstanceUnloaded)) < 4:
            await watch.until(lambda _, message: isinstance(message, InstanceUnloaded))
        gc.collect()
        assert len(device.made) == 4
        assert not [ref for ref in device.made + device.weights if ref() is not None], "weights are still alive"
        assert engine.servers["a"].report is not None

        again = await engine.infer(images(3), widths=WIDE)
        np.testing.assert_allclose(again.logits, expected(images(3), WIDE), atol=TOLERANCE)
        assert len(device.made) == 8


@pytest.mark.accept
async def test_an_unloaded_instance_comes_back_in_the_time_that_the_profile_states():
    """A thread that slept takes its time to wake on a busy machine: this needs a core to itself."""
    network = SlimResNet(preset_named("cifar100-lean").architecture, "lean").eval().requires_grad_(False)
    shape = shape_of(network)
    profile = await measure_model(network, "cpu", batches=(1,), rounds=1, only=WIDE)
    stated = [profile.load_time(shape.weight_bytes[s][shape.index(1.0)]) for s in range(shape.segments)]
    watch = Watch()
    async with SlimEngine(config_of([{"idle_unload_s": 0.6}]), network, shape, recorder=watch) as engine:
        items = np.zeros((1, *shape.item_shape), np.float32)
        for cycle in range(6):
            await engine.infer(items, widths=WIDE)
            while engine.memory_used["a"] or len(watch.seen(InstanceUnloaded)) < 4 * (cycle + 1):
                await watch.until(lambda _, message: isinstance(message, InstanceUnloaded))
    asked = {
        c.instance: (now, c) for _, now, _, commands in watch.steps for c in commands if isinstance(c, LoadInstance)
    }
    ready = [(now, *asked[event.instance]) for _, now, event, _ in watch.steps if isinstance(event, InstanceReady)]
    assert len(ready) == 24
    again = [(end - begin) / stated[load.segment] for end, begin, load in ready[4:]]  # the first four are no return
    assert np.median(again) <= 3.0


async def test_the_budget_is_never_passed_however_many_widths_are_asked_for():
    largest = max(
        SHAPE.instance_bytes(segment, 1.0, 4) + sum(SHAPE.variant(segment, w, 1.0) for w in SHAPE.widths if segment)
        for segment in range(SHAPE.segments)
    )
    budget = int(2.2 * largest)
    device = WatchedCpu(budget)
    watch = Watch()
    config = config_of(
        [{"vram_budget_gib": budget / 2**30, "max_batch": 4, "max_upgrade": 0.0}],
        router={"name": "round-robin:random", "fallback": "jsq:1"},
    )
    async with engine_of(config, recorder=watch, devices={"a": device}) as engine:
        results = await asyncio.gather(*[engine.infer(images(1)) for _ in range(60)])
    assert {result.outcome for result in results} == {Outcome.ANSWERED}
    assert device.peak <= budget
    assert not watch.seen(BatchFailed), "the scheduler's own accounting should have kept within the budget"
    assert watch.seen(InstanceUnloaded), "a budget this small forces instances out"


async def test_out_of_memory_splits_the_batch_and_the_server_remembers():
    rest = sum(SHAPE.weight_bytes[s][-1] + (SHAPE.variant(s, 1.0, 1.0) if s else 0) for s in range(SHAPE.segments))
    room = max(SHAPE.workspace_bytes[s][-1] for s in range(SHAPE.segments))
    device = WatchedCpu(rest + 5 * room)  # less than the configuration promises: batches of 32 cannot run
    watch = Watch()
    async with engine_of(config_of([{"max_new_instances": 1}]), recorder=watch, devices={"a": device}) as engine:
        for _ in range(2):  # the second time with every instance loaded, so with less room
            result = await engine.infer(images(32), widths=WIDE)
            np.testing.assert_allclose(result.logits, expected(images(32), WIDE), atol=TOLERANCE)
        refused = watch.seen(BatchFailed)
        assert len(refused) >= 3, "32, 16 and 8 do not fit"
        assert all(failed.out_of_memory for failed in refused)
        await engine.infer(images(32), widths=WIDE)
        assert len(watch.seen(BatchFailed)) == len(refused), "it tries no size again that did not fit"
    assert device.peak <= device.memory_limit


async def test_a_batch_that_fails_for_another_reason_is_tried_again_on_a_fresh_instance():
    class BreaksOnce(CpuDevice):
        broken = False

        def run(self, instance, rows, previous_width):
            if not self.broken:
                self.broken = True
                raise RuntimeError("the kernel launch failed\nand a second line")
            return super().run(instance, rows, previous_width)

    watch = Watch()
    devices = {"a": BreaksOnce(NETWORK, SHAPE, 1, AMPLE)}
    async with engine_of(config_of(), recorder=watch, devices=devices) as engine:
        result = await engine.infer(images(2), widths=WIDE)
    assert result.outcome is Outcome.ANSWERED
    assert [failed.reason for failed in watch.seen(BatchFailed)] == ["RuntimeError: the kernel launch failed"]
    assert len(watch.seen(LoadInstance)) == 5


async def test_answers_leave_no_activations_behind():
    watch = Watch()
    async with engine_of(config_of(({}, {})), recorder=watch) as engine:
        ledger = engine.fleet.items
        await asyncio.gather(*[engine.infer(images(2)) for _ in range(50)])
        assert len(ledger) == 0
        assert ledger.held_bytes == 0
    assert watch.seen(StartBatch)


def test_a_ledger_refuses_what_would_pass_its_limit():
    ledger = MemoryLedger("cpu", 100)
    ledger.take(60, "one")
    with pytest.raises(OutOfMemoryError, match="two needs 50 bytes, 40 of 100 are free"):
        ledger.take(50, "two")
    with pytest.raises(ValueError, match="broken"), ledger.taken(40, "three"):
        raise ValueError("broken")
    assert ledger.used == 60


def test_a_refusal_of_the_operating_system_is_out_of_memory():
    with pytest.raises(OutOfMemoryError, match="DefaultCPUAllocator"), cpu_memory_errors():
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"), cpu_memory_errors():
        torch.zeros(3).reshape(2)
