"""Rollouts from several processes at once. The workers are without torch, and end with the process that started them.

`RolloutWorkers` hands every worker the same parameters and returns their rollouts in the order of the workers, so that
the result does not depend on who was faster.
"""

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType

from slim_scheduler.core.errors import WorkerLostError
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.interruption import let_sigterm_through, starting_processes
from slim_scheduler.training.rollout import Actor, Rollout, RolloutOrder


class RolloutWorkers:
    """A context: the processes live as long as it does."""

    def __init__(self, config: Config, seed: int) -> None:
        start = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
        self._pipes: list[Connection] = []
        self._processes = []
        with starting_processes():  # the main process says when to stop
            for worker in range(config.training.workers):
                mine, theirs = start.Pipe()
                process = start.Process(target=_work, args=(theirs, config, seed, worker), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)

    def collect(self, order: RolloutOrder) -> list[Rollout]:
        """Raises what a worker raised, and WorkerLostError for one that is gone."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it said last can still be read
                pipe.send(order)
        return [self._answer(worker) for worker in range(len(self._pipes))]

    def _answer(self, worker: int) -> Rollout:
        try:
            answer = self._pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[worker]
            process.join()  # its end of the pipe closes a moment before it is gone
            said = f"training worker {worker} ended with {process.exitcode}; run `slim train` again to resume"
            raise WorkerLostError(said) from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Rollout)
        return answer

    def __enter__(self) -> "RolloutWorkers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _work(pipe: Connection, config: Config, seed: int, worker: int) -> None:
    let_sigterm_through()  # `RolloutWorkers` ends this process so
    try:
        actor = Actor(config, seed, worker)
        while True:
            order = pipe.recv()
            pipe.send(actor.collect(order))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the main process is gone
    except Exception as error:
        pipe.send(error)
