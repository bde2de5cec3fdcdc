"""The load generator's gRPC side, apart because its packages are heavy."""

from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from slim_scheduler.client.client import Constraints, request_parameters
from slim_scheduler.client.senders import LONGEST_REASON, LOST, Status, payloads
from slim_scheduler.client.wire import bearer, sendable, split_address
from slim_scheduler.core.errors import InputError


class GrpcSender:
    """Sends ModelInfer over one channel; HTTP/2 carries many at once."""

    def __init__(self, channel: Any, requests: list[Any], metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        self._requests = requests
        self._metadata = metadata
        self.reasons: dict[Status, str] = {}

    @classmethod
    async def open(
        cls,
        url: str,
        model: str | None,
        token: str | None,
        items: int,
        datatype: str,
        constraints: Constraints,
        rng: np.random.Generator,
    ) -> "GrpcSender":
        model = None if model is None else sendable(model)
        channel = grpc.aio.insecure_channel(split_address(url, ("grpc",)).authority)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("authorization", bearer(token)),) if token else ()
        try:
            if model is None:
                index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True), metadata=metadata)
                if not index.models:
                    raise InputError(f"{url} has no model loaded; load one, or name it with --model")
                model = index.models[0].name
            card = await stub.ModelMetadata(pb.ModelMetadataRequest(name=model), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                said = f"{url} does not answer: {error.details()}; is `slim serve --grpc-port` there?"
                raise InputError(said) from None
            raise InputError(f"{url} refuses: {error.details()}") from None
        requests = []
        for images in payloads(list(card.inputs[0].shape)[1:], items, datatype, rng):
            request = pb.ModelInferRequest(model_name=model)
            request.inputs.add(name="image", datatype=datatype, shape=images.shape)
            request.raw_input_contents.append(images.tobytes())
            for name, value in request_parameters(constraints).items():
                if isinstance(value, float):
                    request.parameters[name].double_param = value
                elif isinstance(value, bool):  # before int, which it is too
                    request.parameters[name].bool_param = value
                elif isinstance(value, int):
                    request.parameters[name].int64_param = value
                else:
                    request.parameters[name].string_param = value
            requests.append(request)
        return cls(channel, requests, metadata)

    async def send(self, number: int) -> Status:
        try:
            await self._infer(self._requests[number % len(self._requests)], metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            status = str(error.code().name)
            if error.code() is grpc.StatusCode.UNAVAILABLE and not _came_from_the_server(error):
                status = LOST
            self.reasons.setdefault(status, str(error.details())[:LONGEST_REASON])
            return status
        return "OK"

    async def close(self) -> None:
        await self._channel.close()


def _came_from_the_server(error: grpc.aio.AioRpcError) -> bool:
    """A server that refuses says when to try again; grpc, where there is no connection, says UNAVAILABLE as well."""
    return any(key == "retry-after" for key, _ in error.trailing_metadata() or ())
