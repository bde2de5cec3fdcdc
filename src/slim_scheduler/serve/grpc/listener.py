"""One gRPC listener: which calls are read at all, how messages come in and go out, and how a call ends.

grpc.aio hands over every call before its message is read, because all methods are declared as streams of bytes, which
on the wire is the same. So the token is checked first, reading has its bounds (`reading.py`), a message that is not
valid protobuf is the client's error, and what a refused call held is freed at once: no exception leaves a handler.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import grpc

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import Seconds
from slim_scheduler.serve.access import Access, Guard
from slim_scheduler.serve.grpc.reading import Reader
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.refusal import DEFECT, Kind, Refusal

log = logging.getLogger(__name__)

PREFIX = "/inference.GRPCInferenceService/"
CODES = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Kind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.TOO_SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
    Kind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
}
MOST_CALLS = 1024  # at a time: one that waits to be read holds up to its window of 64 KiB
MOST_PER_CONNECTION = 256
LOST_AFTER_MS = 20_000  # a client that answers no ping for so long is gone, and so are its calls
OLDEST_CONNECTION_MS = 3_600_000  # then it is asked to connect again: a client that never reads ends with it
LAST_CALLS_MS = 60_000  # for calls of such a connection to end


class _EndedCalls(logging.Filter):
    """Keeps out of the log, with its traceback, that a call was over before its answer or its refusal was sent: its
    deadline had passed, or the client had gone. grpc has told the client, and no counter of ours misses it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


ENDED_CALLS = _EndedCalls()
GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")


class Call:
    """One call: its metadata, its messages, and what it reserves of the memory budget."""

    def __init__(self, context: Any, metadata: Mapping[str, Any], reader: Reader, memory: MemoryBudget) -> None:
        self._context = context
        self._reader = reader
        self.metadata = metadata
        self.memory = memory

    @property
    def remaining(self) -> Seconds | None:
        """Until the client's deadline; None without one."""
        remaining: Seconds | None = self._context.time_remaining()
        return remaining

    async def read(self) -> bytes | None:
        """The one message of the call; None where there is none. Raises Refusal."""
        return await self._reader.read(self._context)

    def stream(self) -> AbstractContextManager[None]:
        """While its messages are read one after the other. Raises Refusal where too many streams are open."""
        return self._reader.stream()

    async def read_next(self) -> bytes | None:
        """A stream's next message; None at its end. Raises Refusal."""
        return await self._reader.read_stream(self._context)

    async def write(self, message: bytes) -> None:
        """Returns when the client has taken the message, but for its last 64 KiB."""
        await self._context.write(message)


Method = Callable[[bytes, Call], Awaitable[bytes]]
StreamMethod = Callable[[Call], Awaitable[Refusal | None]]  # why it ends, None for the end of the stream


class Listener(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves methods by name: `unary` take one message and give one, `streams` do as they like."""

    def __init__(
        self,
        unary: Mapping[str, Method],
        streams: Mapping[str, StreamMethod],
        guard: Guard,
        limits: Limits,
        memory: MemoryBudget,
    ) -> None:
        self._guard = guard
        self._memory = memory
        self._reader = Reader(limits)
        handlers = {name: self._unary(method) for name, method in unary.items()}
        handlers |= {name: self._call(method) for name, method in streams.items()}
        self._handlers = {PREFIX + name: grpc.stream_stream_rpc_method_handler(h) for name, h in handlers.items()}

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    def _unary(self, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        async def one(call: Call) -> None:
            with self._memory.reservation() as reservation:
                message = await call.read()
                if message is None:
                    return  # the client has changed its mind
                reservation.add(len(message))
                answer = await method(message, call)
                del message
                reservation.release()
                reservation.add(len(answer))
                await call.write(answer)

        return self._call(one)

    def _call(self, method: StreamMethod) -> Callable[[Any, Any], Awaitable[None]]:
        async def checked(_: Any, context: Any) -> None:
            try:
                metadata = dict(context.invocation_metadata() or ())
                self._guard.check_token(str(metadata.get("authorization", "")).encode())
                refused = await method(Call(context, metadata, self._reader, self._memory))
                if refused is not None:
                    _end(context, refused)
            except Refusal as refusal:
                _end(context, refusal)
            except (asyncio.CancelledError, grpc.aio.BaseError):
                raise  # the client went away
            except Exception:
                log.exception("a defect of the server, in a gRPC method")
                _end(context, DEFECT)

        return checked


def _end(context: Any, refusal: Refusal) -> None:
    """The call's status. Raising it (`abort`) would tie the traceback, and with it the message, into a cycle."""
    if refusal.retry_after is not None:
        context.set_trailing_metadata((("retry-after", f"{refusal.retry_after:.3f}"),))
    context.set_code(CODES.get(refusal.kind, grpc.StatusCode.INTERNAL))
    context.set_details(refusal.message)


async def start(listener: Listener, access: Access, port: int, limits: Limits) -> tuple[grpc.aio.Server, int]:
    """Starts a listener; returns its server and its port (for port 0)."""
    GRPC_LOG.addFilter(ENDED_CALLS)
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.max_send_message_length", limits.body_bytes),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.per_message_decompression", 0),  # `reading` does it, within the limit
            ("grpc.http2.bdp_probe", 0),  # it would widen the windows of calls that nobody reads
            ("grpc.max_concurrent_streams", MOST_PER_CONNECTION),
            ("grpc.keepalive_time_ms", LOST_AFTER_MS),
            ("grpc.keepalive_timeout_ms", LOST_AFTER_MS),
            ("grpc.max_connection_age_ms", OLDEST_CONNECTION_MS),
            ("grpc.max_connection_age_grace_ms", LAST_CALLS_MS),
            ("grpc.so_reuseport", 0),
        ),
        maximum_concurrent_rpcs=MOST_CALLS,
    )
    server.add_generic_rpc_handlers((listener,))
    host = f"[{access.host}]" if ":" in access.host else access.host
    address = f"{host}:{port}"
    credentials = None
    if access.certificate and access.key:
        credentials = grpc.ssl_server_credentials(
            [(_read(access.key), _read(access.certificate))],
            root_certificates=_read(access.client_ca) if access.client_ca else None,
            require_client_auth=access.client_ca is not None,
        )
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(
            f"cannot listen on {access.host} port {port} for gRPC; choose another --grpc-port, or -1 for none"
        ) from None
    await server.start()
    return server, bound


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
