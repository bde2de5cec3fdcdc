"""OpenVINO as a device: `openvino:CPU`, in bf16 where the CPU computes in it."""

from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino

from slim_scheduler.core.errors import ConfigError, InputError
from slim_scheduler.engine.devices.graphs import Program
from slim_scheduler.model.graph_session import in_batches

HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
CAPABILITIES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16"}

core = openvino.Core()


class OpenVinoEngine:
    """Implements `Engine`."""

    def __init__(self, place: str, threads: int, precision: str) -> None:
        if place not in core.available_devices:
            there = ", ".join(f"openvino:{name}" for name in core.available_devices)
            raise ConfigError(f"device openvino:{place} is not there; available: {there}")
        able = precisions(place)
        if precision not in able:
            raise ConfigError(f"device openvino:{place} runs {', '.join(able)}, not {precision}; set precision to one")
        self.name = f"openvino:{place}"
        self._place = place
        self._options = {
            "INFERENCE_PRECISION_HINT": HINTS[precision],
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
        }
        if place == "CPU":
            self._options["INFERENCE_NUM_THREADS"] = str(threads)

    def compile(self, content: bytes, batch: int, what: str) -> Program:
        try:
            return _OpenVinoProgram(core.compile_model(core.read_model(content), self._place, self._options), batch)
        except RuntimeError as error:
            line = str(error).strip().splitlines()
            raise InputError(f"{what}: OpenVINO cannot run it ({line[-1][:200] if line else 'no reason'})") from None


def precisions(place: str) -> list[str]:
    """What a device computes in, of the precisions that a configuration may name."""
    able = core.get_property(place, "OPTIMIZATION_CAPABILITIES")
    return [name for name, capability in CAPABILITIES.items() if capability in able]


class _OpenVinoProgram:
    """Requests are taken from a pool: one runs one batch at a time."""

    def __init__(self, compiled: Any, batch: int) -> None:
        self._compiled = compiled
        self._batch = batch
        self._idle: SimpleQueue[Any] = SimpleQueue()

    def __call__(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return in_batches(self._once, x, self._batch)

    def _once(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        request = self._compiled.create_infer_request() if self._idle.empty() else self._idle.get()
        try:
            out = request.infer({0: np.ascontiguousarray(x)}, share_inputs=True)[0]
            return np.array(out, np.float32)
        finally:
            self._idle.put(request)
