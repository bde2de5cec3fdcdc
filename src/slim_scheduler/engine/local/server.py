"""One live server: its pure scheduler, and the device side that performs the scheduler's commands.

It turns commands into jobs for the execution threads, and finished jobs into the scheduler's events. It decides
nothing and runs on the event loop.
"""

from slim_scheduler.core.messages import (
    BatchDone,
    BatchFailed,
    DeviceSampled,
    InstanceFailed,
    InstanceReady,
    InstanceUnloaded,
    LoadInstance,
    ServerEvent,
    StartBatch,
    UnloadInstance,
)
from slim_scheduler.core.server.scheduler import ServerScheduler
from slim_scheduler.core.types import Bytes, Joules, Seconds
from slim_scheduler.engine.activations import ActivationStore
from slim_scheduler.engine.executor import BatchJob, Executor, Job, LoadJob, UnloadJob
from slim_scheduler.engine.probe import BusyMeter, Probe


class LiveServer:
    """`credit` is what the dispatcher may have outstanding here, `segments` the network's number of them. `margins`:
    answers' margins are told."""

    def __init__(
        self,
        scheduler: ServerScheduler,
        executor: Executor,
        probe: Probe,
        credit: int,
        segments: int,
        margins: bool = False,
    ) -> None:
        self.name = scheduler.name
        self.scheduler = scheduler
        self.executor = executor
        self.credit = credit
        self._probe = probe
        self._meter = BusyMeter()
        self._segments = segments
        self._margins = margins

    @property
    def memory_used(self) -> Bytes:
        """Bytes its instances and running batches really take."""
        return self.executor.device.memory_used

    def start_batch(self, command: StartBatch, activations: ActivationStore, now: Seconds) -> None:
        batch = command.batch
        tasks, rows = activations.inputs(batch.tasks)
        self._meter.started(now)
        last = batch.segment == self._segments - 1
        self.executor.submit(BatchJob(batch, tasks, rows, to_host=last, with_margins=last and self._margins))

    def load(self, command: LoadInstance) -> None:
        self.executor.submit(LoadJob(command))

    def unload(self, command: UnloadInstance) -> None:
        self.executor.submit(UnloadJob(command.instance))

    def sample(self, now: Seconds) -> DeviceSampled | None:
        """What the sensors say; nothing from a device that is lost."""
        return None if self.executor.lost else self._probe.sample(now, self._meter.fraction(now))

    def finished(self, job: Job, activations: ActivationStore, now: Seconds) -> ServerEvent:
        """The event that a finished job is. A batch's output is stored first."""
        match job:
            case BatchJob():
                energy = self._energy(job)
                self._meter.finished(now)
                if job.error is not None:
                    return BatchFailed(job.batch.batch_id, reason(job.error), job.out_of_memory)
                if job.output is not None:
                    activations.store(job.tasks, job.output)
                not_finite = tuple([job.tasks[row].task_id for row in job.not_finite])
                return BatchDone(job.batch.batch_id, energy, not_finite, _margins(job))
            case LoadJob():
                if job.error is not None:
                    return InstanceFailed(job.load.instance, reason(job.error))
                return InstanceReady(job.load.instance)
            case UnloadJob():
                return InstanceUnloaded(job.instance)

    def _energy(self, job: BatchJob) -> Joules | None:
        """The batch's share of the device's power while it ran: split evenly among concurrent batches."""
        power = self._probe.running_power
        return None if power is None else power * job.seconds / self._meter.running


def _margins(job: BatchJob) -> tuple[float, ...]:
    """Of every task of the batch, 0 where nobody waits any more; nothing where nobody asks."""
    if not job.with_margins:
        return ()
    found = dict(zip([task.task_id for task in job.tasks], job.margins, strict=True))
    return tuple([found.get(task.task_id, 0.0) for task in job.batch.tasks])


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
