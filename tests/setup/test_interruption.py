"""A wish to stop waits for a safe place; a second one does not."""

import signal

import pytest

from slim_scheduler.setup.interruption import deferred, sigterm_as_ctrl_c


@pytest.fixture(autouse=True)
def python_handlers():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_waits_until_stopping_is_safe():
    with deferred() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.check()


def test_a_second_ctrl_c_stops_at_once():
    with deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_afterwards_signals_do_what_they_did_before():
    with deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_stops_also_where_sigint_is_ignored(ignored):
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
