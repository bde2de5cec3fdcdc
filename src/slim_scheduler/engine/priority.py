"""A process's place among the others on a busy machine. `slim demo` asks for the first one."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def real_time() -> Iterator[bool]:
    """Within it, this thread and those it starts go before every ordinary process; yields whether that is allowed.

    For what needs a small part of the machine's cores, at exact times. Linux lets root do so, and users with a limit
    `rtprio`.
    """
    if sys.platform != "linux":
        yield False
        return
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, before, parameters)
