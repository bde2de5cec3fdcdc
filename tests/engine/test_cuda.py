"""CUDA: what can be known without a GPU, and on a machine that has one, that it computes what the CPU does."""

import asyncio

import numpy as np
import pytest
import torch

from slim_scheduler.core.errors import ConfigError, OutOfMemoryError
from slim_scheduler.engine.devices.cuda import batch_buckets, bucket_of, cuda_memory_errors, gpu_index

from .live import NETWORK, SHAPE, config_of, engine_of, expected, images

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
    with device.thread():
        instance = device.load(3, 1.0)
        x = torch.zeros(5, *NETWORK.activation_shape(2, 0.5))
        for size in (1, 2, 5):
            device.run(instance, [(x, row) for row in range(size)], 0.5)
        assert device.memory_used > 0
        device.unload(instance)
        del instance
    device.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
