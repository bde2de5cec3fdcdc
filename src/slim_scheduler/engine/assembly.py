"""Puts live servers together from a configuration: device, threads, sensors, scheduler. Decides nothing later on."""

from collections.abc import Callable

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError, DataError, ProfileError
from slim_scheduler.core.profile import Profile
from slim_scheduler.core.server.window import BatchTime
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import ServerName
from slim_scheduler.engine.devices.base import Device
from slim_scheduler.engine.devices.registry import check_kind, open_device
from slim_scheduler.engine.executor import Executor, Job
from slim_scheduler.engine.host import DISPATCHER
from slim_scheduler.engine.local.server import LiveServer
from slim_scheduler.engine.probe import open_probe
from slim_scheduler.model.protocol import SlimmableModel
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
from slim_scheduler.setup.config import Config, NetworkConfig, ServerConfig
from slim_scheduler.setup.machines import allowed_tasks, batch_time, build_server, load_profiles

GIB = 2**30


def live_config(config: Config) -> Config:
    """The configuration without what only a simulation has: links and faults.

    In one process, moving an activation costs something only between devices that are not the same. A cluster's links
    are real; [network] is what its routers assume of them.
    """
    if any(server.name == DISPATCHER for server in config.servers):
        raise ConfigError(f"a server is named {DISPATCHER}, which the record uses; choose another name")
    for server in config.servers:
        check_kind(server.device)
    if config.cluster.address:
        return msgspec.structs.replace(config, faults=())
    moves = len({server.device for server in config.servers}) > 1
    return msgspec.structs.replace(config, network=NetworkConfig(activations=moves), faults=())


def check_budgets(config: Config) -> None:
    """Servers of one process that share a GPU share its memory. Raises ConfigError where their budgets exceed it."""
    budgets = [(server.device, int(server.vram_budget_gib * GIB)) for server in config.servers]
    if any(device.startswith("cuda") for device, _ in budgets):
        from slim_scheduler.engine.devices.cuda import check_shared_gpus, gpu_memory

        check_shared_gpus(budgets, gpu_memory)


def live_server(
    config: Config,
    name: ServerName,
    model: SlimmableModel,
    shape: ModelShape,
    profiles: dict[ServerName, Profile] | None,
    finished: Callable[[ServerName, Job], None],
    device: Device | None = None,
    incarnation: int = 0,
    on_loop: bool = False,
    margins: bool = False,
    sharing: int | None = None,
) -> LiveServer:
    """One configured server, not yet started. `device`, where given, is used instead of the one configured.

    `on_loop`: its brief batches may run on the event loop. `margins`: it tells those of its answers. `sharing`: so many
    servers use its device and its meter, itself among them; by default those of the configuration.
    """
    server = next(server for server in config.servers if server.name == name)
    profile = (profiles or {}).get(name)
    scheduler = build_server(config, name, shape, incarnation, profile)
    emulated = _emulated(server, shape, profile)
    device = device or open_device(
        server.device,
        model,
        shape,
        threads=server.threads,
        max_batch=server.max_batch,
        memory_limit=int(server.vram_budget_gib * GIB),
        precision=server.precision,
    )
    on_loop = on_loop and server.on_cpu
    executor = Executor(name, device, server.concurrency, server.slowdown, finished, on_loop, emulated)
    power = profile.power if profile is not None and profile.power_source != "none" else None
    if sharing is None:
        here = [other for other in config.servers if other.device == server.device or (other.on_cpu and server.on_cpu)]
        sharing = len(here)
    probe = open_probe(server.device, power, sharing)
    credit = allowed_tasks(config, server, shape, profile)
    return LiveServer(scheduler, executor, probe, credit, shape.segments, margins)


def _emulated(server: ServerConfig, shape: ModelShape, profile: Profile | None) -> BatchTime | None:
    """How long the batches of a server take that keeps to its profile. Raises ProfileError."""
    if server.slowdown_of == "work":
        return None
    if profile is None:
        raise ProfileError(
            f'server {server.name} has slowdown_of = "profile", and no profile was loaded for it; '
            'measure one with `slim measure`, or let slowdown_of be "work"'
        )
    seconds = batch_time(server, profile)
    for segment in range(shape.segments):
        for previous in shape.widths if segment else (None,):
            for width in shape.widths:
                seconds(segment, previous, width, 1)  # what a profile lacks is told now, not in the middle of a batch
    return seconds


def profiles_if_all(config: Config, shape: ModelShape) -> dict[ServerName, Profile] | None:
    """Profiles where every server has one. Routers that need them say so themselves; the others do without.

    Raises ProfileError where a server is to keep to its profile.
    """
    try:
        return load_profiles(config, shape)
    except ProfileError:
        if any(server.slowdown_of == "profile" for server in config.servers):
            raise
        return None


def accuracy_if_measured(config: Config) -> AccuracyTable | None:
    """The accuracy per width tuple, where it was measured; else requests with an accuracy floor are refused."""
    try:
        return read_accuracy(accuracy_path(config))
    except DataError:
        return None
