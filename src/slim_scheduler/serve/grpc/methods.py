"""What each method of the protocol does: from a message's bytes to the answer's, by the calls that HTTP makes too.

The messages are those of the stubs that come with tritonclient. Outputs go back raw, as Triton sends them. A gRPC
deadline is a deadline of the request; a cancelled call frees its work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from slim_scheduler.serve.access import Guard
from slim_scheduler.serve.decode import (
    LONGEST_ID,
    InferenceCall,
    check_forms,
    check_input_parameters,
    image_from,
    output_wish,
)
from slim_scheduler.serve.encode import Answer, cost_of, labels_of, pack_strings
from slim_scheduler.serve.grpc.listener import Call, Listener, Method
from slim_scheduler.serve.grpc.message import Outline, bytes_of_varints, outline
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget, Reservation
from slim_scheduler.serve.metadata import INPUT, OUTPUT, VERSION, ModelCard
from slim_scheduler.serve.parameters import LONGEST_DEADLINE_S, OutputForm, asked_of
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal, invalid, quote
from slim_scheduler.serve.service import Service

log = logging.getLogger(__name__)

STREAM_DEPTH = 64  # requests of one stream in the engine at the same time
STREAM_END = None
OFF = (
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    "TraceSetting", "LogSettings",
)  # fmt: skip
Answers = asyncio.Queue[tuple[asyncio.Task[bytes], Reservation] | None]  # of one stream, in order
State = Callable[[Any], Awaitable[Any]]  # from a request's message to the answer's


def public_listener(service: Service, guard: Guard, limits: Limits, memory: MemoryBudget) -> Listener:
    """Inference and state. `memory` bounds the requests of all listeners together."""
    inference = _Inference(service, limits)
    unary = _state(service, limits) | {"ModelInfer": inference.one}
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        unary[name] = _elsewhere
    return Listener(unary, {"ModelStreamInfer": inference.stream}, guard, limits, memory)


def management_listener(service: Service, guard: Guard, limits: Limits, memory: MemoryBudget) -> Listener:
    """State, loading and unloading, on a listener of its own that is off by default and on loopback only."""

    async def load(request: Any) -> Any:
        if request.parameters:
            raise invalid("load takes no parameters: a model comes from the model folder as it is")
        await service.repository.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def unload(request: Any) -> Any:
        await service.repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    unary = _state(service, limits) | {
        "RepositoryModelLoad": _small(load, pb.RepositoryModelLoadRequest, limits),
        "RepositoryModelUnload": _small(unload, pb.RepositoryModelUnloadRequest, limits),
    }
    return Listener(unary, {}, guard, limits, memory)


# ---- state: health, documents, statistics, the index of models


def _state(service: Service, limits: Limits) -> dict[str, Method]:
    async def live(_: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ready(_: Any) -> Any:
        return pb.ServerReadyResponse(ready=service.ready)

    async def model_ready(request: Any) -> Any:
        try:
            found = service.model_ready(request.name, request.version)
        except Refusal as refusal:
            if refusal.kind is not Kind.UNAVAILABLE:
                raise
            found = False
        return pb.ModelReadyResponse(ready=found)

    async def metadata(_: Any) -> Any:
        return ParseDict(service.metadata(), pb.ServerMetadataResponse())

    async def model_metadata(request: Any) -> Any:
        card = service.repository.find(request.name, request.version).card
        return ParseDict(card.metadata(), pb.ModelMetadataResponse())

    async def model_config(request: Any) -> Any:
        card = service.repository.find(request.name, request.version).card
        return ParseDict({"config": card.config()}, pb.ModelConfigResponse())

    async def statistics(request: Any) -> Any:
        return ParseDict(service.statistics(request.name, request.version), pb.ModelStatisticsResponse())

    async def index(request: Any) -> Any:
        rows = await asyncio.to_thread(service.repository.index)
        chosen = [row for row in rows if row["state"] == "READY" or not request.ready]
        return ParseDict({"models": chosen}, pb.RepositoryIndexResponse())

    methods: dict[str, tuple[State, Any]] = {
        "ServerLive": (live, pb.ServerLiveRequest),
        "ServerReady": (ready, pb.ServerReadyRequest),
        "ModelReady": (model_ready, pb.ModelReadyRequest),
        "ServerMetadata": (metadata, pb.ServerMetadataRequest),
        "ModelMetadata": (model_metadata, pb.ModelMetadataRequest),
        "ModelConfig": (model_config, pb.ModelConfigRequest),
        "ModelStatistics": (statistics, pb.ModelStatisticsRequest),
        "RepositoryIndex": (index, pb.RepositoryIndexRequest),
    }
    return {name: _small(*method, limits) for name, method in methods.items()} | dict.fromkeys(OFF, _off)


def _small(method: State, kind: Any, limits: Limits) -> Method:
    async def answer(message: bytes, call: Call) -> bytes:
        if len(message) > limits.header_bytes:
            raise Refusal(
                Kind.TOO_LARGE, f"the message has {len(message)} bytes; at most {limits.header_bytes} are accepted"
            )
        response: bytes = (await method(_parsed(kind, message))).SerializeToString()
        return response

    return answer


async def _off(message: bytes, call: Call) -> bytes:
    raise Refusal(Kind.UNSUPPORTED, "shared memory, tracing and log settings cannot be changed by clients here")


async def _elsewhere(message: bytes, call: Call) -> bytes:
    raise Refusal(Kind.FORBIDDEN, "management has its own listener, off by default; start with --management-grpc-port")


# ---- inference


class _Inference:
    def __init__(self, service: Service, limits: Limits) -> None:
        self._service = service
        self._limits = limits

    async def one(self, message: bytes, call: Call) -> bytes:
        """ModelInfer."""
        cut = outline(message, self._limits)
        request = _parsed(pb.ModelInferRequest, cut.head)
        response: bytes = (await self._infer(request, cut, call)).SerializeToString()
        return response

    async def _infer(self, request: Any, cut: Outline, call: Call) -> Any:
        served = self._service.repository.find(request.model_name, request.model_version)
        wanted = call_of(request, cut, call.remaining, served.card, self._limits)
        traceparent = str(call.metadata.get("traceparent", ""))
        answer = await self._service.infer(served, wanted, traceparent)
        return response_of(wanted, answer, served.card)

    async def stream(self, call: Call) -> Refusal | None:
        """ModelStreamInfer: requests of a stream run at the same time; answers keep the order of the requests."""
        with call.stream():
            return await self._answer_stream(call)

    async def _answer_stream(self, call: Call) -> Refusal | None:
        answers: Answers = asyncio.Queue()
        depth = asyncio.Semaphore(STREAM_DEPTH)
        reader = asyncio.create_task(self._read_stream(call, answers, depth))
        try:
            while (begun := await answers.get()) is not STREAM_END:
                answer, reservation = begun
                try:
                    await call.write(await answer)
                finally:
                    reservation.release()
                depth.release()
            return await reader
        finally:
            reader.cancel()
            while not answers.empty():
                begun = answers.get_nowait()
                if begun is not STREAM_END:
                    begun[0].cancel()
                    begun[1].release()

    async def _read_stream(self, call: Call, answers: Answers, depth: asyncio.Semaphore) -> Refusal | None:
        """Begins every request as it comes; returns why no more are read, None where the client has sent all."""
        try:
            while True:
                await depth.acquire()
                message = await call.read_next()
                if message is None:
                    return None
                reservation = Reservation(call.memory)
                answers.put_nowait((asyncio.create_task(self._of_a_stream(message, call, reservation)), reservation))
                del message  # it is the task's alone
        except Refusal as refusal:
            return refusal.with_traceback(None)
        finally:
            answers.put_nowait(STREAM_END)

    async def _of_a_stream(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Nothing that is wrong with one request ends the stream."""
        response, error = pb.ModelInferResponse(), ""
        try:
            reservation.add(len(message))
            cut = outline(message, self._limits)
            request = _parsed(pb.ModelInferRequest, cut.head)
            response.id = request.id
            response = await self._infer(request, cut, call)
        except Refusal as refusal:
            error = refusal.message
        except Exception:
            log.exception("a defect of the server, in ModelStreamInfer")
            error = DEFECT.message
        reservation.release()
        whole: bytes = pb.ModelStreamInferResponse(error_message=error, infer_response=response).SerializeToString()
        try:
            reservation.add(len(whole))
        except Refusal as refusal:
            whole = pb.ModelStreamInferResponse(error_message=refusal.message).SerializeToString()
        return whole


def call_of(request: Any, cut: Outline, remaining: float | None, card: ModelCard, limits: Limits) -> InferenceCall:
    """Reads a ModelInferRequest whose tensors' data was cut out. `remaining`: the gRPC deadline, seconds from now."""
    if len(request.id) > LONGEST_ID:
        raise invalid(f"id has {len(request.id)} characters; at most {LONGEST_ID} are kept")
    asked = asked_of(_parameters(request.parameters), card)
    if remaining is not None and (asked.deadline is None or remaining < asked.deadline):
        asked = msgspec.structs.replace(asked, deadline=min(remaining, LONGEST_DEADLINE_S))
    if len(request.outputs) > limits.tensors:
        raise invalid(f"the request has {len(request.outputs)} outputs; at most {limits.tensors} are accepted")
    forms = tuple(OutputForm(output_wish(wish.name, _parameters(wish.parameters)), True) for wish in request.outputs)
    check_forms(forms)
    image = _image(request, cut, card, limits)
    return InferenceCall(image, request.id, asked, forms or (OutputForm(binary=True),))


def response_of(call: InferenceCall, answer: Answer, card: ModelCard) -> Any:
    """The ModelInferResponse of an answer."""
    response = pb.ModelInferResponse(model_name=card.name, model_version=VERSION, id=call.request_id)
    for name, value in cost_of(answer).items():
        if isinstance(value, str):
            response.parameters[name].string_param = value
        elif isinstance(value, int):
            response.parameters[name].int64_param = value
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


def _image(request: Any, cut: Outline, card: ModelCard, limits: Limits) -> Any:
    if len(request.inputs) != 1:
        raise invalid(f"the request has {len(request.inputs)} inputs; {card.name} has one, {INPUT}")
    tensor = request.inputs[0]
    if tensor.name != INPUT:
        raise invalid(f"input {quote(tensor.name)} does not exist; {card.name} has one input, {INPUT}")
    check_input_parameters(_parameters(tensor.parameters))
    if len(tensor.shape) > limits.rank:
        raise invalid(f"input {INPUT} has {len(tensor.shape)} dimensions; at most {limits.rank} are accepted")
    given = [name for name in ("raw", "fp32", "uint") if getattr(cut, name)]
    if len(given) > 1 or len(cut.raw) > 1:
        raise invalid(f"the data of input {INPUT} is given more than once; send one raw_input_contents, or contents")
    data: bytes | memoryview
    if cut.raw:
        data = cut.raw[0]
    elif tensor.datatype == "UINT8":
        data = bytes_of_varints(_joined(cut.uint, limits))
    else:
        data = _joined(cut.fp32, limits)
    return image_from(data, 0, len(data), tensor.datatype, list(tensor.shape), card, limits)


def _joined(pieces: list[memoryview], limits: Limits) -> memoryview:
    """Numbers that came as contents: most often one piece, which is not copied."""
    size = sum(map(len, pieces))
    if size > limits.json_bytes:
        raise Refusal(
            Kind.TOO_LARGE,
            f"contents has {size} bytes; at most {limits.json_bytes} are read, send raw_input_contents",
        )
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(parameter, choice)
    return found


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise invalid(f"the message is not a valid {kind.DESCRIPTOR.name}: {quote(error, 100)}") from None
