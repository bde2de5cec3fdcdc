"""The same network behind LitServe, set up for speed: dynamic batching, the fast queue, pixels as base64.

Of the settings tried (batch timeout 0 to 10 ms, fast queue on and off, 1 and 2 API servers and workers) these were the
fastest. Its route reads JSON; base64 is the fastest that it takes (a list of numbers costs several times as much to
parse).

A program: `python -m benchmarks._litserve_server MODEL_DIR PORT WIDTH MAX_BATCH`.
"""

import base64
import sys
from typing import Any

import litserve
import numpy as np
import torch

from slim_scheduler.model import checkpoint


class WholeNetwork(litserve.LitAPI):
    """All segments at one width, with the slices that our engine runs."""

    def __init__(self, folder: str, width: float, max_batch: int) -> None:
        super().__init__(max_batch_size=max_batch, batch_timeout=0.01)
        self.folder = folder
        self.width = width

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        model = checkpoint.load(self.folder)
        self.item_shape = model.item_shape
        self.slices = [model.slice(segment, self.width, "cpu") for segment in range(model.segments)]
        for segment in self.slices[1:]:
            segment.build_variant(self.width)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # an annotation would change what it is given
        return np.frombuffer(base64.b64decode(request["image"]), "<f4").reshape(self.item_shape)

    def batch(self, inputs: list[Any]) -> Any:
        return torch.from_numpy(np.stack(inputs))

    def predict(self, x: Any) -> Any:
        with torch.inference_mode():
            for number, segment in enumerate(self.slices):
                x = segment.run(x, self.width if number else None)
            return x.numpy()

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"logits": output.tolist()}


if __name__ == "__main__":
    folder, port, width, max_batch = sys.argv[1:]
    api = WholeNetwork(folder, float(width), int(max_batch))
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(port), num_api_servers=2, generate_client_file=False, log_level="error")
