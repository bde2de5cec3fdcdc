"""One session of a server in its actor: the real scheduler and device, and what goes in and out.

The counterpart of `engine/local/fleet.py` for one server: it delivers events to the `ServerScheduler` and performs its
commands on this machine; what is for the dispatcher waits until the router asks. It decides nothing. A server that
starts again is a new session with the next incarnation.
"""

import asyncio
import contextlib
import os
import time
import warnings
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from slim_scheduler.core.messages import (
    BatchReported,
    BlockArrived,
    CancelTasks,
    LoadInstance,
    ServerEvent,
    ServerReported,
    StartBatch,
    TasksReturned,
    TimerFired,
    UnloadInstance,
    WakeAt,
)
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Block, Seconds, ServerName, Task, TaskId
from slim_scheduler.engine.clock import Timers
from slim_scheduler.engine.cluster.activation_store import ServerActivations
from slim_scheduler.engine.cluster.clock import SharedClock
from slim_scheduler.engine.cluster.wire import (
    BlockMessage,
    Poll,
    PollReply,
    ServerStep,
    TaskOutputs,
    cut,
    join,
    pieces_of,
)
from slim_scheduler.engine.executor import Job
from slim_scheduler.engine.local.server import LiveServer

FETCHERS = 64  # threads, made when they are needed: as many blocks of one task as a server has credit for
FETCH_TIMEOUT: Seconds = 1.0  # for another server's outputs; below the dispatcher's loss grace of 2 s

# Arrays that Ray hands out lie in its shared memory, read-only. So are rows here: segments never write to their input.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

Wanted = tuple[Task, TaskId]  # and the task whose output it continues

DEVICE_LOST = 3  # exit status of a server whose device is lost
NOTHING = ((), ())  # in place of whose outputs were found, and their shape

CARRIED = (BatchReported, TasksReturned, ServerReported)


class ServerSession:
    """`log`: every step goes to the router for its record, otherwise only what the dispatcher must hear.

    `peers` are the other servers' actors by name, for what must be fetched from them.
    """

    def __init__(
        self,
        server: LiveServer,
        shape: ModelShape,
        activations: ServerActivations,
        clock: SharedClock,
        peers: dict[ServerName, Any],
        period: Seconds,
        log: bool,
    ) -> None:
        self._server = server
        self._shape = shape
        self._activations = activations
        self._clock = clock
        self._peers = peers
        self._period = period
        self._log = log
        self._timers = Timers(clock, lambda _: self._take(TimerFired()))
        self._events: deque[ServerEvent] = deque()
        self._delivering = False
        self._fetching: set[asyncio.Task[None]] = set()
        # Of their own: those that wait for a silent server must keep nobody waiting but each other.
        self._fetchers = ThreadPoolExecutor(FETCHERS, "slim-fetch")
        self._steps: list[ServerStep] = []
        self._replies = 0
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._broken: BaseException | None = None
        self._sampler: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._server.executor.start()
        self._sample(asyncio.get_running_loop().time())

    async def stop(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
        self._timers.stop()
        for fetching in self._fetching:
            fetching.cancel()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        await self._server.executor.stop()

    # ---- from the router

    def receive(self, message: BlockMessage, items: npt.NDArray[np.float32] | None) -> None:
        """A block came. It reaches the scheduler when its inputs are here; tasks whose inputs are lost go back."""
        block = message.block
        asked = [
            (task, source) for task, source in zip(block.tasks, message.sources, strict=True) if source is not None
        ]
        if block.segment == 0:
            if items is not None:
                rows = torch.from_numpy(items)
                for task, row in asked:
                    self._activations.put_input(task, (rows, row))
            return self._arrive(block, set())
        lost, elsewhere = self._at_home(asked)
        if not elsewhere:
            return self._arrive(block, lost)
        fetching = asyncio.create_task(self._fetch(block, lost, elsewhere))
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetching.discard)

    def _arrive(self, block: Block, lost: set[TaskId]) -> None:
        if lost:
            returned = TasksReturned(
                self._server.name,
                self._server.scheduler.incarnation,
                tuple(lost),
                "its activation is lost",
                activation_lost=True,
            )
            self._tell(ServerStep(self._clock.now(), None, (returned,)))
            block = msgspec.structs.replace(block, tasks=tuple([t for t in block.tasks if t.task_id not in lost]))
        if block.tasks:
            self._take(BlockArrived(block))

    def cancel(self, message: CancelTasks) -> None:
        self._take(message)

    async def poll(self, poll: Poll, items: npt.NDArray[np.float32] | None) -> PollReply:
        """Takes in the block that came along, and says what happened since the last time; waits until something did."""
        polled_at = time.monotonic()
        self._clock.offset = poll.offset
        if poll.message is not None:
            self.receive(poll.message, items)
        self._activations.forget(poll.forget.outputs, poll.forget.items)
        async with self._turn:
            await self._news.wait()
            if self._broken is not None:
                raise RuntimeError(f"server {self._server.name} broke") from self._broken
            self._news.clear()
            steps, self._steps = self._steps, []
            answers, self._activations.answers = self._activations.answers, []
            number = self._replies
            self._replies += 1
        rows = tuple([TaskOutputs.of(tasks, output.numpy()) for tasks, output in answers])
        return PollReply(number, polled_at, time.monotonic(), self._server.memory_used, tuple(steps), rows)

    async def fetch(self, tasks: Sequence[TaskId], pieces: int) -> list[Any]:
        """Outputs for another server: whose of them are here and their shape, then the rows in `pieces` values."""
        found, output = self._activations.rows(tasks)
        if output is None:
            return [NOTHING, *[b""] * pieces]
        if output.device.type != "cpu":
            output = await asyncio.to_thread(output.cpu)
        rows = cut(output.numpy(), pieces)
        return [(found, tuple(output.shape)), *rows, *[b""] * (pieces - len(rows))]

    # ---- inputs

    def _at_home(self, asked: list[Wanted]) -> tuple[set[TaskId], dict[ServerName, list[Wanted]]]:
        """Keeps the inputs that lie here. Returns the tasks whose inputs are lost, and what to fetch, by home."""
        lost: set[TaskId] = set()
        elsewhere: dict[ServerName, list[Wanted]] = {}
        for task, source in asked:
            assert task.home is not None, "a task after the first segment has a home"
            if task.home != self._server.name:
                elsewhere.setdefault(task.home, []).append((task, source))
            elif (row := self._activations.output(source)) is not None:
                self._activations.put_input(task, row)
            else:
                lost.add(task.task_id)
        return lost, elsewhere

    async def _fetch(self, block: Block, lost: set[TaskId], elsewhere: dict[ServerName, list[Wanted]]) -> None:
        try:
            failed = await asyncio.gather(*[self._fetch_from(home, wanted) for home, wanted in elsewhere.items()])
        except Exception as error:
            return self._break(error)
        self._arrive(block, lost.union(*failed))

    async def _fetch_from(self, home: ServerName, wanted: list[Wanted]) -> set[TaskId]:
        from ray.exceptions import RayError

        found: tuple[TaskId, ...] = ()
        if home in self._peers:
            # Dead or silent: the items begin again, which is the dispatcher's decision.
            with contextlib.suppress(RayError, TimeoutError):
                loop = asyncio.get_running_loop()
                found, rows = await loop.run_in_executor(self._fetchers, self._rows_from, home, wanted)
        lost = {task.task_id for task, _ in wanted}
        place = {source: row for row, source in enumerate(found)}
        for task, source in wanted:
            if source in place:
                self._activations.put_input(task, (rows, place[source]))
                lost.discard(task.task_id)
        return lost

    def _rows_from(self, home: ServerName, wanted: list[Wanted]) -> tuple[tuple[TaskId, ...], torch.Tensor]:
        """Asks another server and waits: many pieces cost a thread half of what they cost the event loop."""
        import ray

        task = wanted[0][0]
        assert task.previous_width is not None, "a task after the first segment has a previous width"
        pieces = pieces_of(len(wanted) * self._shape.activation(task.segment - 1, task.previous_width))
        fetch = self._peers[home].fetch.options(num_returns=1 + pieces)
        asked = fetch.remote([source for _, source in wanted], pieces)
        (found, shape), *rows = ray.get(asked, timeout=FETCH_TIMEOUT)
        return found, torch.from_numpy(join(rows, shape[1:])) if found else torch.empty(0)

    # ---- the scheduler

    def finished(self, job: Job) -> None:
        """The executor is done with a job."""
        try:
            event = self._server.finished(job, self._activations, self._clock.now())
        except Exception as error:
            return self._break(error)
        self._take(event)

    def _take(self, event: ServerEvent) -> None:
        self._events.append(event)
        if self._delivering:
            return  # called from within a command: the loop below gets to it
        self._delivering = True
        try:
            while self._events:
                self._step(self._events.popleft())
        except Exception as error:
            self._break(error)
        finally:
            self._delivering = False

    def _step(self, event: ServerEvent) -> None:
        server, now = self._server, self._clock.now()
        commands = server.scheduler.handle(event, now)
        for command in commands:
            match command:
                case StartBatch():
                    server.start_batch(command, self._activations, now)
                case LoadInstance():
                    server.load(command)
                case UnloadInstance():
                    server.unload(command)
                case WakeAt(at):
                    self._timers.wake(server.name, at)
        carried = tuple([command for command in commands if isinstance(command, CARRIED)])
        if self._log:
            self._steps.append(ServerStep(now, event, tuple(commands)))
            if carried:
                self._news.set()
        elif carried:
            self._tell(ServerStep(now, None, carried))

    def _tell(self, step: ServerStep) -> None:
        self._steps.append(step)
        self._news.set()

    def _break(self, error: Exception) -> None:
        """A fault of this program: the router hears it at its next question and starts a new session."""
        self._broken = error
        self._news.set()

    def _sample(self, at: Seconds) -> None:
        loop = asyncio.get_running_loop()
        next_at = max(at + self._period, loop.time())
        self._sampler = loop.call_at(next_at, self._sample, next_at)
        sampled = self._server.sample(self._clock.now())
        if sampled is None:
            os._exit(DEVICE_LOST)  # no call of this process reaches the device any more; Ray starts another
        self._take(sampled)
