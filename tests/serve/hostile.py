"""Malformed infer requests from a seed: valid ones, bent in the ways that break parsers.

Used against the parser in process and against a real server, and as a fuzz target:
`python -m tests.serve.hostile [SEED] [COUNT]`.
"""

import copy
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slim_scheduler.serve.compression import inflate_now
from slim_scheduler.serve.decode import InferenceCall, decode_infer
from slim_scheduler.serve.limits import Limits
from slim_scheduler.serve.metadata import ModelCard
from slim_scheduler.serve.refusal import Refusal

CARD = ModelCard("digits", (1, 8, 8), "NCHW", 10, 4, (0.25, 0.5, 0.75, 1.0))
LIMITS = Limits(body_bytes=1 << 18)
BOMBS = (gzip.compress(bytes(1 << 20), 9), zlib.compress(bytes(1 << 20), 9))
WRONG = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, float("nan"), float("inf"), -0.0, "", "x", "nan", "\x00",
    "\ud800", "../../etc/passwd", "http://x/", [], [[]], [1], {}, {"x": {"y": []}}, [None] * 5, "9" * 400,
)  # fmt: skip
LENGTHS = (b"-1", b"0", b"1", b"", b"x", b"1e3", b"18446744073709551616", b"9" * 40, b"+5", b" 7", b"0x10", b"\xff")


class Malformed(NamedTuple):
    """A request's body, its Inference-Header-Content-Length as sent (None: none), and its Content-Encoding."""

    body: bytes
    length: bytes | None
    encoding: str | None


def malformed(seed: int, count: int) -> Iterator[Malformed]:
    """Requests that are wrong in one to three ways (a few happen to be right again)."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        document = valid(rng)
        data = rng.standard_normal(64, dtype=np.float32).tobytes()
        for _ in range(int(rng.integers(0, 3))):
            bend(document, rng)
        head = json.dumps(document).encode()
        length: bytes | None = b"%d" % len(head)
        body = head + data
        match int(rng.integers(0, 9)):
            case 0:  # cut short, anywhere
                body = body[: int(rng.integers(0, len(body)))]
            case 1:  # bytes changed, in the JSON more often than not
                broken = bytearray(body)
                for _ in range(int(rng.integers(1, 8))):
                    broken[int(rng.integers(0, len(head) + 8))] = int(rng.integers(0, 256))
                body = bytes(broken)
            case 2:
                length = LENGTHS[int(rng.integers(0, len(LENGTHS)))]
            case 3:
                length = None
            case 4:
                body += bytes(int(rng.integers(1, 300)))
            case 5:
                body = rng.bytes(int(rng.integers(0, 2000)))
            case 6:
                body = b'{"inputs":' + b"[" * int(rng.integers(1, 2000)) + body
            case 7:
                body = pack(body, rng)
                encoding = ("gzip", "deflate", "br", "gzip, gzip")[int(rng.integers(0, 4))]
                yield Malformed(body, length, encoding)
                continue
            case _:
                pass
        yield Malformed(body, length, None)


def valid(rng: np.random.Generator) -> dict[str, object]:
    document: dict[str, object] = {
        "id": "1",
        "inputs": [
            {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "parameters": {"binary_data_size": 256}}
        ],
        "outputs": [{"name": "logits", "parameters": {"binary_data": True, "classification": 0}}],
        "parameters": {"priority": 0, "timeout": 10**7, "deadline_ms": 10**4, "accuracy_floor": 0.1, "width": 0.5},
    }
    if rng.random() < 0.3:
        document["inputs"] = [
            {"name": "image", "shape": [1, 1, 8, 8], "datatype": "UINT8", "data": rng.integers(0, 256, 64).tolist()}
        ]
    return document


def bend(node: object, rng: np.random.Generator) -> None:
    """Replaces, removes or doubles something somewhere in a document."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not keys:
            return
        key = keys[int(rng.integers(0, len(keys)))]
        child = node[key]  # type: ignore[index]
        if isinstance(child, dict | list) and child and rng.random() < 0.75:
            node = child
            continue
        match int(rng.integers(0, 4)):
            case 0 if isinstance(node, dict):
                del node[key]
            case 1 if isinstance(node, list):
                node.extend(node * int(rng.integers(1, 20)))
            case 2 if isinstance(node, dict):
                node[str(rng.integers(0, 9)) * int(rng.integers(1, 50))] = wrong(rng)
            case _:
                node[key] = wrong(rng)
        return


def wrong(rng: np.random.Generator) -> object:
    return copy.deepcopy(WRONG[int(rng.integers(0, len(WRONG)))])  # it may be bent itself


def pack(body: bytes, rng: np.random.Generator) -> bytes:
    """Compressed: honest, a bomb, or broken."""
    match int(rng.integers(0, 4)):
        case 0:
            return BOMBS[0]
        case 1:
            return BOMBS[1]
        case 2:
            return gzip.compress(body, 1)[: int(rng.integers(0, 200))]
        case _:
            return gzip.compress(body, 1) + body[:9]


def parse(request: Malformed) -> InferenceCall | None:
    """What the front end does with a body. None where it is refused; anything else that is raised is a defect."""
    try:
        body = request.body
        if request.encoding in ("gzip", "deflate"):
            body = inflate_now(body, request.encoding, LIMITS.body_bytes)
        length = None if request.length is None or not request.length.isdigit() else int(request.length[:18])
        return decode_infer(body, length, CARD, LIMITS)
    except Refusal as refusal:
        refused = refusal
    assert 400 <= refused.kind < 500, refused.message
    assert refused.message.isprintable(), repr(refused.message)
    return None


def fuzz_one(data: bytes) -> None:
    """For coverage-guided fuzzers: the first two bytes say where the JSON ends."""
    parse(Malformed(data[2:], b"%d" % int.from_bytes(data[:2], "little"), None))


if __name__ == "__main__":
    seed, count = (int(word) for word in [*sys.argv[1:], "0", "50000"][:2])
    refused = sum(parse(request) is None for request in malformed(seed, count))
    print(f"{count} requests, {refused} refused, {count - refused} understood")
