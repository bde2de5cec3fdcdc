"""The same workloads under several routers: simulated runs side by side in processes, live ones interleaved.

Every router gets the same arrivals and items per seed. Results are the runs' folders; tables and differences are
`report.comparison`'s.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

from slim_scheduler.core.errors import ConfigError, WorkerLostError
from slim_scheduler.run.runs import live_run, simulated_run
from slim_scheduler.setup.config import Config
from slim_scheduler.setup.interruption import Interruption, let_sigterm_through, sigterm_as_ctrl_c, starting_processes

Progress = Callable[[float, str], None]  # share of all runs in [0, 1], what is running
POLL_S = 0.2
WRITING_S = 10.0  # in which a process writes what it has of a run


class Trial(NamedTuple):
    """One run of a comparison."""

    router: str
    seed: int
    out: Path


class Finished(NamedTuple):
    trial: Trial
    summary: dict[str, Any]


def trials(routers: Sequence[str], seeds: Sequence[int], out: Path) -> list[Trial]:
    """All runs: every router for one seed before the next seed, each seed beginning with another router.

    So interleaved, a disturbance of the machine meets all routers alike.
    """
    if not routers:
        raise ConfigError("no router to compare; give some, such as --routers random,jsq:0.25")
    if len(set(routers)) < len(routers):
        raise ConfigError(f"a router is named twice in {', '.join(routers)}; name each once")
    if not seeds:
        raise ConfigError("no seed to compare on; give --seeds of at least 1")
    return [
        Trial(router, seed, out / folder_name(router) / f"seed-{seed}")
        for i, seed in enumerate(seeds)
        for router in (*routers[i % len(routers) :], *routers[: i % len(routers)])
    ]


def folder_name(router: str) -> str:
    """A router's name as a folder's."""
    return re.sub(r"[^\w.+@-]+", "-", router).strip("-")


def run_live(config: Config, plan: Sequence[Trial], progress: Progress | None = None) -> Iterator[Finished]:
    """Runs them one after the other on this machine; stops after an interrupted one."""
    for i, trial in enumerate(plan):

        def share(of_run: float, i: int = i, trial: Trial = trial) -> None:
            if progress is not None:
                progress((i + of_run) / len(plan), f"{trial.router}, seed {trial.seed}")

        share(0.0)
        summary = live_run(config, trial.router, trial.seed, trial.out, share)
        yield Finished(trial, summary)
        if summary["interrupted"]:
            raise KeyboardInterrupt


def run_simulated(
    config: Config, plan: Sequence[Trial], workers: int | None = None, progress: Progress | None = None
) -> Iterator[Finished]:
    """Runs them in several processes, one per core by default; yields in the order in which they end.

    Ctrl-C lets the runs under way write what they have, and starts no more. Raises WorkerLostError.
    """
    context = get_context("spawn")  # threads of this process must not be forked into the workers
    shares = context.Array("d", len(plan))
    workers = min(workers or len(os.sched_getaffinity(0)), len(plan))
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(config, shares))
    with sigterm_as_ctrl_c(), pool:
        try:
            with starting_processes():
                runs: dict[Future[dict[str, Any]], Trial] = {pool.submit(_work, i, t): t for i, t in enumerate(plan)}
            while runs:
                done, _ = wait(runs, POLL_S, FIRST_COMPLETED)
                for future in done:
                    yield Finished(runs.pop(future), _result(future))
                if progress is not None:
                    running = ", ".join(f"{t.router}, seed {t.seed}" for f, t in runs.items() if f.running())
                    progress(sum(shares[:]) / len(plan), running)
        except BaseException as error:
            children = active_children()
            for child in children:  # each writes what it has and begins no other; leaving the pool waits
                child.terminate()
            if isinstance(error, WorkerLostError):
                for child in children:  # one may wait for ever for what the lost one held
                    child.join(WRITING_S)
                    child.kill()
            raise


def _result(run: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return run.result()
    except BrokenProcessPool:
        raise WorkerLostError(
            "a process that ran some of the runs was killed; where it was for want of memory, lower --workers"
        ) from None


class _Worker:
    """What one worker process holds between its runs."""

    config: Config
    shares: Any
    interruption: Interruption


def _begin_worker(config: Config, shares: Any) -> None:
    _Worker.config, _Worker.shares, _Worker.interruption = config, shares, Interruption()
    _Worker.interruption.watch(signals=2)  # a SIGTERM to all comes twice: the first process passes it on
    let_sigterm_through()


def _work(place: int, trial: Trial) -> dict[str, Any]:
    def share(of_run: float) -> None:
        _Worker.shares[place] = of_run

    _Worker.interruption.check()  # a run that the pool had already handed out
    summary = simulated_run(
        _Worker.config, trial.router, trial.seed, trial.out, share, interruption=_Worker.interruption
    )
    _Worker.shares[place] = 1.0
    return summary
