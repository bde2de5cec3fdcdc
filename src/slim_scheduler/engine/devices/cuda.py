"""NVIDIA GPUs: a stream per execution thread, pinned staging, and a CUDA graph per (instance, previous width, bucket).

All that is special to CUDA lives here. A batch is padded to its bucket by whatever the graph's input buffer held, which
is right because a segment treats every item on its own. The thread waits for its stream, so a result that is reported
is there, and tensors may pass between streams and devices without further synchronisation.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slim_scheduler.core.errors import ConfigError, OutOfMemoryError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Width
from slim_scheduler.engine.activations import runs
from slim_scheduler.engine.devices.base import Device, MemoryLedger, Rows, warm_up
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel

log = logging.getLogger(__name__)

CAPTURE_WARM_RUNS = 3  # what torch's documentation asks for before a capture: libraries choose and allocate first


def open_cuda(device: str, model: SlimmableModel, shape: ModelShape, max_batch: int, memory_limit: Bytes) -> Device:
    """Raises ConfigError where the GPU is not there or has less memory than the budget."""
    index = gpu_index(device)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= available:
        raise ConfigError(
            f"device {device} is not there: torch {torch.__version__} sees {available} GPUs; "
            "use cpu, or run `slim doctor` to see why"
        )
    total = torch.cuda.get_device_properties(index).total_memory
    if memory_limit > total:
        raise ConfigError(f"device {device} has {total} bytes, vram_budget_gib asks for {memory_limit}; lower it")
    return CudaDevice(index, model, shape, max_batch, memory_limit)


def gpu_index(device: str) -> int:
    _, _, index = device.partition(":")
    if index and not index.isdigit():
        raise ConfigError(f"device {device} is no GPU; write cuda:0, cuda:1, ...")
    return int(index or 0)


def nvml_handle(nvml: Any, index: int) -> Any:
    """NVML's handle of torch's GPU `index`: by UUID, because CUDA_VISIBLE_DEVICES renumbers torch's."""
    uuid = torch.cuda.get_device_properties(index).uuid
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two below `max_batch`, and `max_batch`: the batch sizes that graphs are captured for."""
    powers = [2**i for i in range(max_batch.bit_length()) if 2**i < max_batch]
    return (*powers, max_batch)


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size` items."""
    return buckets[bisect_left(buckets, size)]


class CapturedRun:
    """One captured graph with the buffers it reads and writes. `graph` is None where capturing was refused."""

    __slots__ = ("graph", "input", "output")

    def __init__(self, graph: "torch.cuda.CUDAGraph | None", input: Tensor, output: Tensor | None) -> None:
        self.graph = graph
        self.input = input
        self.output = output


class InstanceGraphs:
    """The graphs of one instance. They share one memory pool: an instance runs one batch at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.buffers: dict[Width | None, Tensor] = {}
        self.captured: dict[tuple[Width | None, int], CapturedRun] = {}


class CudaDevice:
    """Implements `Device` on one GPU."""

    def __init__(
        self, index: int, model: SlimmableModel, shape: ModelShape, max_batch: int, memory_limit: Bytes
    ) -> None:
        self.name = f"cuda:{index}"
        self.memory_limit = memory_limit
        self._device = torch.device("cuda", index)
        self._model = model
        self._shape = shape
        self._buckets = batch_buckets(max_batch)
        self._graphs: dict[int, InstanceGraphs] = {}  # by id() of the slice, which outlives its entry
        self._warm: set[tuple[int, Width]] = set()
        self._local = threading.local()
        self._memory = MemoryLedger(self.name, memory_limit)
        self._before = torch.cuda.memory_allocated(self._device)

    @contextmanager
    def thread(self) -> Iterator[None]:
        torch.cuda.set_device(self._device)
        self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        staging = (self._buckets[-1], *self._shape.item_shape)
        self._local.staging = torch.empty(staging, pin_memory=True)
        with torch.cuda.stream(self._local.stream), torch.inference_mode():
            yield

    @property
    def memory_used(self) -> Bytes:
        return max(0, torch.cuda.memory_allocated(self._device) - self._before)

    def load(self, segment: int, width: Width) -> SegmentSlice:
        size = self._shape.weight_bytes[segment][self._shape.index(width)]
        with self._memory.taken(size, f"instance of segment {segment} at width {width:g}"):
            with cuda_memory_errors(self.name):
                instance = self._model.slice(segment, width, self.name)
                if (segment, width) not in self._warm:
                    warm_up(self._model, segment, width, self.name)
                    self._warm.add((segment, width))
                self._finish()
            self._graphs[id(instance)] = InstanceGraphs()
            return instance

    def unload(self, instance: SegmentSlice) -> None:
        # Graphs hold the addresses of the weights, so they go first; then the slice's memory leaves torch's cache too.
        del self._graphs[id(instance)]
        self._memory.give(instance.weight_bytes + instance.variant_bytes)
        instance.to_host()
        self._finish()
        torch.cuda.empty_cache()

    def run(self, instance: SegmentSlice, rows: Rows, previous_width: Width | None) -> Tensor:
        if not instance.has_variant(previous_width):
            size = self._shape.variant(instance.segment, previous_width, instance.width)
            what = f"variant for previous width {previous_width} of segment {instance.segment}"
            with self._memory.taken(size, what), cuda_memory_errors(self.name):
                instance.build_variant(previous_width)
        with cuda_memory_errors(self.name):
            ready = self._captured(instance, previous_width, bucket_of(len(rows), self._buckets))
            self._fill(ready.input[: len(rows)], rows)
            if ready.graph is None or ready.output is None:
                output = instance.run(ready.input[: len(rows)], previous_width)
            else:
                ready.graph.replay()
                output = ready.output[: len(rows)].clone()  # the next replay overwrites the graph's own
            self._finish()
            return output

    def to_host(self, output: Tensor) -> Tensor:
        return output.to("cpu")

    def close(self) -> None:
        self._graphs.clear()
        torch.cuda.empty_cache()

    def _finish(self) -> None:
        """Waits for this thread's stream; torch releases the interpreter lock while it waits."""
        self._local.stream.synchronize()

    def _fill(self, target: Tensor, rows: Rows) -> None:
        """Writes the rows into a graph's input: one kernel from this device, a pinned copy from the host."""
        views = runs(rows)
        kinds = {view.device for view in views}
        if kinds == {self._device}:
            torch.cat(views, out=target)
        elif kinds == {torch.device("cpu")} and target[0].shape == self._local.staging[0].shape:
            staging = self._local.staging[: len(rows)]  # free again: this thread waited for its last batch
            torch.cat(views, out=staging)
            target.copy_(staging, non_blocking=True)
        else:  # activations from other devices
            first = 0
            for view in views:
                target[first : first + len(view)].copy_(view, non_blocking=True)
                first += len(view)

    def _captured(self, instance: SegmentSlice, previous_width: Width | None, bucket: int) -> CapturedRun:
        graphs = self._graphs[id(instance)]
        known = graphs.captured.get((previous_width, bucket))
        if known is None:
            if previous_width not in graphs.buffers:
                graphs.buffers[previous_width] = self._input_buffer(instance.segment, previous_width)
            known = self._capture(instance, previous_width, graphs.buffers[previous_width][:bucket], graphs)
            graphs.captured[previous_width, bucket] = known
        return known

    def _input_buffer(self, segment: int, previous_width: Width | None) -> Tensor:
        if previous_width is None:
            item = self._shape.item_shape
        else:
            item = self._model.activation_shape(segment - 1, previous_width)
        layout = torch.channels_last if len(item) == 3 else torch.contiguous_format
        return torch.zeros((self._buckets[-1], *item), device=self._device).contiguous(memory_format=layout)

    def _capture(
        self, instance: SegmentSlice, previous_width: Width | None, buffer: Tensor, graphs: InstanceGraphs
    ) -> CapturedRun:
        for _ in range(CAPTURE_WARM_RUNS):
            instance.run(buffer, previous_width)
        self._finish()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other execution threads of this process may allocate and copy meanwhile.
            graph.capture_begin(pool=graphs.pool, capture_error_mode="thread_local")
            try:
                output = instance.run(buffer, previous_width)
            finally:
                graph.capture_end()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("%s: segment %d runs without a CUDA graph: %s", self.name, instance.segment, error)
            return CapturedRun(None, buffer, None)
        return CapturedRun(graph, buffer, output)


@contextmanager
def cuda_memory_errors(name: str) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemoryError(f"{name}: {str(error).splitlines()[0]}") from None
