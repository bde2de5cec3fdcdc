"""Everything over HTTP but inference: health, metadata, statistics, repository, metrics, and the live page.

Starlette routes that read the service's state; none of them is on the hot path. `management_routes` are those of the
second listener, which is off by default.
"""

import asyncio
from collections.abc import Awaitable, Callable
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from slim_scheduler.serve.decode import refuse_repeated_keys
from slim_scheduler.serve.live import MOST_VIEWERS, Live
from slim_scheduler.serve.openapi import document
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote
from slim_scheduler.serve.service import Service

PAGE = Path(__file__).parents[1] / "page"
PAGE_FILES = {path.name: path for path in PAGE.iterdir() if path.is_file()}
# Everything the page loads comes from here; nobody may frame it.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
SMALL_BODY = 64 * 1024  # bytes: names, and nothing else
Handler = Callable[[Request], Awaitable[Response]]


class IndexWish(msgspec.Struct):
    ready: bool = False


class PolicyWish(msgspec.Struct):
    router: str


class LoadWish(msgspec.Struct):
    parameters: dict[str, Any] | None = None


def _file(path: Path) -> Response:
    """A small file of the page, whole: an answer to HEAD then has its length."""
    return Response(path.read_bytes(), media_type=guess_type(path.name)[0], headers=PAGE_HEADERS)


def public_routes(service: Service, registry: CollectorRegistry, live: Live) -> Starlette:
    """The routes of the main listener."""
    repository = service.repository

    async def page(request: Request) -> Response:
        return _file(PAGE_FILES["index.html"])

    async def page_file(request: Request) -> Response:
        path = PAGE_FILES.get(request.path_params["name"])  # a name from the folder's listing, never a path
        if path is None:
            raise Refusal(Kind.NOT_FOUND, "no such file")
        return _file(path)

    async def metadata(request: Request) -> Response:
        return _json(service.metadata())

    async def models(request: Request) -> Response:
        return _json({"models": list(repository.served)})

    async def model(request: Request) -> Response:
        card = _find(request).card
        return _json({**card.metadata(), "parameters": card.parameters()})

    async def config(request: Request) -> Response:
        return _json(_find(request).card.config())

    async def statistics(request: Request) -> Response:
        name = request.path_params.get("name", "")
        return _json(service.statistics(name, request.path_params.get("version", "")))

    async def model_ready(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            ready = service.model_ready(name, request.path_params.get("version", ""))
        except Refusal as refusal:
            if refusal.kind is not Kind.UNAVAILABLE:
                raise
            ready = False
        return _ready({"name": name, "ready": ready}, ready)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def snapshot(request: Request) -> Response:
        return _json(live.latest())

    async def events(request: Request) -> Response:
        if live.viewers >= MOST_VIEWERS:
            raise Refusal(Kind.UNAVAILABLE, f"{MOST_VIEWERS} pages are open already", 5.0)
        pieces = iter(()) if request.method == "HEAD" else live.events()
        return StreamingResponse(pieces, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def bound(request: Request) -> Response:
        return _json(await live.bound(request.path_params["name"]))

    async def openapi(request: Request) -> Response:
        return _json(document(list(repository.served.values()), service.version))

    def _find(request: Request) -> Any:
        return repository.find(request.path_params["name"], request.path_params.get("version", ""))

    one = "/v2/models/{name}"
    versioned = one + "/versions/{version}"
    routes = [
        Route("/", page),
        Route("/page/{name}", page_file),
        Route("/v2", metadata),
        Route("/v2/models", models),
        Route("/v2/models/stats", statistics),
        *(Route(prefix, model) for prefix in (one, versioned)),
        *(Route(prefix + "/config", config) for prefix in (one, versioned)),
        *(Route(prefix + "/stats", statistics) for prefix in (one, versioned)),
        *(Route(prefix + "/ready", model_ready) for prefix in (one, versioned)),
        Route("/metrics", metrics),
        Route("/live/snapshot", snapshot),
        Route("/live/events", events),
        Route("/live/bound/{name}", bound),
        Route("/openapi.json", openapi),
        *_health(service),
        _index(service),
        Route("/v2/repository/models/{name}/{what:path}", _elsewhere, methods=["POST"]),
        Route("/v2/{kind:path}sharedmemory{rest:path}", _unsupported, methods=["GET", "POST"]),
        Route("/v2/trace/setting", _unsupported, methods=["GET", "POST"]),
        Route(one + "/trace/setting", _unsupported, methods=["GET", "POST"]),
        Route("/v2/logging", _unsupported, methods=["GET", "POST"]),
    ]
    return _application(routes)


def management_routes(service: Service) -> Starlette:
    """The routes of the management listener: load, unload, policy."""
    repository = service.repository

    async def load(request: Request) -> Response:
        wish = await _body(request, LoadWish)
        if wish.parameters:
            raise invalid("load takes no parameters: a model comes from the model folder as it is")
        await repository.load(request.path_params["name"])
        return _json({})

    async def unload(request: Request) -> Response:
        await repository.unload(request.path_params["name"])
        return _json({})

    async def policy(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "POST":
            await repository.set_router(name, (await _body(request, PolicyWish)).router)
        return _json({"model": name, "router": repository.find(name).config.router.name})

    one = "/v2/repository/models/{name}"
    routes = [
        *_health(service),
        _index(service),
        Route(one + "/load", load, methods=["POST"]),
        Route(one + "/unload", unload, methods=["POST"]),
        Route(one + "/policy", policy, methods=["GET", "POST"]),
    ]
    return _application(routes)


def _health(service: Service) -> list[Route]:
    async def live(request: Request) -> Response:
        return _json({"live": True})

    async def ready(request: Request) -> Response:
        return _ready({"ready": service.ready}, service.ready)

    return [Route("/v2/health/live", live), Route("/v2/health/ready", ready)]


def _index(service: Service) -> Route:
    async def index(request: Request) -> Response:
        wish = await _body(request, IndexWish)
        rows = await asyncio.to_thread(service.repository.index)  # lists a folder
        return _json([row for row in rows if row["state"] == "READY" or not wish.ready])

    return Route("/v2/repository/index", index, methods=["POST"])


async def _elsewhere(request: Request) -> Response:
    raise Refusal(
        Kind.FORBIDDEN, "management has its own listener, off by default; start the server with --management-port"
    )


async def _unsupported(request: Request) -> Response:
    raise Refusal(Kind.UNSUPPORTED, "shared memory, tracing and log settings cannot be changed by clients here")


def _application(routes: list[Route]) -> Starlette:
    application = Starlette(routes=routes, exception_handlers={Refusal: _refusal, HTTPException: _http_error})
    application.router.redirect_slashes = False  # a redirect would lose a POST's body
    return application


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    response = _json({"error": error.message}, int(error.kind))
    if error.kind is Kind.UNAVAILABLE:
        response.headers["retry-after"] = str(max(1, round(error.retry_after or 1.0)))
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{quote(request.method)} {quote(request.url.path)}: {error.detail}"
    response = _json({"error": message}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _body(request: Request, kind: Any) -> Any:
    """A small JSON body; an empty one has every default."""
    text = await request.body()
    try:
        wish = msgspec.json.decode(text or b"{}", type=kind)
        refuse_repeated_keys(text or b"{}")
        return wish
    except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError) as error:
        raise invalid(f"the JSON is not what is expected: {quote(error, 200)}") from None


def _ready(body: dict[str, Any], ready: bool) -> Response:
    if ready:
        return _json(body)
    response = _json(body | {"error": "not ready"}, 503)
    response.headers["retry-after"] = "1"
    return response


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
