"""A process that loads four instances on an engine and prints what it took, and what the engine's ledger counted."""

import ctypes
import gc
import sys

import psutil

from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.model.architecture import Architecture
from slim_scheduler.model.shape import shape_of
from slim_scheduler.model.slim_resnet import SlimResNet

# Weights that are large beside everything else.
WIDE = Architecture(
    item_shape=(3, 8, 8), channels=(64, 512), blocks=(1, 2), strides=(1, 2), stem_channels=64, widths=(0.5, 1.0)
)


def resident() -> int:
    """Bytes of this process, without what the allocator only keeps."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def main(device: str, precision: str) -> None:
    model = SlimResNet(WIDE, "wide").eval().requires_grad_(False)
    shape = shape_of(model)
    running = open_device(device, model, shape, threads=1, max_batch=32, memory_limit=2**34, precision=precision)
    with running.thread():
        running.unload(running.load(1, 1.0))  # what the engine itself takes once
        before = resident()
        held = [running.load(1, 1.0) for _ in range(4)]
        print(resident() - before, running.memory_used, len(held))


if __name__ == "__main__":
    main(*sys.argv[1:])
