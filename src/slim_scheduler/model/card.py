"""The model card: training, costs and accuracy of checkpoints as Markdown, every number read from a manifest.

`write_card` makes docs/model-card.md; typed by hand are only the paper's tables and the
licences.
"""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from slim_scheduler.core.accuracy import tuple_name
from slim_scheduler.core.confidence import BINS
from slim_scheduler.model.architecture import architecture_of, tuple_cost
from slim_scheduler.model.checkpoint import Confidence, Manifest, Training, load_manifest

# Top-1 % on CIFAR-100 (arXiv 2510.09018, tables I and II)
TABLE_I = {(0.25,) * 4: 70.30, (0.50,) * 4: 72.99, (0.75,) * 4: 74.93, (1.00,) * 4: 76.43}
TABLE_II = {
    (1.0, 0.75, 0.5, 0.25): 71.35,
    (0.75, 1.0, 0.25, 0.5): 72.33,
    (0.5, 0.25, 1.0, 0.75): 74.53,
    (0.25, 0.5, 0.75, 1.0): 75.33,
}
LINE = 120
WITHOUT_TEACHER = "without-teacher.json"  # the manifest of another run, beside the one whose weights are shipped


def write_card(folders: Iterable[str | Path], path: str | Path) -> str:
    """Writes the card of these folders of SlimResNets; returns its text."""
    sections = ["# Model card", INTRODUCTION]
    for folder in folders:
        beside = Path(folder) / WITHOUT_TEACHER
        plain = msgspec.json.decode(beside.read_bytes(), type=Manifest) if beside.is_file() else None
        sections += model_section(Path(folder).resolve().name, load_manifest(folder), plain)
    text = "\n\n".join(wrapped(part) for part in (*sections, PICTURE, LICENCES)) + "\n"
    Path(path).write_text(text)
    return text


def wrapped(part: str) -> str:
    """A part with its paragraphs, and list entries in lines of at most 120 characters; tables stay."""
    lines = []
    for line in part.split("\n"):
        if len(line) <= LINE or line.startswith("|"):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(line, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def model_section(name: str, manifest: Manifest, plain: Manifest | None = None) -> list[str]:
    """One model: cost per width, accuracy, the paper's tables where they apply, training; `plain` had no teacher."""
    arch = architecture_of(manifest.architecture)
    parts = [f"## {name}", description(manifest), cost_table(manifest)]
    test = manifest.accuracy.get("test", {})
    if test:
        parts.append(spread_line(manifest))
    if manifest.confidence is not None:
        parts.append(confidence_text(manifest.confidence))
    if test and manifest.training is not None and manifest.training.data == "cifar100" and arch.segments == 4:
        parts += ["Beside the paper's tables I and II (top-1 %, test images, single view):", paper_table(test, plain)]
        parts.append(distance_text(manifest))
        if plain is not None and plain.training is not None:
            parts.append(f"Without a teacher (`{WITHOUT_TEACHER}`; weights not shipped): {training_text(plain)}")
    if manifest.training is not None:
        parts.append(training_text(manifest))
    return parts


def description(manifest: Manifest) -> str:
    arch = architecture_of(manifest.architecture)
    return (
        f"{'x'.join(map(str, arch.item_shape))} pixels into {arch.classes} classes; {arch.segments} segments of "
        f"{'-'.join(map(str, arch.channels))} channels with {'-'.join(map(str, arch.blocks))} blocks and strides "
        f"{'-'.join(map(str, arch.strides))}, stem {arch.stem_channels} channels, {arch.channels_per_group} channels "
        f"per normalisation group, pooling {arch.pooling}. "
        f"Weights {manifest.weights_bytes / 1e6:.2f} MB, SHA-256 `{manifest.weights_sha256}`."
    )


def cost_table(manifest: Manifest) -> str:
    """Multiply-adds, parameters, accuracy and, where known, the confidence's error per uniform width."""
    arch, rows = architecture_of(manifest.architecture), []
    errors = manifest.confidence.error if manifest.confidence is not None else {}
    for width in arch.widths:
        widths = (width,) * arch.segments
        macs, parameters = tuple_cost(arch, widths)
        cells = [f"{width:g}", f"{macs / 1e6:.1f}", f"{parameters / 1e6:.3f}"]
        for split in ("test", "held-out"):
            top1 = manifest.accuracy.get(split, {}).get(tuple_name(widths))
            cells.append("" if top1 is None else f"{100 * top1:.2f}")
        cells += [f"{100 * by_tuple[tuple_name(widths)]:.2f}" for by_tuple in errors.values()]
        rows.append(cells)
    head = ("width", "multiply-adds (M)", "parameters (M)", "top-1 %, test", "top-1 %, held-out")
    return table((*head, *(f"ECE %, {split}" for split in errors)), rows)


def spread_line(manifest: Manifest) -> str:
    """How accuracy behaves over all tuples, not just the uniform ones."""
    test, arch = manifest.accuracy["test"], architecture_of(manifest.architecture)
    slim = test[tuple_name((arch.widths[0],) * arch.segments)]
    worst, best = min(test, key=lambda t: test[t]), max(test, key=lambda t: test[t])
    below = sum(top1 < slim - 0.02 for top1 in test.values())
    return (
        f"All {len(test)} width tuples: worst {100 * test[worst]:.2f} % at ({worst}), best {100 * test[best]:.2f} % at "
        f"({best}), mean {100 * sum(test.values()) / len(test):.2f} %; {below} are more than 2 points below uniform "
        f"{arch.widths[0]:g}."
    )


def confidence_text(confidence: Confidence) -> str:
    """How far the confidence of answers is from the share of right ones, at worst."""
    worst = (f"{100 * max(errors.values()):.2f} % on {split} images" for split, errors in confidence.error.items())
    return f"ECE over all width tuples: at most {', '.join(worst)}."


def paper_table(test: dict[str, float], plain: Manifest | None) -> str:
    columns = {"ours": test, **({"without a teacher": plain.accuracy["test"]} if plain else {})}
    rows = []
    for widths, paper in (TABLE_I | TABLE_II).items():
        top1 = [100 * accuracy[tuple_name(widths)] for accuracy in columns.values()]
        pairs = [text for found in top1 for text in (f"{found:.2f}", f"{found - paper:+.2f}")]
        rows.append([f"({tuple_name(widths)})", f"{paper:.2f}", *pairs])
    return table(("width tuple", "paper", *(head for name in columns for head in (name, "difference"))), rows)


def distance_text(manifest: Manifest) -> str:
    """How far the network is from the paper's eight figures."""
    test, targets = manifest.accuracy["test"], TABLE_I | TABLE_II
    mean = sum(100 * test[tuple_name(widths)] - paper for widths, paper in targets.items()) / len(targets)
    return f"On average {abs(mean):.2f} points {'above' if mean >= 0 else 'below'} the paper."


def training_text(manifest: Manifest) -> str:
    """On what, how long and by whom it was trained."""
    training = manifest.training
    assert training is not None
    epochs = training.history[-1].epoch if training.history else 0.0
    further = f" Trained further from weights `{training.started_from[:16]}...`." if training.started_from else ""
    return (
        f"Trained on {training.data} with seed {training.seed}: {epochs:g} epochs in "
        f"{training.seconds / 60:.1f} minutes.{further} {teaching_text(training)}"
    )


def teaching_text(training: Training) -> str:
    """Who taught, and whether anything but the data of the same name reached the weights."""
    text = (
        f"Outside data behind these weights: {training.outside_data}." if training.outside_data else "No outside data."
    )
    teacher = training.teacher
    if teacher is None:
        return text
    top1 = "" if teacher.top1 is None else f", {100 * teacher.top1:.2f} % on images held out from it"
    kept = (teacher.data, teacher.seed, teacher.held_out) == (training.data, training.seed, training.recipe.held_out)
    seen = "" if kept else " It had seen some of the held-out images: accuracy on them is no honest estimate."
    return f"Taught by {teacher.name} (SHA-256 `{teacher.sha256[:16]}...`{top1}).{seen} {text}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


INTRODUCTION = (
    "Written by `python -m slim_scheduler.model.card` from what was measured. Settings and training curves are in each "
    "`models/NAME/manifest.json`. All are SlimResNets with group norm, weight standardisation and SiLU. Training "
    "never looks at test images; curves and choices come from held-out training images. Each network was trained with "
    "one seed: the spread over seeds is not measured. Confidence is a logistic function of an answer's margin (the "
    "difference of its two highest softmax values), fitted on held-out images per width of the last segment. ECE is "
    f"its expected calibration error over {BINS} bins."
)
PICTURE = (
    "## Beside other networks\n\n"
    "![Accuracy over multiply-adds: ours, the paper's tables, MobileNetV2](figures/accuracy-macs.svg)\n\n"
    "One point per width tuple of ours, the uniform ones joined. Neither the paper nor MobileNetV2 had a teacher: the "
    "line without one compares with them. It is 0.2 to 0.6 points below MobileNetV2 at equal multiply-adds; only the "
    "taught network is above it. MobileNetV2 x0.5 to x1.4 are four networks, each trained for itself "
    "(CIFAR-100 table of github.com/chenyaofo/pytorch-cifar-models). "
    "Drawn by `python -m slim_scheduler.report.designs`."
)
LICENCES = (
    "## Data and licence\n\n"
    "- digits: UCI *Optical Recognition of Handwritten Digits* (Alpaydin and Kaynak 1998), CC BY 4.0, as in "
    "scikit-learn; a seed in `model/data.py` fixes the held-out third.\n"
    "- CIFAR-100: Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009, "
    "<https://www.cs.toronto.edu/~kriz/cifar.html>. No licence is stated, so the images are not in this project; the "
    "SHA-256 of the archive that you download is checked.\n"
    "- The weights: Apache-2.0, as the project."
)

if __name__ == "__main__":
    folders = sorted(path.parent for path in Path("models").glob("*/manifest.json"))
    print(write_card(folders, "docs/model-card.md"))
