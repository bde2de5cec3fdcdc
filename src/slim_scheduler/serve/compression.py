"""gzip and deflate, undone within a limit.

A compressed body is given up as soon as what it inflates to passes the limit, so a small bomb never takes more memory
than an honest large body.
"""

import asyncio
import zlib
from concurrent.futures import Executor

from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote

# Inflating takes about 4 ms per MiB: beyond this it would hold up every other request.
INFLATE_INLINE = 256 * 1024
# zlib: 16 + MAX_WBITS reads gzip, MAX_WBITS a zlib header (HTTP's "deflate"), -MAX_WBITS what some clients send for it.
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def inflate(body: bytes | bytearray, encoding: str, limit: int, threads: Executor | None = None) -> bytes:
    """Undoes one Content-Encoding, where much comes of it in one of `threads` (by default the loop's).

    Raises Refusal for a broken, unknown or too large one.
    """
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise invalid(f"Content-Encoding {quote(encoding)} is not accepted; available: gzip, deflate, identity")
    if len(body) <= INFLATE_INLINE // 8:
        try:
            return inflate_now(body, encoding, min(limit, INFLATE_INLINE))
        except Refusal as refusal:
            if refusal.kind is not Kind.TOO_LARGE or limit <= INFLATE_INLINE:
                raise
    return await asyncio.get_running_loop().run_in_executor(threads, inflate_now, body, encoding, limit)


def inflate_now(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """The same, at once. Memory stays within `limit` and a little."""
    if encoding == "deflate":
        # A zlib header is 0x78 and a checksum over two bytes; without one the data is bare deflate.
        zlibbed = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        stream = zlib.decompressobj(_ZLIB if zlibbed else _RAW)
    else:
        stream = zlib.decompressobj(_GZIP)
    try:
        out = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(f"the body is not valid {encoding}: {error}") from None
    if len(out) > limit:
        raise too_large(len(out), limit, at_least=True)
    if not stream.eof:
        raise invalid(f"the {encoding} body ends too early")
    if stream.unused_data:
        raise invalid(f"the {encoding} body has {len(stream.unused_data)} bytes after its end")
    return out


def too_large(size: int, limit: int, at_least: bool = False) -> Refusal:
    """The refusal for a body over the limit."""
    return Refusal(
        Kind.TOO_LARGE,
        f"the body has {'at least ' if at_least else ''}{size} bytes; at most {limit} are accepted, split the request",
    )
