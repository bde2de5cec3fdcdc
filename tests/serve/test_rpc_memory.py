"""Guarantees 24, 25 and 29 over gRPC: what a message may take of memory, with a token and without, packed or not."""

import asyncio
import gzip
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from slim_scheduler.serve.grpc.reading import STREAMS
from tests.serve.conftest import Running, serving

MIB = 1 << 20
TOKEN = "0123456789abcdef0123456789abcdef"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class Memory:
    """The most memory that a process took, above what it had at first, in MiB."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._start = process.memory_info().rss
        self.most = 0.0

    @property
    def now(self) -> float:
        return (self._process.memory_info().rss - self._start) / MIB

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            self.most = max(self.most, self.now)

    def settles_within(self, seconds: float) -> bool:
        """Whether it comes back to within 100 MiB."""
        until = time.monotonic() + seconds
        while self.now > 100 and time.monotonic() < until:
            time.sleep(0.1)
        return self.now <= 100


@contextmanager
def watched(server: Running) -> Iterator[Memory]:
    memory, stop = Memory(psutil.Process(server.process.pid)), threading.Event()
    thread = threading.Thread(target=memory.watch, args=(stop,))
    thread.start()
    try:
        yield memory
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("guarded"), SLIM_TOKEN=TOKEN) as running:
        yield running


def message(mebibytes: int = 60) -> bytes:
    request = pb.ModelInferRequest(model_name="digits")
    request.inputs.add(name="image", datatype="FP32", shape=[1, 1, 8, 8])
    request.raw_input_contents.append(bytes(mebibytes * MIB))
    return request.SerializeToString()


def send(
    server: Running,
    body: bytes,
    count: int,
    channels: int = 1,
    *,
    at_once: int = 1,
    token: str = "",
    packed: bool = False,
) -> Counter[str]:
    """So many ModelInfer calls; how they ended."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    ends: Counter[str] = Counter()

    async def main() -> None:
        options: list[Any] = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        compression = grpc.Compression.Gzip if packed else None
        opened = [grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}", options, compression) for _ in range(channels)]
        turns = iter(range(count))

        async def caller() -> None:
            for turn in turns:
                try:
                    await opened[turn % channels].unary_unary(INFER)(body, metadata=metadata, timeout=300)
                    ends["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    ends[error.code().name] += 1

        await asyncio.gather(*(caller() for _ in range(at_once)))
        for channel in opened:
            await channel.close()

    asyncio.run(main())
    return ends


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=[pytest.mark.accept, pytest.mark.timeout(900)])])
def test_messages_without_a_token_are_not_read(guarded, count):
    with watched(guarded) as memory:
        assert send(guarded, message(), count) == {"UNAUTHENTICATED": count}
    assert memory.most < 100


@pytest.mark.parametrize(
    ("count", "channels"),
    [
        (12, 1),
        (12, 4),
        pytest.param(64, 1, marks=[pytest.mark.accept, pytest.mark.timeout(900)]),
        pytest.param(64, 8, marks=[pytest.mark.accept, pytest.mark.timeout(900)]),
    ],
)
def test_large_messages_at_once_take_a_bounded_part_and_it_comes_back(guarded, count, channels):
    with watched(guarded) as memory:
        assert send(guarded, message(), count, channels, at_once=count, token=TOKEN) == {"INVALID_ARGUMENT": count}
    assert memory.most < 600
    assert memory.settles_within(5 if count == 64 else 30)


def test_messages_that_inflate_to_the_limit_do_so_one_after_the_other(guarded):
    with watched(guarded) as memory:
        assert send(guarded, message(), 8, 4, at_once=8, token=TOKEN, packed=True) == {"INVALID_ARGUMENT": 8}
    assert memory.most < 600
    assert memory.settles_within(30)


def test_a_bomb_is_refused_when_it_passes_the_limit(guarded):
    bomb = gzip.compress(bytes(300 * MIB), 1)
    with watched(guarded) as memory:
        assert send(guarded, bomb, 8, 4, at_once=8, token=TOKEN) == {"INVALID_ARGUMENT": 8}
    assert memory.most < 600


def test_a_message_of_many_small_fields_is_refused_before_it_is_parsed(guarded):
    """A repeated field of two bytes takes protobuf a hundred: 30 MiB of them would be 1.5 GiB."""
    inputs = pb.ModelInferRequest(model_name="digits").SerializeToString() + b"\x2a\x00" * (15 * MIB)
    with watched(guarded) as memory:
        assert send(guarded, inputs, 2, token=TOKEN) == {"INVALID_ARGUMENT": 2}
    assert memory.most < 200


@pytest.mark.timeout(180)
def test_streams_may_send_large_messages_all_at_once_because_they_are_few(guarded):
    async def main() -> Counter[str]:
        options = [("grpc.max_send_message_length", -1)]
        ends: Counter[str] = Counter()
        body = message(60)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{guarded.grpc}", options) as channel:

            async def one() -> None:
                call = channel.stream_stream(STREAM)(metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=120)
                try:
                    await asyncio.sleep(0.5)  # reading has begun
                    await call.write(body)
                    await call.done_writing()
                    answers = [pb.ModelStreamInferResponse.FromString(answer) async for answer in call]
                    assert [bool(answer.error_message) for answer in answers] == [True]
                    ends["answered"] += 1
                except grpc.aio.AioRpcError as error:
                    ends[error.code().name] += 1
                except asyncio.InvalidStateError:  # it was refused while it was written to
                    ends[(await call.code()).name] += 1

            await asyncio.gather(*(one() for _ in range(24)))
        return ends

    with watched(guarded) as memory:
        ends = asyncio.run(main())
    assert ends == {"answered": STREAMS, "UNAVAILABLE": 24 - STREAMS}
    assert memory.most < 800
    assert memory.settles_within(30)
