"""A small typed client for a running server, sync and async: arrays in, logits and what they cost out.

Speaks the protocol's binary tensor extension over HTTP and needs nothing of the server's packages. The standard
clients (tritonclient, kserve) work too; this one knows our request and response parameters by name.
"""

import asyncio
import http.client
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slim_scheduler.client.wire import HttpConnection, KeptConnections, bearer, model_path, request_head, split_address
from slim_scheduler.core.errors import InputError, SlimError

SCHEMES = ("http", "https")
Images = npt.NDArray[np.float32] | npt.NDArray[np.uint8]


class RefusedError(SlimError):
    """The server turned a request down. `retry_after` is in seconds, None where it did not say."""

    def __init__(self, status: int, message: str, retry_after: float | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.retry_after = retry_after


class Prediction(msgspec.Struct, frozen=True):
    """The answer to one request. `logits` is float32 `(items, classes)`; times in milliseconds, energy in joules.

    `widths` and `servers` have one entry per segment, items that went different ways separated by `;`. `unmet` names
    a constraint that was given up because `unmet="answer"` preferred an answer. `passes` is the most of any item,
    `confidence`, in [0, 1], the least; `other_` is of the passes that did not answer. docs/http.md has all of them.
    """

    logits: npt.NDArray[np.float32]
    widths: str
    servers: str
    queue_ms: float
    compute_ms: float
    energy_source: str
    energy_j: float | None = None
    unmet: str = ""
    passes: int = 1
    confidence: float | None = None
    item_passes: str = ""
    item_confidence: str = ""
    other_widths: str = ""
    other_compute_ms: float = 0.0
    other_energy_j: float | None = None
    precision: str = "fp32"

    @property
    def classes(self) -> npt.NDArray[np.int64]:
        """The most likely class of each item."""
        return np.asarray(self.logits.argmax(axis=1), np.int64)


class Constraints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be asked of a request; see docs/http.md."""

    deadline_ms: float | None = None
    accuracy_floor: float | None = None
    confidence_floor: float | None = None
    anytime: bool = True
    width: float | None = None
    widths: tuple[float, ...] | None = None
    priority: int = 0
    unmet: str = "refuse"


NO_CONSTRAINTS = Constraints()


class SlimClient:
    """One connection to a server, for programs without an event loop. Not for several threads at once.

    A request is sent once more where the server had closed the connection since the last one.
    """

    def __init__(self, url: str, model: str | None = None, token: str | None = None, timeout_s: float = 30.0) -> None:
        self._url = split_address(url, SCHEMES)
        self._token = token
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(self._url.host, self._url.port, timeout=timeout_s)
        self._model = model

    def infer(self, images: Images, constraints: Constraints = NO_CONSTRAINTS) -> Prediction:
        """Logits for `(items, channels, height, width)`: float32 normalised, or uint8 pixels. Raises RefusedError."""
        body, json_length = infer_body(images, constraints)
        headers = {"Inference-Header-Content-Length": str(json_length), "Content-Type": "application/octet-stream"}
        status, fields, reply = self._send("POST", model_path(self.model, "/infer"), body, headers)
        return read_prediction(status, fields, reply)

    @property
    def model(self) -> str:
        """The model asked for; the server's first one unless a name was given."""
        if self._model is None:
            self._model = _first_model(self._get("/v2/models"))
        return self._model

    def metadata(self) -> dict[str, Any]:
        return self._get(model_path(self.model))

    def ready(self) -> bool:
        return self._send("GET", "/v2/health/ready")[0] == 200

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "SlimClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, path: str) -> dict[str, Any]:
        return _document(*self._send("GET", path))

    def _send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        if self._token:
            headers = {"Authorization": bearer(self._token), **(headers or {})}
        kept = self._connection.sock is not None
        try:
            try:
                response = self._begin(method, path, body, headers)
            except ConnectionError:
                if not kept:
                    raise
                self._connection.close()  # the server had, while nothing was sent on it
                response = self._begin(method, path, body, headers)
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        except BaseException:
            self._connection.close()  # what is left of this answer must not be taken for the next one's
            raise

    def _begin(self, method: str, path: str, body: bytes, headers: dict[str, str] | None) -> http.client.HTTPResponse:
        self._connection.request(method, path, body, headers or {})
        return self._connection.getresponse()


class AsyncSlimClient:
    """A pool of connections to one server, as many as there are requests at the same time. Plain HTTP."""

    def __init__(self, url: str, model: str | None = None, token: str | None = None, timeout_s: float = 30.0) -> None:
        self._url = split_address(url, SCHEMES)
        if self._url.scheme != "http":
            raise InputError(f"{url}: the async client speaks http; use SlimClient for https")
        self._token = token
        self._timeout = timeout_s
        self._model = model
        self._kept = KeptConnections()

    async def infer(self, images: Images, constraints: Constraints = NO_CONSTRAINTS) -> Prediction:
        """As `SlimClient.infer`. Cancelling it closes the connection, which frees the work at the server."""
        body, json_length = infer_body(images, constraints)
        head = {"inference-header-content-length": str(json_length), "content-type": "application/octet-stream"}
        return read_prediction(*await self._send("POST", model_path(await self.model(), "/infer"), body, head))

    async def model(self) -> str:
        if self._model is None:
            self._model = _first_model(_document(*await self._send("GET", "/v2/models")))
        return self._model

    async def metadata(self) -> dict[str, Any]:
        return _document(*await self._send("GET", model_path(await self.model())))

    async def ready(self) -> bool:
        return (await self._send("GET", "/v2/health/ready"))[0] == 200

    async def close(self) -> None:
        self._kept.close()

    async def __aenter__(self) -> "AsyncSlimClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        if self._token:
            headers = {"authorization": bearer(self._token), **(headers or {})}
        head = request_head(method, path, self._url.authority, len(body), headers)
        connection = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = self._kept.take() or await HttpConnection.open(self._url.host, self._url.port)
                answer = await connection.send(head + body)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        self._kept.keep(connection)
        return answer


def infer_body(images: Images, constraints: Constraints = NO_CONSTRAINTS) -> tuple[bytes, int]:
    """The body of an infer request with a binary tensor, and the length of its JSON part."""
    if images.dtype not in (np.float32, np.uint8):
        raise InputError(f"images are {images.dtype}; give float32 (normalised) or uint8 (pixels)")
    data = np.ascontiguousarray(images).tobytes()
    head = msgspec.json.encode(
        {
            "inputs": [
                {
                    "name": "image",
                    "shape": images.shape,
                    "datatype": "FP32" if images.dtype == np.float32 else "UINT8",
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "parameters": {"binary_data_output": True, **request_parameters(constraints)},
        }
    )
    return head + data, len(head)


def request_parameters(constraints: Constraints) -> dict[str, Any]:
    """Constraints as parameters of a request, over HTTP and gRPC alike. Raises InputError for widths in a text."""
    parameters: dict[str, Any] = msgspec.to_builtins(constraints)
    if "widths" in parameters:
        try:
            parameters["widths"] = ",".join(f"{width:g}" for width in parameters["widths"])
        except (TypeError, ValueError):
            said = f"widths are {constraints.widths!r}; give one number per segment, as (0.25, 0.5, 1.0)"
            raise InputError(said) from None
    return parameters


def read_prediction(status: int, headers: dict[str, str], body: bytes) -> Prediction:
    """The answer in a response. Raises RefusedError for any other status than 200."""
    if status != 200:
        _document(status, headers, body)
    json_length = int(headers["inference-header-content-length"])
    reply = msgspec.json.decode(body[:json_length])
    shape = reply["outputs"][0]["shape"]
    logits = np.frombuffer(body, "<f4", shape[0] * shape[1], json_length).reshape(shape)
    return msgspec.convert({"logits": None, **reply["parameters"]}, _Cost).with_logits(logits)


class _Cost(msgspec.Struct):
    """The response parameters; unknown ones are of a newer server."""

    widths: str
    servers: str
    queue_ms: float
    compute_ms: float
    energy_source: str
    energy_j: float | None = None
    unmet: str = ""
    passes: int = 1
    confidence: float | None = None
    item_passes: str = ""
    item_confidence: str = ""
    other_widths: str = ""
    other_compute_ms: float = 0.0
    other_energy_j: float | None = None
    precision: str = "fp32"

    def with_logits(self, logits: npt.NDArray[np.float32]) -> Prediction:
        return Prediction(logits, **msgspec.structs.asdict(self))


def _document(status: int, headers: dict[str, str], body: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = msgspec.json.decode(body)
    except msgspec.DecodeError:
        document = {"error": body[:200].decode("latin-1")}
    if status != 200:
        retry_after = headers.get("retry-after")
        raise RefusedError(status, str(document.get("error")), float(retry_after) if retry_after else None)
    return document


def _first_model(document: dict[str, Any]) -> str:
    if not document["models"]:
        raise InputError("the server has no model loaded; load one, or give a model's name")
    return str(document["models"][0])
