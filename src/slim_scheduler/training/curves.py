"""What training shows while it runs: numbers per update, curves on disk, and early warnings.

Curves go to `curves.csv`, and to TensorBoard where it is installed. The warnings are for the failures that the paper
names: collapse to the slimmest width, gaming the imbalance term, memory at its limit.
"""

import csv
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slim_scheduler.training.rollout import Rollout

COLLAPSED = 0.97  # share of the slimmest width
ONE_SERVER = 0.9  # share of the tasks on one server
FULL = 0.97  # share of the memory budget
UNBALANCED = 0.1  # variance of utilisation; three servers at 1, 1 and 0 have 0.22


class UpdateStats(msgspec.Struct):
    """Means over an update, for the curves."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    clip_fraction: float = 0.0
    explained_variance: float = 0.0
    entropy_server: float = 0.0
    entropy_width: float = 0.0
    entropy_group: float = 0.0
    gradient_norm: float = 0.0


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One update. Rewards and terms are means per task of the blocks that finished; shares are of decisions."""

    update: int
    updates: int
    decided: int
    seconds: float
    decisions_per_s: float
    reward: float
    accuracy: float
    latency: float
    energy: float
    variance: float
    charged: float
    hoped: float
    memory: float
    width_share: tuple[float, ...]
    server_share: tuple[float, ...]
    group_mean: float
    stats: UpdateStats
    imitating: bool = False

    def figures(self) -> dict[str, float]:
        """All numbers by name, as the curves have them."""
        flat = {
            f"reward/{name}": getattr(self, name)
            for name in ("reward", "accuracy", "latency", "energy", "variance", "charged", "hoped")
        }
        flat |= {f"ppo/{name}": value for name, value in msgspec.structs.asdict(self.stats).items()}
        flat |= {f"width_share/{i}": share for i, share in enumerate(self.width_share)}
        flat |= {f"server_share/{i}": share for i, share in enumerate(self.server_share)}
        flat |= {"choice/group_mean": self.group_mean, "memory/used": self.memory}
        return {**flat, "speed/decisions_per_s": self.decisions_per_s, "speed/decided": float(self.decided)}


def describe(
    rollouts: list[Rollout], groups: tuple[int, ...], stats: UpdateStats, widths: int, **position: Any
) -> UpdateReport:
    """The report of an update from what the workers brought."""
    credits = [credit for rollout in rollouts for credit in rollout.credits]
    weights = np.array([credit.tasks for credit in credits], float)
    table = np.array([credit[2:] for credit in credits], float).reshape(len(credits), 7)
    means = np.average(table, axis=0, weights=weights) if weights.sum() else np.full(7, np.nan)
    action = np.concatenate([rollout.steps.action for rollout in rollouts])
    servers = rollouts[0].steps.present.shape[1]
    return UpdateReport(
        reward=float(means[0]),
        accuracy=float(means[1]),
        latency=float(means[2]),
        energy=float(means[3]),
        variance=float(means[4]),
        charged=float(means[5]),
        hoped=float(means[6]),
        memory=max(rollout.memory for rollout in rollouts),
        server_share=_shares(action[:, 0], servers),
        width_share=_shares(action[:, 1], widths),
        group_mean=float(np.asarray(groups)[action[:, 2]].mean()),
        stats=stats,
        **position,
    )


def warnings(report: UpdateReport) -> list[str]:
    """What looks as if training went wrong, each with what to do."""
    found = []
    if len(report.width_share) > 1 and report.width_share[0] > COLLAPSED:
        found.append(
            f"{report.width_share[0]:.0%} of decisions take the slimmest width: accuracy collapses; "
            "raise reward.alpha, or lower reward.beta and reward.gamma, unless that is wanted"
        )
    one = max(report.server_share)
    if len(report.server_share) > 1 and one > ONE_SERVER and report.variance > UNBALANCED:
        found.append(
            f"{one:.0%} of decisions go to one server at utilisation variance {report.variance:.3f}: raise reward.delta"
        )
    if report.memory > FULL:
        found.append(
            f"a server's instances fill {report.memory:.0%} of its memory budget: "
            "loads and evictions cost latency; raise vram_budget_gib, or serve fewer widths"
        )
    return found


class Curves:
    """Appends reports to `curves.csv` and TensorBoard. A resumed run drops the rows after its checkpoint."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "curves.csv"
        rows = []
        if self._path.exists():
            with self._path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["update"]) < resumed_at]
        self._header = list(rows[0]) if rows else []
        with self._path.open("w", newline="") as file:
            if rows:
                writer = csv.DictWriter(file, self._header)
                writer.writeheader()
                writer.writerows(rows)
        self._board = _tensorboard(folder / "tensorboard", resumed_at)

    def add(self, report: UpdateReport) -> None:
        row = {"update": report.update, **{name: f"{value:.6g}" for name, value in report.figures().items()}}
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._header or list(row))
            if not self._header:
                self._header = list(row)
                writer.writeheader()
            writer.writerow(row)
        if self._board is not None:
            for name, value in report.figures().items():
                self._board.add_scalar(name, value, report.update)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path, resumed_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resumed_at, flush_secs=10)


def _shares(chosen: np.ndarray, of: int) -> tuple[float, ...]:
    counts = np.bincount(chosen, minlength=of)
    return tuple((counts / counts.sum()).tolist())
