"""Three real runs of a small simulated cluster, made once."""

import pytest

from slim_scheduler.report.run_folder import RunFolder
from slim_scheduler.run.runs import simulated_run
from tests.sim.clusters import small_cluster


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two seeds of jsq:0.5 and one of random, each with its folder."""
    folder = tmp_path_factory.mktemp("runs")
    workload = {"rate": 50.0, "duration_s": 3.0, "data": "made-up"}
    config = small_cluster(folder / "model", [{}, {"slowdown": 2.0}], workload=workload)
    made = [("jsq:0.5", 0), ("jsq:0.5", 1), ("random", 0)]
    for router, seed in made:
        simulated_run(config, router, seed, folder / f"{router.replace(':', '-')}-{seed}")
    return [RunFolder(folder / f"{router.replace(':', '-')}-{seed}") for router, seed in made]
