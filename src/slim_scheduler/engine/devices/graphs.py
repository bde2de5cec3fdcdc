"""A device whose instances are compiled graphs: what ONNX Runtime and OpenVINO have in common.

An instance holds one program per previous width, all compiled when it is loaded, so that no request waits for a
compiler. Its bytes are those of all its programs (`setup/machines.device_shape` tells the scheduler the same).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Width
from slim_scheduler.engine.devices.base import MemoryLedger, Rows
from slim_scheduler.engine.devices.cpu import cpu_memory_errors, run_counted
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel
from slim_scheduler.model.segment_graph import GraphExporter, Prepare
from slim_scheduler.setup.machines import compiled_shape


class Program(Protocol):
    """A compiled graph. May be called from several threads at the same time."""

    def __call__(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]: ...


class Engine(Protocol):
    """Compiles graphs for one kind of hardware."""

    name: str  # as a configuration names the device

    def compile(self, content: bytes, batch: int, what: str) -> Program:
        """A program from an ONNX file that takes batches of `batch` alone, 0 for any. Raises InputError."""
        ...


class CompiledSlice:
    """Implements `SegmentSlice`: one program per previous width."""

    variant_bytes = 0

    def __init__(
        self, segment: int, width: Width, size: Bytes, programs: dict[Width | None, tuple[Prepare, Program]]
    ) -> None:
        self.segment = segment
        self.width = width
        self.weight_bytes = size
        self._programs = programs

    def has_variant(self, previous_width: Width | None) -> bool:
        return previous_width in self._programs

    def build_variant(self, previous_width: Width | None) -> int:
        return 0

    def run(self, x: Tensor, previous_width: Width | None) -> Tensor:
        prepare, program = self._programs[previous_width]
        return torch.from_numpy(program(prepare(x)))

    def to_host(self) -> None:
        """The programs are in host memory."""

    def to_device(self) -> None:
        """The programs are in host memory."""


class GraphDevice:
    """Implements `Device` on an engine."""

    def __init__(self, engine: Engine, model: SlimmableModel, shape: ModelShape, memory_limit: Bytes) -> None:
        self.name = engine.name
        self.memory_limit = memory_limit
        self._engine = engine
        self._model = model
        self._shape = compiled_shape(shape)
        self._exporter = GraphExporter(model)
        self._memory = MemoryLedger(self.name, memory_limit)
        for segment in range(shape.segments):  # ahead: a graph that is not in the cache takes longer than a load
            for width in shape.widths:
                for previous in shape.widths if segment else (None,):
                    self._exporter.graph(segment, previous, width)

    @contextmanager
    def thread(self) -> Iterator[None]:
        torch.get_num_threads()  # as in `CpuDevice.thread`
        torch.set_num_threads(1)  # torch only gathers and resizes here
        with torch.inference_mode():
            yield

    @property
    def memory_used(self) -> Bytes:
        return self._memory.used

    def load(self, segment: int, width: Width) -> SegmentSlice:
        size = self._shape.weight_bytes[segment][self._shape.index(width)]
        what = f"instance of segment {segment} at width {width:g}"
        with self._memory.taken(size, what), cpu_memory_errors():
            programs: dict[Width | None, tuple[Prepare, Program]] = {}
            for previous in self._shape.widths if segment else (None,):
                graph = self._exporter.graph(segment, previous, width)
                program = self._engine.compile(graph.content, graph.batch, what)
                program(
                    graph.prepare(torch.zeros(1, *self._input(segment, previous)))
                )  # kernels are chosen at the first run
                programs[previous] = graph.prepare, program
            return CompiledSlice(segment, width, size, programs)

    def _input(self, segment: int, previous: Width | None) -> tuple[int, ...]:
        return self._model.item_shape if previous is None else self._model.activation_shape(segment - 1, previous)

    def unload(self, instance: SegmentSlice) -> None:
        assert isinstance(instance, CompiledSlice)
        self._memory.give(instance.weight_bytes)
        instance._programs.clear()

    def run(self, instance: SegmentSlice, rows: Rows, previous_width: Width | None) -> Tensor:
        return run_counted(self._memory, self._shape, instance, rows, previous_width)

    def to_host(self, output: Tensor) -> Tensor:
        return output

    def close(self) -> None:
        """Nothing is held beyond the instances."""
