"""`slim load`: callers where nothing answers, what it says of refusals, and how it ends."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from slim_scheduler.client import load
from slim_scheduler.client.client import Constraints
from slim_scheduler.client.grpc_sender import GrpcSender
from slim_scheduler.client.load import Tally, closed_loop, open_loop, result_of
from slim_scheduler.client.senders import LOST, UNANSWERED, HttpSender, Status, payloads
from slim_scheduler.client.wire import split_address
from slim_scheduler.core.errors import InputError
from tests.serve.conftest import ROOT
from tests.serve.wire import answers, metrics, scripted, stays_silent

SLIM_LOAD = (sys.executable, "-m", "slim_scheduler", "load")


def test_a_caller_whose_connection_is_lost_pauses_before_it_tries_again(monkeypatch):
    monkeypatch.setattr(load, "LOST_PAUSE_S", 0.01)
    tally = Tally()

    async def lost(number: int) -> Status:
        return LOST

    asyncio.run(closed_loop(lost, 2, 0.1, tally))
    assert 0 < len(tally.ended) <= 20
    assert {status for _, _, status in tally.ended} == {LOST}


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_model_that_is_not_there_is_refused_in_one_line(server, scheme):
    url = f"{scheme}://127.0.0.1:{server.http if scheme == 'http' else server.grpc}"
    with pytest.raises(InputError, match=f"{url} refuses: .*model nope does not exist; loaded: digits"):
        load.load(url, rate=5.0, duration=0.2, model="nope", warmup=0.0)


@pytest.mark.parametrize(("scheme", "status"), [("http", "400"), ("grpc", "INVALID_ARGUMENT")])
def test_the_result_says_why_requests_failed(server, scheme, status):
    url = f"{scheme}://127.0.0.1:{server.http if scheme == 'http' else server.grpc}"
    result = load.load(url, rate=50.0, duration=0.2, constraints=Constraints(width=0.3), warmup=0.0)
    assert result.answered == 0
    assert result.errors == result.sent > 0
    assert "0.3" in result.reasons[status]
    assert list(result.reasons) == [status]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_what_is_asked_arrives_as_it_was_meant(server, scheme):
    url = f"{scheme}://127.0.0.1:{server.http if scheme == 'http' else server.grpc}"
    asked = Constraints(deadline_ms=5000.0, anytime=False, width=0.5, priority=1, unmet="refuse")
    result = load.load(url, rate=20.0, duration=0.2, constraints=asked, warmup=0.0)
    assert result.reasons == {}
    assert result.answered == result.sent > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"url": "http://127.0.0.1:99999"}, "is not an address"),
        ({"url": "http://127.0.0.1:abc"}, "is not an address"),
        ({"url": "grpc://127.0.0.1:abc"}, "is not an address; give grpc://HOST:PORT"),
        ({"url": "grpc://127.0.0.1"}, "is not an address; give grpc://HOST:PORT"),
        ({"url": "http://a..b:80"}, "is not an address"),
        ({"url": f"http://{'a' * 64}:80"}, "is not an address"),
        ({"rate": 1e30}, "lower --rate, --duration or --warmup"),
        ({"rate": 1.0, "warmup": 1e30}, "lower --rate, --duration or --warmup"),
        ({"warmup": float("nan")}, "warmup is nan; it must be 0 or more and finite"),
        ({"token": "ü€"}, "beyond printable ASCII"),
        ({"url": "grpc://127.0.0.1:1", "token": "a\nb"}, "beyond printable ASCII"),
        ({"model": "\udcff"}, r"model '\\udcff' is not UTF-8"),
        ({"url": "grpc://127.0.0.1:1", "model": "\udcff"}, r"model '\\udcff' is not UTF-8"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_line(asked, said):
    with pytest.raises(InputError, match=said):
        load.load(**{"url": "http://127.0.0.1:1", "rate": 5.0, "duration": 0.2, **asked})


def test_more_items_than_there_are_numbers_for_are_refused():
    with pytest.raises(InputError, match="lower --items"):
        payloads([1, 8, 8], 10**400, "UINT8", np.random.default_rng(0))


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("localhost", "localhost:80"),
        ("https://a.b", "a.b:443"),
        ("[::1]:8000", "[::1]:8000"),
        ("http://例え.jp", "xn--r8jz45g.jp:80"),
    ],
)
def test_an_address_is_read_as_it_is_meant(url, authority):
    assert split_address(url, ("http", "https")).authority == authority


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_gone_refuses_nothing_and_the_result_says_why(scheme):
    async def gone() -> tuple[Status, dict[Status, str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        if scheme == "http":
            sender = HttpSender("127.0.0.1", port, [b"GET / HTTP/1.1\r\n\r\n"], 1)
        else:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            sender = GrpcSender(channel, [pb.ModelInferRequest(model_name="x")], ())
        try:
            return await sender.send(0), sender.reasons
        finally:
            await sender.close()

    status, reasons = asyncio.run(gone())
    assert status == LOST
    assert reasons[LOST]


async def answers_even_ones(number: int) -> Status:
    if number % 2:
        await asyncio.Event().wait()
    await asyncio.sleep(0.001)
    return 200


async def test_an_open_loop_ends_though_answers_do_not_come(monkeypatch):
    monkeypatch.setattr(load, "UNANSWERED_S", 0.05)
    tally = Tally()
    async with asyncio.timeout(20):
        await open_loop(answers_even_ones, 200.0, 0.1, np.random.default_rng(0), tally)
    result = result_of("url", 200.0, None, 1, 0.1, tally.began, None, tally)
    assert result.sent > 2
    assert result.statuses == {"200": (result.sent + 1) // 2, "unanswered": result.sent // 2}
    assert result.errors == result.sent // 2
    assert all(age > 0 for _, age, _ in tally.ended)
    assert not result.interrupted


async def test_a_closed_loop_ends_though_answers_do_not_come(monkeypatch):
    monkeypatch.setattr(load, "UNANSWERED_S", 0.05)
    tally = Tally()
    async with asyncio.timeout(20):
        await closed_loop(answers_even_ones, 4, 0.1, tally)
    statuses = [status for _, _, status in tally.ended]
    assert statuses.count(UNANSWERED) == 2
    assert statuses.count(200) >= 2


async def test_what_a_caller_raises_ends_a_closed_loop():
    async def fails(number: int) -> Status:
        if number == 1:
            raise ValueError("no number of mine")
        return await answers_even_ones(3)

    with pytest.raises(ValueError, match="no number of mine"):
        async with asyncio.timeout(20):
            await closed_loop(fails, 2, 0.1, Tally())


def test_a_server_that_falls_silent_is_left_and_its_connection_closed(monkeypatch):
    monkeypatch.setattr(load, "UNANSWERED_S", 0.05)
    metadata = json.dumps({"name": "digits", "inputs": [{"shape": [-1, 1, 8, 8]}]}).encode()
    with scripted(answers(metadata), stays_silent) as url:
        result = load.load(url, concurrency=1, duration=0.1, model="digits", warmup=0.0)
    assert (result.sent, result.answered, result.statuses) == (1, 0, {"unanswered": 1})
    assert result.reasons == {"unanswered": "no answer came until the load's end"}


def test_the_time_of_waiting_in_vain_is_not_measured():
    tally = Tally()
    tally.ended = [(1.0, 0.5, 200), (2.0, 68.0, UNANSWERED)]
    whole = result_of("url", 1.0, None, 1, 10.0, 0.0, None, tally)
    assert (whole.duration_s, whole.throughput_items_s, whole.interrupted) == (10.0, 0.1, False)
    stopped = result_of("url", 1.0, None, 1, 10.0, 0.0, None, tally, interrupted_at=4.0)
    assert (stopped.duration_s, stopped.throughput_items_s, stopped.interrupted) == (4.0, 0.25, True)
    before = result_of("url", 1.0, None, 1, 10.0, 5.0, None, tally, interrupted_at=4.0)
    assert (before.sent, before.duration_s, before.throughput_items_s) == (0, 0.0, 0.0)


def test_ctrl_c_ends_a_load_with_what_it_saw(server, tmp_path):
    def served() -> float:
        return sum(value for name, value in metrics(server.http).items() if name.startswith("slim_requests_total"))

    out = tmp_path / "load.json"
    long = ("--url", server.url, "--rate", "100", "--duration", "600", "--warmup", "0", "--out", str(out), "--json")
    before = served()
    with subprocess.Popen([*SLIM_LOAD, *long], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while served() < before + 20:
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            printed, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "interrupted; what was written so far stays" in said
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    assert result["interrupted"]
    assert result["answered"] > 0
    assert result["duration_s"] < 600


def test_more_callers_than_files_may_be_open_are_refused():
    limited = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *SLIM_LOAD)
    asked = ("--url", "http://127.0.0.1:9", "--concurrency", "100")
    done = subprocess.run([*limited, *asked], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "concurrency is 100, and this process may open 128 files, 64 of them for itself" in done.stderr
    assert "give at most 64, or allow more with `ulimit -n 164`" in done.stderr


def test_the_limit_of_open_files_is_raised_as_far_as_a_load_needs():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert load._allowed_connections(400, 4000) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400 + load.SPARE_FILES, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
