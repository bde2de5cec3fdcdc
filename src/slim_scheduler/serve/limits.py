"""How much of anything a client may send; checked before memory is taken for it."""

import msgspec

MIB = 1024 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request, one connection and the whole server.

    Body sizes count after decompression. `json_bytes` bounds the JSON part, so that text is shorter than binary data:
    a number of two bytes takes 44 while it is parsed. `header_bytes` bounds a head, and what a message or the JSON has
    beside its tensors' data. `held_bytes` bounds all bodies in memory together, and the numbers being parsed.
    `fields` bounds the fields of a gRPC message, each of which takes microseconds on the event loop.
    """

    body_bytes: int = 64 * MIB
    json_bytes: int = 16 * MIB
    held_bytes: int = 512 * MIB
    header_bytes: int = 64 * 1024
    fields: int = 4096
    tensors: int = 16
    rank: int = 8
    elements: int = 16 * MIB
    items: int = 4096
    connections: int = 4096
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 30.0
