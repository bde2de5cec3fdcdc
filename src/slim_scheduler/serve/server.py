"""`slim serve`: brings the listeners up and takes them down again.

Owns the order of things: a model first, then the sockets. On SIGTERM: not ready, but everything is served for
`drain_delay_s`, in which whoever balances load can notice; then no new connections, and the last answer of each says
so; then the engines and the sockets end, and the process exits 0, or 1 without a batch or a load that does not end.
Everything else is the service's and the fronts'.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from slim_scheduler.engine.work_thread import still_running
from slim_scheduler.serve.access import Access, Guard, token_from_environment
from slim_scheduler.serve.allocator import limit_arenas, limit_kernels
from slim_scheduler.serve.grpc import listener as grpc_listener
from slim_scheduler.serve.grpc.methods import management_listener, public_listener
from slim_scheduler.serve.http.front import HttpFront
from slim_scheduler.serve.http.listener import HttpListener
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
from slim_scheduler.setup.model_names import model_name

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import SlimEngine

log = logging.getLogger(__name__)

GARBAGE = 20_000  # objects between two collections; requests make few cycles and many objects
DRAIN_DELAY_S = 2.0  # Kubernetes takes a pod out of its services within about a second of its end being asked for
UNFINISHED = 1  # exit code where a batch or a load did not end
CLOSING_S = 2.0  # for answers that are on their way out when everything else is done


class Ports(msgspec.Struct, frozen=True):
    """What is listened on; 0 asks the system for a port, None is off."""

    http: int
    grpc: int | None = None
    management: int | None = None
    management_grpc: int | None = None


@contextlib.asynccontextmanager
async def running(
    config: Config,
    access: Access,
    ports: Ports,
    *,
    limits: Limits | None = None,
    layout: Layout = "NCHW",
    seed: int = 0,
    drain_delay_s: float = 0.0,
    grace_s: float = 30.0,
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[Ports]:
    """A running server, ready when entered and drained when left. Yields the ports it really has.

    `drain_delay_s` is how long it serves on, not ready, when left; `hurry` ends that. `grace_s` is what the requests
    then in flight have.
    """
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
    front = HttpFront(service, Guard(access), limits, public_routes(service, registry, live))
    responses.append(front.responses)
    inside = msgspec.structs.replace(access, host="127.0.0.1")
    listeners: list[HttpListener] = []
    rpc_servers: list[Any] = []  # grpc has no types
    async with contextlib.AsyncExitStack() as stack:

        async def listening(front: HttpFront, access: Access, port: int) -> int:
            listener = HttpListener(front, limits, memory, access)
            listeners.append(listener)
            stack.push_async_callback(lambda: listener.close(time.monotonic() + CLOSING_S))
            return await listener.start(access.host, port)

        async def listening_rpc(listener: grpc_listener.Listener, access: Access, port: int) -> int:
            server, bound = await grpc_listener.start(listener, access, port, limits)
            rpc_servers.append(server)
            stack.push_async_callback(server.stop, CLOSING_S)
            return bound

        http = await listening(front, access, ports.http)
        management = rpc = management_rpc = None
        if ports.management is not None:
            manager = HttpFront(service, Guard(inside), limits, management_routes(service), inference=False)
            management = await listening(manager, inside, ports.management)
        if ports.grpc is not None:
            rpc = await listening_rpc(public_listener(service, Guard(access), limits, memory), access, ports.grpc)
        if ports.management_grpc is not None:
            managing = management_listener(service, Guard(inside), limits, memory)
            management_rpc = await listening_rpc(managing, inside, ports.management_grpc)
        sampler = asyncio.create_task(live.run())
        try:
            yield Ports(http, rpc, management, management_rpc)
        finally:
            service.drain()
            if drain_delay_s and not (hurry is not None and hurry.is_set()):
                log.info("draining: not ready, serving on for %g s", drain_delay_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for((hurry or asyncio.Event()).wait(), drain_delay_s)
            log.info("ending: %d requests in flight", service.in_flight)
            until = time.monotonic() + grace_s
            await live.stop()
            ending = [asyncio.create_task(server.stop(grace_s)) for server in rpc_servers]  # no new calls
            await asyncio.gather(*(listener.drain(until) for listener in listeners))
            await service.stop(max(0.0, until - time.monotonic()))
            sampler.cancel()
    await asyncio.gather(*ending)


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
    drain_delay_s: float = DRAIN_DELAY_S,
    grace_s: float = 30.0,
    limits: Limits | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Raises InputError's kinds for what cannot be served.

    SIGINT, or a second signal, leaves the drain delay out. Where a batch or the load of a model does not end, the
    process does, with code 1.
    """
    loaded = config if isinstance(config, Config) else load_config(Path(config))
    access = Access(
        host, token_from_environment(token), certificate, key, client_ca, insecure, allow_hosts, allow_origins
    )
    access.check()
    ports = Ports(port, grpc_port, management_port, management_grpc_port)

    async def main() -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def signalled(number: int) -> None:
            if stop.is_set() or number == signal.SIGINT:
                hurry.set()
            stop.set()

        async with running(
            loaded,
            access,
            ports,
            limits=limits,
            layout=layout,
            seed=seed,
            drain_delay_s=drain_delay_s,
            grace_s=grace_s,
            hurry=hurry,
        ) as bound:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, signalled, number)
            announce(_addresses(access, bound, model_name(loaded.model.path)))
            announce(f"live page: {_page(access, bound.http)}")
            await stop.wait()

    limit_arenas()
    limit_kernels()
    gc.set_threshold(GARBAGE, 20, 100)
    # Until the server is up there is nothing to drain. A container's first process has no default action to rely on.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except KeyboardInterrupt:
        _end_without_threads(128 + signal.SIGINT)
        raise
    _end_without_threads(UNFINISHED)


def _end_without_threads(code: int) -> None:
    """Ends the process where a thread's work has not ended: at an ordinary exit, such a thread can crash it."""
    if left := still_running():
        log.warning("ending without %s", ", ".join(left))
        os._exit(code)


def _builder(seed: int) -> Build:
    def build(config: Config, observer: Observer) -> "SlimEngine":
        from slim_scheduler.engine.engine import SlimEngine  # torch takes seconds to import

        return SlimEngine.from_config(config, seed=seed, recorder=observer)

    return build


def _page(access: Access, port: int) -> str:
    """The page's address for a browser on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    host = everywhere.get(access.host, f"[{access.host}]" if ":" in access.host else access.host)
    return f"{'https' if access.certificate else 'http'}://{host}:{port}/"


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
