"""A wish to stop waits for a safe place; a second one does not."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from slim_scheduler.setup.interruption import SIGNALS, Interruption, deferred, sigterm_as_ctrl_c, starting_processes

TOLD_TO_STOP = """
import signal, sys
from slim_scheduler.setup.interruption import Interruption, let_sigterm_through

print("started", flush=True)
sys.stdin.readline()  # the signal has been sent
interruption = Interruption()
interruption.watch()
let_sigterm_through()
print(interruption.got)
"""


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


def test_who_is_told_twice_ends_where_it_is_safe_all_the_same_and_the_third_stops_at_once():
    interruption = Interruption()
    interruption.watch(signals=2)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert interruption.wanted
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_afterwards_signals_do_what_they_did_before():
    with deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_processes_start_a_signal_waits_and_does_not_reach_them(number):
    says_what_is_blocked = f"import signal; print({number:d} in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    ended = threading.Event()
    threading.Thread(target=ended.wait).start()  # which takes the signal that this one blocks
    said = []

    def start():
        with sigterm_as_ctrl_c(), starting_processes():
            os.kill(os.getpid(), number)
            ended.wait(0.05)
            said.append(subprocess.check_output([sys.executable, "-c", says_what_is_blocked], text=True).strip())

    with pytest.raises(KeyboardInterrupt):
        start()
    ended.set()
    assert said == ["True"]
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_is_told_to_stop_while_it_starts_stops_where_it_is_safe():
    with starting_processes():
        command = [sys.executable, "-c", TOLD_TO_STOP]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.terminate()
    said, _ = process.communicate("\n")
    assert (process.returncode, said) == (0, f"{signal.SIGTERM:d}\n")


def test_who_defers_ctrl_c_is_told_of_one_that_came_while_processes_started():
    with deferred() as interruption:
        with starting_processes():
            signal.raise_signal(signal.SIGTERM)
        assert interruption.wanted


def test_a_second_one_while_processes_start_stops_whoever_defers():
    def start():
        with sigterm_as_ctrl_c(), deferred(), starting_processes():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        start()


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_stops_also_where_sigint_is_ignored(ignored):
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
