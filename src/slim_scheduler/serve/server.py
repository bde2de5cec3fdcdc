"""`slim serve`: brings the listeners up and takes them down again.

Owns the order of things: a model first, then the sockets; on SIGTERM not ready, then what is in flight, then the
engines, then the sockets, then exit 0. Everything else is the service's and the fronts'.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn
import uvloop

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.serve.access import Access, Guard, token_from_environment
from slim_scheduler.serve.allocator import limit_arenas
from slim_scheduler.serve.grpc import listener as grpc_listener
from slim_scheduler.serve.grpc.methods import management_listener, public_listener
from slim_scheduler.serve.http.connection import connection_class, sweep_forever
from slim_scheduler.serve.http.front import App, HttpFront
from slim_scheduler.serve.http.routes import management_routes, public_routes
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.live import Live
from slim_scheduler.serve.memory import MemoryBudget
from slim_scheduler.serve.metadata import Layout
from slim_scheduler.serve.metrics import registry_of
from slim_scheduler.serve.observer import Observer
from slim_scheduler.serve.repository import Build, Repository
from slim_scheduler.serve.service import Service
from slim_scheduler.serve.tracing import tracer_from_environment
from slim_scheduler.setup.config import Config, load_config

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import SlimEngine

log = logging.getLogger(__name__)

# libuv accepts one connection per listening handle and turn of the loop: with one handle, new connections of a busy
# server wait for seconds.
ACCEPTED_AT_ONCE = 32
GARBAGE = 20_000  # objects between two collections; requests make few cycles and many objects
CLOSING_S = 2.0  # for answers that are on their way out when everything else is done


class Ports(msgspec.Struct, frozen=True):
    """What is listened on; 0 asks the system for a port, None is off."""

    http: int
    grpc: int | None = None
    management: int | None = None
    management_grpc: int | None = None


class _Listener(uvicorn.Server):
    """uvicorn without its signal handlers: the order of stopping is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def running(
    config: Config,
    access: Access,
    ports: Ports,
    *,
    limits: Limits | None = None,
    layout: Layout = "NCHW",
    seed: int = 0,
    grace_s: float = 30.0,
) -> AsyncIterator[Ports]:
    """A running server, ready when entered and drained when left. Yields the ports it really has."""
    access.check()
    limits = limits or Limits()
    repository = Repository(config, _builder(seed), layout, limits.items)
    memory = MemoryBudget(limits.held_bytes)
    service = Service(repository, trace=tracer_from_environment(), memory=memory)
    await service.start()
    gc.collect()
    gc.freeze()  # what is loaded now stays: no need to look at it in every collection
    live = Live(service)
    responses: list[dict[int, int]] = []
    registry = registry_of(service, responses)
    public = public_routes(service, registry, live)
    front = HttpFront(service, Guard(access), limits, public, memory=memory)  # type: ignore[arg-type]
    responses.append(front.responses)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(_listening(front, access, ports.http, limits))
        inside = msgspec.structs.replace(access, host="127.0.0.1")
        management = rpc = management_rpc = None
        if ports.management is not None:
            routes = management_routes(service)
            manager = HttpFront(service, Guard(inside), limits, routes, inference=False)  # type: ignore[arg-type]
            management = await stack.enter_async_context(_listening(manager, inside, ports.management, limits))
        if ports.grpc is not None:
            listener = public_listener(service, Guard(access), limits, memory)
            rpc = await stack.enter_async_context(_listening_rpc(listener, access, ports.grpc, limits))
        if ports.management_grpc is not None:
            listener = management_listener(service, Guard(inside), limits, memory)
            management_rpc = await stack.enter_async_context(
                _listening_rpc(listener, inside, ports.management_grpc, limits)
            )
        sampler = asyncio.create_task(live.run())
        try:
            yield Ports(http, rpc, management, management_rpc)
        finally:
            log.info("draining: %d requests in flight", service.in_flight)
            await service.drain(grace_s)
            sampler.cancel()
            await live.wake()


def serve(
    config: Config | str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int | None = 8001,
    token: str | None = None,
    insecure: bool = False,
    *,
    management_port: int | None = None,
    management_grpc_port: int | None = None,
    allow_hosts: tuple[str, ...] = (),
    allow_origins: tuple[str, ...] = (),
    certificate: str | None = None,
    key: str | None = None,
    client_ca: str | None = None,
    layout: Layout = "NCHW",
    seed: int = 0,
    grace_s: float = 30.0,
    limits: Limits | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Raises InputError's kinds for what cannot be served."""
    loaded = config if isinstance(config, Config) else load_config(Path(config))
    access = Access(
        host, token_from_environment(token), certificate, key, client_ca, insecure, allow_hosts, allow_origins
    )
    access.check()
    ports = Ports(port, grpc_port, management_port, management_grpc_port)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with running(loaded, access, ports, limits=limits, layout=layout, seed=seed, grace_s=grace_s) as bound:
            announce(_addresses(access, bound, Path(loaded.model.path).name))
            await stop.wait()

    limit_arenas()
    gc.set_threshold(GARBAGE, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _builder(seed: int) -> Build:
    def build(config: Config, observer: Observer) -> "SlimEngine":
        from slim_scheduler.engine.engine import SlimEngine  # torch takes seconds to import

        return SlimEngine.from_config(config, seed=seed, recorder=observer)

    return build


@contextlib.asynccontextmanager
async def _listening(app: App, access: Access, port: int, limits: Limits) -> AsyncIterator[int]:
    """One HTTP listener; yields its port."""
    bound = _bind(access.host, port)
    config = uvicorn.Config(
        app,
        http=connection_class(limits),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # what a client says about its own address is not to be believed
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(limits.idle_timeout_s),
        timeout_graceful_shutdown=int(CLOSING_S),
        backlog=2048,
        ssl_certfile=access.certificate,
        ssl_keyfile=access.key,
        ssl_ca_certs=access.client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if access.client_ca else ssl.CERT_NONE,
    )
    # uvicorn logs every malformed request as a warning; a flood of them must not become a flood of log lines.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = _Listener(config)
    accepting = [bound, *(bound.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]
    task = asyncio.create_task(server.serve(sockets=accepting))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    sweeper = asyncio.create_task(sweep_forever(server.server_state.connections))
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        sweeper.cancel()


@contextlib.asynccontextmanager
async def _listening_rpc(
    listener: grpc_listener.Listener, access: Access, port: int, limits: Limits
) -> AsyncIterator[int]:
    """One gRPC listener; yields its port."""
    server, bound = await grpc_listener.start(listener, access, port, limits)
    try:
        yield bound
    finally:
        await server.stop(CLOSING_S)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None


def _addresses(access: Access, ports: Ports, model: str) -> str:
    scheme = "https" if access.certificate else "http"
    text = f"serving {model} on {scheme}://{access.host}:{ports.http}"
    if ports.grpc is not None:
        text += f", gRPC on {access.host}:{ports.grpc}"
    if ports.management is not None:
        text += f", management on {scheme}://127.0.0.1:{ports.management}"
    if ports.management_grpc is not None:
        text += f", management over gRPC on 127.0.0.1:{ports.management_grpc}"
    return text
