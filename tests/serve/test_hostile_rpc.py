"""Malformed gRPC requests: refused with the reason, whatever is wrong, and the next one is served."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def stub(server) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def good(**parameters: Any) -> Any:
    request = pb.ModelInferRequest(model_name="digits")
    request.inputs.add(name="image", datatype="FP32", shape=[1, 1, 8, 8])
    request.raw_input_contents.append(np.zeros((1, 1, 8, 8), np.float32).tobytes())
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def broken(change: str) -> Any:
    """A good request with one thing wrong."""
    request = good()
    tensor = request.inputs[0]
    match change:
        case "no inputs":
            del request.inputs[:]
        case "many inputs":
            for _ in range(100_000):
                request.inputs.add()
        case "many dimensions":
            tensor.shape.extend([1] * 3_000_000)
        case "negative side":
            tensor.shape[0] = -1
        case "huge side":
            tensor.shape[0] = 2**62
        case "short data":
            request.raw_input_contents[0] = request.raw_input_contents[0][:-1]
        case "not finite":
            request.raw_input_contents[0] = np.full(64, np.nan, np.float32).tobytes()
        case "long id":
            request.id = "x" * 100_000
        case "many outputs":
            for _ in range(1000):
                request.outputs.add(name="logits")
        case "shared memory":
            tensor.parameters["shared_memory_region"].string_param = "/dev/shm/x"
    return request


CHANGES = ("no inputs", "many inputs", "many dimensions", "negative side", "huge side", "short data", "not finite",
           "long id", "many outputs", "shared memory")  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_malformed_is_invalid_and_short(stub, change):
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(broken(change), timeout=20)
    assert caught.value.code() in (INVALID, grpc.StatusCode.UNIMPLEMENTED)
    assert len(caught.value.details()) < 2000
    assert stub.ModelInfer(good(), timeout=20).raw_output_contents


@pytest.mark.parametrize("parameters", [{"deadline_ms": "soon"}, {"timeout": "-1"}, {"widths": "1"}, {"priority": "x"}])
def test_parameters_without_meaning_are_invalid_with_and_without_a_client_deadline(stub, parameters):
    for timeout in (20, None):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(good(**parameters), timeout=timeout)
        assert caught.value.code() is INVALID


def test_nothing_wrong_with_one_request_ends_a_stream(stub):
    requests = [good(), *[broken(change) for change in CHANGES], good(deadline_ms="soon"), good()]
    answers = list(stub.ModelStreamInfer(iter(requests), timeout=60))
    assert [bool(answer.error_message) for answer in answers] == [False, *[True] * (len(CHANGES) + 1), False]
