"""The execution threads of one server: batches on `concurrency` threads, loads and unloads on one more.

The event loop hands jobs in and gets each back, finished, by a call on the loop. Threads share nothing with the loop
but the job. Errors become part of the job: an execution thread never dies. A batch that takes less than being handed to
a thread and back may run on the loop itself (`Brief`).

After the loss of its device the executor is silent, as a machine that is gone is: its server is missed, and its work
runs elsewhere.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from slim_scheduler.core.errors import DeviceLostError, OutOfMemoryError
from slim_scheduler.core.messages import LoadInstance
from slim_scheduler.core.server.window import BatchTime
from slim_scheduler.core.types import Batch, InstanceId, Seconds, ServerName, Task
from slim_scheduler.engine.devices.base import Device, Rows
from slim_scheduler.engine.work_thread import WorkThread
from slim_scheduler.model.calibration import margins_of
from slim_scheduler.model.protocol import SegmentSlice

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchJob:
    """`tasks` are those of the batch whose answer somebody waits for; row i of `output` is tasks[i]'s.

    `seconds` is what the device took, with the slowdown, and `busy` what the calling thread worked for it, without
    waiting for a core or the interpreter; `to_host` brings the output into host memory, where the rows that are
    `not_finite` are found. `with_margins`: the rows are logits, and their `margins` are wanted.
    """

    batch: Batch
    tasks: list[Task]
    rows: Rows
    to_host: bool
    with_margins: bool = False
    output: Tensor | None = None
    not_finite: Sequence[int] = ()
    margins: Sequence[float] = ()
    seconds: Seconds = 0.0
    busy: Seconds = 0.0
    error: Exception | None = None

    @property
    def out_of_memory(self) -> bool:
        return isinstance(self.error, OutOfMemoryError)


BRIEF: Seconds = 0.003  # beside a busy loop, a thread's batch of 1 ms takes 5 to 30, and 2 to 5 ms of work
GROWTH = 1.25  # of what is expected, at most, after a batch that took longer: one that was disturbed decides nothing
TURN: Seconds = 0.002  # of one server's batches, after which the loop goes round; the last may end up to BRIEF later
STOPPING: Seconds = 5.0  # that a running job has when the executor stops; one that takes longer may never end
MOST_LATE: Seconds = 0.005  # of a timer, that the next batch makes up for


class Brief:
    """Which batches may run on the event loop: those whose like, of late, was work of less than `BRIEF`.

    Work, not time: a thread that waits for the interpreter takes long for little. Its work grows too, so who is handed
    to a thread by mistake may stay there: `BRIEF` is well above what such batches need, and what is expected falls at
    once but rises slowly.
    """

    def __init__(self) -> None:
        self._expected: dict[tuple[int, float | None, float, int], Seconds] = {}
        self._spent: Seconds = 0.0

    def expects(self, batch: Batch) -> bool:
        return self._expected.get(_kind(batch, len(batch.tasks)), BRIEF) < BRIEF

    def ran(self, job: BatchJob) -> None:
        if job.tasks:
            kind = _kind(job.batch, len(job.tasks))
            slower = GROWTH * self._expected.get(kind, job.busy)
            self._expected[kind] = BRIEF if job.error is not None else min(job.busy, slower)

    def turn_is_over(self, seconds: Seconds) -> bool:
        """Whether it is time to let the loop go round, after so many more seconds of batches."""
        self._spent += seconds
        if self._spent < TURN:
            return False
        self._spent = 0.0
        return True


def slowed_work(job: BatchJob, device: Device) -> Seconds:
    """What a slow server takes longer for: on a CPU the thread's work, not what the thread waited for a core."""
    return min(job.busy, job.seconds) if device.name == "cpu" else job.seconds


def _kind(batch: Batch, size: int) -> tuple[int, float | None, float, int]:
    """Batches of one kernel and about one size: a small one says little of a large one, its fixed cost is the same."""
    return batch.segment, batch.previous_width, batch.width, (size - 1).bit_length()


@dataclass(slots=True)
class LoadJob:
    load: LoadInstance
    seconds: Seconds = 0.0
    error: Exception | None = None


@dataclass(slots=True)
class UnloadJob:
    instance: InstanceId
    error: Exception | None = None


Job = BatchJob | LoadJob | UnloadJob


class Executor:
    """Runs one server's jobs. `finished(name, job)` is called on the event loop, once per job.

    With `on_loop`, brief batches run on the loop, inside `submit`, and `finished` may be called before it returns. A
    batch takes `slowdown` times its work; or, where `batch_time` is given, as long as that says of it, if its work is
    done by then.
    """

    def __init__(
        self,
        name: ServerName,
        device: Device,
        concurrency: int,
        slowdown: float,
        finished: Callable[[ServerName, Job], None],
        on_loop: bool = False,
        batch_time: BatchTime | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self._concurrency = concurrency
        self._slowdown = slowdown
        self._batch_time = batch_time
        self._finished = finished
        self._batches: SimpleQueue[Job | None] = SimpleQueue()
        self._moves: SimpleQueue[Job | None] = SimpleQueue()
        self._instances: dict[InstanceId, SegmentSlice] = {}
        self._threads: list[WorkThread] = []
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._logged: set[type[Exception]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._brief = Brief() if on_loop and concurrency == 1 else None
        self._slowed: tuple[BatchJob, asyncio.TimerHandle, Seconds] | None = None  # and when it began to wait
        self._owed: Seconds = 0.0  # of waiting; negative where timers were late

    @property
    def lost(self) -> bool:
        """Whether the device is lost for this process."""
        return self._lost.is_set()

    @property
    def instances(self) -> int:
        return len(self._instances)

    def start(self) -> None:
        """Starts the threads; they report to the running event loop."""
        self._loop = asyncio.get_running_loop()
        queues = [self._batches] * self._concurrency + [self._moves]
        for i, queue in enumerate(queues):
            self._threads.append(WorkThread(f"slim-{self.name}-{i}", partial(self._serve, queue)))

    def submit(self, job: Job) -> None:
        if not isinstance(job, BatchJob):
            self._moves.put(job)
        elif self._brief is not None and self._brief.expects(job.batch) and not self._stopping.is_set():
            self._run_here(job, self._brief)
        else:
            self._batches.put(job)
            time.sleep(0)  # lets go of the interpreter; else the thread waits until the loop has nothing to do

    def _run_here(self, job: BatchJob, brief: Brief) -> None:
        assert self._loop is not None
        with self.device.thread():
            self._do(job)
        brief.ran(job)
        over = brief.turn_is_over(job.seconds)
        self._owed += self._slow(job)
        if self._owed > 0.0:
            self._slowed = job, self._loop.call_later(self._owed, self._end_slow), time.perf_counter()
        elif over:
            self._loop.call_soon(self._finished, self.name, job)
        else:
            self._finished(self.name, job)

    def _end_slow(self) -> None:
        if self._slowed is not None:
            job, timer, began = self._slowed
            timer.cancel()
            self._slowed = None
            self._owed = max(-MOST_LATE, self._owed - (time.perf_counter() - began))
            self._finished(self.name, job)

    def _slow(self, job: BatchJob) -> Seconds:
        """For how long a server that is to be slower than its device stays busy without using the CPU."""
        if self._batch_time is None:
            rest = max(0.0, self._slowdown - 1.0) * slowed_work(job, self.device)
        elif job.tasks and job.error is None:
            batch = job.batch
            whole = self._batch_time(batch.segment, batch.previous_width, batch.width, len(job.tasks))
            rest = max(0.0, whole - job.seconds)
        else:
            rest = 0.0
        job.seconds += rest
        return rest

    async def stop(self) -> None:
        """Lets running jobs end, drops waiting ones, frees every instance.

        A job that has not ended after `STOPPING` is left to its thread, and so is what the device holds.
        """
        self._stopping.set()
        self._end_slow()
        for _ in range(self._concurrency):
            self._batches.put(None)
        self._moves.put(None)
        until = time.monotonic() + STOPPING
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        if left:
            log.warning("%s: %s did not end within %g s and is left", self.name, ", ".join(left), STOPPING)
            return
        self._instances.clear()
        self.device.close()

    def _serve(self, queue: "SimpleQueue[Job | None]") -> None:
        try:
            with self.device.thread():
                self._jobs(queue, None)
        except Exception as error:  # the device refuses this thread: its jobs fail, and the scheduler hears of it
            self._jobs(queue, error.with_traceback(None))

    def _jobs(self, queue: "SimpleQueue[Job | None]", refusal: Exception | None) -> None:
        while (job := queue.get()) is not None:
            if not self._stopping.is_set():
                if refusal is None:
                    self._do(job)
                    if isinstance(job, BatchJob):
                        if self._brief is not None:
                            self._brief.ran(job)
                        if rest := self._slow(job):
                            self._stopping.wait(rest)
                else:
                    job.error = refusal
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    assert self._loop is not None
                    if not self.lost:
                        self._loop.call_soon_threadsafe(self._finished, self.name, job)
            del job  # an idle thread must not keep a batch's tensors alive

    def _do(self, job: Job) -> None:
        try:
            match job:
                case BatchJob():
                    self._run(job)
                case LoadJob():
                    begin = time.perf_counter()
                    self._instances[job.load.instance] = self.device.load(job.load.segment, job.load.width)
                    job.seconds = time.perf_counter() - begin
                case UnloadJob():
                    self.device.unload(self._instances.pop(job.instance))
        except Exception as error:
            if isinstance(error, DeviceLostError):
                self._lost.set()
            self._log(error)
            job.error = error.with_traceback(None)  # a traceback would keep the batch's tensors alive

    def _log(self, error: Exception) -> None:
        """Where it was raised, of the first of its kind: what answers say is one line."""
        kind = type(error)
        if kind not in self._logged and kind is not OutOfMemoryError:
            self._logged.add(kind)
            log.warning("%s: %s", self.name, error, exc_info=error)

    def _run(self, job: BatchJob) -> None:
        begin, worked = time.perf_counter(), time.thread_time()
        if job.tasks:
            output = self.device.run(self._instances[job.batch.instance], job.rows, job.batch.previous_width)
            job.output = self.device.to_host(output) if job.to_host else output
            if job.to_host:
                job.not_finite = _not_finite(job.output)
            if job.with_margins:
                job.margins = margins_of(job.output).tolist()
        job.rows = ()
        job.busy = time.thread_time() - worked
        job.seconds = time.perf_counter() - begin


def _not_finite(output: Tensor) -> Sequence[int]:
    """Rows with a value that is NaN or infinite. One such value shows in the sum of all, which is cheaper."""
    if math.isfinite(output.sum()):
        return ()
    good = output.isfinite().flatten(1).all(1)  # (rows,)
    return [row for row, is_good in enumerate(good.tolist()) if not is_good]
