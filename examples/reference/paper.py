"""The paper's experiment, made again: tables I to V beside the paper's and figures 1 to 3, in one report.

    make paper                    # SLIM_CIFAR100 names the data; without it tables I and II are from the shipped file
    python examples/reference/paper.py --scale 0.1 --seeds 2 --out runs/paper-look      # a first look, in minutes

Tables III to V are simulated runs of cluster.toml with `end = "cut"`, all of its length, on seeds 200 to 209.
`paper-*.toml` are the paper's own PPO to the letter. The ablation, at a share of the length, adds one thing at a time.
An interrupted run goes on where it stopped: runs that are complete and have the same configuration and policy are not
made again. `made.json` beside each has the commit that it was made at, and the report names the commits of all.
"""

import argparse
import hashlib
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from matplotlib.figure import Figure

from slim_scheduler.cli.terminal import Show, progress
from slim_scheduler.core.errors import ConfigError, SlimError
from slim_scheduler.core.profile import LatencyTable
from slim_scheduler.model import checkpoint
from slim_scheduler.model.card import TABLE_I, TABLE_II
from slim_scheduler.model.data import load_data
from slim_scheduler.report.measures import Estimate, aggregate
from slim_scheduler.report.notes import refuse_raising
from slim_scheduler.report.page import figure_element, write_page
from slim_scheduler.report.theme import FIGURE_SIZE, drawing, series
from slim_scheduler.run.compare import Trial, run_simulated, trials
from slim_scheduler.run.provenance import measured_commit, versions
from slim_scheduler.run.runs import write_json
from slim_scheduler.setup.accuracy_files import TABLE_FILES, read_accuracy
from slim_scheduler.setup.config import Config, config_from, load_config
from slim_scheduler.setup.profiles import read_profile

HERE = Path(__file__).parent
CLONE = HERE.parents[1]
POLICIES = HERE / "policies"
BATCHES = (1, 2, 4, 8, 16, 32)
IMAGES = 250  # of a batch, tables I and II
FULL_S = 147.8  # cluster.toml's fitted duration
MADE = "made.json"
QUICK = ("paper-", "random")  # a tenth to half of the other rows' time: they come last, so that no core waits long


class Row(NamedTuple):
    """One line of a table: what it is called, the router, and the paper's own line where it has one."""

    name: str
    router: str
    paper: "Paper | None" = None


class Paper(NamedTuple):
    """A line of tables III to V: accuracy in %, latency in s, energy in J, population variance, images."""

    accuracy: float
    latency: tuple[float, float]
    energy: tuple[float, float]
    variance: tuple[float, float]
    images: int


def policy(name: str) -> str:
    return f"ppo:{POLICIES / name}"


TABLES: dict[str, tuple[Row, ...]] = {
    "Table III: random routing": (
        Row("random", "random", Paper(74.43, (8.979, 7.302), (1967.94, 1629.53), (0.0433, 0.0216), 250_906)),
    ),
    "Table IV: efficiency weights": (
        Row(
            "the paper's PPO, to the letter",
            policy("paper-efficiency"),
            Paper(70.30, (0.318, 0.755), (52.85, 131.46), (0.0633, 0.0571), 420_538),
        ),
        Row("this system's", policy("efficiency")),
    ),
    "Table V: balanced weights": (
        Row(
            "the paper's PPO, to the letter",
            policy("paper-balanced"),
            Paper(75.26, (6.100, 11.673), (1085.41, 2125.62), (0.0815, 0.0374), 196_947),
        ),
        Row("this system's", policy("balanced")),
    ),
}
# Weights of balanced.toml throughout; each line adds to the one above it, the fifth is the teacher's imitation alone.
ABLATION = (
    Row("the paper's PPO, to the letter", policy("paper-balanced")),
    Row("+ observation `extended`", policy("ablation-extended")),
    Row("+ the plan in the observation", policy("ablation-plan")),
    Row("+ the plan's price charged", policy("ablation-charge")),
    Row("imitation of `lp:1.08` alone", policy("ablation-imitation")),
    Row("this system's `balanced`", policy("balanced")),
    Row("`lp`", "lp"),
    Row("`lp:1.08`", "lp:1.08"),
    Row("`cost-model:0.5/0.75/0.75/1`", "cost-model:0.5/0.75/0.75/1"),
    Row("`jsq:0.5`", "jsq:0.5"),
    Row("`slackfit`", "slackfit"),
    Row("`reward-greedy`", "reward-greedy"),
    Row("`random`", "random"),
)
Estimates = Mapping[str, Estimate]


class Made(msgspec.Struct, frozen=True):
    """What a run was made of beside its configuration: the code, and the policy by its manifest's hash."""

    commit: str
    policy: str


class Runs(NamedTuple):
    """Every row's estimates over the seeds, and the commits at which their runs were made."""

    rows: dict[Row, Estimates]
    commits: set[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=os.environ.get("SLIM_CIFAR100", ""), help="CIFAR-100 (default: SLIM_CIFAR100)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=200, help="the first one; 200 to 209 are the report's")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the experiment's length, tables III to V")
    parser.add_argument("--ablation-scale", type=float, default=0.1, help="the same, the ablation")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: one per core)")
    asked = parser.parse_args()
    began = time.monotonic()
    accuracy, origin = uniform_and_mixed(asked.data)  # first: data that is not there is found out at once
    seeds = range(asked.seed, asked.seed + asked.seeds)
    tables = [row for rows in TABLES.values() for row in rows]
    main_rows, commits = simulate(tables, seeds, asked.scale, asked.out / "tables", asked.workers)
    ablation, others = simulate(
        ABLATION, seeds, min(asked.scale, asked.ablation_scale), asked.out / "ablation", asked.workers
    )
    made_at = sorted(commits | others)
    live = measure_cpu()
    body = [
        "<h1>The paper's experiment, made again</h1>",
        f'<p class="soft">arXiv 2510.09018, tables I to V and figures 1 to 3. Tables III to V: {len(seeds)} seeds from '
        f"{asked.seed}, {asked.scale:g} of the experiment's 147.8 s, cut at its end. Their runs, and the ablation's, "
        f"were made at {' and '.join(made_at)}.</p>",
        '<p class="note">Tables III to V are simulated; energy is estimated from assumed power curves; none of the '
        "paper's cards was used. Tables I and II are of models/cifar100, which had a teacher that had seen ImageNet "
        "(docs/model-card.md has its figures without one); the rest is of models/cifar100-lean.</p>",
        *accuracy_table(accuracy, origin),
        *run_tables(main_rows, asked.scale),
        *ablation_table(ablation, min(asked.scale, asked.ablation_scale)),
        *figures(live),
    ]
    write_page(asked.out / "report.html", "The paper's experiment, made again", "\n".join(body))
    kept = {
        "commit": measured_commit(CLONE),
        "commits_of_runs": made_at,
        "command": " ".join(["python", "examples/reference/paper.py", *sys.argv[1:]]),
        "versions": versions("slim-scheduler", "numpy", "torch"),
        "seconds": round(time.monotonic() - began),
        "seeds": list(seeds),
        "scale": asked.scale,
        "accuracy": {",".join(f"{w:g}" for w in t): top1 for t, top1 in accuracy.items()},
        "rows": {
            part: {row.name: {k: list(v.runs) for k, v in of.items()} for row, of in rows.items()}
            for part, rows in (("tables", main_rows), ("ablation", ablation))
        },
    }
    write_json(asked.out / "paper.json", kept)
    print_tables(accuracy, main_rows, ablation)
    print(f"\n{(time.monotonic() - began) / 60:.0f} minutes; report: {asked.out / 'report.html'}")


# Tables III to V, and the ablation


def simulate(rows: Sequence[Row], seeds: Sequence[int], scale: float, out: Path, workers: int | None) -> Runs:
    """Runs every row on every seed. Runs that are there already, whole and of the same configuration and policy, are
    kept. Raises RouterError where a router raised.
    """
    config = load_config(
        HERE / "cluster.toml",
        (f"workload.duration_s={FULL_S * scale:g}", "workload.end=cut", "workload.warmup_s=0"),
    )
    plan = trials([row.router for row in rows], seeds, out)
    plan.sort(key=lambda trial: Path(trial.router).name.startswith(QUICK))
    commit = measured_commit(CLONE)
    made = {row.router: Made(commit, policy_hash(row.router)) for row in rows}
    summaries: dict[str, dict[int, dict[str, Any]]] = {row.router: {} for row in rows}
    commits: set[str] = set()
    open_trials = []
    for trial in plan:
        kept = finished(config, trial)
        if kept is None:
            open_trials.append(trial)
            (trial.out / MADE).unlink(missing_ok=True)  # until the new run is whole
        else:
            summaries[trial.router][trial.seed], commit_of_run = kept
            commits.add(commit_of_run)
    if open_trials:
        commits.add(commit)
        with progress(f"{out.name}: {len(open_trials)} of {len(plan)} runs") as show:
            for done in run_simulated(config, open_trials, workers, show):
                refuse_raising(done.summary)
                write_json(done.trial.out / MADE, msgspec.to_builtins(made[done.trial.router]))
                summaries[done.trial.router][done.trial.seed] = done.summary
    return Runs({row: aggregate([summaries[row.router][seed] for seed in seeds]) for row in rows}, commits)


def finished(config: Config, trial: Trial) -> tuple[dict[str, Any], str] | None:
    """The summary and the commit of a run that was made before: complete, and of the same configuration and policy."""
    wanted = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, name=trial.router))
    try:
        summary = msgspec.json.decode((trial.out / "summary.json").read_bytes())
        made = msgspec.json.decode((trial.out / MADE).read_bytes(), type=Made)
        ran = config_from(tomllib.loads((trial.out / "config.toml").read_text()))
    except (OSError, ValueError, ConfigError):  # not there, cut off, or of another version
        return None
    same = ran == wanted and made.policy == policy_hash(trial.router)
    return (summary, made.commit) if same and not summary["interrupted"] else None


def policy_hash(router: str) -> str:
    """Of the manifest of a learned router's policy, which has the weights' own; empty for other routers."""
    manifest = Path(router.removeprefix("ppo:")) / "manifest.json"
    if not router.startswith("ppo:") or not manifest.is_file():  # a run says what it lacks
        return ""
    return hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]


COLUMNS = ("accuracy, %", "block latency, s: mean / sd", "block energy, J: mean / sd", "variance: mean / sd", "images")
PAIRS = (("block_latency_s", 3), ("energy_block_j", 1), ("utilization_variance", 4))


def cells(of: Estimates) -> list[str]:
    """A row's numbers: means over the seeds, with the 95 % interval of accuracy, latency and energy."""
    shown = [number(of, "accuracy", 2, scale=100.0)]
    for key, digits in PAIRS:
        shown.append(f"{number(of, f'{key}.mean', digits)} / {number(of, f'{key}.sd', digits, interval=False)}")
    return [*shown, number(of, "items_completed", 0, interval=False)]


def number(of: Estimates, key: str, digits: int, scale: float = 1.0, interval: bool = True) -> str:
    value = of.get(key, Estimate(None, None, ()))
    if value.mean is None:
        return "–"
    text = f"{value.mean * scale:,.{digits}f}"
    return f"{text} ± {value.ci95 * scale:,.{digits}f}" if interval and value.ci95 is not None else text


def paper_cells(paper: Paper) -> list[str]:
    pairs = zip((paper.latency, paper.energy, paper.variance), PAIRS, strict=True)
    shown = [" / ".join(f"{value:,.{digits}f}" for value in pair) for pair, (_, digits) in pairs]
    return [f"{paper.accuracy:.2f}", *shown, f"{paper.images:,}"]


def run_tables(rows: Mapping[Row, Estimates], scale: float) -> Iterator[str]:
    by_name = dict(rows)
    for title, of in TABLES.items():
        lines = []
        for row in of:
            if row.paper is not None:
                lines.append(("the paper", paper_cells(row.paper)))
        lines += [(f"{row.name} <small>simulated</small>", cells(by_name[row])) for row in of]
        yield from table(
            title, ("", *COLUMNS), lines, f"{FULL_S * scale:g} s of arrivals; mean over seeds ± 95 % interval"
        )
    random = by_name[TABLES["Table III: random routing"][0]]
    lines = [
        (
            name,
            [against_random(by_name[row], random, key) for key in ("block_latency_s.mean", "energy_block_j.mean")]
            + [points(by_name[row], random)],
        )
        for title, of in list(TABLES.items())[1:]
        for row in of
        for name in [f"{title.split(':')[1].strip()}, {row.name}"]
    ]
    paper = [
        ("the paper, efficiency", ["−96.45 %", "−97.31 %", "−4.13"]),
        ("the paper, balanced (its tables)", ["−32.06 %", "−44.85 %", "+0.83"]),
    ]
    yield from table("Against random routing", ("", "block latency", "block energy", "accuracy, points"), paper + lines)


def against_random(of: Estimates, random: Estimates, key: str) -> str:
    mine, theirs = of[key].mean, random[key].mean
    return "–" if mine is None or not theirs else f"{100 * (mine / theirs - 1):+.2f} %".replace("-", "−")


def points(of: Estimates, random: Estimates) -> str:
    mine, theirs = of["accuracy"].mean, random["accuracy"].mean
    return "–" if mine is None or theirs is None else f"{100 * (mine - theirs):+.2f}".replace("-", "−")


def ablation_table(rows: Mapping[Row, Estimates], scale: float) -> Iterator[str]:
    lines = [
        (code(row.name), [*cells(of), "–" if of["reward.mean"].mean is None else f"{of['reward.mean'].mean:.4f}"])
        for row, of in rows.items()
    ]
    said = f"weights of balanced.toml; {FULL_S * scale:g} s of arrivals, so queues are shorter than above; simulated"
    yield from table("What each addition is worth", ("", *COLUMNS, "reward per item"), lines, said)


def code(text: str) -> str:
    """Backticks as code elements."""
    parts = text.split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def table(title: str, head: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]], said: str = "") -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    yield '<div class="wide" tabindex="0"><table>'
    if said:
        yield f"<caption><span>{said}</span></caption>"
    yield "<thead><tr>" + "".join(f"<th>{text}</th>" for text in head) + "</tr></thead><tbody>"
    for name, values in lines:
        yield f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{value}</td>" for value in values) + "</tr>"
    yield "</tbody></table></div>"


# Tables I and II


def uniform_and_mixed(data: str) -> tuple[dict[tuple[float, ...], float], str]:
    """Top-1 in % of the paper's eight width tuples on test images, and where the numbers come from."""
    folder = CLONE / "models" / "cifar100"
    wanted = [*TABLE_I, *TABLE_II]
    if not data:
        shipped = read_accuracy(folder / TABLE_FILES["test"])
        return {
            t: 100 * float(np.mean(shipped.correct(t))) for t in wanted
        }, "from the shipped table; SLIM_CIFAR100 is not set"
    manifest = checkpoint.load_manifest(folder)
    images = load_data(data, (3, 32, 32)).test
    model = checkpoint.load(folder)
    shift, scale = (torch.tensor(values).view(1, -1, 1, 1) for values in (manifest.mean, manifest.std))
    right = dict.fromkeys(wanted, 0)
    with torch.inference_mode(), progress("tables I and II") as show:
        for start in range(0, len(images), IMAGES):
            pixels = (torch.from_numpy(images.pixels[start : start + IMAGES]) / 255.0 - shift) / scale
            labels = torch.from_numpy(images.labels[start : start + IMAGES])
            for widths in wanted:  # eight of 256 tuples
                right[widths] += int((model(pixels, widths).argmax(1) == labels).sum())
            show((start + len(labels)) / len(images))
    top1 = {widths: 100 * count / len(images) for widths, count in right.items()}
    return top1, f"measured now on {len(images):,} test images"


def accuracy_table(top1: Mapping[tuple[float, ...], float], origin: str) -> Iterator[str]:
    for title, paper in (("Table I: uniform widths", TABLE_I), ("Table II: mixed widths", TABLE_II)):
        lines = [
            (
                ", ".join(f"{w:g}" for w in t),
                [f"{theirs:.2f}", f"{top1[t]:.2f}", f"{top1[t] - theirs:+.2f}".replace("-", "−")],
            )
            for t, theirs in paper.items()
        ]
        yield from table(
            title, ("widths", "the paper, %", "this network, %", "difference"), lines, f"top-1 on CIFAR-100, {origin}"
        )


# Figures 1 to 3


class Measured(NamedTuple):
    """What this machine's CPU did, one thread: seconds per batch by (segment, width), and by how busy it was kept."""

    seconds: dict[tuple[int, float], list[float]]
    memory: dict[tuple[int, float], list[float]]  # MiB: weights and workspace
    busy: list[float]
    paced: list[float]  # seconds of a batch of 8 at width 1, through all segments


def measure_cpu(visits: int = 5) -> Measured:
    """Times every segment on one thread of this CPU, and a batch at paces that keep the thread more and more busy."""
    model = checkpoint.load(CLONE / "models" / "cifar100-lean")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[tuple[int, float], list[float]] = {}
    memory: dict[tuple[int, float], list[float]] = {}
    with torch.inference_mode(), progress("figures 1 to 3: this machine's CPU") as show:
        total = model.segments * len(model.widths)
        for place, (segment, width) in enumerate((s, w) for s in range(model.segments) for w in model.widths):
            piece, previous = model.slice(segment, width, "cpu"), width if segment else None
            piece.build_variant(previous)
            item = model.activation_shape(segment - 1, width) if segment else model.item_shape
            weights = piece.weight_bytes + piece.variant_bytes
            run = partial(piece.run, previous_width=previous)
            seconds[segment, width] = [
                statistics.median(timed(run, torch.rand(batch, *item)) for _ in range(visits)) for batch in BATCHES
            ]
            memory[segment, width] = [(weights + b * model.workspace_bytes(segment, width)) / 2**20 for b in BATCHES]
            show(place / total)
        busy, paced = paces(model, show)
    torch.set_num_threads(threads)
    return Measured(seconds, memory, busy, paced)


def timed(run: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    start = time.perf_counter()
    run(x)
    return time.perf_counter() - start


def paces(model: Any, show: Show, seconds: float = 1.0) -> tuple[list[float], list[float]]:
    """(share of the time busy, mean seconds of a batch) at paces from idle to back to back."""
    slices = [model.slice(s, 1.0, "cpu") for s in range(model.segments)]
    for piece in slices[1:]:
        piece.build_variant(1.0)

    def run(x: torch.Tensor) -> None:
        for place, piece in enumerate(slices):
            x = piece.run(x, 1.0 if place else None)

    x = torch.rand(8, *model.item_shape)
    run(x)
    alone = statistics.median(timed(run, x) for _ in range(10))
    busy, paced = [], []
    for wanted in (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0):
        period, took, start = alone / wanted, [], time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            took.append(timed(run, x))
            if wanted < 1.0:
                time.sleep(max(0.0, now + period - time.perf_counter()))
        busy.append(min(1.0, sum(took) / (time.perf_counter() - start)))
        paced.append(statistics.mean(took))
        show(wanted)
    return busy, paced


def figures(live: Measured) -> Iterator[str]:
    """Figures 1 to 3 as HTML: what the simulator assumes, and what this CPU did."""
    profile = read_profile(CLONE / "profiles" / "rtx-2080-ti.json")
    assumed = LatencyTable(profile, max(BATCHES))
    shape = checkpoint.load(CLONE / "models" / "cifar100-lean")
    derived = {
        (s, w): [assumed.seconds(s, w if s else None, w, b) for b in BATCHES]
        for s in range(shape.segments)
        for w in shape.widths
    }
    yield "<h2>Figures 1 to 3</h2>"
    yield (
        '<p class="soft">Assumed: the RTX 2080 Ti of the simulator, derived from public data. Measured: '
        "one thread of this machine's CPU, measured now.</p>"
    )
    yield '<div class="grid">'
    said = "One batch at a time, at the pace of the slowest full one: the share of the time that it takes."
    yield figure_element(utilisation_figure(derived, "assumed"), "Figure 1, assumed: utilisation by batch size", said)
    yield figure_element(
        utilisation_figure(live.seconds, "measured"), "Figure 1, measured: utilisation by batch size", said
    )
    said = "Weights and workspace, as the memory ledger counts them; the same on both."
    yield figure_element(memory_figure(live.memory), "Figure 1: memory by batch size", said)
    u = np.linspace(0.0, 1.0, 101)
    full = sum(derived[s, 1.0][-1] for s in range(shape.segments))
    latency = [full * profile.slowdown(float(x)) for x in u]
    yield figure_element(
        curve(u, [1000 * v for v in latency], "latency of a batch of 32 at width 1, ms", "assumed"),
        "Figure 2, assumed: latency by utilisation",
        "The slowdown curve of the profile: near-linear to 92 % busy, sharp beyond.",
    )
    yield figure_element(
        curve(live.busy, [1000 * v for v in live.paced], "latency of a batch of 8 at width 1, ms", "measured"),
        "Figure 2, measured: latency by utilisation",
        "The time of one batch, run at paces that keep the thread busy more and more.",
    )
    yield figure_element(
        curve(
            u,
            [profile.power(float(x)) * v for x, v in zip(u, latency, strict=True)],
            "P x L of a batch of 32, J",
            "assumed",
        ),
        "Figure 3, assumed: energy by utilisation",
        "Power curve times latency, as eq. 7 counts energy. A CPU without a meter has no measured counterpart.",
    )
    yield "</div>"


def utilisation_figure(seconds: Mapping[tuple[int, float], Sequence[float]], said: str) -> Figure:
    period = max(max(of) for of in seconds.values())
    return by_batch({key: [100 * v / period for v in of] for key, of in seconds.items()}, f"utilisation, % ({said})")


def memory_figure(memory: Mapping[tuple[int, float], Sequence[float]]) -> Figure:
    return by_batch(memory, "memory, MiB (counted)")


def by_batch(values: Mapping[tuple[int, float], Sequence[float]], label: str) -> Figure:
    """One panel per segment, one line per width."""
    segments = sorted({s for s, _ in values})
    with drawing(height=FIGURE_SIZE[1] * 1.3) as figure:
        panels = figure.subplots(2, -(-len(segments) // 2), sharex=True, sharey=True).flat
        for segment, axes in zip(segments, panels, strict=False):
            for i, width in enumerate(sorted(w for s, w in values if s == segment)):
                color, dash = series(i)
                axes.plot(BATCHES, values[segment, width], color=color, ls=dash, marker=".", label=f"width {width:g}")
            axes.set_title(f"segment {segment}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(BATCHES, [str(b) for b in BATCHES])
        figure.supylabel(label, fontsize=10)
        figure.supxlabel("batch size", fontsize=10)
        axes.legend()
    return figure


def curve(x: Any, y: Sequence[float], label: str, said: str) -> Figure:
    with drawing() as figure:
        axes = figure.subplots()
        axes.plot([100 * v for v in x], y, marker="o" if said == "measured" else None)
        axes.set_xlabel(f"utilisation, % ({said})")
        axes.set_ylabel(label)
        axes.set_ylim(0, max(y) * 1.1)
    return figure


# The terminal


def print_tables(accuracy: Mapping[tuple[float, ...], float], *parts: Mapping[Row, Estimates]) -> None:
    print("Tables I and II, top-1 %: widths, the paper, this network")
    for widths, theirs in {**TABLE_I, **TABLE_II}.items():
        print(f"  {', '.join(f'{w:g}' for w in widths):24} {theirs:6.2f} {accuracy[widths]:6.2f}")
    for title, rows in zip(("Tables III to V, simulated", "Ablation, simulated"), parts, strict=True):
        print(f"\n{title}: {' | '.join(COLUMNS)}")
        for row, of in rows.items():
            if row.paper is not None:
                print(f"  {'the paper':44} {' | '.join(paper_cells(row.paper))}")
            print(f"  {row.name:44} {' | '.join(cells(of))}")


if __name__ == "__main__":
    try:
        main()
    except SlimError as error:
        print(f"paper: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("paper: interrupted; what was finished is kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
