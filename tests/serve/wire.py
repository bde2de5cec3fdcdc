"""Bytes on a socket, for what well-behaved clients never send."""

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from slim_scheduler.client.client import infer_body
from slim_scheduler.client.wire import request_head


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


@contextlib.contextmanager
def scripted(*turns: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers its first connection by the first of these, the second by the second; gives its URL."""

    def serve() -> None:
        for turn in turns:
            wire, _ = listener.accept()
            with wire:
                wire.settimeout(20.0)
                turn(wire)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as worker:
        listener.settimeout(20.0)
        served = worker.submit(serve)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        served.result()


def answers(body: bytes = b"{}") -> Callable[[socket.socket], None]:
    """Reads one request without a body, answers it, and closes the connection without having said so."""

    def turn(wire: socket.socket) -> None:
        read_head(wire)
        wire.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    return turn


def stays_silent(wire: socket.socket) -> None:
    """Reads until the client closes the connection, and never answers."""
    with contextlib.suppress(ConnectionError):
        while wire.recv(65536):
            pass


def hangs_up(wire: socket.socket) -> None:
    """Closes the connection once it has read a request."""
    read_head(wire)


def read_head(wire: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        piece = wire.recv(65536)
        assert piece, "the client closed the connection before its request was whole"
        head += piece


def metrics(port: int) -> dict[str, float]:
    """`/metrics` as a table from the series, labels included, to its value."""
    _, _, text = call(port, "GET", "/metrics")
    rows = (line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in rows}


class Wire:
    """One kept connection, for bytes at any time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20.0)
        self._read = self._socket.makefile("rb")
        self.host = f"127.0.0.1:{port}"

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self._read.close()
        self._socket.close()

    def request(self, image: np.ndarray, **fields: str) -> bytes:
        body, length = infer_body(image)
        head = {"inference-header-content-length": str(length)} | fields
        return request_head("POST", "/v2/models/digits/infer", self.host, len(body), head) + body

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def end(self) -> None:
        """Nothing more is sent; answers can still be read."""
        self._socket.shutdown(socket.SHUT_WR)

    def closed(self) -> bool:
        """The server has ended the connection, and nothing came before."""
        return self._read.read() == b""

    def answer(self) -> tuple[int, np.ndarray]:
        """Status and logits of the next answer; no logits for an error."""
        status = 100
        while status == 100:
            status = int(self._read.readline().split()[1])
            fields = {}
            while line := self._read.readline().strip():
                name, _, value = line.partition(b": ")
                fields[name] = value
        body = self._read.read(int(fields[b"content-length"]))
        begin = int(fields.get(b"inference-header-content-length", len(body)))
        return status, np.frombuffer(body[begin:], "<f4")

    def ask(self, image: np.ndarray) -> tuple[int, np.ndarray]:
        self.send(self.request(image))
        return self.answer()

    def silent(self) -> bool:
        """No further answer comes."""
        self._socket.settimeout(0.3)
        try:
            return not self._socket.recv(1)
        except TimeoutError:
            return True
