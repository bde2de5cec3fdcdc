"""Builds the pure machines of a run from its configuration, for both hosts and for replays.

Here users' units become the core's, names become routers, and profiles and manifests are found on disk. It decides
nothing while a run goes on.
"""

import json
from functools import partial
from pathlib import Path

import msgspec
from numpy.random import Generator, SeedSequence, default_rng

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.dispatch.dispatcher import Dispatcher
from slim_scheduler.core.dispatch.limits import DispatchLimits
from slim_scheduler.core.dispatch.order import Order, RemainingTime
from slim_scheduler.core.errors import CheckpointError, ConfigError, ProfileError
from slim_scheduler.core.profile import LatencyTable, Profile
from slim_scheduler.core.router.base import Escalation, Router, RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import batch_seconds, items_per_second, tasks_to_stay_busy
from slim_scheduler.core.server.pace import Pace
from slim_scheduler.core.server.scheduler import ServerKnobs, ServerScheduler
from slim_scheduler.core.server.window import BatchTime
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Seconds, ServerName, Width
from slim_scheduler.setup import routers
from slim_scheduler.setup.accuracy_files import PRECISIONS, accuracy_path, read_accuracy
from slim_scheduler.setup.config import Config, DispatchConfig, ServerConfig
from slim_scheduler.setup.profiles import profile_name, read_profile
from slim_scheduler.setup.routers import RouterInputs, parse_router

BYTES_PER_S_OF_MBPS = 1e6 / 8
LOSS_GRACE = 2.5  # so many times the heartbeat timeout: a block that reports leave out for so long was lost
LIVE_KINDS = ("cpu", "cuda", "openvino", "onnxruntime")  # of devices that compute, before the colon
COMPILED = ("openvino:", "onnxruntime:")  # devices that run compiled graphs
# Of the weights: as the graph has them and as its kernels want them. Measured: 2.04 in float32 on both, 1.54 in bf16.
COMPILED_COPIES = 2


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

    A server that computes in bf16 or fp16 has profiles/DEVICE-PRECISION-MODEL.json, and no other of a live device.
    `profiles` is in the working directory, or beside the `models` folder that holds the model.
    """
    device = server.profile or server.device
    any_precision = [f"profiles/{device}.json", f"profiles/{device}-{shape.name}.json"]
    of_precision = f"profiles/{profile_name(device, server.precision, shape.name)}"
    if server.precision not in PRECISIONS[1:]:
        names = [device, *any_precision, of_precision]
    elif device.partition(":")[0] in LIVE_KINDS:
        names = [device, of_precision]
    else:  # a simulated device, whose profile is of whatever it computes in
        names = [device, of_precision, *any_precision]
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
                f"measure one with `{measure_command(config, server)}`"
            )
        profile = read_profile(path)
        if profile.model != shape.name:
            raise ProfileError(f"profile {path} is of network {profile.model}, but the model is {shape.name}")
        profiles[server.name] = profile
    return profiles


def measure_command(config: Config, server: ServerConfig) -> str:
    """What measures a server's profile."""
    precision = f" --precision {server.precision}" if server.precision in PRECISIONS[1:] else ""
    return f"slim measure --model {config.model.path} --device {server.device}{precision}"


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
    servers = {server.name: _server_facts(config, server, profiles[server.name]) for server in config.servers}
    shared = config.network.shared_mbps is not None
    return RouterFacts(shape, config.router.groups, servers, config.network.activations, shared)


def _server_facts(config: Config, server: ServerConfig, profile: Profile) -> ServerFacts:
    return ServerFacts(
        name=server.name,
        profile=profile,
        latency=LatencyTable(profile, server.max_batch),
        slowdown=server.slowdown,
        max_batch=server.max_batch,
        concurrency=server.concurrency,
        vram_budget=_budget(server),
        link_latency=config.network.latency_ms / 1e3,
        bytes_per_s=(config.network.shared_mbps or config.network.mbps) * BYTES_PER_S_OF_MBPS,
        max_upgrade=server.max_upgrade,
    )


def allowed_tasks(config: Config, server: ServerConfig, shape: ModelShape, profile: Profile | None) -> int:
    """Tasks that the dispatcher lets a server have at once. Raises ProfileError for a profile without latencies."""
    if isinstance(server.credit_tasks, int):
        return server.credit_tasks
    if server.credit_tasks is None or profile is None or not config.network.takes_time:
        return 2 * server.max_batch
    return tasks_to_stay_busy(_server_facts(config, server, profile), shape)


def build_router(name: str, config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> Router:
    """A router by its name on the command line. Raises InputError."""
    return routers.build_router(name, router_inputs(config, shape, profiles))


def router_inputs(config: Config, shape: ModelShape, profiles: dict[ServerName, Profile] | None) -> RouterInputs:
    """What routers are built from in a run."""
    return RouterInputs(
        shape=shape,
        facts=None if profiles is None else router_facts(config, shape, profiles),
        groups=config.router.groups,
        accuracy=partial(router_accuracy, config),
        measured=router_accuracy_path(config) is not None,
        reward=config.reward,
        deadline=(config.workload.deadline_ms or config.workload.slo_ms) / 1e3,
        sample=config.router.sample,
        escalates=config.router.escalation,
        fallback=fallback_name(config, shape, profiles is not None),
    )


def router_accuracy(config: Config) -> AccuracyTable:
    """Measured accuracies for a router: held-out ones where there are any, because test images judge it."""
    return read_accuracy(router_accuracy_path(config) or config.model.path)


def router_accuracy_path(config: Config) -> Path | None:
    """The table of `router_accuracy`; None where nothing was measured."""
    tables = [accuracy_path(config, split) for split in ("held-out", "test")]
    return next((path for path in tables if path.is_file()), None)


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
    """The dispatcher of a run: with the router of that name and what it lets run again, or with a given router and
    escalation. Raises InputError."""
    dispatch = config.dispatch
    limits = DispatchLimits(
        reentry_back=dispatch.reentry == "back",
        max_waiting_items=dispatch.max_waiting_items,
        max_activation_bytes=max(1, int(dispatch.max_activation_mib * 2**20)),
        home_matters=config.network.activations,
        heartbeat_timeout=dispatch.heartbeat_timeout_s,
        loss_grace=LOSS_GRACE * dispatch.heartbeat_timeout_s + 2 * config.telemetry.age_s,
        no_server_timeout=dispatch.no_server_timeout_s,
        batch_windows=bool(config.cluster.address) or any(server.batch_window_ms != 0 for server in config.servers),
    )
    inputs = router_inputs(config, shape, profiles)
    if router is None:
        router = routers.build_router(router_name, inputs)
        escalation = routers.build_escalation(router, inputs)
    fallback = routers.build_router(inputs.fallback, inputs)
    calibration = None if accuracy is None else accuracy.calibration
    rng, order = run_rng(seed, "router"), _order(dispatch, inputs.facts)
    return Dispatcher(limits, shape, router, fallback, rng, accuracy, escalation, calibration, order)


def _order(dispatch: DispatchConfig, facts: RouterFacts | None) -> Order | None:
    """None: the first that came is next."""
    queue = dispatch.queue
    if queue == "fifo":
        return None
    if facts is None:
        raise ConfigError(f'dispatch.queue "{queue}" needs every server\'s profile; measure them with `slim measure`')
    return Order(RemainingTime(batch_seconds(facts)), dispatch.queue_bound_s, by_slack=queue == "least-slack")


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
        batch_window=None if server.batch_window_ms == "auto" else server.batch_window_ms / 1e3,
        tile=None if server.tile == "auto" else server.tile,
        credit=allowed_tasks(config, server, shape, profile),
        link_latency=config.network.latency_ms / 1e3,
        awaits_return=config.dispatch.reentry == "oldest-item" and _dispatcher_is_near(config),
    )
    if profile is not None:
        knobs = msgspec.structs.replace(knobs, best_utilization=profile.best_utilization)
    seconds = pace = None
    if profile is not None:
        seconds = batch_time(server, profile)
        pace = Pace(seconds, profile)
    return ServerScheduler(name, knobs, served_shape(server, shape), incarnation, seconds, pace)


def served_shape(server: ServerConfig, shape: ModelShape) -> ModelShape:
    """The network's sizes as a server counts them."""
    return device_shape(server.device, server.precision, shape)


def device_shape(device: str, precision: str, shape: ModelShape) -> ModelShape:
    """The network's sizes in a device's memory."""
    if device.startswith(COMPILED):
        return compiled_shape(shape)
    shape = shape if precision == "fp32" else halved_shape(shape)
    return whole_shape(shape) if device.startswith("cuda") else shape


def compiled_shape(shape: ModelShape) -> ModelShape:
    """The network's sizes where instances are compiled: a program per previous width, all weights twice in each."""
    whole = []
    for own, variants in zip(shape.weight_bytes, shape.variant_bytes, strict=True):
        whole.append(tuple(COMPILED_COPIES * sum(size + row[w] for row in variants) for w, size in enumerate(own)))
    return _without_variants(shape, whole)


def whole_shape(shape: ModelShape) -> ModelShape:
    """The network's sizes where an instance has the layers for every previous width from the start."""
    whole = []
    for own, variants in zip(shape.weight_bytes, shape.variant_bytes, strict=True):
        whole.append(tuple(size + sum(row[w] for row in variants) for w, size in enumerate(own)))
    return _without_variants(shape, whole)


def _without_variants(shape: ModelShape, weight_bytes: list[tuple[int, ...]]) -> ModelShape:
    none = tuple(tuple((0,) * len(row) for row in variants) for variants in shape.variant_bytes)
    return msgspec.structs.replace(shape, weight_bytes=tuple(weight_bytes), variant_bytes=none)


def halved_shape(shape: ModelShape) -> ModelShape:
    """The network's sizes where torch holds its weights in 16 bits. Items and activations keep their 32."""
    own = tuple(tuple(size // 2 for size in row) for row in shape.weight_bytes)
    variants = tuple(tuple(tuple(size // 2 for size in row) for row in rows) for rows in shape.variant_bytes)
    return msgspec.structs.replace(shape, weight_bytes=own, variant_bytes=variants)


def _dispatcher_is_near(config: Config) -> bool:
    """In the servers' own process, where deciding about a finished batch's items takes no message."""
    return config.network.latency_ms == 0 and not config.cluster.address


def batch_time(server: ServerConfig, profile: Profile) -> BatchTime:
    """Seconds of a server's batches by its profile: segment, previous width, width and size (1 to `max_batch`)."""
    table = LatencyTable(profile, server.max_batch)

    def seconds(segment: int, previous_width: Width | None, width: Width, size: int) -> Seconds:
        return server.slowdown * table.seconds(segment, previous_width, width, size)

    return seconds


STREAMS = ("router", "workload", "faults", "network", "devices")


def run_rng(seed: int, part: str) -> Generator:
    """The generator of one part of a run: children of the run's seed, independent of each other."""
    return default_rng(SeedSequence(seed, spawn_key=(STREAMS.index(part),)))


def fallback_name(config: Config, shape: ModelShape, profiled: bool) -> str:
    """The router that decides where the configured one fails. Without profiles a cost model is the shortest queue."""
    middle = shape.widths[(len(shape.widths) - 1) // 2]
    name = config.router.fallback or f"cost-model:{middle:g}"
    if not profiled and parse_router(name).kind == "cost-model":
        return f"jsq:{name.partition(':')[2]}"
    return name


def _budget(server: ServerConfig) -> int:
    return int(server.vram_budget_gib * 2**30)
