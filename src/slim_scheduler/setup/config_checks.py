"""What the values of a configuration must satisfy beyond their types: limits, and settings that depend on each other.

Each breach is one ConfigError with the key, the value and the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slim_scheduler.core.errors import ConfigError

if TYPE_CHECKING:
    from slim_scheduler.setup.config import Config

# Section -> keys whose value, where there is one, must be above 0 and finite
POSITIVE = {
    "servers": (
        "max_batch vram_budget_gib utilization_block idle_unload_s slowdown threads scale_queue_threshold "
        "max_new_instances max_concurrent_batches credit_tasks"
    ),
    "dispatch": (
        "max_waiting_items max_activation_mib heartbeat_timeout_s loss_grace_s priority_aging_s no_server_timeout_s"
    ),
    "network": "mbps shared_mbps",
    "telemetry": "period_s",
    "workload": "rate duration_s items_per_request slo_ms burst_factor burst_s burst_every_s",
    "cluster": "hung_limit_s",
    "router": "patience_room",
    "faults": "factor duration_s",
    "training": (
        "hidden decisions workers rollout_decisions episode_rollouts epochs minibatch learning_rate clip_coef "
        "max_grad_norm n_steps checkpoint_updates horizon_s target_delay_s plan_rho patience_room"
    ),
}
# Likewise, 0 or more
NOT_NEGATIVE = {
    "servers": "max_upgrade num_gpus",
    "dispatch": "max_retries retry_budget",
    "network": "latency_ms",
    "telemetry": "age_s",
    "workload": "deadline_ms",
    "faults": "at_s",
    "router": "patience_s",
    "training": "value_coef entropy_coef warm_start_decisions backlog_s patience_s",
}
# Likewise, from 0 to 1
SHARES = {"faults": "share", "training": "epsilon_min epsilon_max gae_lambda warm_start_doubt"}
# Resources that a server does not ask for by name
RAYS_OWN = {
    "CPU": "servers take none of Ray's CPUs; leave it out",
    "GPU": "say num_gpus instead",
    "memory": "vram_budget_gib bounds a server's memory",
}


def check(config: Config) -> None:
    """Raises ConfigError for the first breach."""
    if not config.servers:
        raise ConfigError("no server is configured; add at least one [[servers]] with name and device")
    for section, keys in POSITIVE.items():
        for key, value in _values(config, section, keys):
            _positive(key, value)
    for section, keys in NOT_NEGATIVE.items():
        for key, value in _values(config, section, keys):
            if not value >= 0:
                raise ConfigError(f"{key} is {value:g}; it must be 0 or more")
    for section, keys in SHARES.items():
        for key, value in _values(config, section, keys):
            if not 0 <= value <= 1:
                raise ConfigError(f"{key} is {value:g}; it must be from 0 to 1")
    _check_servers(config)
    _check_run(config)
    _check_training(config)


def _values(config: Config, section: str, keys: str) -> list[tuple[str, Any]]:
    """(key as the user writes it, value) of all keys that have one; of every entry where the section is a list."""
    part = getattr(config, section)
    entries = [(f"{section}.{i}", e) for i, e in enumerate(part)] if isinstance(part, tuple) else [(section, part)]
    return [
        (f"{where}.{key}", getattr(entry, key))
        for where, entry in entries
        for key in keys.split()
        if getattr(entry, key) is not None
    ]


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
            _positive(f"servers.{i}.resources.{resource}", amount)
        if server.batch_window_ms != "auto" and not 0 <= server.batch_window_ms < float("inf"):
            raise ConfigError(
                f'servers.{i}.batch_window_ms is {server.batch_window_ms:g}; it must be "auto", or 0 or more and finite'
            )
        if server.tile != "auto" and not 1 <= server.tile <= server.max_batch:
            raise ConfigError(
                f'servers.{i}.tile is {server.tile}; it must be "auto", or from 1 to max_batch ({server.max_batch})'
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


def _check_training(config: Config) -> None:
    training = config.training
    low, high = training.loads
    if not 0 < low <= high:
        raise ConfigError(f"training.loads is {low:g} to {high:g}; the first must be above 0 and not above the second")
    if training.slowdown < 1:
        raise ConfigError(f"training.slowdown is {training.slowdown:g}; it must be 1 or more")
    if training.servers is not None:
        fewest, most = training.servers
        if not 1 <= fewest <= most:
            raise ConfigError(f"training.servers is {fewest} to {most}; the first must be at least 1")
        if training.observation == "paper":
            raise ConfigError("training.servers needs observation extended: paper has a fixed number of servers")
