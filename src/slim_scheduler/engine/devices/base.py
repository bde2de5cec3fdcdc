"""What runs segments: the `Device` protocol, and the ledger that every kind of device keeps of its memory.

A device loads instances (slices of the network in its own memory), runs batches on them and keeps count of the bytes
they really take. Its methods are called from execution threads, each inside `thread()`; it decides nothing. Each kind
of device is one file beside this one.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from slim_scheduler.core.errors import OutOfMemoryError
from slim_scheduler.core.types import Bytes, Width
from slim_scheduler.model.protocol import SegmentSlice, SlimmableModel

Rows = Sequence[tuple[Tensor, int]]


class Device(Protocol):
    """One CPU or GPU. `run` returns when the result is there; out of memory is always `OutOfMemoryError`,
    and a device that is lost for this process `DeviceLostError`, from then on."""

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
    """Bytes taken of a limit that is never passed. Thread-safe; `give` may be called by a finaliser at any time."""

    def __init__(self, name: str, limit: Bytes) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self._lock = threading.RLock()

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


def warm_up(model: SlimmableModel, segment: int, width: Width, device: str) -> None:
    """Runs a spare slice once, so that kernels are chosen and compiled before the first batch.

    A spare one, because an instance must not keep a variant that nobody asked for.
    """
    previous = width if segment else None
    spare = model.slice(segment, width, device)
    spare.build_variant(previous)
    item = model.activation_shape(segment - 1, width) if segment else model.item_shape
    spare.run(torch.zeros((1, *item), device=device), previous)
