"""Accuracy per multiply-add of the CIFAR-100 network, beside the paper's figures.

Drawn by `python -m slim_scheduler.report.designs`. Ours are measured on the test images, one point per width tuple. The
paper's are its tables I and II, at the multiply-adds of its size as this project counts them; a network of just that
size was not trained here. Separately trained networks, one per point, show what one set of weights has to compare with.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from slim_scheduler.core.types import WidthTuple
from slim_scheduler.model.architecture import Architecture, architecture_of, tuple_cost
from slim_scheduler.model.card import TABLE_I, TABLE_II, WITHOUT_TEACHER
from slim_scheduler.model.checkpoint import Manifest, load_manifest
from slim_scheduler.report.theme import FIGURE_SIZE, drawing, series

# (width, millions of multiply-adds, top-1 % on all 10,000 test images), each trained for itself, without a teacher:
# the CIFAR-100 table of github.com/chenyaofo/pytorch-cifar-models
MOBILENET_V2 = ((0.5, 28.08, 70.88), (0.75, 59.43, 73.61), (1.0, 88.09, 74.20), (1.4, 170.23, 75.98))
FIGURE = Path("docs/figures/accuracy-macs.svg")


def draw(networks: Mapping[str, Manifest], path: Path) -> None:
    """Writes the figure of networks by label. Their manifests must have test accuracies of all tuples."""
    paper = Architecture()
    (theirs, dashed), (separate, dotted) = series(len(networks)), series(len(networks) + 1)
    with drawing(FIGURE_SIZE[1] * 1.2) as figure:
        axes = figure.subplots()
        for i, (label, network) in enumerate(networks.items()):
            color, style = series(i)
            arch = architecture_of(network.architecture)
            test = {tuple(map(float, t.split(","))): 100 * top1 for t, top1 in network.accuracy["test"].items()}
            uniform = [(width,) * arch.segments for width in arch.widths]
            axes.scatter(
                [_macs(arch, t) for t in test], list(test.values()), s=6, color=color, alpha=0.35, linewidths=0
            )
            axes.plot([_macs(arch, t) for t in uniform], [test[t] for t in uniform], style, color=color, label=label)
        axes.plot(
            [_macs(paper, t) for t in TABLE_I], list(TABLE_I.values()), dashed, color=theirs, label="the paper, table I"
        )
        axes.scatter(
            [_macs(paper, t) for t in TABLE_II],
            list(TABLE_II.values()),
            s=28,
            marker="D",
            facecolors="none",
            edgecolors=theirs,
            label="the paper, table II (mixed)",
        )
        axes.plot(
            [macs for _, macs, _ in MOBILENET_V2],
            [top1 for _, _, top1 in MOBILENET_V2],
            dotted,
            color=separate,
            marker="s",
            markersize=4,
            label="MobileNetV2 x0.5 to x1.4, trained separately",
        )
        axes.set_xscale("log")
        axes.set_xticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("multiply-adds per image, millions")
        axes.set_ylabel("top-1 on CIFAR-100 test images, %")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.3 * (high - low))  # the legend's place, above the lines
        axes.legend(loc="upper left")
        figure.savefig(path, facecolor="white", metadata={"Date": None})


def shipped(models: Path) -> dict[str, Manifest]:
    """The CIFAR-100 networks by label: who taught them, and with what data, belongs to the comparison."""
    new, lean = models / "cifar100", models / "cifar100-lean"
    return {
        "cifar100, its teacher from ImageNet": load_manifest(new),
        "the same without a teacher": msgspec.json.decode((new / WITHOUT_TEACHER).read_bytes(), type=Manifest),
        "cifar100-lean, no teacher": load_manifest(lean),
    }


def _macs(arch: Architecture, widths: WidthTuple) -> float:
    """Millions."""
    return tuple_cost(arch, widths)[0] / 1e6


if __name__ == "__main__":
    draw(shipped(Path("models")), FIGURE)
    print(FIGURE)
