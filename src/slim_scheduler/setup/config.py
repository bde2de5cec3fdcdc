"""The configuration of a run: TOML plus `--set key.path=value` overrides, typed and checked.

Relative paths start from the file's folder where they exist there, else from the working directory; those of an
override start from the working directory. Fields carry the units users write; `machines.py` turns them into the core's
seconds and bytes. An unknown key is an error that names the nearest valid one.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.learned.layout import Kind
from slim_scheduler.core.types import ServerName
from slim_scheduler.setup.recipes import RECIPES, RouterRecipe
from slim_scheduler.setup.removed import REMOVED
from slim_scheduler.setup.routers import ROUTERS, parse_router

# Resources that a server does not ask for by name
RAYS_OWN = {
    "CPU": "servers take none of Ray's CPUs; leave it out",
    "memory": "vram_budget_gib bounds a server's memory",
}

Tier = Literal["user", "paper", "expert"]  # who turns a key: everybody; who reproduces the paper; who knows the code


def key(
    tier: Tier, says: str, *, above: float | None = None, least: float | None = None, most: float | None = None
) -> msgspec.Meta:
    """What a field says of itself: who turns it, what it means, and its bounds (`above` and `least` mean finite too).

    docs/configuration.md is made from this (`setup/reference.py`), and `_check_bounds` reads the bounds.
    """
    bounds = {name: bound for name, bound in (("above", above), ("least", least), ("most", most)) if bound is not None}
    return msgspec.Meta(description=says, extra={"tier": tier, "bounds": bounds})


ROUTER_FILES = tuple(name if name.endswith("@") else f"{name}:" for name, kind in ROUTERS.items() if kind.needs_files)
# Keys that may hold a path, and what may stand before it.
PATHS = {
    ".model.path": ("",),
    ".servers.profile": ("",),
    ".router.name": ROUTER_FILES,
    ".router.fallback": ROUTER_FILES,
    ".workload.data": ("",),
    ".workload.trace": ("",),
    ".training.warm_start": ROUTER_FILES,
}


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network that is served."""

    path: Annotated[str, key("user", "folder of the network: weights, manifest, accuracy tables")] = "models/digits"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server: one device with its greedy scheduler (the paper's Algorithm 1)."""

    name: Annotated[ServerName, key("user", "its name, in records, answers and metrics")]
    device: Annotated[str, key("user", "live: `cpu`, `cuda:N` or an engine (docs/engines.md); simulated: a profile")]
    profile: Annotated[str | None, key("user", "profile of a live device; none: profiles/DEVICE-MODEL.json")] = None
    max_batch: Annotated[int, key("user", "most tasks of one key that run together (B_max)", above=0)] = 32
    vram_budget_gib: Annotated[float, key("user", "memory that instances and batches may take (M_max)", above=0)] = 10.0
    utilization_block: Annotated[
        float, key("paper", "no instance is loaded while the device is at least so busy (U_blk)", above=0)
    ] = 0.95
    idle_unload_s: Annotated[float, key("user", "an instance not used for so long is unloaded (t_idle)", above=0)] = (
        30.0
    )
    scale_queue_threshold: Annotated[
        int, key("paper", "several instances of one kind are loaded from so many waiting tasks on (Q_th)", above=0)
    ] = 16
    max_new_instances: Annotated[int, key("paper", "most instances loaded per trigger (N_new)", above=0)] = 2
    max_concurrent_batches: Annotated[
        int | None, key("expert", "batches at the same time; none: 1 on a CPU, 2 elsewhere", above=0)
    ] = None
    max_upgrade: Annotated[
        float | None, key("user", "how much wider than asked for an instance may be; none: any", least=0)
    ] = None
    credit_tasks: Annotated[
        int | Literal["auto"] | None,
        key(
            "expert",
            "most tasks sent and not yet reported done; none: 2 x max_batch; `auto`: where `[network]` takes time and "
            "there is a profile, about as many as keep the device busy while work waits",
        ),
    ] = None
    batch_window_ms: Annotated[
        float | Literal["auto"],
        key("user", "how long tasks may be held back for a batch worth starting; 0: not at all, the paper's"),
    ] = 0.0
    tile: Annotated[
        int | Literal["auto"],
        key("expert", "with a batch window: so many tasks of a key are worth starting; `auto`: the profile's knee"),
    ] = "auto"
    slowdown: Annotated[
        float, key("user", "takes so many times as long; live it waits without using the CPU, counted busy", above=0)
    ] = 1.0
    slowdown_of: Annotated[
        Literal["work", "profile"],
        key("expert", "live, as long as what: its work now, or its profile's mean (of one batch at a time)"),
    ] = "work"
    threads: Annotated[int, key("user", "CPU threads of a live server on a CPU", above=0)] = 1
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "auto"],
        key(
            "user",
            "what a live device computes in; `auto`: the fastest whose measured accuracy is fp32's to 0.2 points",
        ),
    ] = "fp32"
    resources: Annotated[
        dict[str, float],
        key("user", "Ray: what it takes of its machine, such as {gtx980ti = 1}; GPU: 1 for cuda devices"),
    ] = {}

    @property
    def concurrency(self) -> int:
        return self.max_concurrent_batches or (1 if self.on_cpu else 2)

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on this process's own cores."""
        return self.device.startswith("cpu") or self.device.endswith(":CPU")


class DispatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dispatcher: its queue, its limits, and when a server counts as lost."""

    reentry: Annotated[
        Literal["back", "oldest-item"], key("paper", "where the next segment's task enters the global FIFO")
    ] = "back"
    queue: Annotated[
        Literal["fifo", "shortest", "least-slack"],
        key(
            "user",
            "the waiting task that is next: the first that came, the one with the least computing left, the one with "
            "the least time to spare before its deadline",
        ),
    ] = "fifo"
    queue_bound_s: Annotated[
        float, key("expert", "other than `fifo`: no task is passed by one that came so much later", above=0)
    ] = 0.5
    max_waiting_items: Annotated[int, key("user", "new arrivals are refused beyond so many waiting items", above=0)] = (
        100_000
    )
    max_activation_mib: Annotated[
        float, key("expert", "segment 0 is held back while activations of items in flight take more", above=0)
    ] = 2048.0
    heartbeat_timeout_s: Annotated[float, key("expert", "a server silent for so long is out of service", above=0)] = 0.8
    no_server_timeout_s: Annotated[float, key("expert", "items fail after so long without any server", above=0)] = 30.0


NO_LIMIT_MBPS = 1e6  # that inputs take microseconds


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated network; live clusters have a real one."""

    latency_ms: Annotated[float, key("user", "of every message, each way", least=0)] = 0.0
    mbps: Annotated[float, key("user", "per server and direction", above=0)] = NO_LIMIT_MBPS
    shared_mbps: Annotated[float | None, key("user", "one medium for all servers, instead of `mbps`", above=0)] = None
    activations: Annotated[bool, key("paper", "false: only the input's bytes are charged")] = True

    @property
    def takes_time(self) -> bool:
        return self.latency_ms > 0 or self.shared_mbps is not None or self.mbps < NO_LIMIT_MBPS


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What servers report of themselves."""

    period_s: Annotated[float, key("expert", "between two reports of a server", above=0)] = 0.1
    age_s: Annotated[float, key("expert", "simulated delay of reports", least=0)] = 0.0


FaultKind = Literal["exit", "crash", "hang", "slow", "recover", "drop-messages", "duplicate-messages", "delay-messages"]


class FaultConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One simulated fault.

    `exit`: the process ends, and the broken connection tells; `crash`: the machine is gone without a word.
    """

    server: Annotated[ServerName, key("user", "the server that it befalls")]
    at_s: Annotated[float, key("user", "when, from the run's start", least=0)]
    kind: Annotated[FaultKind, key("user", "what happens")]
    factor: Annotated[float, key("user", "`slow`: how many times slower", above=0)] = 3.0
    share: Annotated[float, key("user", "share of the messages that are dropped, doubled or late", least=0, most=1)] = (
        0.01
    )
    duration_s: Annotated[float | None, key("user", "ends the fault; none: it lasts", above=0)] = None


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who decides."""

    name: Annotated[
        str, key("user", "the router, with its argument: `jsq:0.5`, `lp`, `ppo:FOLDER`, `module:Class`")
    ] = "random"
    groups: Annotated[tuple[int, ...], key("paper", "group sizes that the learned router and `random` choose from")] = (
        1, 2, 4, 8, 16, 32,
    )  # fmt: skip
    fallback: Annotated[
        str, key("user", "decides where the router cannot; empty: `cost-model` at the middle width")
    ] = ""
    sample: Annotated[bool, key("paper", "a learned router draws from its policy instead of taking the argmax")] = False
    escalation: Annotated[
        bool, key("user", "`lp`, and policies trained with it, run items of small margin again at another width")
    ] = False


class WorkloadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arrivals of `slim simulate`, `bench`, `compare` and `train`."""

    kind: Annotated[
        Literal["poisson", "steps", "bursty", "diurnal", "trace"],
        key(
            "user",
            "`steps`: Poisson at a rate that changes; `bursty`: two-state Markov-modulated Poisson; `diurnal`: a sine, "
            "one period over `duration_s`, by half of the rate; `trace`: a file's arrivals",
        ),
    ] = "poisson"
    rate: Annotated[
        float, key("user", "in `rate_unit`, the mean of every kind but `steps` and a trace as recorded", above=0)
    ] = 200.0
    rate_unit: Annotated[
        Literal["items/s", "narrowest"],
        key("user", "`narrowest`: multiples of what all servers carry at the narrowest width, by their profiles"),
    ] = "items/s"
    duration_s: Annotated[float, key("user", "arrivals stop then", above=0)] = 30.0
    data: Annotated[
        str, key("user", "`digits`, a folder in the cifar-100-binary layout, or class folders of images")
    ] = "digits"
    deadline_ms: Annotated[float, key("user", "of every item, from its arrival; 0: none", least=0)] = 0.0
    slo_ms: Annotated[float, key("user", "what counts as in time where there is no deadline", above=0)] = 500.0
    warmup_s: Annotated[float | None, key("user", "not measured; none: the first 10 %")] = None
    end: Annotated[
        Literal["drain", "cut"], key("user", "`drain`: what has come is finished; `cut`: the run stops, as the paper's")
    ] = "drain"
    items_per_request: Annotated[int, key("user", "items of one request", above=0)] = 1
    trace: Annotated[str | None, key("user", "file of arrival times, for `trace`: CSV, also gzipped, or Parquet")] = (
        None
    )
    trace_at_rate: Annotated[
        bool, key("user", "`trace`: sped up or slowed down until its mean is `rate`; false: as recorded")
    ] = False
    steps: Annotated[
        tuple[tuple[float, float], ...],
        key("user", "`steps`: [seconds, factor on `rate`], one after the other; the last one lasts"),
    ] = ()
    burst_factor: Annotated[float, key("user", "`bursty`: rate in a burst over the calm rate", above=0)] = 4.0
    burst_s: Annotated[float, key("user", "`bursty`: mean length of a burst", above=0)] = 1.0
    burst_every_s: Annotated[float, key("user", "`bursty`: mean time from burst to burst", above=0)] = 5.0

    @property
    def warmup(self) -> float:
        return 0.1 * self.duration_s if self.warmup_s is None else self.warmup_s


class RewardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of eq. 7."""

    alpha: Annotated[float, key("user", "accuracy")] = 1.0
    beta: Annotated[float, key("user", "a second of block latency")] = 0.1
    gamma: Annotated[float, key("user", "a joule of block energy")] = 0.001
    delta: Annotated[float, key("user", "variance of utilisation over servers")] = 0.5
    bonus: Annotated[float, key("paper", "added to every block's reward (b)")] = 0.0
    center_accuracy: Annotated[bool, key("paper", "accuracy counts as its difference to the mean top-1")] = True


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the servers run."""

    address: Annotated[
        str,
        key(
            "user",
            "empty: this process; `local`: a Ray cluster of this machine's own, which ends with the run; `auto`, "
            "`HOST:PORT` or `ray://HOST:PORT`: one that runs already",
        ),
    ] = ""


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of a run is kept."""

    level: Annotated[
        Literal["full", "blocks", "summary"], key("user", "`full` can be replayed; `summary` keeps what measures need")
    ] = "blocks"


class TrainingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How `slim train` trains: PPO's settings, and the clusters it practises on (docs/training.md)."""

    recipe: Annotated[
        Literal["paper", "planned"], key("user", "`paper`: the method's own; `planned`: beside the plan of `lp`")
    ] = "planned"
    observation: Annotated[
        Literal["paper", "extended", "planned"] | None,
        key("expert", "`extended`: a row per server and no plan; none: the recipe's"),
    ] = None
    decisions: Annotated[
        int, key("user", "decisions to learn from, after the warm start; 0: imitation alone", least=0)
    ] = 600_000
    workers: Annotated[int, key("expert", "processes that act, each with episodes of its own", above=0)] = 2
    rollout_decisions: Annotated[int, key("expert", "decisions of one worker per update", above=0)] = 2048
    episode_rollouts: Annotated[int, key("expert", "rollouts after which an episode is cut", above=0)] = 4
    learning_rate: Annotated[float, key("expert", "of Adam, at the start", above=0)] = 1e-3
    entropy_coef: Annotated[float, key("paper", "c_H of eq. 13", least=0)] = 0.003
    plan_coef: Annotated[float, key("expert", "`planned`: how strongly the width is held to the plan's next")] = 0.0
    plan_server_coef: Annotated[float, key("expert", "`planned`: the same for the server, to `lp`'s choice")] = 0.0
    plan_rho: Annotated[
        float | Literal["lp"],
        key("expert", "how busy plans let devices and links be; above 1 the queue may grow; `lp`: as `lp`'s", above=0),
    ] = 0.89
    plan_queue_s: Annotated[
        float,
        key(
            "expert",
            "so long a queue may stand, and a longer one as with `lp@SECONDS`; 0: as `plan_rho` has it",
            least=0,
        ),
    ] = 0.0
    horizon_s: Annotated[
        float | None,
        key("expert", "returns look ahead, discounted with this time constant; none: eq. 8, one step", above=0),
    ] = None
    target_delay_s: Annotated[
        float | None,
        key("expert", "a decision is charged the plan's price, times how much longer tasks stay than this", above=0),
    ] = None
    charged_batch: Annotated[
        Literal["own", "shared"], key("expert", "charged for a batch of its own, or its share of the one that ran")
    ] = "own"
    backlog_s: Annotated[
        float, key("expert", "half of the episodes begin with up to so much work waiting", least=0)
    ] = 0.0
    loads: Annotated[tuple[float, float], key("user", "factors on `workload.rate`, drawn per episode")] = (1.0, 1.0)
    servers: Annotated[
        tuple[int, int] | None, key("user", "how many copies of configured servers an episode has; none: the cluster")
    ] = None
    slowdown: Annotated[float, key("expert", "such copies are up to so many times slower", least=1)] = 1.0
    warm_start: Annotated[str, key("user", "a heuristic that is imitated first")] = ""
    warm_start_decisions: Annotated[int, key("expert", "decisions of that imitation", least=0)] = 40_000
    warm_start_doubt: Annotated[float, key("expert", "share of even choices in what is imitated", least=0, most=1)] = (
        0.1
    )

    @property
    def resolved(self) -> RouterRecipe:
        """The recipe, with what these settings say otherwise."""
        recipe = RECIPES[self.recipe]
        return msgspec.structs.replace(recipe, observation=self.observation or recipe.observation)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a run needs."""

    model: ModelConfig = ModelConfig()
    servers: tuple[ServerConfig, ...] = ()
    dispatch: DispatchConfig = DispatchConfig()
    network: NetworkConfig = NetworkConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    faults: tuple[FaultConfig, ...] = ()
    router: RouterConfig = RouterConfig()
    workload: WorkloadConfig = WorkloadConfig()
    reward: RewardConfig = RewardConfig()
    record: RecordConfig = RecordConfig()
    cluster: ClusterConfig = ClusterConfig()
    training: TrainingConfig = TrainingConfig()

    @property
    def observation(self) -> Kind:
        """What a policy that is trained with this sees: beside plans of two passes, where `lp` would make them."""
        kind = self.training.resolved.observation
        return "escalating" if kind == "planned" and self.router.escalation else kind


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Reads a TOML file and applies `key.path=value` overrides. Raises ConfigError with one clear line."""
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    tree = _from_folder(tree, path.parent)
    for override in overrides:
        _override(tree, override)
    return config_from(tree)


def _from_folder(tree: Any, folder: Path, where: str = "") -> Any:
    """The tree with each relative path that exists in `folder`, the file's, as seen from the working directory."""
    if isinstance(tree, dict):
        return {key: _from_folder(value, folder, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [_from_folder(value, folder, where) for value in tree]
    if where not in PATHS or not isinstance(tree, str):
        return tree
    prefix = next((prefix for prefix in PATHS[where] if tree.startswith(prefix)), None)
    name = tree.removeprefix(prefix or "")
    if prefix is None or not name or Path(name).is_absolute() or not (folder / name).exists():
        return tree
    return prefix + os.path.normpath(folder / name)


def config_from(tree: dict[str, Any]) -> Config:
    """Builds and checks a configuration from plain data."""
    _reject_unknown(tree, Config, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_plainly(str(error))) from None
    _check(config)
    return config


def _plainly(error: str) -> str:
    """What msgspec says of a value of the wrong kind, with the key's name as `--set` has it and what it may be."""
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", error)
    if found is None:
        return f"configuration: {error}"
    where = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", found[2])
    section, *rest = [part for part in where.split(".") if part and not part.isdecimal()]
    kind = next((kind for name, kind, _ in sections() if name == section), None)
    if kind is not None and rest and rest[0] in get_type_hints(kind):
        bounds = dict(documented(kind))[rest[0]].extra["bounds"]
        return f"{where} must be {values_of(get_type_hints(kind)[rest[0]], bounds)}: {found[1]}".replace("`", "")
    return f"{where}: {found[1]}"


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with `key.path=value` overrides applied to it."""
    tree = msgspec.json.decode(msgspec.json.encode(config))
    for override in overrides:
        _override(tree, override)
    return config_from(tree)


def with_preset(config: Config, folder: Path, preset: str) -> Config:
    """The configuration with the `[reward]` and `[training]` keys of a preset: a file, or PRESET.toml in `folder`."""
    path = Path(preset) if preset.endswith(".toml") else folder / f"{preset}.toml"
    try:
        tree = tomllib.loads(path.read_text())
    except OSError:
        found = ", ".join(sorted(file.stem for file in folder.glob("*.toml"))) or "none"
        raise ConfigError(f"preset {path} does not exist; files beside the configuration: {found}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"preset {path} is not valid TOML: {error}") from None
    if not set(tree) <= {"reward", "training"}:
        raise ConfigError(f"preset {path} may hold [reward] and [training]; it has {', '.join(tree)}")
    whole = msgspec.to_builtins(config)
    return config_from({**whole, **{name: {**whole[name], **keys} for name, keys in tree.items()}})


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: expected key.path=value, such as servers.0.max_batch=64")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = tree
    *parents, last = key.split(".")
    try:
        for part in parents:
            node = node[_place(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[_place(last) if isinstance(node, list) else last] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"--set {key}: no such place in the configuration") from None


def _place(part: str) -> int:
    """A place in a list, from 0. Raises ValueError for what is none, such as -1."""
    if not part.isdecimal():
        raise ValueError(part)
    return int(part)


def _reject_unknown(tree: Any, kind: Any, where: str) -> None:
    if not isinstance(tree, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            removed = REMOVED.get(re.sub(r"\.\d+\.", ".", f"{where}{key}"))
            if removed is not None:
                raise ConfigError(f"key {where}{key} does not exist any more; {removed}")
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {where}{key}; the nearest valid one is {where}{near}")
        kinds = [k for k in (fields[key], *getattr(fields[key], "__args__", ())) if _is_struct(k)]
        for inner in kinds:
            entries = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for i, entry in entries:
                _reject_unknown(entry, inner, f"{where}{key}." if i is None else f"{where}{key}.{i}.")


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _check(config: Config) -> None:
    """Raises ConfigError for the first value out of its bounds, or settings that do not go together."""
    if not config.servers:
        raise ConfigError("no server is configured; add at least one [[servers]] with name and device")
    for section in msgspec.structs.fields(Config):
        part = getattr(config, section.name)
        for i, entry in enumerate(part if isinstance(part, tuple) else (part,)):
            _check_bounds(entry, f"{section.name}.{i}" if isinstance(part, tuple) else section.name)
    _check_servers(config)
    _check_run(config)
    _check_training(config)


def _check_bounds(part: msgspec.Struct, where: str) -> None:
    for name, meta in documented(type(part)):
        value, bounds = getattr(part, name), meta.extra["bounds"]
        if isinstance(value, float) and not bounds and not math.isfinite(value):
            raise ConfigError(f"{where}.{name} is {value:g}; it must be finite")
        if value is None or isinstance(value, str) or not bounds:
            continue
        at = f"{where}.{name} is {value:g}; it must be "
        if "most" in bounds:
            if not bounds["least"] <= value <= bounds["most"]:
                raise ConfigError(f"{at}from {bounds['least']:g} to {bounds['most']:g}")
        elif "above" in bounds:
            _positive(f"{where}.{name}", value)
        elif not value >= bounds["least"]:
            raise ConfigError(f"{at}{bounds['least']:g} or more")


@cache
def documented(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """(name, what `key` said of it) of every field of a section."""
    hints = get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name].__metadata__[0]) for field in msgspec.structs.fields(kind)]


def sections() -> Iterator[tuple[str, type[msgspec.Struct], bool]]:
    """(name, kind, whether there may be several) of every section of the file."""
    for field in msgspec.structs.fields(Config):
        several = get_origin(field.type) is tuple
        yield field.name, get_args(field.type)[0] if several else field.type, several


def values_of(hint: Any, bounds: dict[str, float]) -> str:
    """What a field may be, for people."""
    kinds = [kind for kind in _options(hint) if kind is not NoneType]
    said = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            said += [f'`"{value}"`' for value in get_args(kind)]
        else:
            said.append(_kind(kind))
    text = ", ".join(said)
    if "most" in bounds:
        text += f", {bounds['least']:g} to {bounds['most']:g}"
    elif "least" in bounds:
        text += f", {bounds['least']:g} or more"
    elif "above" in bounds:
        text += f", above {bounds['above']:g}"
    return text


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kind(kind: Any, many: bool = False) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    if get_origin(kind) is tuple:
        return ("lists of " if many else "list of ") + _kind(get_args(kind)[0], many=True)
    return names.get(kind, "table") + ("s" if many else "")


def _positive(key: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise ConfigError(f"{key} is {value:g}; it must be above 0 and finite")


def _check_servers(config: Config) -> None:
    names = [server.name for server in config.servers]
    if len(set(names)) < len(names):
        raise ConfigError(f"server names repeat: {', '.join(names)}; each needs its own")
    for i, server in enumerate(config.servers):
        for resource, amount in server.resources.items():
            if resource in RAYS_OWN:
                raise ConfigError(f"servers.{i}.resources has {resource}, which is Ray's own; {RAYS_OWN[resource]}")
            if resource != "GPU" or amount != 0:  # none, for a server that Ray is to count no card for
                _positive(f"servers.{i}.resources.{resource}", amount)
        if server.batch_window_ms != "auto" and not 0 <= server.batch_window_ms < float("inf"):
            raise ConfigError(
                f'servers.{i}.batch_window_ms is {server.batch_window_ms:g}; it must be "auto", or 0 or more and finite'
            )
        if isinstance(server.credit_tasks, int) and server.credit_tasks < 1:
            raise ConfigError(f'servers.{i}.credit_tasks is {server.credit_tasks}; it must be "auto", or 1 or more')
        if server.tile != "auto" and server.tile < 1:
            raise ConfigError(f'servers.{i}.tile is {server.tile}; it must be "auto", or 1 or more')
        if server.slowdown_of == "profile" and server.concurrency > 1:
            raise ConfigError(
                f'servers.{i}.slowdown_of is "profile", which says what one batch at a time takes, and '
                f"max_concurrent_batches is {server.concurrency}; let it be 1"
            )
    for fault in config.faults:
        if fault.server not in names:
            raise ConfigError(f"faults: server {fault.server} is not configured; there are {', '.join(names)}")
    if config.dispatch.heartbeat_timeout_s < 2 * config.telemetry.period_s:
        raise ConfigError(
            f"dispatch.heartbeat_timeout_s is {config.dispatch.heartbeat_timeout_s:g}; it must be at least twice "
            f"telemetry.period_s ({config.telemetry.period_s:g})"
        )


def _check_run(config: Config) -> None:
    parse_router(config.router.name)
    for name in (config.router.fallback, config.training.warm_start):
        if name:
            parse_router(name)
    if config.router.fallback and parse_router(config.router.fallback).kind == "auto":
        raise ConfigError(
            'router.fallback is "auto", which itself takes the fallback where it cannot plan; leave it empty'
        )
    if not config.router.groups:
        raise ConfigError("router.groups is empty; give at least one group size")
    for group in config.router.groups:
        _positive("router.groups", group)
    workload = config.workload
    if not 0 <= workload.warmup < workload.duration_s:
        raise ConfigError(
            f"workload.warmup_s is {workload.warmup:g}; it must be from 0 to below duration_s ({workload.duration_s:g})"
        )
    if workload.kind == "trace" and not workload.trace:
        raise ConfigError("workload.kind is trace but workload.trace names no file")
    if workload.kind == "steps" and not workload.steps:
        raise ConfigError("workload.kind is steps but workload.steps is empty; give some, such as [[20, 0.5], [5, 2]]")
    for seconds, factor in workload.steps:
        _positive("workload.steps: a step's seconds", seconds)
        if not 0 <= factor < float("inf"):
            raise ConfigError(f"workload.steps: a factor is {factor:g}; it must be 0 or more and finite")


def _check_training(config: Config) -> None:
    training = config.training
    low, high = training.loads
    if not 0 < low <= high:
        raise ConfigError(f"training.loads is {low:g} to {high:g}; the first must be above 0 and not above the second")
    if training.servers is not None:
        fewest, most = training.servers
        if not 1 <= fewest <= most:
            raise ConfigError(f"training.servers is {fewest} to {most}; the first must be at least 1")
        if training.resolved.observation == "paper":
            raise ConfigError("training.servers needs another recipe: what paper sees has a fixed number of servers")
    for name in ("plan_coef", "plan_server_coef"):
        if getattr(training, name) and training.resolved.observation != "planned":
            raise ConfigError(
                f"training.{name} needs the observation planned; this is {training.resolved.observation}, "
                "which sees no plan"
            )
