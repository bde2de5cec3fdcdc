"""Runs kserve's client: `kserve_program.py rest|grpc PORT IMAGES.npy` prints the logits as JSON."""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def main(protocol: str, port: str, path: str) -> None:
    images = np.load(path)
    tensor = InferInput("image", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images, binary_data=True)
    request = InferRequest("digits", [tensor], request_id="k")
    if protocol == "rest":
        client = InferenceRESTClient(RESTConfig(protocol="v2", verbose=False))
        assert await client.is_server_ready(f"http://127.0.0.1:{port}")
        assert await client.is_model_ready(f"http://127.0.0.1:{port}", "digits")
        response = await client.infer(f"http://127.0.0.1:{port}", request, model_name="digits")
    else:
        client = InferenceGRPCClient(f"127.0.0.1:{port}")
        assert await client.is_server_ready()
        assert await client.is_model_ready("digits")
        response = await client.infer(request)
    await client.close()
    print(json.dumps(response.outputs[0].as_numpy().tolist()))


asyncio.run(main(*sys.argv[1:]))
