"""NVIDIA GPUs: a stream per instance, pinned staging, and a CUDA graph per (instance, previous width, bucket).

All that is special to CUDA lives here, and what calls the driver in `CudaRuntime`. A batch is padded to its bucket by
whatever the graph's input buffer held, which is right because a segment treats every item on its own. A thread waits
for the stream that it used, so a result that is reported is there, and tensors may pass between streams and devices
without further synchronisation.

Everything of an instance runs on the instance's own stream, whichever thread asks: cuBLAS keeps one workspace per
stream, graphs remember its address, and two streams that replayed graphs with one workspace would overwrite each other.
"""

import logging
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from slim_scheduler.core.errors import ConfigError, DeviceLostError, OutOfMemoryError
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Width
from slim_scheduler.engine.activations import gather, runs
from slim_scheduler.engine.devices.base import Device, MemoryLedger, Rows, warm_up
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel

log = logging.getLogger(__name__)

AHEAD = 0.5  # of the memory limit may be taken when a graph is captured ahead; the rest is for instances and outputs
CAPTURE_WARM_RUNS = 3  # what torch's documentation asks for before a capture: libraries choose and allocate first
# cuBLAS keeps a workspace for every stream that it was used on, 32 MiB by torch's default on Hopper, and cuBLASLt
# another MiB. A classifier's product needs less (the setting is in KiB; a user's own stays), and torch has 32 streams.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
STREAM_BYTES: Bytes = 2 * 2**20
LIBRARY_BYTES: Bytes = 32 * STREAM_BYTES
FLOAT_BYTES = 4
# After one of these every later call of the process fails: the CUDA context is lost, not the batch.
STICKY = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "hardware stack error",
    "uncorrectable ECC",
    "GPU is lost",
    "CUDA driver shutting down",
)


class Runtime(Protocol):
    """What the device asks of CUDA. Tests run the device's own logic with one that computes on the CPU."""

    device: torch.device

    def thread(self) -> AbstractContextManager[None]: ...
    def stream(self) -> Any: ...
    def on(self, stream: Any) -> AbstractContextManager[Any]: ...
    def wait(self, stream: Any) -> None: ...
    def staging(self, shape: Sequence[int]) -> Tensor: ...
    def pool(self) -> Any: ...

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], object], Tensor]:
        """(what replays the captured run, the tensor that it writes). Raises RuntimeError where that is refused."""
        ...

    def give_back(self) -> None:
        """Returns cached memory to the driver."""
        ...


class CudaRuntime:
    """CUDA through torch, on one GPU."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    @contextmanager
    def thread(self) -> Iterator[None]:
        torch.cuda.set_device(self.device)
        yield

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def wait(self, stream: Any) -> None:
        stream.synchronize()  # torch releases the interpreter lock while it waits

    def staging(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), pin_memory=True)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], object], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other execution threads of this process may allocate and copy meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
        return graph.replay, output

    def give_back(self) -> None:
        torch.cuda.empty_cache()


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
    exact_float32()
    os.environ.setdefault(*WORKSPACE)
    return CudaDevice(f"cuda:{index}", CudaRuntime(index), model, shape, max_batch, memory_limit)


def exact_float32() -> None:
    """Float32 is float32: TF32, which keeps 10 bits of the fraction, is off for matrices and for convolutions."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def gpu_memory(index: int) -> Bytes | None:
    """All memory of torch's GPU `index`, None where it is not there."""
    there = torch.cuda.is_available() and index < torch.cuda.device_count()
    return torch.cuda.get_device_properties(index).total_memory if there else None


def check_shared_gpus(budgets: Sequence[tuple[str, Bytes]], total_of: Callable[[int], Bytes | None]) -> None:
    """Servers on one GPU share its memory: (device, budget) of each. Raises ConfigError where they exceed it."""
    sums: dict[int, Bytes] = {}
    for device, budget in budgets:
        if device == "cuda" or device.startswith("cuda:"):
            sums[gpu_index(device)] = sums.get(gpu_index(device), 0) + budget
    for index, asked in sums.items():
        total = total_of(index)
        if total is not None and asked > total:
            raise ConfigError(
                f"the servers on cuda:{index} have budgets of {asked} bytes together, the GPU has {total}; "
                "lower their vram_budget_gib"
            )


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
    """One captured run: what replays it, the buffers that it reads and writes, and the bytes that they take."""

    __slots__ = ("input", "output", "replay", "size")

    def __init__(self, replay: Callable[[], object], input: Tensor, output: Tensor, size: Bytes) -> None:
        self.replay = replay
        self.input = input
        self.output = output
        self.size = size


class InstanceGraphs:
    """What the device keeps of one instance: its stream, and its graphs, which share one memory pool.

    `eager` are the (previous width, bucket) for which capturing was refused; `running` while a thread runs a batch.
    """

    def __init__(self, stream: Any, pool: Any) -> None:
        self.stream = stream
        self.pool = pool
        self.captured: dict[tuple[Width | None, int], CapturedRun] = {}
        self.eager: set[tuple[Width | None, int]] = set()
        self.running = False


class CudaDevice:
    """Implements `Device` on one GPU. Its ledger counts weights, graphs, batches, outputs and libraries.

    `shape` is `setup.machines.whole_shape`'s: an instance has all its variants from the start.
    """

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        model: SlimmableModel,
        shape: ModelShape,
        max_batch: int,
        memory_limit: Bytes,
    ) -> None:
        self.name = name
        self.memory_limit = memory_limit
        self._runtime = runtime
        self._model = model
        self._shape = shape
        self._buckets = batch_buckets(max_batch)
        self._instances: dict[int, InstanceGraphs] = {}  # by id() of the slice, which outlives its entry
        self._lock = threading.Lock()  # of the instances' states
        self._warm: set[tuple[int, Width]] = set()
        self._local = threading.local()
        self._memory = MemoryLedger(self.name, memory_limit)
        self._memory.take(LIBRARY_BYTES, "the libraries' workspaces")
        self._lost = ""

    @contextmanager
    def thread(self) -> Iterator[None]:
        with self._runtime.thread(), torch.inference_mode():
            self._local.staging = self._runtime.staging((self._buckets[-1], *self._shape.item_shape))
            yield

    @property
    def memory_used(self) -> Bytes:
        return self._memory.used

    def load(self, segment: int, width: Width) -> SegmentSlice:
        """Builds the layers for every previous width and captures graphs for all of them, as far as memory goes: no
        live request waits for a capture, and profiles are measured with them."""
        size = self._shape.weight_bytes[segment][self._shape.index(width)]
        self._make_room(size)
        stream = self._runtime.stream()
        with self._memory.taken(size, f"instance of segment {segment} at width {width:g}"), self._errors():
            with self._runtime.on(stream):
                instance = self._model.slice(segment, width, str(self._runtime.device))
                for previous in self._previous(segment):
                    instance.build_variant(previous)
                if (segment, width) not in self._warm:
                    warm_up(self._model, segment, width, str(self._runtime.device))
                    self._warm.add((segment, width))
            self._runtime.wait(stream)
        state = InstanceGraphs(stream, self._runtime.pool())
        with self._errors(), self._runtime.on(stream):
            for bucket in self._buckets:
                for previous in self._previous(segment):
                    if self._memory.used <= AHEAD * self._memory.limit:
                        self._captured(instance, state, previous, bucket)
            self._runtime.wait(stream)
        with self._lock:
            self._instances[id(instance)] = state
        return instance

    def _previous(self, segment: int) -> tuple[Width | None, ...]:
        return self._shape.widths if segment else (None,)

    def unload(self, instance: SegmentSlice) -> None:
        # Graphs hold the addresses of the weights, so they go first; then the slice's memory leaves torch's cache too.
        with self._lock:
            state = self._instances.pop(id(instance))
        self._drop_graphs(state)
        self._memory.give(instance.weight_bytes + instance.variant_bytes)
        with self._errors(), self._runtime.on(state.stream):
            instance.to_host()
            self._runtime.wait(state.stream)
        self._runtime.give_back()

    def run(self, instance: SegmentSlice, rows: Rows, previous_width: Width | None) -> Tensor:
        with self._lock:
            state = self._instances[id(instance)]
            state.running = True
        try:
            with self._errors(), self._runtime.on(state.stream):
                bucket = bucket_of(len(rows), self._buckets)
                ready = self._captured(instance, state, previous_width, bucket)
                output = self._kept(len(rows), instance)
                if ready is None:
                    output.copy_(self._eager(instance, rows, previous_width))
                else:
                    self._fill(ready.input[: len(rows)], rows)
                    ready.replay()
                    output.copy_(ready.output[: len(rows)])  # the next replay overwrites the graph's own
                self._runtime.wait(state.stream)
                return output
        finally:
            with self._lock:
                state.running = False

    def to_host(self, output: Tensor) -> Tensor:
        with self._errors():
            return output.to("cpu")

    def close(self) -> None:
        with self._lock:
            states = list(self._instances.values())
            self._instances.clear()
        for state in states:
            self._drop_graphs(state)
        self._runtime.give_back()

    # Memory

    def _make_room(self, size: Bytes) -> None:
        """Gives up graphs of instances that are not running where `size` bytes are not free: they come back lazily."""
        while self._memory.limit - self._memory.used < size:
            with self._lock:
                idle = [s for s in self._instances.values() if s.captured and not s.running]
                if not idle:
                    return
                state = max(idle, key=lambda s: sum(run.size for run in s.captured.values()))
                dropped = self._take_graphs(state)
            self._free(dropped)

    def _drop_graphs(self, state: InstanceGraphs) -> None:
        with self._lock:
            dropped = self._take_graphs(state)
        self._free(dropped)

    def _take_graphs(self, state: InstanceGraphs) -> list[CapturedRun]:
        dropped = list(state.captured.values())
        state.captured.clear()
        state.eager.clear()
        return dropped

    def _free(self, dropped: list[CapturedRun]) -> None:
        size = sum(run.size for run in dropped)
        dropped.clear()
        self._runtime.give_back()
        self._memory.give(size)

    def _kept(self, items: int, instance: SegmentSlice) -> Tensor:
        """Memory for a batch's output, counted until nobody holds it any more."""
        shape = (items, *self._model.activation_shape(instance.segment, instance.width))
        size = prod(shape) * FLOAT_BYTES
        self._make_room(size)
        with self._memory.taken(size, f"output of {items} items of segment {instance.segment}"):
            output = torch.empty(shape, device=self._runtime.device)
        weakref.finalize(output, self._memory.give, size)
        return output

    # Batches

    def _eager(self, instance: SegmentSlice, rows: Rows, previous_width: Width | None) -> Tensor:
        """Runs the rows without a graph, in as much memory as they need themselves."""
        size = len(rows) * self._shape.workspace_bytes[instance.segment][self._shape.index(instance.width)]
        what = f"batch of {len(rows)} in segment {instance.segment} at width {instance.width:g}"
        self._make_room(size)
        self._memory.take(size, what)
        try:
            return instance.run(gather(rows, str(self._runtime.device)), previous_width)
        finally:
            self._memory.give(size)

    def _fill(self, target: Tensor, rows: Rows) -> None:
        """Writes the rows into a graph's input: one kernel from this device, a pinned copy from the host."""
        views = runs(rows)
        kinds = {view.device for view in views}
        if kinds == {self._runtime.device}:
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

    def _captured(
        self, instance: SegmentSlice, state: InstanceGraphs, previous_width: Width | None, bucket: int
    ) -> CapturedRun | None:
        """The graph for batches of up to `bucket` items, None where there is none: no memory for it, or refused."""
        key = (previous_width, bucket)
        known = state.captured.get(key)
        if known is not None or key in state.eager:
            return known
        segment = instance.segment
        if previous_width is None:
            item: tuple[int, ...] = tuple(self._shape.item_shape)
        else:
            item = tuple(self._model.activation_shape(segment - 1, previous_width))
        answer = self._model.activation_shape(segment, instance.width)
        workspace = self._shape.workspace_bytes[segment][self._shape.index(instance.width)]
        size = bucket * (FLOAT_BYTES * (prod(item) + prod(answer)) + workspace)
        try:
            with self._memory.taken(size, f"graph of segment {segment} for {bucket} items"):
                known = self._capture(instance, state, previous_width, (bucket, *item), size)
        except (OutOfMemoryError, torch.cuda.OutOfMemoryError):
            return None  # eager this time; there may be memory for it later
        if known is None:
            self._memory.give(size)
            state.eager.add(key)
            return None
        with self._lock:
            state.captured[key] = known
        return known

    def _capture(
        self,
        instance: SegmentSlice,
        state: InstanceGraphs,
        previous_width: Width | None,
        shape: tuple[int, ...],
        size: Bytes,
    ) -> CapturedRun | None:
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        buffer = torch.zeros(shape, device=self._runtime.device).contiguous(memory_format=layout)
        for _ in range(CAPTURE_WARM_RUNS):
            instance.run(buffer, previous_width)
        self._runtime.wait(state.stream)
        try:
            replay, output = self._runtime.capture(lambda: instance.run(buffer, previous_width), state.pool)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if is_sticky(error):
                raise
            log.warning("%s: segment %d runs without a CUDA graph: %s", self.name, instance.segment, error)
            return None
        return CapturedRun(replay, buffer, output, size)

    # Errors

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """CUDA's errors as ours. After one that loses the context every call is refused at once."""
        if self._lost:
            raise DeviceLostError(self._lost)
        try:
            with cuda_memory_errors(self.name):
                yield
        except RuntimeError as error:
            if not is_sticky(error):
                raise
            self._lost = f"{self.name} is lost: {str(error).splitlines()[0]}; this process must be started anew"
            log.error("%s", self._lost)
            raise DeviceLostError(self._lost) from None


def is_sticky(error: BaseException) -> bool:
    """Whether an error means that the CUDA context is lost, and not the batch alone."""
    return any(text in str(error) for text in STICKY)


@contextmanager
def cuda_memory_errors(name: str) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemoryError(f"{name}: {str(error).splitlines()[0]}") from None
