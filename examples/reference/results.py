"""The tables and the figure of docs/reference-cluster.md, from runs that are stored by seed.

    make results                                    # every experiment of results.toml; an interrupted one goes on
    python examples/reference/results.py ten        # one of them
    python examples/reference/results.py --look     # two seeds of 4 s each into runs/results-look; the page stays
    python examples/reference/results.py --tables   # the page from what is stored; nothing is run
    python examples/reference/results.py --check    # the first seed of every row again: is it what is stored?
    SLIM_TRACES=FOLDER python examples/reference/results.py real-code    # FOLDER has the file of real arrivals

A run is stored in results/NAME.json as soon as it has ended, with the commit that it was made at. It is made again
only where the experiment's settings, its configuration file or its policy have changed. The page has a table of each
experiment between `<!-- results: NAME -->` and `<!-- /results -->`; a test holds it against the stored runs.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from results_figure import Lines, draw

from slim_scheduler.cli.terminal import progress
from slim_scheduler.core.errors import ConfigError, SlimError
from slim_scheduler.core.router.plan.program import PlanProgram
from slim_scheduler.report.measures import Estimate, Measure, estimate, flatten
from slim_scheduler.report.notes import refuse_raising
from slim_scheduler.run.compare import Finished, run_simulated, trials
from slim_scheduler.run.frontier import program
from slim_scheduler.run.provenance import measured_commit, versions
from slim_scheduler.run.runs import write_json
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
from slim_scheduler.setup.config import Config, load_config
from slim_scheduler.setup.machines import load_profiles, load_shape

HERE = Path(__file__).parent
CLONE = HERE.parents[1]
EXPERIMENTS = HERE / "results.toml"
STORED = HERE / "results"
PAGE = CLONE / "docs" / "reference-cluster.md"
FIGURE = CLONE / "docs" / "figures" / "routers-loads.svg"
WRITTEN = ("examples/reference/results", "docs/reference-cluster.md", "docs/figures/routers-loads.svg")
DRAWN = {"below": "Poisson arrivals (simulated)", "bursts": "bursts (simulated)"}
OFF_THE_SCALE = ("reward-greedy",)
LOOK_SEEDS = (0, 2)
LOOK_SETTINGS = ("workload.duration_s=4", "workload.warmup_s=0.4")
SLO = re.compile(r"@(\S+) ms$")
MARKED = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)

ACCURACY = Measure("accuracy_arrived", "accuracy", "%", 100, 2)
MEAN = Measure("latency_s.mean", "mean", "ms", 1000, 0)
P99 = Measure("latency_s.p99", "p99", "ms", 1000, 0)
REWARD = Measure("reward.mean", "reward", digits=4)
ENERGY = Measure("energy_per_item_j", "energy per item", "mJ", 1000, 1)
COLUMNS = {
    "items": (ACCURACY, MEAN, P99, ENERGY, REWARD),
    "passes": (ACCURACY, MEAN, P99, ENERGY),
    "blocks": (
        ACCURACY,
        Measure("block_latency_s.mean", "block latency", "ms", 1000, 1),
        Measure("energy_block_j.mean", "block energy", "J", 1, 2),
        REWARD,
    ),
    "deadlines": (
        Measure("accuracy_arrived", "right of all that came", "%", 100, 2),
        Measure("goodput_items_s", "in time", "items/s", 1, 0),
        P99,
        ENERGY,
    ),
}
FIGURE_MEASURES = (ACCURACY, P99, ENERGY)
KEPT = (
    *dict.fromkeys(measure.key for columns in COLUMNS.values() for measure in columns),
    "utilization_variance.mean",
    "items_arrived",
    "items_completed",
)


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table: every router at every load, on the same seeds. Settings are as in `--set`; `share=0.5` stands for half
    of the highest load that the configuration's cluster carries (`slim frontier`), rounded to whole items per second.

    `trace` is a file of arrival times in the folder SLIM_TRACES, sped up until its mean is the load's `workload.rate`.
    The seed then decides only which images arrive. `W` in a router's name stands for the load's width tuple in `fixed`,
    `SLO` in `slackfit@SLO` for its milliseconds in `slo_ms`, which this router alone is given.
    """

    name: str
    says: str
    config: str
    routers: tuple[str, ...]
    seeds: tuple[int, int]
    columns: Literal["items", "passes", "blocks", "deadlines"]
    set: tuple[str, ...] = ()
    trace: str = ""
    loads: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: {"": ()})
    fixed: dict[str, str] = {}
    slo_ms: dict[str, float] = {}

    def routers_at(self, load: str) -> tuple[str, ...]:
        """Every router once, by its whole name."""
        return tuple(dict.fromkeys(self.at(load, router) for router in self.routers))

    def at(self, load: str, router: str) -> str:
        slo = f"@{self.slo_ms[load]:g} ms" if load in self.slo_ms else ""
        return router.replace(":W", f":{self.fixed.get(load, 'W')}").replace("@SLO", slo)

    @property
    def each_seed(self) -> range:
        return range(self.seeds[0], self.seeds[0] + self.seeds[1])

    def settings(self, load: str, router: str = "", folder: Path = HERE) -> tuple[str, ...]:
        slo = SLO.search(router)
        own = (f"workload.slo_ms={slo[1]}",) if slo else ()
        return tuple(_rate(setting, folder / self.config) for setting in (*self.set, *self.loads[load], *own))


def _rate(setting: str, config: Path) -> str:
    name, _, share = setting.partition("=")
    return f"workload.rate={float(share) * highest_load(config):.0f}" if name == "share" else setting


def highest_load(path: Path) -> float:
    """What a configuration's cluster carries at most, in items per second."""
    return _program(path).max_load()


@cache
def _program(path: Path) -> PlanProgram:
    config = load_config(path)
    shape = load_shape(config)
    return program(config, shape, load_profiles(config, shape), read_accuracy(accuracy_path(config)))


class Run(msgspec.Struct, frozen=True):
    """One stored run. `made_of` stands for settings, configuration file and policy; metrics are the summary's."""

    load: str
    router: str
    seed: int
    commit: str
    made_of: str
    metrics: dict[str, float | None]


class Store(msgspec.Struct):
    """What results/NAME.json holds."""

    command: str = "make results"
    versions: dict[str, str] = {}
    runs: list[Run] = []

    def of(self, load: str, router: str, seeds: Sequence[int], made_of: str) -> dict[int, Run]:
        """The runs that still hold, by seed."""
        found = {r.seed: r for r in self.runs if (r.load, r.router, r.made_of) == (load, router, made_of)}
        return {seed: found[seed] for seed in seeds if seed in found}


def read_experiments(path: Path = EXPERIMENTS) -> dict[str, Experiment]:
    listed = msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Experiment]])["experiments"]
    return {experiment.name: experiment for experiment in listed}


def read_store(folder: Path, name: str) -> Store:
    path = folder / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Store) if path.is_file() else Store()


def whole_name(router: str) -> str:
    """As the program knows it: `ppo:NAME` with the policy's folder, `slackfit` without its SLO."""
    if router.startswith("ppo:"):
        return f"ppo:{HERE / 'policies' / router.removeprefix('ppo:')}"
    return SLO.sub("", router)


def made_of(experiment: Experiment, load: str, router: str, folder: Path = HERE) -> str:
    """Changes whenever a run of these would come out otherwise by what is configured, comments aside."""
    configured = tomllib.loads((folder / experiment.config).read_text())
    policy = HERE / "policies" / router.removeprefix("ppo:") / "manifest.json"
    trained = policy.read_text() if router.startswith("ppo:") else ""  # with the weights' hash
    replayed = [experiment.trace] if experiment.trace else []
    settings = experiment.settings(load, router, folder)
    parts = json.dumps([configured, settings, router, trained, *replayed], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def trace_file(trace: str) -> Path:
    """Where the file is. Raises ConfigError."""
    path = Path(os.environ.get("SLIM_TRACES", "")) / trace
    if "SLIM_TRACES" not in os.environ or not path.is_file():
        raise ConfigError(f"{path} is not there; SLIM_TRACES names the folder that holds {trace}")
    return path.resolve()


def run(experiment: Experiment, stored: Path, out: Path, workers: int | None = None, folder: Path = HERE) -> int:
    """Makes the runs that are not stored, and stores each as it ends. Returns how many were made."""
    commit = measured_commit(CLONE, *WRITTEN)
    store = read_store(stored, experiment.name)
    made = 0
    for load, config, names in configured(experiment, folder):
        marks = {router: made_of(experiment, load, router, folder) for router in names.values()}
        plan = [
            trial
            for trial in trials(list(names), experiment.each_seed, out / experiment.name / load)
            if not store.of(load, names[trial.router], [trial.seed], marks[names[trial.router]])
        ]
        if not plan:
            continue
        with progress(f"{experiment.name} {load}: {len(plan)} runs") as show:
            for done in run_simulated(config, plan, workers, show):
                if done.summary["interrupted"]:
                    continue
                refuse_raising(done.summary)
                router, seed = names[done.trial.router], done.trial.seed
                new = Run(load, router, seed, commit, marks[router], kept(done))
                others = [r for r in store.runs if (r.load, r.router, r.seed) != (load, router, seed)]
                store.runs = sorted([*others, new], key=lambda r: (r.load, r.router, r.seed))
                store.versions = versions("slim-scheduler", "numpy")
                stored.mkdir(parents=True, exist_ok=True)
                write_json(stored / f"{experiment.name}.json", msgspec.to_builtins(store))
                made += 1
    return made


def check(
    experiment: Experiment, stored: Path, out: Path, workers: int | None = None, folder: Path = HERE
) -> tuple[int, list[str]]:
    """Makes the first seed of every stored row again, and says of each what came out.

    Returns how many were made, and what came out otherwise.
    """
    store, seed = read_store(stored, experiment.name), experiment.seeds[0]
    made, otherwise = 0, []
    for load, config, names in configured(experiment, folder):
        before = {
            router: store.of(load, router, [seed], made_of(experiment, load, router, folder))
            for router in names.values()
        }
        plan = [t for t in trials(list(names), [seed], out / experiment.name / load) if before[names[t.router]]]
        if not plan:
            continue
        with progress(f"{experiment.name} {load}: {len(plan)} rows") as show:
            for done in run_simulated(config, plan, workers, show):
                if done.summary["interrupted"]:
                    continue
                made += 1
                router, now = names[done.trial.router], kept(done)
                then = before[router][seed].metrics
                row = " ".join(filter(None, (experiment.name, load, router)))
                differ = [
                    f"{row}, seed {seed}: {key} is {now[key]}, stored {then[key]}"
                    for key in then
                    if now[key] != then[key]
                ]
                print("\n".join(differ) or f"{row}, seed {seed}: as stored", flush=True)  # not lost on Ctrl-C
                otherwise += differ
    return made, otherwise


def configured(experiment: Experiment, folder: Path = HERE) -> Iterator[tuple[str, Config, dict[str, str]]]:
    """Every load, its configuration, and the routers that it is of, by their whole names; a router with settings of its
    own comes with a configuration of its own. Raises ConfigError where the trace is not there."""
    for load in experiment.loads:
        alike: dict[tuple[str, ...], dict[str, str]] = {}
        for router in experiment.routers_at(load):
            alike.setdefault(experiment.settings(load, router, folder), {})[whole_name(router)] = router
        for settings, names in alike.items():
            if experiment.trace:
                replayed = f"workload.trace={trace_file(experiment.trace)}"
                settings = (*settings, "workload.kind=trace", "workload.trace_at_rate=true", replayed)
            yield load, load_config(folder / experiment.config, settings), names


def kept(done: Finished) -> dict[str, float | None]:
    """What of a run is stored."""
    numbers = flatten(done.summary)
    return {key: numbers.get(key) for key in KEPT}


# Tables


def table(experiment: Experiment, store: Store, folder: Path = HERE) -> str:
    """Markdown: a line per router and load that is stored whole, means with their 95 % intervals; what lacks is said.

    The reward against the first router's is the difference, paired by seed, over the first's mean.
    """
    seeds = experiment.each_seed
    rows = {
        (load, router): store.of(load, router, seeds, made_of(experiment, load, router, folder))
        for load in experiment.loads
        for router in experiment.routers_at(load)
    }
    wanted = {load: len(experiment.routers_at(load)) * len(seeds) for load in experiment.loads}
    there = {load: sum(len(rows[load, router]) for router in experiment.routers_at(load)) for load in wanted}
    needs = "SLIM_TRACES=FOLDER " if experiment.trace else ""
    command = f"`{needs}python examples/reference/results.py {experiment.name}`"
    rows = {key: runs for key, runs in rows.items() if there[key[0]] == wanted[key[0]]}
    if not rows:
        return (
            f"{experiment.says}\n{sum(there.values())} of {sum(wanted.values())} runs are stored; "
            f"the others: {command}.\n"
        )
    commits = sorted({run.commit[:12] for runs in rows.values() for run in runs.values()})
    measures = COLUMNS[experiment.columns]
    several = len(experiment.loads) > 1
    first = experiment.routers[0]
    compared = len(experiment.routers) > 1
    head = [
        *(["load"] if several else []),
        "router",
        *[measure.heading for measure in measures],
        *([f"reward against `{first}`, %"] if compared else []),
        "answered, %",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (load, router), runs in rows.items():
        cells = [*([load] if several else []), f"`{router}`"]
        for measure in measures:
            value = estimate([run.metrics[measure.key] for run in runs.values()])
            cells.append(measure.show(value.mean, value.ci95).replace("−", "-"))
        if compared:
            cells.append("" if router == first else _percent(_relative(runs, rows[load, first])))
        cells.append(f"{_answered(list(runs.values())):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    said = [
        experiment.says,
        f"Simulated; seeds {seeds[0]} to {seeds[-1]}, mean ± 95 % interval.",
        f"Commit {', '.join(f'`{commit}`' for commit in commits)}; {command}.",
    ]
    said += [f"Load {load} is not whole: {n} of {wanted[load]} runs." for load, n in there.items() if n < wanted[load]]
    return "\n".join([*said, "", *lines]) + "\n"


def page(text: str, experiments: dict[str, Experiment], stored: Path = STORED) -> str:
    """The page with every marked table as the stored runs give it. Raises ConfigError for an unknown name."""

    def fill(found: re.Match[str]) -> str:
        name = found[2]
        if name not in experiments:
            raise ConfigError(
                f"the page has a table {name}, which no experiment is; there are {', '.join(experiments)}"
            )
        return f"{found[1]}{table(experiments[name], read_store(stored, name))}{found[4]}"

    return MARKED.sub(fill, text)


def drawn(experiments: dict[str, Experiment], stored: Path = STORED) -> tuple[dict[str, Lines], dict[str, float]]:
    """The figure's panels, of loads that are stored whole, and the highest accuracy by share of the highest load."""
    panels = {
        title: _lines(experiments[name], read_store(stored, name), FIGURE_MEASURES) for name, title in DRAWN.items()
    }
    first = experiments[next(iter(DRAWN))]
    return panels, {load: _most_accurate(HERE / first.config, float(load)) for load in first.loads}


def _lines(experiment: Experiment, store: Store, measures: Sequence[Measure]) -> Lines:
    lines: dict[str, dict[str, list[float]]] = {}
    for load in experiment.loads:
        runs = {
            router: store.of(load, whole, experiment.each_seed, made_of(experiment, load, whole))
            for router in experiment.routers
            for whole in [experiment.at(load, router)]
        }
        if any(len(of) < len(experiment.each_seed) for of in runs.values()):
            continue
        for router, of in runs.items():
            if router not in OFF_THE_SCALE:
                means = [estimate([run.metrics[m.key] for run in of.values()]).mean for m in measures]
                row = [m.scale * mean for m, mean in zip(measures, means, strict=True) if mean is not None]
                lines.setdefault(router, {})[load] = row
    return lines


@cache
def _most_accurate(path: Path, share: float) -> float:
    """The accuracy in percent that no router can pass at this share of the highest load, in one pass."""
    plan = _program(path).most_accurate(share * highest_load(path))
    assert plan is not None
    return 100 * plan.accuracy


def _answered(runs: Sequence[Run]) -> float:
    arrived = sum(run.metrics["items_arrived"] or 0 for run in runs)
    return 100 * sum(run.metrics["items_completed"] or 0 for run in runs) / arrived if arrived else 0.0


def _relative(runs: dict[int, Run], first: dict[int, Run]) -> Estimate:
    """Paired difference of the reward, as a share of the other's mean."""
    pairs = [(runs[seed].metrics["reward.mean"], first[seed].metrics["reward.mean"]) for seed in runs]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    scale = abs(sum(b for _, b in known) / len(known)) if known else 0.0
    return estimate([(a - b) / scale for a, b in known] if scale and len(known) == len(pairs) else [None])


def _percent(difference: Estimate) -> str:
    if difference.mean is None:
        return "–"
    spread = "" if difference.ci95 is None else f" ± {100 * difference.ci95:.1f}"
    return f"{100 * difference.mean:+.1f}{spread}"


def write(experiments: dict[str, Experiment]) -> None:
    """The page's tables and its figure."""
    PAGE.write_text(page(PAGE.read_text(), experiments))
    panels, bound = drawn(experiments)
    draw(panels, FIGURE_MEASURES, bound, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments of results.toml (default: all)")
    parser.add_argument("--look", action="store_true", help="a first look: seeds 0 and 1, runs of 4 s")
    parser.add_argument(
        "--tables", action="store_true", help="only make the page's tables and figure from what is stored"
    )
    parser.add_argument("--check", action="store_true", help="make each row's first seed again; nothing is stored")
    parser.add_argument("--out", type=Path, default=Path("runs/results"), help="folder of the runs' records")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: one per core)")
    asked = parser.parse_args()
    experiments = read_experiments()
    for name in asked.names:
        if name not in experiments:
            raise ConfigError(f"no experiment {name}; there are {', '.join(experiments)}")
    chosen = [experiments[name] for name in asked.names or experiments]
    if asked.look:
        stored = asked.out.with_name(asked.out.name + "-look")
        for listed in chosen:
            look = msgspec.structs.replace(listed, seeds=LOOK_SEEDS, set=(*listed.set, *LOOK_SETTINGS))
            run(look, stored, stored, asked.workers)
            print(f"\n{look.name}, a look\n\n{table(look, read_store(stored, look.name))}", flush=True)
        return
    if asked.tables:
        write(experiments)
        return
    if asked.check:
        again = asked.out.with_name(asked.out.name + "-check")
        differ = False
        for listed in chosen:
            made, otherwise = check(listed, STORED, again, asked.workers)
            print(f"{listed.name}: {made} rows made again, {len(otherwise)} numbers differ", flush=True)
            differ |= bool(otherwise)
        sys.exit(differ)
    for experiment in chosen:
        print(f"{experiment.name}: {run(experiment, STORED, asked.out, asked.workers)} runs made", flush=True)
        write(experiments)


if __name__ == "__main__":
    try:
        main()
    except SlimError as error:
        print(f"results: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("results: interrupted; what was made is stored, and what was checked is said above", file=sys.stderr)
        sys.exit(130)
