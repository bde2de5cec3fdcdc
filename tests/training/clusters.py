"""A small cluster to train on: the simulator's small device, with an accuracy table beside its network."""

from pathlib import Path
from typing import Any

import numpy as np

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.setup.accuracy_files import TABLE_FILES, write_accuracy
from slim_scheduler.setup.config import Config
from tests.sim.clusters import small_cluster

UNEQUAL = ({}, {"slowdown": 2.0}, {"slowdown": 4.0})


def small_table(split: str = "held-out") -> AccuracyTable:
    """100 items: 70 right at (0.5, 0.5), 80 and 85 at mixed widths, 90 at (1, 1)."""
    shares = {(0.5, 0.5): 70, (1.0, 0.5): 80, (0.5, 1.0): 85, (1.0, 1.0): 90}
    columns = {widths: np.arange(100) < right for widths, right in shares.items()}
    sure = {widths: np.ones(100) for widths in columns}
    return AccuracyTable(columns, split=split, data="made up", margins=sure)


def training_cluster(folder: Path, servers: Any = UNEQUAL, **sections: Any) -> Config:
    sections = {"workload": {"rate": 300.0, "duration_s": 2.0}, **sections}
    config = small_cluster(folder, servers, **sections)
    for split in TABLE_FILES:
        write_accuracy(small_table(split), folder / TABLE_FILES[split])
    return config
