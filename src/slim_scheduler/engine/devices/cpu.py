"""The CPU as a device: torch on a few threads of this process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slim_scheduler.core.errors import OutOfMemoryError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Width
from slim_scheduler.engine.activations import gather
from slim_scheduler.engine.devices.base import MemoryLedger, Rows, warm_up
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel


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
        return run_counted(self._memory, self._shape, instance, rows, previous_width)

    def to_host(self, output: Tensor) -> Tensor:
        return output

    def close(self) -> None:
        self._warm.clear()


def run_counted(
    memory: MemoryLedger, shape: ModelShape, instance: SegmentSlice, rows: Rows, previous_width: Width | None
) -> Tensor:
    """A batch in host memory, on an instance that has the variant; what it needs is counted while it runs."""
    segment, width = instance.segment, instance.width
    workspace = len(rows) * shape.workspace_bytes[segment][shape.index(width)]
    with memory.taken(workspace, f"batch of {len(rows)} in segment {segment} at width {width:g}"), cpu_memory_errors():
        output = instance.run(gather(rows, "cpu"), previous_width)
    memory.give(workspace)
    return output


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
