"""How the load generator sends a request over HTTP, and the payloads that it sends."""

import asyncio
import math
from typing import Any

import numpy as np

from slim_scheduler.client.client import AsyncSlimClient, Constraints, infer_body
from slim_scheduler.client.wire import (
    ConnectionLostError,
    HttpConnection,
    KeptConnections,
    bearer,
    model_path,
    request_head,
    split_address,
)
from slim_scheduler.core.errors import InputError

MOST_BYTES = 2**30  # of all inputs together
Status = int | str  # an HTTP status, a gRPC code's name, or what went wrong
OK = 200
LONGEST_REASON = 500  # bytes of an answer
LOST = "lost"  # no connection, or one that ended before the answer
UNANSWERED = "unanswered"  # given up: no answer came until the load's end


class HttpSender:
    """Sends infer requests over a pool of kept connections; more requests than connections wait for one."""

    def __init__(self, host: str, port: int, requests: list[bytes], most: int) -> None:
        self._host = host
        self._port = port
        self._requests = requests
        self._kept = KeptConnections()
        self.reasons: dict[Status, str] = {}  # what the first answer of a status said, where it was no success
        self._room = asyncio.Semaphore(most)

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
        most: int,
    ) -> "HttpSender":
        address = split_address(url, ("http",))
        async with AsyncSlimClient(url, model, token) as client:
            metadata = await client.metadata()
        requests = []
        for images in payloads(metadata["inputs"][0]["shape"][1:], items, datatype, rng):
            body, json_length = infer_body(images, constraints)
            fields = {"inference-header-content-length": str(json_length)}
            if token:
                fields["authorization"] = bearer(token)
            path = model_path(metadata["name"], "/infer")
            requests.append(request_head("POST", path, address.authority, len(body), fields) + body)
        return cls(address.host, address.port, requests, most)

    async def send(self, number: int) -> Status:
        async with self._room:
            connection = None
            try:
                connection = self._kept.take() or await HttpConnection.open(self._host, self._port)
                status, _, body = await connection.send(self._requests[number % len(self._requests)])
            except (OSError, ConnectionLostError) as error:
                self.reasons.setdefault(LOST, str(error)[:LONGEST_REASON])
                return LOST
            except asyncio.CancelledError:
                if connection is not None:
                    connection.close()
                raise
            self._kept.keep(connection)
            if status != OK and status not in self.reasons:
                self.reasons[status] = body[:LONGEST_REASON].decode(errors="replace")
            return status

    async def close(self) -> None:
        self._kept.close()


def payloads(item_shape: list[int], items: int, datatype: str, rng: np.random.Generator, count: int = 16) -> list[Any]:
    """Some different inputs; what is in them does not change how long they take. Raises InputError."""
    shape = (items, *item_shape)
    size = count * math.prod(shape) * (1 if datatype == "UINT8" else 4)
    if size > MOST_BYTES:
        raise InputError(
            f"{count} requests of {items} items take {size // 2**20:,} MiB, of at most {MOST_BYTES // 2**20:,}; "
            "lower --items"
        )
    if datatype == "UINT8":
        return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(count)]
