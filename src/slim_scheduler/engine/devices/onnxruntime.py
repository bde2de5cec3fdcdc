"""ONNX Runtime as a device: `onnxruntime:CPU`, and `onnxruntime:CUDA`, `onnxruntime:TensorRT` where they are there.

The two on a GPU have never run: they are opened as ONNX Runtime documents it, and what they take of the GPU's memory
is bounded by ONNX Runtime's own arena, at the server's budget.
"""

from typing import Any

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import Bytes
from slim_scheduler.engine.devices.graphs import Program
from slim_scheduler.model.graph_session import CPU, GraphSession

PROVIDERS = {"CPU": "CPUExecutionProvider", "CUDA": "CUDAExecutionProvider", "TensorRT": "TensorrtExecutionProvider"}
PRECISIONS = {"CPU": ("fp32",), "CUDA": ("fp32",), "TensorRT": ("fp32", "fp16", "bf16")}


class OnnxRuntimeEngine:
    """Implements `Engine`."""

    def __init__(self, place: str, threads: int, precision: str, memory_limit: Bytes) -> None:
        import onnxruntime

        if place not in PROVIDERS:
            raise ConfigError(f"device onnxruntime:{place} does not exist; available: {_named(PROVIDERS)}")
        there = onnxruntime.get_available_providers()
        if PROVIDERS[place] not in there:
            found = [name for name, provider in PROVIDERS.items() if provider in there]
            raise ConfigError(
                f"device onnxruntime:{place} is not in this build of ONNX Runtime, which has {_named(found)}; "
                "for a GPU: pip install onnxruntime-gpu in place of onnxruntime"
            )
        if precision not in PRECISIONS[place]:
            known = ", ".join(PRECISIONS[place])
            raise ConfigError(f"device onnxruntime:{place} runs {known}, not {precision}; set precision to one of them")
        self.name = f"onnxruntime:{place}"
        self._threads = threads
        self._providers = _providers(place, precision, memory_limit)

    def compile(self, content: bytes, batch: int, what: str) -> Program:
        return GraphSession(content, self._threads, batch=batch, providers=self._providers, name=what).run


def _providers(place: str, precision: str, memory_limit: Bytes) -> list[Any]:
    if place == "CPU":
        return list(CPU)
    cuda = ("CUDAExecutionProvider", {"gpu_mem_limit": memory_limit, "use_tf32": 0})
    if place == "CUDA":
        return [cuda, *CPU]
    tensorrt = {"trt_max_workspace_size": memory_limit, f"trt_{precision}_enable": precision != "fp32"}
    return [("TensorrtExecutionProvider", tensorrt), cuda, *CPU]


def _named(places: Any) -> str:
    return ", ".join(f"onnxruntime:{place}" for place in places)
