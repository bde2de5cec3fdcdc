"""Malformed gRPC requests: refused with the reason, whatever is wrong, and the next one is served."""

import asyncio
import gzip
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.serve.access import Access, Guard
from slim_scheduler.serve.grpc.listener import Listener, start
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from tests.serve.wire import call, metrics

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


@pytest.mark.parametrize(
    "parameters",
    [
        {"deadline_ms": "soon"},
        {"deadline_ms": "5_000"},
        {"deadline_ms": "\u0665\u0660\u0660\u0660"},
        {"timeout": "-1"},
        {"widths": "1"},
        {"widht": "1"},
        {"priority": "x"},
    ],
)
def test_parameters_without_meaning_are_invalid_with_and_without_a_client_deadline(stub, parameters):
    for timeout in (20, None):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(good(**parameters), timeout=timeout)
        assert caught.value.code() is INVALID


@pytest.mark.parametrize("message", [b"\xff" * 40, b"\x2a\xff\x01abc", b"\x0b", good().SerializeToString()[:-1]])
def test_what_is_no_protobuf_is_invalid_and_no_line_in_the_log(stub, server, message):
    logged = len(server.errors)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message, timeout=20)
    assert caught.value.code() is INVALID
    assert stub.ModelInfer(good(), timeout=20).raw_output_contents
    assert server.errors[logged:] == []


def test_nothing_wrong_with_one_request_ends_a_stream(stub):
    requests = [good(), *[broken(change) for change in CHANGES], good(deadline_ms="soon"), good()]
    answers = list(stub.ModelStreamInfer(iter(requests), timeout=60))
    assert [bool(answer.error_message) for answer in answers] == [False, *[True] * (len(CHANGES) + 1), False]


def test_an_output_asked_for_again_and_again_is_refused(stub, server):
    request = good()
    for _ in range(16):
        request.outputs.add(name="logits").parameters["classification"].int64_param = 10
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=20)
    assert caught.value.code() is INVALID
    assert "16 times" in caught.value.details()
    document = {
        "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "UINT8", "data": [0] * 64}],
        "outputs": [{"name": "logits", "parameters": {"classification": 10}}] * 16,
    }
    status, _, reply = call(server.http, "POST", "/v2/models/digits/infer", document)
    assert (status, "16 times" in reply["error"]) == (400, True)


@pytest.mark.parametrize("value", [3e38, -2e6, np.inf])
def test_values_beyond_any_pixel_are_invalid(stub, value):
    request = good()
    request.raw_input_contents[0] = np.full(64, value, np.float32).tobytes()
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=20)
    assert caught.value.code() is INVALID


@pytest.mark.parametrize("datatype", ["FP32", "UINT8"])
def test_numbers_may_come_as_contents(stub, datatype):
    request = good()
    pixels = np.random.default_rng(3).integers(0, 256, 64)
    request.inputs[0].datatype = datatype
    request.raw_input_contents[0] = pixels.astype(np.float32 if datatype == "FP32" else np.uint8).tobytes()
    raw = stub.ModelInfer(request, timeout=20).raw_output_contents[0]
    del request.raw_input_contents[:]
    contents = request.inputs[0].contents
    (contents.fp32_contents if datatype == "FP32" else contents.uint_contents).extend(pixels.tolist())
    assert stub.ModelInfer(request, timeout=20).raw_output_contents[0] == raw
    contents.uint_contents.append(256)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=20)
    assert caught.value.code() is INVALID


# What a method may end with, whatever it is sent.
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE"}
METHODS = ("ModelInfer", "ModelInfer", "ModelInfer", "ModelStreamInfer", "ModelReady", "ModelMetadata",
           "RepositoryIndex", "ModelStatistics")  # fmt: skip


def malformed(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Methods, and messages that are valid ones bent on the wire: bits, lengths, order, nesting, compression."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        request = good()
        if rng.random() < 0.5:
            request = broken(CHANGES[int(rng.choice([0, 3, 4, 5, 6, 7, 8, 9]))])
        if rng.random() < 0.3:
            request.inputs.add().contents.fp32_contents.extend(rng.standard_normal(int(rng.integers(0, 99))).tolist())
        wire = bytearray(request.SerializeToString())
        match int(rng.integers(0, 7)):
            case 0:
                wire = wire[: int(rng.integers(0, len(wire)))]
            case 1:
                for _ in range(int(rng.integers(1, 9))):
                    wire[int(rng.integers(0, len(wire)))] = int(rng.integers(0, 256))
            case 2:
                wire = bytearray(rng.bytes(int(rng.integers(0, 500))))
            case 3:
                at = int(rng.integers(0, len(wire)))
                wire[at:at] = b"\xff" * int(rng.integers(1, 20))
            case 4:
                wire *= int(rng.integers(2, 30))
            case 5:
                wire = bytearray(gzip.compress(bytes(wire), 1))
                if rng.random() < 0.7:
                    wire = wire[: int(rng.integers(0, len(wire)))] + rng.bytes(5)
            case _:
                wire = bytearray(b"\x2a\x80\x01" * int(rng.integers(1, 9)) + wire)
        yield METHODS[int(rng.integers(0, len(METHODS)))], bytes(wire)


async def send_all(port: int, requests: list[tuple[str, bytes]], callers: int = 16) -> Counter[str]:
    """Every request over one channel; how the calls ended."""
    ends: Counter[str] = Counter()
    waiting = iter(requests)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def caller() -> None:
            for method, wire in waiting:
                send = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
                try:
                    await send(wire, timeout=60)
                    ends["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    ends[error.code().name] += 1

        await asyncio.gather(*(caller() for _ in range(callers)))
    return ends


async def test_thousands_of_malformed_messages_do_no_harm(server, stub):
    await send_all(server.grpc, list(malformed(21, 500)))
    process, logged = psutil.Process(server.process.pid), len(server.errors)
    before = process.memory_info().rss
    ends = await send_all(server.grpc, list(malformed(22, 5000)))
    assert sum(ends.values()) == 5000
    assert set(ends) <= ALLOWED
    assert ends["INVALID_ARGUMENT"] > 2000
    assert process.memory_info().rss - before < 48 << 20
    assert server.errors[logged:] == [], "a malformed message is no line in the log"
    assert stub.ModelInfer(good(), timeout=20).raw_output_contents
    found = metrics(server.http)
    ended = sum(value for name, value in found.items() if name.startswith("slim_items_total{"))
    assert found['slim_items_received_total{model="digits"}'] == ended


def test_a_port_that_is_taken_is_named_with_the_next_step():
    async def twice() -> None:
        listener = Listener({}, {}, Guard(Access()), Limits(), MemoryBudget(1 << 20))
        server, port = await start(listener, Access(), 0, Limits())
        try:
            with pytest.raises(ConfigError, match=rf"port {port} for gRPC; choose another --grpc-port"):
                await start(listener, Access(), port, Limits())
        finally:
            await server.stop(None)

    asyncio.run(twice())


def test_a_call_that_was_over_before_its_refusal_was_sent_is_no_line_in_the_log(caplog):
    """grpc says so, with a traceback, once per call; what else it logs stays. In 8,625 calls with deadlines of 5 and
    20 ms to a slow server it said it 128 times."""

    async def once() -> None:
        listener = Listener({}, {}, Guard(Access()), Limits(), MemoryBudget(1 << 20))
        server, _ = await start(listener, Access(), 0, Limits())
        await server.stop(None)

    asyncio.run(once())
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("ExecuteBatchError raised in core by servicer method [/inference.GRPCInferenceService/ModelInfer]")
    log.error("another line")
    assert [record.getMessage() for record in caplog.records if record.name == log.name] == ["another line"]
