"""The same protocol over gRPC: grpc.aio with the stubs that come with tritonclient.

Reads protobuf messages into the calls that HTTP makes, and maps refusals to gRPC codes. Outputs go back raw, as
Triton sends them. A gRPC deadline is a deadline of the request; a cancelled call frees its work.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

import grpc
import msgspec
import numpy as np
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from slim_scheduler.serve.access import Access, Guard
from slim_scheduler.serve.decode import (
    DTYPES,
    LONGEST_ID,
    InferenceCall,
    check_input_parameters,
    check_shape,
    image_from,
    output_wish,
)
from slim_scheduler.serve.encode import Answer, cost_of, labels_of, pack_strings
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.metadata import INPUT, OUTPUT, VERSION, ModelCard
from slim_scheduler.serve.parameters import LONGEST_DEADLINE_S, OutputForm, asked_of
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal, invalid, quote
from slim_scheduler.serve.service import Service

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext; grpc has no types
CODES = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Kind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
}
STREAM_DEPTH = 64  # requests of one stream in the engine at the same time
STREAM_END = None


def rpc(method: Callable[[Any, Any, Context], Awaitable[Any]]) -> Callable[[Any, Any, Context], Awaitable[Any]]:
    """Checks the token first, and ends the call with the right code where the method refuses."""

    @wraps(method)
    async def checked(self: "StateRpc", request: Any, context: Context) -> Any:
        try:
            self.check_token(context)
            return await method(self, request, context)
        except Refusal as refusal:
            if refusal.retry_after is not None:
                context.set_trailing_metadata((("retry-after", f"{refusal.retry_after:.3f}"),))
            await context.abort(CODES.get(refusal.kind, grpc.StatusCode.INTERNAL), refusal.message)
        except Exception:
            log.exception("a defect of the server, in %s", method.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, DEFECT.message)

    return checked


class StateRpc(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """What every listener tells: health, documents, statistics, the index of models."""

    def __init__(self, service: Service, guard: Guard, limits: Limits) -> None:
        self._service = service
        self._guard = guard
        self._limits = limits

    def check_token(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self._guard.check_token(str(metadata.get("authorization", "")).encode())

    @rpc
    async def ServerLive(self, request: Any, context: Context) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    @rpc
    async def ServerReady(self, request: Any, context: Context) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._service.ready)

    @rpc
    async def ModelReady(self, request: Any, context: Context) -> Any:  # noqa: N802
        try:
            ready = self._service.model_ready(request.name, request.version)
        except Refusal as refusal:
            if refusal.kind is not Kind.UNAVAILABLE:
                raise
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    @rpc
    async def ServerMetadata(self, request: Any, context: Context) -> Any:  # noqa: N802
        return ParseDict(self._service.metadata(), pb.ServerMetadataResponse())

    @rpc
    async def ModelMetadata(self, request: Any, context: Context) -> Any:  # noqa: N802
        card = self._service.repository.find(request.name, request.version).card
        return ParseDict(card.metadata(), pb.ModelMetadataResponse())

    @rpc
    async def ModelConfig(self, request: Any, context: Context) -> Any:  # noqa: N802
        card = self._service.repository.find(request.name, request.version).card
        return ParseDict({"config": card.config()}, pb.ModelConfigResponse())

    @rpc
    async def ModelStatistics(self, request: Any, context: Context) -> Any:  # noqa: N802
        return ParseDict(self._service.statistics(request.name, request.version), pb.ModelStatisticsResponse())

    @rpc
    async def RepositoryIndex(self, request: Any, context: Context) -> Any:  # noqa: N802
        rows = await asyncio.to_thread(self._service.repository.index)
        chosen = [row for row in rows if row["state"] == "READY" or not request.ready]
        return ParseDict({"models": chosen}, pb.RepositoryIndexResponse())

    @rpc
    async def SystemSharedMemoryStatus(self, request: Any, context: Context) -> Any:  # noqa: N802
        raise Refusal(Kind.UNSUPPORTED, "shared memory, tracing and log settings cannot be changed by clients here")

    SystemSharedMemoryRegister = SystemSharedMemoryUnregister = SystemSharedMemoryStatus
    CudaSharedMemoryStatus = CudaSharedMemoryRegister = CudaSharedMemoryUnregister = SystemSharedMemoryStatus
    TraceSetting = LogSettings = SystemSharedMemoryStatus


class InferenceRpc(StateRpc):
    """The public listener's service: inference as well. `memory` bounds the requests of all listeners together."""

    def __init__(self, service: Service, guard: Guard, limits: Limits, memory: MemoryBudget) -> None:
        super().__init__(service, guard, limits)
        self._memory = memory

    @rpc
    async def ModelInfer(self, request: Any, context: Context) -> Any:  # noqa: N802
        return await self._infer(request, context)

    async def ModelStreamInfer(self, request_iterator: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """Several requests of one stream run at the same time; answers keep the order of the requests."""
        try:
            self.check_token(context)
        except Refusal as refusal:
            await context.abort(CODES[refusal.kind], refusal.message)
        answers: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(STREAM_DEPTH)

        async def read() -> None:
            async for request in request_iterator:
                await answers.put(asyncio.create_task(self._stream_one(request, context)))
            await answers.put(STREAM_END)

        reader = asyncio.create_task(read())
        try:
            while (task := await answers.get()) is not STREAM_END:
                yield await task
            await reader
        finally:
            reader.cancel()
            while not answers.empty():
                task = answers.get_nowait()
                if task is not STREAM_END:
                    task.cancel()

    async def _stream_one(self, request: Any, context: Context) -> Any:
        """Nothing that is wrong with one request ends the stream."""
        try:
            return pb.ModelStreamInferResponse(infer_response=await self._infer(request, context))
        except Refusal as refusal:
            message = refusal.message
        except Exception:
            log.exception("a defect of the server, in ModelStreamInfer")
            message = DEFECT.message
        response = pb.ModelInferResponse(id=request.id)
        return pb.ModelStreamInferResponse(error_message=message, infer_response=response)

    async def _infer(self, request: Any, context: Context) -> Any:
        size = request.ByteSize()
        self._memory.reserve(size)
        try:
            metadata = dict(context.invocation_metadata() or ())
            served = self._service.repository.find(request.model_name, request.model_version)
            call = call_of(request, context.time_remaining(), served.card, self._limits)
            answer = await self._service.infer(served, call, str(metadata.get("traceparent", "")))
            return response_of(call, answer, served.card)
        finally:
            self._memory.release(size)

    @rpc
    async def RepositoryModelLoad(self, request: Any, context: Context) -> Any:  # noqa: N802
        raise Refusal(
            Kind.FORBIDDEN, "management has its own listener, off by default; start with --management-grpc-port"
        )

    RepositoryModelUnload = RepositoryModelLoad


def call_of(request: Any, remaining: float | None, card: ModelCard, limits: Limits) -> InferenceCall:
    """Reads a ModelInferRequest. `remaining` is the gRPC deadline in seconds from now."""
    if len(request.id) > LONGEST_ID:
        raise invalid(f"id has {len(request.id)} characters; at most {LONGEST_ID} are kept")
    asked = asked_of(_parameters(request.parameters), card)
    if remaining is not None and (asked.deadline is None or remaining < asked.deadline):
        asked = msgspec.structs.replace(asked, deadline=min(remaining, LONGEST_DEADLINE_S))
    if len(request.outputs) > limits.tensors:
        raise invalid(f"the request has {len(request.outputs)} outputs; at most {limits.tensors} are accepted")
    forms = tuple(OutputForm(output_wish(wish.name, _parameters(wish.parameters)), True) for wish in request.outputs)
    image = _image(request, card, limits)
    return InferenceCall(image, request.id, asked, forms or (OutputForm(binary=True),))


def response_of(call: InferenceCall, answer: Answer, card: ModelCard) -> Any:
    """The ModelInferResponse of an answer."""
    response = pb.ModelInferResponse(model_name=card.name, model_version=VERSION, id=call.request_id)
    for name, value in cost_of(answer).items():
        if isinstance(value, str):
            response.parameters[name].string_param = value
        else:
            response.parameters[name].double_param = value
    for form in call.outputs:
        output = response.outputs.add(name=OUTPUT)
        if form.classification:
            labels = labels_of(answer.logits, form.classification, card)
            output.datatype = "BYTES"
            output.shape.extend((len(labels), len(labels[0])))
            response.raw_output_contents.append(pack_strings(labels))
        else:
            output.datatype = "FP32"
            output.shape.extend(answer.logits.shape)
            response.raw_output_contents.append(answer.logits.tobytes())
    return response


def _image(request: Any, card: ModelCard, limits: Limits) -> Any:
    if len(request.inputs) != 1:
        raise invalid(f"the request has {len(request.inputs)} inputs; {card.name} has one, {INPUT}")
    tensor = request.inputs[0]
    if tensor.name != INPUT:
        raise invalid(f"input {quote(tensor.name)} does not exist; {card.name} has one input, {INPUT}")
    check_input_parameters(_parameters(tensor.parameters))
    if len(tensor.shape) > limits.rank:
        raise invalid(f"input {INPUT} has {len(tensor.shape)} dimensions; at most {limits.rank} are accepted")
    shape = list(tensor.shape)
    raw = request.raw_input_contents
    if raw:
        if len(raw) != 1:
            raise invalid(f"raw_input_contents has {len(raw)} entries for 1 input; send one each")
        return image_from(raw[0], 0, len(raw[0]), tensor.datatype, shape, card, limits)
    elements = check_shape(tensor.datatype, shape, card, limits)
    values = tensor.contents.uint_contents if tensor.datatype == "UINT8" else tensor.contents.fp32_contents
    if len(values) != elements:
        raise invalid(f"input {INPUT} has {len(values)} values; shape {shape} needs {elements}")
    dtype = DTYPES[tensor.datatype]
    array = np.fromiter(values, np.float64 if dtype.kind == "f" else np.int64, elements)
    if dtype.kind == "u" and (array > 255).any():
        raise invalid(f"input {INPUT} has values above 255; UINT8 holds 0 to 255")
    data = array.astype(dtype).tobytes()
    return image_from(data, 0, len(data), tensor.datatype, shape, card, limits)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(parameter, choice)
    return found


async def start_rpc(servicer: StateRpc, access: Access, port: int, limits: Limits) -> tuple[grpc.aio.Server, int]:
    """Starts a listener; returns it and its port (for port 0)."""
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.max_send_message_length", limits.body_bytes),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.so_reuseport", 0),
        ),
        maximum_concurrent_rpcs=limits.connections,
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    host = f"[{access.host}]" if ":" in access.host else access.host
    address = f"{host}:{port}"
    if access.certificate and access.key:
        credentials = grpc.ssl_server_credentials(
            [(_read(access.key), _read(access.certificate))],
            root_certificates=_read(access.client_ca) if access.client_ca else None,
            require_client_auth=access.client_ca is not None,
        )
        bound = server.add_secure_port(address, credentials)
    else:
        bound = server.add_insecure_port(address)
    await server.start()
    return server, bound


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
