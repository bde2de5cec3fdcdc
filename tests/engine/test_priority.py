"""The demo's threads go before those of ordinary processes where that is allowed, and only for as long as it runs."""

import os
import threading

from slim_scheduler.engine.priority import real_time


def policies() -> list[int]:
    """This thread's scheduling policy and that of one which it starts."""
    found = [os.sched_getscheduler(0)]
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found


def test_threads_are_in_the_real_time_class_where_that_is_allowed_and_come_back_from_it() -> None:
    with real_time() as allowed:
        inside = policies()
    assert inside == ([os.SCHED_RR, os.SCHED_RR] if allowed else [os.SCHED_OTHER, os.SCHED_OTHER])
    assert policies() == [os.SCHED_OTHER, os.SCHED_OTHER]


def test_who_may_not_goes_on_as_before(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with real_time() as allowed:
        assert not allowed
