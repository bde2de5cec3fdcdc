"""Bytes on a socket, for what well-behaved clients never send."""

import http.client
import json
import socket
from typing import Any

import numpy as np

from slim_scheduler.client.client import infer_body


def call(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """One request; status, headers, and the body as JSON where it is. `_` in a header's name stands for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        raw = response.read()
        fields = {name.lower(): value for name, value in response.getheaders()}
        is_json = fields.get("content-type") == "application/json" and "content-encoding" not in fields
        return response.status, fields, json.loads(raw) if is_json and raw else raw
    finally:
        connection.close()


def infer(port: int, images: np.ndarray, path: str = "/v2/models/digits/infer", **headers: str) -> tuple[int, Any, Any]:
    """A binary inference; status, headers and the raw body."""
    body, length = infer_body(images)
    return call(port, "POST", path, body, inference_header_content_length=str(length), **headers)


def exchange(port: int, data: bytes, timeout: float = 20.0) -> bytes:
    """Sends bytes and reads until the server closes or falls silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as wire:
        received = b""
        try:
            wire.sendall(data)
            wire.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has closed already; what it said can still be read
        try:
            while piece := wire.recv(65536):
                received += piece
        except OSError:
            pass
        return received


def metrics(port: int) -> dict[str, float]:
    """`/metrics` as a table from the series, labels included, to its value."""
    _, _, text = call(port, "GET", "/metrics")
    rows = (line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in rows}
