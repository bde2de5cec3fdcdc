"""A network that overflows: an error over HTTP and gRPC, counted, and never a NaN in an answer."""

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2_grpc

from slim_scheduler.model import checkpoint
from tests.engine.live import tiny_network
from tests.serve.conftest import serving
from tests.serve.test_hostile_rpc import good
from tests.serve.wire import call, infer, metrics


def test_an_output_that_is_not_finite_is_an_error_and_counted(tmp_path, images):
    network = tiny_network()
    network.name = "digits"
    with torch.no_grad():
        for parameter in list(network.parameters())[-2:]:  # the last layer's
            parameter.fill_(3e38)
    checkpoint.save(network, tmp_path / "digits")
    with serving(tmp_path, config={"model": tmp_path / "digits"}) as server:
        status, _, reply = infer(server.http, images)
        assert status == 500
        assert reply["error"].startswith("the output is not finite")
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = good()
            request.raw_input_contents[0] = images[0].tobytes()
            with pytest.raises(grpc.RpcError, match="the output is not finite") as caught:
                stub.ModelInfer(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        found = metrics(server.http)
        assert found['slim_items_not_finite_total{model="digits"}'] == len(images) + 1
        assert found['slim_items_total{model="digits",outcome="failed"}'] == len(images) + 1
        assert call(server.http, "GET", "/v2/health/ready")[0] == 200, "no server was blamed"


@pytest.mark.parametrize("value", [3e38, -3e38, 2e6])
def test_finite_values_beyond_any_pixel_are_no_input(server, value):
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [value] * 64}
    status, _, reply = call(server.http, "POST", "/v2/models/digits/infer", {"inputs": [tensor]})
    assert status == 400, reply
    assert "1e+06" in reply["error"]
