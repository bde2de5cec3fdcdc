"""Slices on an execution engine, for who measures what a model gets right there and serves nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.engine.devices.cuda import exact_float32
from slim_scheduler.engine.devices.registry import open_device
from slim_scheduler.model.family import is_family
from slim_scheduler.model.fit import check_device
from slim_scheduler.model.folder import load_model
from slim_scheduler.model.protocol import SegmentSlice
from slim_scheduler.setup.config import Config, ModelConfig
from slim_scheduler.setup.machines import COMPILED, load_shape

UNLIMITED = 1 << 50


@contextmanager
def slices_of(folder: Path, device: str, precision: str) -> Iterator[Callable[[int, float], SegmentSlice] | None]:
    """What loads a model's slices on an engine; None for torch's devices, whose slices the model makes itself.

    Raises InputError for a device that is not there, or that cannot run the model.
    """
    if not device.startswith(COMPILED):
        kind, _, number = device.partition(":")
        if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
            raise ConfigError(f"device {device} is not known; give cpu, cuda:N, openvino:CPU or onnxruntime:CPU")
        if kind == "cuda" and is_family(folder):
            raise ConfigError(f"device {device} runs no families, {folder} is one; give cpu, or onnxruntime:CUDA")
        check_device(device)
        exact_float32()  # a GPU serves so
        yield None
        return
    shape = load_shape(Config(model=ModelConfig(path=str(folder))))
    opened = open_device(
        device, load_model(folder), shape, threads=1, max_batch=1, memory_limit=UNLIMITED, precision=precision
    )
    with torch.inference_mode():
        yield opened.load
    opened.close()
