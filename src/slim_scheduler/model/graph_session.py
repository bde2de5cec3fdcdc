"""A checked ONNX graph, ready to run on ONNX Runtime."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from slim_scheduler.core.errors import InputError, first_line

if TYPE_CHECKING:
    from onnx import ModelProto

CPU = ("CPUExecutionProvider",)
SILENT = 4  # ONNX Runtime's log level: what it raises says the same as what it would print


class GraphSession:
    """Runs batches of any size, also where the graph takes only one size (`batch`, 0 for any)."""

    def __init__(
        self, content: bytes, threads: int, *, batch: int = 0, providers: Sequence[Any] = CPU, name: str = "the graph"
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = SILENT
        # A thread that spins while it waits for the next batch would take the core from another server.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._batch = batch
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=list(providers))
        except Exception as error:  # ONNX Runtime's own kinds share no base but this
            raise InputError(f"{name}: ONNX Runtime cannot run it ({first_line(error)})") from None
        self._input = self._session.get_inputs()[0].name

    def run(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """(batch, ...) of the graph's own shape and type -> float32 (batch, ...)."""
        return in_batches(self._once, x, self._batch)

    def _once(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        (out,) = self._session.run(None, {self._input: np.ascontiguousarray(x)})
        return np.asarray(out, np.float32)


def inferred_shapes(model: "ModelProto", name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all results, as ONNX Runtime infers them without running anything: it knows its own operators."""
    from onnx import ModelProto, ValueInfoProto

    every = ModelProto()
    every.CopyFrom(model)
    ends = {value.name for value in every.graph.output}
    results = [made for node in every.graph.node for made in node.output if made and made not in ends]
    every.graph.output.extend(ValueInfoProto(name=made) for made in results)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # they would compute
    options.log_severity_level = SILENT
    try:
        session = onnxruntime.InferenceSession(every.SerializeToString(), options, providers=list(CPU))
    except Exception as error:  # as in `GraphSession`
        raise InputError(f"{name}: ONNX Runtime cannot run it ({first_line(error)})") from None
    known = [(value.name, value.shape) for value in session.get_outputs()]
    return {name: tuple(shape) for name, shape in known if all(isinstance(side, int) for side in shape)}


def in_batches(run: Any, x: npt.NDArray[Any], batch: int) -> npt.NDArray[np.float32]:
    """`run` on batches of the only size that it takes, the last one filled up with its last item; 0: as it comes."""
    if not batch or len(x) == batch:
        return np.asarray(run(x), np.float32)
    parts = []
    for start in range(0, len(x), batch):
        part = x[start : start + batch]
        if missing := batch - len(part):
            part = np.concatenate((part, np.repeat(part[-1:], missing, 0)))
        parts.append(run(part))
    return np.concatenate(parts)[: len(x)]
