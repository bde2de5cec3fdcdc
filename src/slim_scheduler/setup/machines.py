"""Builds the pure machines of a run from its configuration, for both hosts and for replays.

Here users' units become the core's, names become routers, and profiles and manifests are found on disk. It decides
nothing while a run goes on.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from numpy.random import Generator, SeedSequence, default_rng

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.errors import CheckpointError, ConfigError, DataError, ProfileError
from slim_scheduler.core.profile import LatencyTable, Profile
from slim_scheduler.core.router.base import Escalation, Router, RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import items_per_second
from slim_scheduler.core.router.escalation import Choice, FixedEscalation, TwoPasses, two_passes
from slim_scheduler.core.router.heuristics import (
    CostModel,
    JoinShortestQueue,
    PowerOfTwo,
    RandomRouter,
    RoundRobin,
    width_rule,
    width_shares,
    width_tuple,
)
from slim_scheduler.core.server.scheduler import ServerKnobs, ServerScheduler
from slim_scheduler.core.server.window import BatchTime
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, ServerName, Width, WidthTuple
from slim_scheduler.setup.config import Config, ServerConfig
from slim_scheduler.setup.plugins import find_class, is_class_name
from slim_scheduler.setup.profiles import profile_name, read_profile

BYTES_PER_S_OF_MBPS = 1e6 / 8
COMPILED = ("openvino:", "onnxruntime:")  # devices that run compiled graphs
# Of the weights: as the graph has them and as its kernels want them. Measured: 2.04 in float32 on both, 1.54 in bf16.
COMPILED_COPIES = 2
ROUTER_NAMES = (
    "auto, random, round-robin:W, jsq:W, jsq@RUN_DIR, p2c:W, cost-model:W, slackfit, reward-greedy, lp, lp:RHO, "
    "ppo:POLICY_DIR, module:Class"
)
ROUTER_GROUP = "slim_scheduler.routers"  # of entry points, through which a package offers a router


def load_shape(config: Config) -> ModelShape:
    """The network's shape from its manifest, without torch. Raises CheckpointError."""
    path = Path(config.model.path) / "manifest.json"
    try:
        shape = msgspec.convert(json.loads(path.read_bytes())["shape"], ModelShape)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; train a network with `slim fit`, or set model.path") from None
    except (ValueError, KeyError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} is not a model's manifest: {error}") from None
    shape.check()
    return shape


def find_profile(server: ServerConfig, shape: ModelShape, model: Path) -> Path | None:
    """A server's profile: the file it names, or profiles/DEVICE.json, or profiles/DEVICE-MODEL.json.

    `profiles` is in the working directory, or beside the `models` folder that holds the model.
    """
    device = server.profile or server.device
    names = [device, f"profiles/{device}.json", f"profiles/{device}-{shape.name}.json"]
    names.append(f"profiles/{profile_name(device, server.precision, shape.name)}")
    folders = (Path(), model.parent.parent)
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def load_profiles(config: Config, shape: ModelShape) -> dict[ServerName, Profile]:
    """Each server's profile. Raises ProfileError where one is missing or of another network."""
    profiles = {}
    for server in config.servers:
        path = find_profile(server, shape, Path(config.model.path))
        if path is None:
            raise ProfileError(
                f"server {server.name}: no profile for {server.profile or server.device} with {shape.name}; "
                f"measure one with `slim measure --model {config.model.path} --device {server.device}`"
            )
        profile = read_profile(path)
        if profile.model != shape.name:
            raise ProfileError(f"profile {path} is of network {profile.model}, but the model is {shape.name}")
        profiles[server.name] = profile
    return profiles


def in_items_per_second(config: Config) -> Config:
    """The configuration with `workload.rate` in items per second, if it is in multiples of what the servers carry.

    Raises CheckpointError and ProfileError.
    """
    if config.workload.rate_unit == "items/s":
        return config
    carried = carried_by_width(config)
    rate = config.workload.rate * carried[min(carried)]
    workload = msgspec.structs.replace(config.workload, rate=rate, rate_unit="items/s")
    return msgspec.structs.replace(config, workload=workload)


def carried_by_width(config: Config) -> dict[Width, float]:
    """Items per second that all servers together carry at each width throughout, in full batches, by their profiles.

    Links cost nothing here. Raises CheckpointError and ProfileError.
    """
    shape = load_shape(config)
    facts = router_facts(config, shape, load_profiles(config, shape))
    return {
        width: sum(items_per_second(server, shape, width) for server in facts.servers.values())
        for width in shape.widths
    }


def router_facts(config: Config, shape: ModelShape, profiles: dict[ServerName, Profile]) -> RouterFacts:
    servers = {
        server.name: ServerFacts(
            name=server.name,
            profile=profiles[server.name],
            latency=LatencyTable(profiles[server.name], server.max_batch),
            slowdown=server.slowdown,
            max_batch=server.max_batch,
            concurrency=server.concurrency,
            vram_budget=_budget(server),
            link_latency=config.network.latency_ms / 1e3,
            bytes_per_s=(config.network.shared_mbps or config.network.mbps) * BYTES_PER_S_OF_MBPS,
            max_upgrade=server.max_upgrade,
        )
        for server in config.servers
    }
    shared = config.network.shared_mbps is not None
    return RouterFacts(shape, config.router.groups, servers, config.network.activations, shared)


def build_router(name: str, config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> Router:
    """A router by its name on the command line. Raises ConfigError that lists the names."""
    if name == "auto":
        name = _best_known(config, shape, profiles)
    kind, _, argument = name.partition(":")
    if kind == "random" and not argument:
        return RandomRouter(config.router.groups)
    if name.startswith("jsq@"):
        return JoinShortestQueue(name, width_shares(_shares_of_run(Path(name.removeprefix("jsq@")))))
    if kind in ("round-robin", "jsq", "p2c", "cost-model") and argument:
        passes = two_passes(argument)
        rule = width_rule(passes.first if passes else argument, shape)
        match kind:
            case "round-robin":
                return RoundRobin(name, rule)
            case "jsq":
                return JoinShortestQueue(name, rule)
            case "p2c":
                return PowerOfTwo(name, rule)
        if profiles is None:
            raise ConfigError(f"router {name} needs every server's profile; measure them with `slim measure`")
        return CostModel(name, rule, router_facts(config, shape, profiles))
    if kind == "ppo" and argument:
        if profiles is None:
            raise ConfigError(f"router {name} needs every server's profile; measure them with `slim measure`")
        from slim_scheduler.setup.policy_files import load_router  # safetensors, which most routers do not need

        facts = router_facts(config, shape, profiles)
        return load_router(Path(argument), facts, partial(_prior, config), name, config.router.sample)
    if name in ("slackfit", "reward-greedy") or kind == "lp":
        if profiles is None:
            raise ConfigError(f"router {name} needs every server's profile; measure them with `slim measure`")
        return _informed_router(name, config, router_facts(config, shape, profiles))
    return _own_router(name, config, shape, profiles)


def _best_known(config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> str:
    """What `auto` stands for: the plan, where profiles and accuracies were measured, else the fallback."""
    from slim_scheduler.setup.accuracy_files import TABLE_FILES

    folder = Path(config.model.path)
    measured = any((folder / file).is_file() for file in TABLE_FILES.values())
    return "lp" if measured and profiles is not None else _fallback_name(config, shape, profiles)


def _own_router(name: str, config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> Router:
    """A user's router: its class is given the facts, and gets the name under which it was asked for."""
    if not is_class_name(name, ROUTER_GROUP):
        raise ConfigError(f"router {name!r} is unknown; available: {ROUTER_NAMES}")
    kind = find_class(name, ROUTER_GROUP, {}, ("decide", "chooses_full"))
    if profiles is None:
        raise ConfigError(f"router {name} needs every server's profile; measure them with `slim measure`")
    try:
        router: Router = kind(router_facts(config, shape, profiles))
    except Exception as error:  # a router may be anybody's code
        raise ConfigError(f"router {name} cannot be made: {type(error).__name__}: {error}") from error
    router.name = name
    return router


def _informed_router(name: str, config: Config, facts: RouterFacts) -> Router:
    """A router that knows the measured accuracies."""
    accuracy = _prior(config)
    if name == "slackfit":
        from slim_scheduler.core.router.slackfit import SlackFit

        deadline_ms = config.workload.deadline_ms or config.workload.slo_ms
        return SlackFit(facts, accuracy, deadline_ms / 1e3)
    if name == "reward-greedy":
        from slim_scheduler.core.router.reward_greedy import RewardGreedy

        return RewardGreedy(facts, accuracy, config.reward)
    from slim_scheduler.core.router.plan.choices import pairs, uniform
    from slim_scheduler.core.router.plan.follower import PlanFollower
    from slim_scheduler.core.router.plan.plans import RHO, Plans

    _, _, rho = name.partition(":")
    try:
        busy = float(rho) if rho else RHO
    except ValueError:
        raise ConfigError(f"router {name}: {rho!r} is no share of a device's time; such as lp:0.95") from None
    further = pairs(facts, accuracy, uniform(accuracy)) if config.router.escalation else ()
    return PlanFollower(Plans(facts, accuracy, busy, further), name)


def build_escalation(config: Config, shape: ModelShape, router: Router) -> Escalation | None:
    """Which items run again under a router: as its W says, or its plan. None: none does. Raises ConfigError."""
    from slim_scheduler.core.router.plan.follower import PlanFollower

    if isinstance(router, PlanFollower):
        return router if config.router.escalation else None
    passes = two_passes(router.name.partition(":")[2]) if "+" in router.name else None
    if passes is None:
        return None
    second = width_tuple(passes.second, shape)
    return FixedEscalation(second, passes.threshold, _as_choice(passes, second, config, shape))


def _as_choice(passes: TwoPasses, second: WidthTuple, config: Config, shape: ModelShape) -> Sequence[Choice]:
    """A W of two passes with its measured accuracy, which floors may count on; nothing where that is not known."""
    from slim_scheduler.core.router.plan.choices import pair_of

    if passes.first == "random":
        return ()
    try:
        return (pair_of(_prior(config), width_tuple(passes.first, shape), second, passes.threshold),)
    except DataError:
        return ()


def _prior(config: Config) -> AccuracyTable:
    """Measured accuracies for a router: held-out ones where there are any, because test images judge it."""
    from slim_scheduler.setup.accuracy_files import TABLE_FILES, read_accuracy

    folder = Path(config.model.path)
    tables = [folder / TABLE_FILES[split] for split in ("held-out", "test")]
    return read_accuracy(next((path for path in tables if path.is_file()), folder))


def build_dispatcher(
    config: Config,
    shape: ModelShape,
    router_name: str,
    profiles: dict[ServerName, Profile] | None,
    seed: int,
    accuracy: AccuracyTable | None = None,
    router: Router | None = None,
    escalation: Escalation | None = None,
) -> Dispatcher:
    """The dispatcher of a run. `router`, where given, is used instead of the one `router_name` names; `escalation` then
    says which items run again."""
    dispatch = config.dispatch
    limits = DispatchLimits(
        reentry_back=dispatch.reentry == "back",
        max_waiting_items=dispatch.max_waiting_items,
        max_activation_bytes=int(dispatch.max_activation_mib * 2**20),
        home_matters=config.network.activations,
        priority_aging=dispatch.priority_aging_s,
        max_retries=dispatch.max_retries,
        retry_budget=dispatch.retry_budget,
        heartbeat_timeout=dispatch.heartbeat_timeout_s,
        loss_grace=dispatch.loss_grace_s + 2 * config.telemetry.age_s,
        no_server_timeout=dispatch.no_server_timeout_s,
        slow_router=config.router.slow_ms / 1e3,
        router_probe=config.router.probe_s,
        batch_windows=any(server.batch_window_ms != 0 for server in config.servers),
    )
    chosen = router or build_router(router_name, config, shape, profiles)
    fallback = _fallback(config, shape, profiles)
    escalation = escalation or build_escalation(config, shape, chosen)
    calibration = None if accuracy is None else accuracy.calibration
    return Dispatcher(limits, shape, chosen, fallback, run_rng(seed, "router"), accuracy, escalation, calibration)


def build_server(
    config: Config, name: ServerName, shape: ModelShape, incarnation: int = 0, profile: Profile | None = None
) -> ServerScheduler:
    """One server's scheduler. Its `profile` is what automatic batch windows and tiles come from."""
    server = next(server for server in config.servers if server.name == name)
    knobs = ServerKnobs(
        max_batch=server.max_batch,
        vram_budget=_budget(server),
        utilization_block=server.utilization_block,
        idle_unload=server.idle_unload_s,
        scale_queue_threshold=server.scale_queue_threshold,
        max_new_instances=server.max_new_instances,
        max_concurrent_batches=server.concurrency,
        max_upgrade=server.max_upgrade,
        priority_aging=config.dispatch.priority_aging_s,
        batch_window=None if server.batch_window_ms == "auto" else server.batch_window_ms / 1e3,
        tile=None if server.tile == "auto" else server.tile,
        credit=server.credit,
        awaits_return=config.dispatch.reentry == "oldest-item" and _dispatcher_is_near(config),
    )
    if profile is not None:
        knobs = msgspec.structs.replace(knobs, best_utilization=profile.best_utilization)
    batch_time = None if profile is None else _batch_time(server, profile)
    shape = compiled_shape(shape) if server.device.startswith(COMPILED) else shape
    return ServerScheduler(name, knobs, shape, incarnation, batch_time)


def compiled_shape(shape: ModelShape) -> ModelShape:
    """The network's sizes where instances are compiled: a program per previous width, all weights twice in each."""
    whole = []
    for own, variants in zip(shape.weight_bytes, shape.variant_bytes, strict=True):
        whole.append(tuple(COMPILED_COPIES * sum(size + row[w] for row in variants) for w, size in enumerate(own)))
    none = tuple(tuple((0,) * len(row) for row in variants) for variants in shape.variant_bytes)
    return msgspec.structs.replace(shape, weight_bytes=tuple(whole), variant_bytes=none)


def _dispatcher_is_near(config: Config) -> bool:
    """In the servers' own process, where deciding about a finished batch's items takes no message."""
    return config.network.latency_ms == 0 and not config.cluster.address


def _batch_time(server: ServerConfig, profile: Profile) -> BatchTime:
    table = LatencyTable(profile, server.max_batch)

    def seconds(segment: int, previous_width: Width | None, width: Width, size: int) -> Seconds:
        return server.slowdown * table.seconds(segment, previous_width, width, size)

    return seconds


STREAMS = ("router", "workload", "faults", "network", "devices")


def run_rng(seed: int, part: str) -> Generator:
    """The generator of one part of a run: children of the run's seed, independent of each other."""
    return default_rng(SeedSequence(seed, spawn_key=(STREAMS.index(part),)))


def _fallback(config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> Router:
    return build_router(_fallback_name(config, shape, profiles), config, shape, profiles)


def _fallback_name(config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> str:
    middle = shape.widths[(len(shape.widths) - 1) // 2]
    name = config.router.fallback or f"cost-model:{middle:g}"
    return name.replace("cost-model:", "jsq:") if profiles is None and name.startswith("cost-model:") else name


def _budget(server: ServerConfig) -> int:
    return int(server.vram_budget_gib * 2**30)


def _shares_of_run(run: Path) -> dict[int, dict[float, float]]:
    from slim_scheduler.record.recorder import read_width_shares  # the record needs pyarrow, which most routers do not

    return read_width_shares(run)
