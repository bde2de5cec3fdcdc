"""The seeded fault run (guarantees 5, 8, 11, 12, 14, 16, 22). FAULT_SEEDS in the environment asks for more seeds."""

import os
from pathlib import Path

import pytest

from tests.sim.fault_run import fault_run


@pytest.mark.parametrize("seed", range(int(os.environ.get("FAULT_SEEDS", "300"))))
def test_every_request_gets_its_one_outcome_whatever_goes_wrong(seed: int, tmp_path: Path) -> None:
    try:
        fault_run(seed, tmp_path)
    except Exception as error:
        error.add_note(f"replay it with: python -m tests.sim.replay {seed}")
        raise
