"""The configuration of a run: TOML plus `--set key.path=value` overrides, typed and checked.

Fields carry the units users write; `machines.py` turns them into the core's seconds and bytes. An unknown key is an
error that names the nearest valid one.
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.types import ServerName
from slim_scheduler.setup.config_checks import check


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str = "models/digits"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server. `device` is `cpu` or `cuda:N` live, a profile's name or file when simulated.

    `max_concurrent_batches` defaults to 1 on a CPU and 2 elsewhere, `credit_tasks` to 2 x max_batch. `batch_window_ms`:
    how long tasks may be held back until there are `tile` of their kind; 0, the paper's rule: not at all. `profile`
    names the profile of a live device (default: profiles/DEVICE-MODEL.json). `max_upgrade` bounds how much wider than
    requested an instance may be. `threads` are the CPU threads of a live `cpu` server. In a cluster, `num_gpus`
    (default: 1 for cuda devices) and `resources` (such as {gtx980ti = 1}) say which machine may run it.
    """

    name: ServerName
    device: str
    profile: str | None = None
    max_batch: int = 32
    vram_budget_gib: float = 10.0
    utilization_block: float = 0.95
    idle_unload_s: float = 30.0
    scale_queue_threshold: int = 16
    max_new_instances: int = 2
    max_concurrent_batches: int | None = None
    max_upgrade: float | None = None
    credit_tasks: int | None = None
    batch_window_ms: float | Literal["auto"] = 0.0
    tile: int | Literal["auto"] = "auto"
    slowdown: float = 1.0
    threads: int = 1
    num_gpus: float | None = None
    resources: dict[str, float] = {}

    @property
    def concurrency(self) -> int:
        return self.max_concurrent_batches or (1 if self.device.startswith("cpu") else 2)

    @property
    def credit(self) -> int:
        return self.credit_tasks or 2 * self.max_batch


class DispatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`retry_budget` is a share of the arriving items; `priority_aging_s` is how much later a task of the next lower
    priority counts as having come."""

    reentry: Literal["back", "oldest-item"] = "back"
    max_waiting_items: int = 100_000
    max_activation_mib: float = 2048.0
    priority_aging_s: float = 1.0
    max_retries: int = 3
    retry_budget: float = 0.2
    heartbeat_timeout_s: float = 0.8
    loss_grace_s: float = 2.0
    no_server_timeout_s: float = 30.0


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mbps` per server and direction; `shared_mbps`, where given, is one medium for all."""

    latency_ms: float = 0.0
    mbps: float = 1e6
    shared_mbps: float | None = None
    activations: bool = True


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    period_s: float = 0.1
    age_s: float = 0.0


FaultKind = Literal["exit", "crash", "hang", "slow", "recover", "drop-messages", "duplicate-messages", "delay-messages"]


class FaultConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`factor` is how much slower for `slow`; `share` of messages lost for `drop-messages` (also doubled and late
    for `duplicate-messages`, `delay-messages`); `duration_s` ends the fault, None lasts. `exit`: its process ends, and
    the broken connection tells; `crash`: its machine is gone without a word."""

    server: ServerName
    at_s: float
    kind: FaultKind
    factor: float = 3.0
    share: float = 0.01
    duration_s: float | None = None


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`sample`: a learned router draws from its policy instead of taking each head's argmax. `patience_s`: how long the
    head may wait for a full server that `cost-model` or `lp` chose; 0, the method's: they see only servers with credit.
    A learned router has its own (`TrainingConfig`). `patience_room`: nobody waits so while more tasks wait than so many
    times what all servers may have at once, because then each of them is needed; `random`, which always waits, does.
    `fallback` decides where the router cannot; empty: `cost-model` at the network's middle width."""

    name: str = "random"
    groups: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    fallback: str = ""
    slow_ms: float = 20.0
    probe_s: float = 1.0
    sample: bool = False
    patience_s: float = 0.0
    patience_room: float = 2.0


class WorkloadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arrivals. `rate` in items per second, the mean of every kind but `trace`.

    bursty: two-state Markov-modulated Poisson, `burst_factor` times the calm rate during bursts, which last
    `burst_s` of every `burst_every_s` on average. diurnal: a sine of `day_s` with `day_swing` of the rate.
    """

    kind: Literal["poisson", "bursty", "diurnal", "trace"] = "poisson"
    rate: float = 200.0
    duration_s: float = 30.0
    data: str = "digits"
    deadline_ms: float = 0.0
    slo_ms: float = 500.0
    warmup_s: float | None = None
    end: Literal["drain", "cut"] = "drain"
    items_per_request: int = 1
    trace: str | None = None
    burst_factor: float = 4.0
    burst_s: float = 1.0
    burst_every_s: float = 5.0
    day_s: float = 60.0
    day_swing: float = 0.5

    @property
    def warmup(self) -> float:
        return 0.1 * self.duration_s if self.warmup_s is None else self.warmup_s


class RewardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of eq. 7."""

    alpha: float = 1.0
    beta: float = 0.1
    gamma: float = 0.001
    delta: float = 0.5
    bonus: float = 0.0
    center_accuracy: bool = True


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the servers run.

    `address` empty: in this process; `local`: on a Ray cluster of this machine's own, which ends with the run; `auto`,
    `HOST:PORT` or `ray://HOST:PORT`: on one that runs already. A server that does not answer for `hung_limit_s` is
    started anew.
    """

    address: str = ""
    hung_limit_s: float = 30.0


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["full", "blocks", "summary"] = "blocks"


class TrainingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How `slim train` trains: PPO's settings, and the clusters it practises on (docs/training.md explains each).

    `patience_s`: the policy and its teacher may choose a full server; the head then waits for it, so long at most, and
    with `patience_room` as in `RouterConfig` (None: however many wait, whatever the run's own is).
    `returns`: `one-step` is the paper's eq. 8; `gae` and `n-step` look ahead, discounted over `horizon_s` seconds
    (None: the time of 30 full batches), because decisions are not evenly spaced. `target_delay_s`: a decision is
    charged with the plan's price of what it uses, as many times as tasks stay longer than this; `charged_batch`: of a
    batch of its own, or of its share of the batches in which its tasks ran. `accuracy`: a last
    segment's accuracy is its tuple's measured share of right answers, or each item's own outcome (the same mean,
    noisier). `reward_scale`: rewards are centred and scaled by each rollout's own mean and spread, so that an
    overloaded episode does not drown the others, or by the run's running ones. `loads` are factors on the workload's
    rate, drawn per episode; half of the episodes begin with up to `backlog_s` seconds of arrivals waiting; `servers` is
    how many copies of configured servers an episode has (None: the cluster itself), each up to `slowdown` times slower;
    the rate follows their capacity. `warm_start` names a heuristic that is imitated first, with a share of even choices
    among widths and groups (`warm_start_doubt`): enough exploration to improve on it. `plan_coef` and
    `plan_server_coef`, with the observation `planned`: how strongly the width is held to the plan's next one, and the
    server to the one that `lp` would take. `plan_rho`: how busy plans let devices and links be; above 1 the queue may
    grow for as long as the load lasts, and without `target_delay_s` a decision is charged with the plan's price itself.
    An episode is cut after `episode_rollouts` rollouts of `rollout_decisions`.
    """

    observation: Literal["paper", "extended", "planned"] = "extended"
    patience_s: float = 0.0
    patience_room: float | None = None
    hidden: int = 64
    decisions: int = 600_000
    workers: int = 2
    rollout_decisions: int = 2048
    episode_rollouts: int = 4
    epochs: int = 3
    minibatch: int = 1024
    learning_rate: float = 1e-3
    learning_rate_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    clip_coef: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.003
    max_grad_norm: float = 0.5
    plan_coef: float = 0.0
    plan_server_coef: float = 0.0
    plan_rho: float = 0.9
    epsilon_max: float = 0.1
    epsilon_min: float = 0.0
    epsilon_decisions: int | None = None
    returns: Literal["one-step", "n-step", "gae"] = "gae"
    horizon_s: float | None = None
    gae_lambda: float = 0.97
    target_delay_s: float | None = None
    charged_batch: Literal["own", "shared"] = "own"
    n_steps: int = 32
    reward_weight: Literal["tasks", "block"] = "tasks"
    reward_scale: Literal["rollout", "run"] = "rollout"
    accuracy: Literal["expected", "outcomes"] = "expected"
    backlog_s: float = 0.0
    loads: tuple[float, float] = (1.0, 1.0)
    servers: tuple[int, int] | None = None
    slowdown: float = 1.0
    warm_start: str = ""
    warm_start_decisions: int = 40_000
    warm_start_doubt: float = 0.1
    checkpoint_updates: int = 8


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a run needs; `base` is the folder relative paths start from."""

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


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Reads a TOML file and applies `key.path=value` overrides. Raises ConfigError with one clear line."""
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _override(tree, override)
    return config_from(tree)


def config_from(tree: dict[str, Any]) -> Config:
    """Builds and checks a configuration from plain data."""
    _reject_unknown(tree, Config, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from None
    check(config)
    return config


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with `key.path=value` overrides applied to it."""
    tree = msgspec.json.decode(msgspec.json.encode(config))
    for override in overrides:
        _override(tree, override)
    return config_from(tree)


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
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[int(last) if isinstance(node, list) else last] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"--set {key}: no such place in the configuration") from None


def _reject_unknown(tree: Any, kind: Any, where: str) -> None:
    if not isinstance(tree, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in tree.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {where}{key}; the nearest valid one is {where}{near}")
        kinds = [k for k in (fields[key], *getattr(fields[key], "__args__", ())) if _is_struct(k)]
        for inner in kinds:
            entries = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for i, entry in entries:
                _reject_unknown(entry, inner, f"{where}{key}." if i is None else f"{where}{key}.{i}.")


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
