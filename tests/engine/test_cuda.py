"""CUDA: what can be known without a GPU, and on a machine that has one, that it computes what the CPU does."""

import asyncio
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from slim_scheduler.core.errors import ConfigError, DeviceLostError, OutOfMemoryError
from slim_scheduler.engine.devices.cuda import (
    LIBRARY_BYTES,
    STREAM_BYTES,
    CudaDevice,
    batch_buckets,
    bucket_of,
    check_shared_gpus,
    cuda_memory_errors,
    exact_float32,
    gpu_index,
)
from slim_scheduler.setup.machines import whole_shape

from .live import NETWORK, SHAPE, Watch, config_of, engine_of, expected, images

LIMIT = 1 << 30


WHOLE = whole_shape(SHAPE)


class HostRuntime:
    """The runtime's protocol on the CPU: captured runs run again, into the tensor that the capture gave.

    It remembers on which stream each run was made and replayed, which is what the workspace of cuBLAS hangs on.
    """

    device = torch.device("cpu")

    def __init__(self):
        self.streams, self.current, self.used = 0, threading.local(), []
        self.refuse = self.broken = None  # what captures raise; what captures and replays raise

    @contextmanager
    def thread(self):
        yield

    def stream(self):
        self.streams += 1
        return self.streams

    @contextmanager
    def on(self, stream):
        before, self.current.stream = getattr(self.current, "stream", None), stream
        yield
        self.current.stream = before

    def wait(self, stream):
        pass

    def staging(self, shape):
        return torch.empty(tuple(shape))

    def pool(self):
        return object()

    def capture(self, run, pool):
        if refused := self.broken or self.refuse:
            raise refused
        captured_on, output = self.current.stream, run()

        def replay():
            if self.broken is not None:
                raise self.broken
            self.used.append((captured_on, self.current.stream))
            output.copy_(run())

        return replay, output

    def give_back(self):
        pass


def cuda_on_host(runtime=None, limit=LIMIT, max_batch=8):
    return CudaDevice("cuda:0", runtime or HostRuntime(), NETWORK, WHOLE, max_batch, limit)


def inputs(segment, width, items=8):
    shape = NETWORK.activation_shape(segment - 1, width) if segment else NETWORK.item_shape
    x = torch.randn(items, *shape, generator=torch.Generator().manual_seed(1))
    return [(x, row) for row in range(items)], x


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_buckets_are_powers_of_two_up_to_the_largest_batch():
    assert batch_buckets(32) == (1, 2, 4, 8, 16, 32)
    assert batch_buckets(24) == (1, 2, 4, 8, 16, 24)
    assert batch_buckets(1) == (1,)
    assert [bucket_of(size, batch_buckets(32)) for size in (1, 2, 3, 5, 17, 32)] == [1, 2, 4, 8, 32, 32]


def test_devices_are_named_as_torch_names_them():
    assert [gpu_index(name) for name in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
    with pytest.raises(ConfigError, match="cuda:x is no GPU; write cuda:0"):
        gpu_index("cuda:x")


def test_a_gpu_that_is_not_there_is_one_clear_line():
    missing = f"cuda:{torch.cuda.device_count() if torch.cuda.is_available() else 0}"
    with pytest.raises(ConfigError, match=f"device {missing} is not there.*use cpu, or run `slim doctor`"):
        engine_of(config_of([{"device": missing}]))


def test_cuda_out_of_memory_is_out_of_memory():
    with pytest.raises(OutOfMemoryError, match="cuda:0: CUDA out of memory"), cuda_memory_errors("cuda:0"):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    with pytest.raises(RuntimeError, match="illegal"), cuda_memory_errors("cuda:0"):
        raise RuntimeError("an illegal memory access was encountered")


def test_batches_of_every_size_are_the_networks_own_answers():
    device = cuda_on_host()
    with device.thread():
        for segment, previous, width in ((0, None, 0.5), (2, 0.25, 1.0), (3, 1.0, 0.25)):
            instance = device.load(segment, width)
            reference = NETWORK.slice(segment, width, "cpu")
            reference.build_variant(previous)
            rows, x = inputs(segment, previous)
            for size in (1, 3, 8, 5, 2):
                np.testing.assert_allclose(
                    device.run(instance, rows[:size], previous), reference.run(x[:size], previous), atol=1e-5
                )


def test_the_ledger_counts_graphs_and_kept_outputs_and_gets_all_of_it_back():
    device = cuda_on_host()
    with device.thread():
        assert device.memory_used == LIBRARY_BYTES
        instance = device.load(3, 1.0)
        assert instance.weight_bytes + instance.variant_bytes == WHOLE.weight_bytes[3][SHAPE.index(1.0)]
        held = device.memory_used
        graphs = held - instance.variant_bytes - instance.weight_bytes - LIBRARY_BYTES
        of_one = sum(device._buckets) * SHAPE.workspace_bytes[3][SHAPE.index(1.0)]
        assert graphs > len(SHAPE.widths) * of_one, "input, output and workspace of every graph"
        rows, _ = inputs(3, 0.5)
        output = device.run(instance, rows, 0.5)
        assert device.memory_used == held + output.nbytes
        del output
        assert device.memory_used == held
        device.unload(instance)
    assert device.memory_used == LIBRARY_BYTES


def test_without_memory_for_a_graph_a_batch_runs_in_what_it_needs_itself():
    at = SHAPE.index(1.0)
    resident = LIBRARY_BYTES + WHOLE.weight_bytes[3][at]
    device = cuda_on_host(limit=resident + 5 * SHAPE.workspace_bytes[3][at])
    rows, x = inputs(3, 1.0)
    with device.thread():
        instance = device.load(3, 1.0)
        reference = NETWORK.slice(3, 1.0, "cpu")
        reference.build_variant(1.0)
        with pytest.raises(OutOfMemoryError, match="batch of 8 in segment 3"):
            device.run(instance, rows, 1.0)
        for half in (rows[:4], rows[4:]):  # the split helps: a smaller batch takes less
            np.testing.assert_allclose(
                device.run(instance, half, 1.0), reference.run(x[half[0][1] : half[0][1] + 4], 1.0), atol=1e-5
            )


def test_graphs_of_idle_instances_make_room_for_a_load():
    device = cuda_on_host()
    with device.thread():
        first = device.load(0, 1.0)
        held = device.memory_used
        size = WHOLE.weight_bytes[3][SHAPE.index(1.0)]
        tight = cuda_on_host(limit=held + size // 2)
    with tight.thread():
        first = tight.load(0, 1.0)
        tight.load(3, 1.0)
        rows, x = inputs(0, None)
        reference = NETWORK.slice(0, 1.0, "cpu")
        np.testing.assert_allclose(tight.run(first, rows[:1], None), reference.run(x[:1], None), atol=1e-5)


def test_an_instance_is_captured_and_replayed_on_its_own_stream_whichever_thread_runs_it():
    runtime = HostRuntime()
    device = cuda_on_host(runtime)
    with device.thread():
        instances = [device.load(0, width) for width in (0.25, 1.0)]
    rows, _ = inputs(0, None)

    def batches(order):
        with device.thread():
            for i in order:
                device.run(instances[i], rows[: 1 + i], None)

    for order in ((0, 1, 0), (1, 0, 1)):
        thread = threading.Thread(target=batches, args=(order,))
        thread.start()
        thread.join()
    assert len(runtime.used) == 6
    assert all(captured == replayed for captured, replayed in runtime.used)
    assert len({stream for stream, _ in runtime.used}) == 2


@pytest.mark.parametrize("segment", range(SHAPE.segments))
def test_every_segment_is_captured_before_it_is_ready(segment):
    runtime = HostRuntime()
    device = cuda_on_host(runtime, max_batch=8)
    runs = 0
    with device.thread():
        instance = device.load(segment, 0.5)
        runtime.refuse = RuntimeError("no capture may fall on a request")
        for previous in SHAPE.widths if segment else (None,):
            rows, _ = inputs(segment, previous)
            for size in (1, 2, 3, 8):
                device.run(instance, rows[:size], previous)
                runs += 1
    assert len(runtime.used) == runs


def test_graphs_are_captured_ahead_in_half_of_the_memory_alone():
    runtime = HostRuntime()
    limit = 3 * LIBRARY_BYTES
    device = cuda_on_host(runtime, limit=limit, max_batch=32)
    with device.thread():
        instances = [device.load(segment, width) for segment in range(4) for width in SHAPE.widths]
        largest = 32 * max(max(row) for row in SHAPE.workspace_bytes) * 2
        assert device.memory_used <= limit / 2 + sum(map(max, WHOLE.weight_bytes)) * 4 + largest
        assert len(instances) == 16


def test_what_cannot_be_captured_runs_without_a_graph():
    runtime = HostRuntime()
    runtime.refuse = RuntimeError("operation not permitted when stream is capturing")
    device = cuda_on_host(runtime)
    with device.thread():
        instance = device.load(1, 0.5)
        rows, x = inputs(1, 0.25)
        reference = NETWORK.slice(1, 0.5, "cpu")
        reference.build_variant(0.25)
        np.testing.assert_allclose(device.run(instance, rows[:3], 0.25), reference.run(x[:3], 0.25), atol=1e-5)


def test_a_lost_context_is_said_once_and_refused_from_then_on():
    runtime = HostRuntime()
    device = cuda_on_host(runtime)
    with device.thread():
        instance = device.load(1, 0.5)
        rows, _ = inputs(1, 0.5)
        runtime.broken = RuntimeError("CUDA error: an illegal memory access was encountered")
        with pytest.raises(DeviceLostError, match="cuda:0 is lost: CUDA error: an illegal memory access"):
            device.run(instance, rows, 0.5)
        runtime.broken = None
        with pytest.raises(DeviceLostError, match="must be started anew"):
            device.run(instance, rows, 0.5)


async def test_a_server_whose_device_is_lost_falls_silent_and_its_work_runs_elsewhere():
    runtime = HostRuntime()
    watch = Watch()
    config = config_of(({}, {}), router={"name": "round-robin:0.5", "fallback": "jsq:0.5"})
    async with engine_of(config, recorder=watch, devices={"a": cuda_on_host(runtime, max_batch=32)}) as engine:
        await engine.infer(images(8))
        runtime.broken = RuntimeError("CUDA error: device-side assert triggered")
        results = await asyncio.gather(*[engine.infer(images(1, seed)) for seed in range(40)])
    for seed, result in enumerate(results):
        np.testing.assert_allclose(result.logits, expected(images(1, seed), result.items[0].widths), atol=1e-4)


def test_servers_on_one_gpu_must_fit_it_together():
    gib = 1 << 30
    check_shared_gpus([("cuda:0", 6 * gib), ("cuda:1", 6 * gib), ("cpu", 100 * gib)], lambda index: 8 * gib)
    with pytest.raises(ConfigError, match=r"servers on cuda:0 have budgets of \d+ bytes together.*lower"):
        check_shared_gpus([("cuda:0", 6 * gib), ("cuda", 6 * gib)], lambda index: 8 * gib)


def test_float32_is_float32():
    exact_float32()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


@gpu
async def test_gpu_answers_are_the_cpus():
    items = images(200)
    config = config_of(
        [{"device": "cuda:0", "max_concurrent_batches": 2}, {"device": "cpu"}, {"device": "cuda:0", "max_batch": 24}]
    )
    async with engine_of(config) as engine:
        results = await asyncio.gather(*[engine.infer(items[i : i + 1]) for i in range(len(items))])
    for i, result in enumerate(results):
        np.testing.assert_allclose(result.logits, expected(items[i : i + 1], result.items[0].widths), atol=1e-3)


@gpu
async def test_gpu_memory_is_freed_when_instances_go():
    from slim_scheduler.engine.devices.registry import open_device

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    device = open_device("cuda:0", NETWORK, SHAPE, threads=1, max_batch=32, memory_limit=1 << 30)
    x = torch.zeros(5, *NETWORK.activation_shape(2, 0.5))
    left = []
    with device.thread():
        for _ in range(3):
            instance = device.load(3, 1.0)
            for size in (1, 2, 5):
                device.run(instance, [(x, row) for row in range(size)], 0.5)
            assert device.memory_used > LIBRARY_BYTES
            device.unload(instance)
            del instance
            torch.cuda.synchronize()
            left.append(torch.cuda.memory_allocated() - before)
            assert device.memory_used == LIBRARY_BYTES
    device.close()
    assert all(bytes <= STREAM_BYTES * (i + 1) for i, bytes in enumerate(left)), "only streams' workspaces stay"


@gpu
def test_two_threads_that_replay_two_instances_keep_their_answers_apart():
    """Silent corruption by a shared cuBLAS workspace would show here."""
    from slim_scheduler.engine.devices.registry import open_device

    device = open_device("cuda:0", NETWORK, SHAPE, threads=1, max_batch=32, memory_limit=1 << 30)
    with device.thread():
        instances = [device.load(3, width) for width in (0.25, 1.0)]
    references = [NETWORK.slice(3, width, "cpu") for width in (0.25, 1.0)]
    wrong: list[int] = []

    def batches(i: int) -> None:
        references[i].build_variant(1.0)
        with device.thread():
            end = time.monotonic() + 10.0
            while time.monotonic() < end:
                x = torch.randn(32, *NETWORK.activation_shape(2, 1.0))
                got = device.to_host(device.run(instances[i], [(x, row) for row in range(32)], 1.0))
                if not torch.allclose(got, references[i].run(x, 1.0), atol=1e-3):
                    wrong.append(i)

    threads = [threading.Thread(target=batches, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.close()
    assert not wrong
