"""Management over gRPC: load and unload, on a listener of its own that is off by default and on loopback only."""

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from slim_scheduler.serve.grpc.servicer import Context, StateRpc, rpc
from slim_scheduler.serve.refusal import invalid


class ManagementRpc(StateRpc):
    """Inference is UNIMPLEMENTED here."""

    @rpc
    async def RepositoryModelLoad(self, request: Any, context: Context) -> Any:  # noqa: N802
        if request.parameters:
            raise invalid("load takes no parameters: a model comes from the model folder as it is")
        await self._service.repository.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    @rpc
    async def RepositoryModelUnload(self, request: Any, context: Context) -> Any:  # noqa: N802
        await self._service.repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()
