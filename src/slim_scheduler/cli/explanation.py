"""What a configuration means: the findings behind `slim doctor --config`.

Reads the configuration, the model, profiles and the router's files. It runs an item on a CPU server's network, and
tries the engines that `auto` leaves open, as `slim serve` would; it starts no server. What belongs to one server, to
the load, or to the router is a finding of its own, with advice where something is likely not meant.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slim_scheduler.cli.doctor import GIB, Finding, Status
from slim_scheduler.cli.terminal import Show
from slim_scheduler.core.errors import InputError
from slim_scheduler.core.router.base import RouterFacts, ServerFacts
from slim_scheduler.core.router.costs import items_per_second
from slim_scheduler.core.shape import ModelShape
from slim_scheduler.core.types import Bytes, Seconds, Width
from slim_scheduler.run.runs import accuracy_table, check_data
from slim_scheduler.setup.accuracy_files import least_precision, table_file
from slim_scheduler.setup.config import NO_LIMIT_MBPS, Config, ServerConfig, WorkloadConfig
from slim_scheduler.setup.machines import (
    LIVE_KINDS,
    allowed_tasks,
    build_router,
    fallback_name,
    find_profile,
    in_items_per_second,
    load_profiles,
    load_shape,
    measure_command,
    router_facts,
    served_shape,
)
from slim_scheduler.setup.profiles import read_profile

if TYPE_CHECKING:
    from slim_scheduler.model.protocol import SlimmableModel

FULL = 0.9  # of what is carried: above it queues are long whoever routes
MIB = float(1 << 20)


def explain(config: Config, show: Show = lambda share, now="": None) -> list[Finding]:
    """All findings about a configuration that was read. `show` hears of the trials of what `auto` leaves open."""
    try:
        shape = load_shape(config)
    except InputError as error:
        return [Finding("model", "problem", str(error), "the rest needs the network's sizes")]
    widths = ", ".join(f"{width:g}" for width in shape.widths)
    findings = [Finding("model", "ok", f"{shape.name}: {shape.segments} segments, widths {widths}")]
    config = _as_served(config, shape, findings, show)
    findings.extend(_data(config))
    for server in config.servers:
        findings.extend(_server(server, config, shape))
    try:
        facts = router_facts(config, shape, load_profiles(config, shape))
    except InputError:
        facts = None  # the server's own finding says which profile is missing
    if facts is not None:
        findings.extend(_capacity(facts))
        findings.extend(_load(config, facts))
    findings.extend(_router(config, shape, facts))
    findings.append(Finding("dispatcher", "ok", _dispatcher(config)))
    return findings


def _as_served(config: Config, shape: ModelShape, findings: list[Finding], show: Show) -> Config:
    """The configuration with the devices and precisions that `auto` takes here; finds what keeps live servers from
    running it, as `bench` and `serve` would say."""
    from slim_scheduler.model.folder import load_model

    try:
        model = load_model(config.model.path)
    except InputError as error:
        findings.append(Finding("model", "problem", str(error), "simulations need its manifest alone"))
        return config
    servers = []
    for server in config.servers:
        try:
            servers.append(_live(server, config, model, shape, findings, show))
        except InputError as error:
            findings.append(Finding(f"server {server.name}", "problem", str(error)))
            servers.append(server)
    return msgspec.structs.replace(config, servers=tuple(servers))


def _live(
    server: ServerConfig,
    config: Config,
    model: "SlimmableModel",
    shape: ModelShape,
    findings: list[Finding],
    show: Show,
) -> ServerConfig:
    """A server that computes, with what `auto` takes in its place. Raises InputError where it cannot run the model."""
    from slim_scheduler.engine.automatic import with_fastest_device
    from slim_scheduler.model.contract import check_runs
    from slim_scheduler.model.precision import in_precision

    if "auto" in (server.device, server.precision) and _is_live(server):
        server = with_fastest_device(server, Path(config.model.path), model, shape, show)
        found = f"{server.device} in {server.precision} is the fastest here"
        findings.append(Finding(f"server {server.name}", "ok", found))
    elif server.device == "cpu":
        check_runs(in_precision(model, server.precision))
    elif server.device.startswith("cuda"):  # an engine has its own precisions
        in_precision(model, server.precision)
    return server


def _is_live(server: ServerConfig) -> bool:
    return server.device == "auto" or server.device.partition(":")[0] in LIVE_KINDS


def _data(config: Config) -> Iterator[Finding]:
    path, data = config.model.path, config.workload.data
    try:
        accuracy = accuracy_table(config)
        check_data(config, accuracy)
    except InputError as error:
        yield Finding("data", "note", f"simulate, compare and bench refuse it: {error}", "serve takes clients' images")
        return
    if accuracy is None:
        found = f"none measured for {path}: unknown in runs, and routers that weigh it refuse"
        yield Finding("accuracy", "note", found, f"slim accuracy --model {path} --data DIR")
    elif (least := least_precision(config)) != "fp32" and not (Path(path) / table_file("test", least)).is_file():
        device = next(server.device for server in config.servers if server.precision == least)
        advice = f"slim accuracy --model {path} --data DIR --device {device} --precision {least}"
        yield Finding("accuracy", "note", f"in {least} it was not measured, so fp32's is taken", advice)
    if data != "digits" and not Path(data).is_dir():
        advice = "simulations need its name alone, `slim bench` the folder: set workload.data"
        yield Finding("data", "note", f"{data} is no folder here", advice)


def _server(server: ServerConfig, config: Config, shape: ModelShape) -> Iterator[Finding]:
    subject, profile = f"server {server.name}", None
    path = find_profile(server, shape, Path(config.model.path))
    if path is None and server.device == "auto":
        yield Finding(subject, "note", "auto: no device was taken, so its speed is not known")
    elif path is None and not _is_live(server):
        found = f"{server.device}: no device that computes, and no profile of that name"
        yield Finding(subject, "problem", found, f"live devices: {', '.join(LIVE_KINDS)}; else name its profile's file")
    elif path is None and server.slowdown_of == "profile":
        found = f'{server.device}: no profile, and slowdown_of = "profile" keeps to one'
        yield Finding(subject, "problem", found, measure_command(config, server))
    elif path is None:
        advice = f"{measure_command(config, server)}, or a router without costs"
        yield Finding(subject, "note", f"{server.device}: no profile, so its speed is not known", advice)
    else:
        try:
            profile = read_profile(path)
            slower = f", {server.slowdown:g} times slower" if server.slowdown != 1 else ""
            yield Finding(subject, "ok", f"{server.device} by {path}{slower}, {profile.source}")
        except InputError as error:
            yield Finding(subject, "problem", str(error))
    yield _memory(subject, server, shape)
    at_once = "1 batch" if server.concurrency == 1 else f"{server.concurrency} batches"
    window = "are held back as the profile says" if server.batch_window_ms == "auto" else "start at once"
    if isinstance(server.batch_window_ms, float) and server.batch_window_ms > 0:
        window = f"are held back up to {server.batch_window_ms:g} ms"
    try:
        credit, enough = (
            allowed_tasks(config, asked, shape, profile)
            for asked in (server, msgspec.structs.replace(server, credit_tasks="auto"))
        )
    except InputError as error:
        yield Finding(subject, "problem", str(error))
        return
    found = f"{at_once} of up to {server.max_batch} at a time, {credit} tasks on the way; tasks {window}"
    if server.max_upgrade is None and len(shape.widths) > 1:
        advice = f"max_upgrade = 0 for server {server.name}, if the width that is asked for is to be what runs"
        yield Finding(subject, "note", f"{found}; a wider instance that is free may run instead", advice)
    else:
        yield Finding(subject, "ok", found)
    if max(config.router.groups) > credit:
        found = f"groups of {max(config.router.groups)} are cut to the {credit} tasks it may be sent"
        yield Finding(subject, "note", found, f"lower router.groups, or raise credit_tasks of server {server.name}")
    elif credit < enough and not _is_live(server) and config.network.shared_mbps is None:
        found = f"{credit} tasks on the way may leave it short of work while some waits; automatic are {enough}"
        yield Finding(subject, "note", found, f'credit_tasks = "auto" for server {server.name}')


def _memory(subject: str, server: ServerConfig, shape: ModelShape) -> Finding:
    """The budget in sets of instances: one of every segment at every width, or of every segment at the widest."""
    sizes = served_shape(server, shape)
    budget = server.vram_budget_gib * GIB
    whole = sum(_instance(sizes, s, width, server.max_batch) for s in range(sizes.segments) for width in sizes.widths)
    widest = sum(_instance(sizes, s, sizes.widths[-1], server.max_batch) for s in range(sizes.segments))
    largest = max(_instance(sizes, s, sizes.widths[-1], server.max_batch) for s in range(sizes.segments))
    if budget < largest:
        found = f"{server.vram_budget_gib:g} GiB hold no instance of the widest, which takes {largest / MIB:.1f} MiB"
        return Finding(subject, "problem", found, "raise vram_budget_gib, or lower max_batch")
    found = (
        f"{server.vram_budget_gib:g} GiB hold every segment at every width {math.floor(budget / whole)} times "
        f"({whole / MIB:.1f} MiB), at the widest alone {math.floor(budget / widest)} times ({widest / MIB:.1f} MiB)"
    )
    if budget < whole:
        return Finding(subject, "note", found, "instances take turns: raise vram_budget_gib, or expect loads")
    return Finding(subject, "ok", found)


def _instance(shape: ModelShape, segment: int, width: Width, max_batch: int) -> Bytes:
    """An instance that has served every previous width."""
    previous = shape.widths if segment else ()
    return shape.instance_bytes(segment, width, max_batch) + sum(shape.variant(segment, p, width) for p in previous)


def _capacity(facts: RouterFacts) -> Iterator[Finding]:
    servers, shape = facts.servers, facts.shape
    carried = [{n: items_per_second(servers[n], shape, width) for n in servers} for width in shape.widths]
    for width, each, wider in zip(shape.widths, carried, [*carried[1:], {}], strict=True):
        parts = ", ".join(f"{name} {rate:,.0f}" for name, rate in each.items())
        found = f"{sum(each.values()):,.0f} items/s in full batches, if full use slows nothing: {parts}"
        slow = [name for name, rate in each.items() if rate <= wider.get(name, 0.0)]
        if slow:
            advice = f"the next wider one is as fast at {', '.join(slow)}: measure when the machine is quiet"
            yield Finding(f"width {width:g}", "note", found, advice)
        else:
            yield Finding(f"width {width:g}", "ok", found)


def _load(config: Config, facts: RouterFacts) -> Iterator[Finding]:
    workload = in_items_per_second(config).workload
    narrow, wide = (_carried(facts, width) for width in (facts.shape.widths[0], facts.shape.widths[-1]))
    if workload.kind == "trace" and not workload.trace_at_rate:
        yield Finding("load", "ok", f"as {workload.trace} says, for {workload.duration_s:g} s")
    else:
        factors = [factor for _, factor in workload.steps] if workload.kind == "steps" else [1.0]
        peak = workload.rate * max(factors)
        most = ", at most" if workload.kind == "steps" else ""
        share = f"{peak / narrow:.2f} of the narrowest and {peak / wide:.2f} of the widest"
        found = f"{peak:,.0f} items/s ({workload.kind}{most}), {share}"
        if peak > FULL * narrow:
            advice = "expect queues and refusals at that load: lower workload.rate, or add a server"
            yield Finding("load", "note", found, advice)
        else:
            yield Finding("load", "ok", found)
    if config.network.shared_mbps is not None or config.network.mbps < NO_LIMIT_MBPS:
        yield _links(config, facts)
    yield _time(workload, facts)


def _links(config: Config, facts: RouterFacts) -> Finding:
    servers = facts.servers.values()
    rate = next(iter(servers)).bytes_per_s if facts.shared_link else sum(server.bytes_per_s for server in servers)
    found = f"carry {rate / facts.shape.input_bytes:,.0f} inputs/s"
    if facts.move_activations:
        found += f", or {rate / max(map(max, facts.shape.activation_bytes)):,.0f} of the largest activations"
    return Finding("links", "ok", found, "slim frontier has the bound with links")


def _time(workload: WorkloadConfig, facts: RouterFacts) -> Finding:
    limit, what = (workload.deadline_ms, "deadline") if workload.deadline_ms else (workload.slo_ms, "SLO")
    servers, widths = facts.servers.values(), facts.shape.widths
    alone = 1e3 * min(_pass(server, facts.shape, widths[0]) for server in servers)
    full = 1e3 * max(_pass(server, facts.shape, widths[-1], server.max_batch) for server in servers)
    found = f"{what} {limit:g} ms; an item takes {alone:.1f} ms alone and narrow, {full:.1f} ms in wide batches"
    if limit < alone:
        status: Status = "problem" if workload.deadline_ms else "note"
        return Finding("time", status, found, f"no item can be in time: raise workload.{what.lower()}_ms")
    if limit < full:
        return Finding("time", "note", found, "wide full batches on the slowest server are late: lower max_batch")
    return Finding("time", "ok", found)


def _carried(facts: RouterFacts, width: Width) -> float:
    return sum(items_per_second(server, facts.shape, width) for server in facts.servers.values())


def _pass(server: ServerFacts, shape: ModelShape, width: Width, size: int = 1) -> Seconds:
    """One way through the network on a server, without waiting, links included."""
    times = [server.latency.seconds(s, width if s else None, width, size) for s in range(shape.segments)]
    return server.slowdown * sum(times) + 2 * server.link_latency * shape.segments


def _router(config: Config, shape: ModelShape, facts: RouterFacts | None) -> Iterator[Finding]:
    name, fallback = config.router.name, fallback_name(config, shape, facts is not None)
    profiles = None if facts is None else {name: server.profile for name, server in facts.servers.items()}
    try:
        router = build_router(name, config, shape, profiles)
        build_router(fallback, config, shape, profiles)
    except InputError as error:
        yield Finding("router", "problem", str(error))
        return
    is_auto = f", here {router.name}" if router.name != name else ""
    yield Finding("router", "ok", f"{name}{is_auto}; where it fails {fallback} decides")


def _dispatcher(config: Config) -> str:
    dispatch = config.dispatch
    place = "at the back" if dispatch.reentry == "back" else "at its item's place"
    return (
        f"a finished task goes on {place}; refuses beyond {dispatch.max_waiting_items:,} waiting items; a server that "
        f"is silent for {dispatch.heartbeat_timeout_s:g} s is out"
    )
