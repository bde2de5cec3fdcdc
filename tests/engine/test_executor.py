"""Execution threads: own thread settings, waits that use no CPU, and errors that never kill a thread."""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from slim_scheduler.core.messages import LoadInstance
from slim_scheduler.core.server.window import BatchTime
from slim_scheduler.core.types import Batch, Task
from slim_scheduler.engine import executor
from slim_scheduler.engine.devices.cpu import CpuDevice
from slim_scheduler.engine.executor import BRIEF, BatchJob, Brief, Executor, Job, LoadJob, UnloadJob
from slim_scheduler.engine.work_thread import still_running

from .live import NETWORK, SHAPE, images

AMPLE = 1 << 30


def batch_job(items: torch.Tensor, instance: int = 1) -> BatchJob:
    tasks = [Task(i, i, 0, None, None, 0.0, None, 0) for i in range(len(items))]
    batch = Batch(1, instance, 0, 1.0, 1.0, None, tuple(tasks), 0.0)
    return BatchJob(batch, tasks, [(items, row) for row in range(len(items))], to_host=False)


class Desk:
    """An executor whose jobs can be awaited."""

    def __init__(
        self,
        concurrency: int = 1,
        slowdown: float = 1.0,
        on_loop: bool = False,
        batch_time: BatchTime | None = None,
    ) -> None:
        device = CpuDevice(NETWORK, SHAPE, 1, AMPLE)
        self.executor = Executor("a", device, concurrency, slowdown, self._finished, on_loop, batch_time)
        self._waiting: dict[int, asyncio.Future[Job]] = {}

    async def __aenter__(self) -> "Desk":
        self.executor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.executor.stop()

    def submit(self, job: Job) -> "asyncio.Future[Job]":
        future = self._waiting[id(job)] = asyncio.get_running_loop().create_future()
        self.executor.submit(job)
        return future

    def _finished(self, name: str, job: Job) -> None:
        self._waiting.pop(id(job)).set_result(job)


def test_cpu_threads_are_set_per_execution_thread():
    seen: dict[int, int] = {}
    together = threading.Barrier(2, timeout=20)

    def work(threads: int) -> None:
        with CpuDevice(NETWORK, SHAPE, threads, AMPLE).thread():
            together.wait()
            seen[threads] = torch.get_num_threads()
            together.wait()

    before = torch.get_num_threads()
    workers = [threading.Thread(target=work, args=(threads,)) for threads in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == {1: 1, 2: 2}
    assert torch.get_num_threads() == before


class WaitingDevice(CpuDevice):
    """Its thread waits in every batch, as one does that gets no core."""

    WAIT = 0.2

    def run(self, *arguments):
        threading.Event().wait(self.WAIT)
        return super().run(*arguments)


async def test_what_a_slow_server_waited_for_a_core_is_not_multiplied():
    factor = 50.0
    async with Desk(slowdown=factor) as desk:
        desk.executor.device = WaitingDevice(NETWORK, SHAPE, 1, AMPLE)
        await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        job = await desk.submit(batch_job(torch.from_numpy(images(1))))
    assert isinstance(job, BatchJob)
    assert WaitingDevice.WAIT <= job.seconds < factor * WaitingDevice.WAIT / 2


async def test_a_slow_server_takes_its_time_without_using_the_cpu():
    factor = 20.0
    items = torch.from_numpy(images(32))
    async with Desk(slowdown=factor) as desk:
        await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        cpu = time.process_time()
        begin = time.perf_counter()
        job = await desk.submit(batch_job(items))
        waited, cpu = time.perf_counter() - begin, time.process_time() - cpu
    assert job.seconds <= waited
    assert cpu < waited / 2


async def brief_job(desk: Desk) -> BatchJob:
    """A job that the executor expects to be brief; on a busy machine one before it may not have been."""
    items = torch.from_numpy(images(4))
    while not desk.executor._brief.expects(batch_job(items).batch):
        await desk.submit(batch_job(items))
    return batch_job(items)


async def test_a_slow_server_with_brief_batches_leaves_the_loop_to_others():
    slowdown = 200.0  # a wait of much more than a late timer earlier can have made up for
    async with Desk(slowdown=slowdown, on_loop=True) as desk:
        await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        job = await brief_job(desk)
        threads = threading.active_count()
        running = desk.submit(job)
        assert job.output is not None, "computed on the loop"
        assert not running.done()
        others = 0
        while not running.done():
            others += 1
            await asyncio.sleep(0)
        assert others > 1
        assert job.seconds > (slowdown - 1.0) * job.busy > 0.0
        assert threading.active_count() == threads
        last = desk.submit(await brief_job(desk))
        assert not last.done()
    assert last.done(), "a running job ends when the executor stops"


@pytest.mark.parametrize("on_loop", [False, True])
async def test_a_server_that_keeps_to_its_profile_takes_as_long_as_that_says(on_loop):
    asked = []

    def batch_time(*of: object) -> float:
        asked.append(of)
        return 0.5 if len(asked) > 1 else 1e-9

    # A million times the work would be minutes.
    async with asyncio.timeout(30), Desk(slowdown=1e6, on_loop=on_loop, batch_time=batch_time) as desk:
        await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        longer = await desk.submit(batch_job(torch.from_numpy(images(3))))
        assert 1e-9 < longer.busy <= longer.seconds, "work that is not done by then takes what it takes"
        begin = time.perf_counter()
        kept = await desk.submit(batch_job(torch.from_numpy(images(4))))
        waited = time.perf_counter() - begin
        assert max(0.5, kept.busy) <= kept.seconds < 10.0
        assert waited > 0.5 - 0.001  # timers count in steps of the clock
        failed = await desk.submit(batch_job(torch.zeros(1, 5, 8, 8)))
        assert isinstance(failed.error, RuntimeError)
    assert asked == [(0, None, 1.0, 3), (0, None, 1.0, 4)]


async def test_an_error_becomes_part_of_the_job_and_the_thread_goes_on():
    async with Desk() as desk:
        missing = await desk.submit(batch_job(torch.zeros(1, *SHAPE.item_shape), instance=9))
        assert isinstance(missing.error, KeyError)
        assert not missing.out_of_memory
        await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        wrong = await desk.submit(batch_job(torch.zeros(1, 5, 8, 8)))
        assert isinstance(wrong.error, RuntimeError)
        right = await desk.submit(batch_job(torch.zeros(1, *SHAPE.item_shape)))
        assert right.error is None
        assert right.output.shape == (1, *NETWORK.activation_shape(0, 1.0))


async def test_a_device_that_refuses_its_threads_fails_the_jobs_instead_of_hanging():
    class Refuses(CpuDevice):
        @contextmanager
        def thread(self):
            raise RuntimeError("no such device any more")
            yield

    desk = Desk()
    desk.executor.device = Refuses(NETWORK, SHAPE, 1, AMPLE)
    async with desk:
        loaded = await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        ran = await desk.submit(batch_job(torch.zeros(1, *SHAPE.item_shape)))
    assert {str(job.error) for job in (loaded, ran)} == {"no such device any more"}


async def test_a_batch_nobody_waits_for_costs_nothing():
    async with Desk() as desk:
        empty = batch_job(torch.zeros(1, *SHAPE.item_shape))
        empty.tasks, empty.rows = [], []
        job = await desk.submit(empty)
        assert job.error is None
        assert job.output is None


async def test_as_many_batches_at_once_as_configured():
    both_inside = threading.Barrier(2, timeout=20)

    class Meeting(CpuDevice):
        def run(self, instance, rows, previous_width):
            both_inside.wait()  # passes only if two threads are in here
            return super().run(instance, rows, previous_width)

    desk = Desk(concurrency=2)
    desk.executor.device = Meeting(NETWORK, SHAPE, 1, AMPLE)
    async with desk:
        await asyncio.gather(*[desk.submit(LoadJob(LoadInstance(i, 0, 1.0, 0))) for i in (1, 2)])
        x = torch.zeros(1, *SHAPE.item_shape)
        jobs = await asyncio.gather(*[desk.submit(batch_job(x, instance=i)) for i in (1, 2)])
    assert [job.error for job in jobs] == [None, None]


async def test_loads_do_not_wait_for_a_running_batch():
    loaded = threading.Event()

    class LongBatch(CpuDevice):
        def run(self, instance, rows, previous_width):
            assert loaded.wait(20), "the second instance should have been loaded meanwhile"
            return super().run(instance, rows, previous_width)

    desk = Desk()
    desk.executor.device = LongBatch(NETWORK, SHAPE, 1, AMPLE)
    async with desk:
        await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
        batch = desk.submit(batch_job(torch.zeros(1, *SHAPE.item_shape)))
        await desk.submit(LoadJob(LoadInstance(2, 1, 0.5, 0)))
        loaded.set()
        assert (await batch).error is None
        assert (await desk.submit(UnloadJob(2))).error is None
        assert desk.executor.instances == 1


async def test_a_batch_that_does_not_end_is_left_with_what_it_uses(monkeypatch, caplog):
    monkeypatch.setattr(executor, "STOPPING", 0.1)
    inside, go_on = threading.Event(), threading.Event()

    class Hangs(CpuDevice):
        closed = False

        def run(self, instance, rows, previous_width):
            inside.set()
            go_on.wait(60)
            return super().run(instance, rows, previous_width)

        def close(self):
            self.closed = True

    desk = Desk()
    desk.executor.device = device = Hangs(NETWORK, SHAPE, 1, AMPLE)
    desk.executor.start()
    await desk.submit(LoadJob(LoadInstance(1, 0, 1.0, 0)))
    ran = desk.submit(batch_job(torch.zeros(1, *SHAPE.item_shape)))
    await asyncio.to_thread(inside.wait, 20)
    await desk.executor.stop()
    assert not ran.done()
    assert not device.closed
    assert caplog.messages == ["a: slim-a-0 did not end within 0.1 s and is left"]
    assert "slim-a-0" in still_running()
    go_on.set()
    assert (await ran).error is None, "its instance is there"


def test_a_batch_is_brief_where_its_like_was_brief():
    brief = Brief()
    one, some, many, full = (batch_job(images(size)) for size in (1, 17, 20, 32))
    assert not brief.expects(many.batch), "nothing is known"
    one.busy = 0.6 * BRIEF
    brief.ran(one)
    assert brief.expects(one.batch)
    assert not brief.expects(many.batch), "a small one says nothing of a large one"
    many.busy = 0.9 * BRIEF
    brief.ran(many)
    brief.ran(one)
    assert brief.expects(some.batch)
    assert brief.expects(full.batch)
    many.busy = 10 * BRIEF
    brief.ran(many)
    assert not brief.expects(full.batch), "9/10 of the limit, and longer since"
    for expected, disturbed in ((0.3, 5), (0.9, 1)):
        many.busy = expected * BRIEF
        brief.ran(many)
        many.busy = 10 * BRIEF
        for _ in range(disturbed):
            assert brief.expects(full.batch)
            brief.ran(many)
    assert not brief.expects(full.batch)
    many.busy = 0.9 * BRIEF
    brief.ran(many)
    assert brief.expects(full.batch), "what is expected falls at once"
    many.error = RuntimeError("out of order")
    brief.ran(many)
    assert brief.expects(one.batch)
    assert not brief.expects(full.batch)
