"""What libraries keep of memory that nobody uses: the C library's allocator, and oneDNN.

glibc gives every thread that finds the others busy an arena of its own, up to eight per core, and an arena keeps its
free pages. A server that takes and frees large buffers on many threads grows by all of them. Where the library is not
glibc, nothing is done. oneDNN compiles a kernel for each shape, the batch size included, and keeps the last 1,024.
"""

import ctypes
import os

M_ARENA_MAX = -8  # malloc.h
ARENAS = 2  # one for the event loop, one for the threads that compute
KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"  # read by oneDNN at its first kernel; a user's own value stands
MOST_KERNELS = 256


def limit_arenas() -> None:
    """To be called before threads start."""
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


def limit_kernels() -> None:
    """To be called before anything is computed."""
    os.environ.setdefault(KERNELS, str(MOST_KERNELS))


def give_back() -> None:
    """Returns free pages to the system; takes milliseconds, so it belongs on a thread."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None
