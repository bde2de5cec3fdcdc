"""One ONNX file behind LitServe on ONNX Runtime, with the settings that `_litserve_server.py` found to be the fastest.

A program: `python -m benchmarks._litserve_onnx FILE PORT CHANNELSxHEIGHTxWIDTH MAX_BATCH`.
"""

import base64
import sys
from typing import Any

import litserve
import numpy as np
import onnxruntime


class OneGraph(litserve.LitAPI):
    """The whole network in one ONNX Runtime session on one thread, as our family has it."""

    def __init__(self, file: str, item_shape: tuple[int, ...], max_batch: int) -> None:
        super().__init__(max_batch_size=max_batch, batch_timeout=0.01)
        self.file = file
        self.item_shape = item_shape

    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.file, options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # an annotation would change what it is given
        return np.frombuffer(base64.b64decode(request["image"]), "<f4").reshape(self.item_shape)

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        return self.session.run(None, {self.input: x})[0]

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"logits": output.tolist()}


if __name__ == "__main__":
    file, port, shape, max_batch = sys.argv[1:]
    api = OneGraph(file, tuple(int(side) for side in shape.split("x")), int(max_batch))
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(port), num_api_servers=1, generate_client_file=False, log_level="error")
