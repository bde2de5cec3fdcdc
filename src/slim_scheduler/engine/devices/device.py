"""What runs segments: the `Device` protocol, and the CPU. CUDA is in `cuda.py`; another kind of device is another file.

A device loads instances (slices of the network in its own memory), runs batches on them and keeps count of the bytes
they really take. Its methods are called from execution threads, each inside `thread()`; it decides nothing.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from slim_scheduler.core.errors import ConfigError, OutOfMemoryError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Width
from slim_scheduler.engine.activations import gather
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel

Rows = Sequence[tuple[Tensor, int]]


class Device(Protocol):
    """One CPU or GPU. `run` returns when the result is there; out of memory is always `OutOfMemoryError`."""

    name: str
    memory_limit: Bytes

    def thread(self) -> AbstractContextManager[None]:
        """Everything that one execution thread needs around its work."""
        ...

    def load(self, segment: int, width: Width) -> SegmentSlice:
        """Allocates a slice and warms it up."""
        ...

    def unload(self, instance: SegmentSlice) -> None:
        """Gives the slice's memory back. The network itself stays in host memory, so it can be loaded again."""
        ...

    def run(self, instance: SegmentSlice, rows: Rows, previous_width: Width | None) -> Tensor:
        """Gathers the rows and runs the segment: (batch, ...) on this device. Builds the variant where it is new."""
        ...

    def to_host(self, output: Tensor) -> Tensor: ...

    @property
    def memory_used(self) -> Bytes:
        """Bytes that instances and running batches take right now."""
        ...

    def close(self) -> None: ...


class MemoryLedger:
    """Bytes taken of a limit that is never passed. Thread-safe."""

    def __init__(self, name: str, limit: Bytes) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def take(self, size: Bytes, what: str) -> None:
        with self._lock:
            if self.used + size > self.limit:
                raise OutOfMemoryError(
                    f"{self.name}: {what} needs {size} bytes, {self.limit - self.used} of {self.limit} are free"
                )
            self.used += size

    @contextmanager
    def taken(self, size: Bytes, what: str) -> Iterator[None]:
        """Takes the bytes, and gives them back if what they are for fails."""
        self.take(size, what)
        try:
            yield
        except BaseException:
            self.give(size)
            raise

    def give(self, size: Bytes) -> None:
        with self._lock:
            self.used -= size
            assert self.used >= 0, f"{self.name}: gave back {size} bytes more than were taken"


class CpuDevice:
    """Runs segments on `threads` CPU threads per execution thread. Its memory is the process's; the limit is ours."""

    name = "cpu"

    def __init__(self, model: SlimmableModel, shape: ModelShape, threads: int, memory_limit: Bytes) -> None:
        self.memory_limit = memory_limit
        self._model = model
        self._shape = shape
        self._threads = threads
        self._memory = MemoryLedger(self.name, memory_limit)
        self._warm: set[tuple[int, Width]] = set()

    @contextmanager
    def thread(self) -> Iterator[None]:
        # OpenMP and MKL keep the number per calling thread, so servers in one process can differ. But a thread's first
        # parallel operation sets it to what any thread set last, unless asking for it has done so before.
        torch.get_num_threads()
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            yield

    @property
    def memory_used(self) -> Bytes:
        return self._memory.used

    def load(self, segment: int, width: Width) -> SegmentSlice:
        size = self._shape.weight_bytes[segment][self._shape.index(width)]
        with self._memory.taken(size, f"instance of segment {segment} at width {width:g}"), cpu_memory_errors():
            instance = self._model.slice(segment, width, "cpu")
            if (segment, width) not in self._warm:
                warm_up(self._model, segment, width, "cpu")
                self._warm.add((segment, width))
            return instance

    def unload(self, instance: SegmentSlice) -> None:
        self._memory.give(instance.weight_bytes + instance.variant_bytes)

    def run(self, instance: SegmentSlice, rows: Rows, previous_width: Width | None) -> Tensor:
        segment, width = instance.segment, instance.width
        if not instance.has_variant(previous_width):
            size = self._shape.variant(segment, previous_width, width)
            what = f"variant for previous width {previous_width} of segment {segment}"
            with self._memory.taken(size, what), cpu_memory_errors():
                instance.build_variant(previous_width)
        workspace = len(rows) * self._shape.workspace_bytes[segment][self._shape.index(width)]
        self._memory.take(workspace, f"batch of {len(rows)} in segment {segment} at width {width:g}")
        try:
            with cpu_memory_errors():
                return instance.run(gather(rows, "cpu"), previous_width)
        finally:
            self._memory.give(workspace)

    def to_host(self, output: Tensor) -> Tensor:
        return output

    def close(self) -> None:
        self._warm.clear()


def warm_up(model: SlimmableModel, segment: int, width: Width, device: str) -> None:
    """Runs a spare slice once, so that kernels are chosen and compiled before the first batch.

    A spare one, because an instance must not keep a variant that nobody asked for.
    """
    previous = width if segment else None
    spare = model.slice(segment, width, device)
    spare.build_variant(previous)
    item = model.activation_shape(segment - 1, width) if segment else model.item_shape
    spare.run(torch.zeros((1, *item), device=device), previous)


# How torch's CPU allocator says that memory is out: it raises a plain RuntimeError.
CPU_MEMORY_REFUSED = re.compile(r"DefaultCPUAllocator|not enough memory|can't allocate memory|std::bad_alloc")


@contextmanager
def cpu_memory_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(f"cpu: {error}") from None
    except RuntimeError as error:
        if CPU_MEMORY_REFUSED.search(str(error)):
            raise OutOfMemoryError(f"cpu: {str(error).splitlines()[0]}") from None
        raise


def open_device(
    device: str, model: SlimmableModel, shape: ModelShape, *, threads: int, max_batch: int, memory_limit: Bytes
) -> Device:
    """The device that a configuration names: `cpu` or `cuda:N`. Raises ConfigError for one that is not there."""
    if device == "cpu":
        return CpuDevice(model, shape, threads, memory_limit)
    if device == "cuda" or device.startswith("cuda:"):
        from slim_scheduler.engine.devices.cuda import open_cuda

        return open_cuda(device, model, shape, max_batch, memory_limit)
    raise ConfigError(f"device {device} cannot run live; live devices are cpu and cuda:N (a profile is for simulation)")
