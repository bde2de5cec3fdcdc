"""The learned router: what it sees, what it refuses, and that order and framework do not change what it decides."""

import hashlib
import json

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from slim_scheduler.core.errors import CheckpointError, RouterError
from slim_scheduler.core.messages import RouterFellBack
from slim_scheduler.core.router.costs import full_batch_time
from slim_scheduler.core.router.learned.encoders import build_encoder
from slim_scheduler.core.router.learned.observation import Observation
from slim_scheduler.core.router.learned.policy import NetworkSizes, build_network
from slim_scheduler.core.router.learned.router import LearnedRouter, PolicyManifest
from slim_scheduler.core.router.plan.plans import Plans
from slim_scheduler.core.view import Head, ServerReport, ServerView, View
from slim_scheduler.setup.machines import build_dispatcher, build_router, load_profiles, load_shape, router_facts
from slim_scheduler.setup.policy_files import load_router, write_policy
from slim_scheduler.sim.host import Simulation
from slim_scheduler.training.policy import Inputs, PolicyNetwork
from tests.core.facts import Table
from tests.training.clusters import training_cluster


def facts_of(config):
    shape = load_shape(config)
    return router_facts(config, shape, load_profiles(config, shape))


def sizes_for(kind, facts, hidden=32):
    encoder = build_encoder(kind, facts, full_batch_time(facts), lambda: Plans(facts, Table()))
    servers = len(facts.servers) if kind == "paper" else None
    return NetworkSizes(
        kind,
        encoder.layout.shared.size,
        encoder.layout.server.size,
        servers,
        len(facts.shape.widths),
        len(facts.groups),
        hidden,
    )


def random_parameters(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in sizes.shapes().items()}


def write_random_policy(folder, config, kind, seed=0):
    facts = facts_of(config)
    sizes = sizes_for(kind, facts)
    manifest = PolicyManifest(
        kind=kind,
        network=facts.shape.name,
        segments=facts.shape.segments,
        widths=facts.shape.widths,
        groups=facts.groups,
        sizes=sizes,
        batch_time=full_batch_time(facts),
    )
    write_policy(folder, manifest, random_parameters(sizes, seed))
    return facts


class Watcher:
    """Collects the views and decisions of a run."""

    def step(self, machine, now, event, commands):
        pass


def views(config, router="jsq:0.5", count=150):
    """Views of a run, each handed out while it holds."""
    simulation = Simulation(config, router, 0, recorder=Watcher())
    for _ in range(count):
        view = simulation.run_until_decision()
        if view is None:
            return
        yield view
        simulation.decide()


@pytest.mark.parametrize("kind", ["paper", "extended", "planned"])
def test_numpy_policy_equals_the_torch_policy(tmp_path, kind):
    config = training_cluster(tmp_path)
    facts = facts_of(config)
    sizes = sizes_for(kind, facts)
    network = PolicyNetwork(sizes, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    ours = build_network(kind, network.arrays())
    encoder = build_encoder(kind, facts, full_batch_time(facts), lambda: Plans(facts, Table()))
    for view in views(config):
        observation = encoder.encode(view)
        heads = ours.forward(observation)
        batch = [torch.from_numpy(np.asarray(part))[None] for part in observation]
        present = torch.ones(1, len(observation.server_mask), dtype=torch.bool)
        with torch.no_grad():
            out = network(Inputs(batch[0], batch[1], present, *batch[2:]))
        for mine, theirs, mask in zip(heads[:3], out[:3], observation[2:], strict=True):
            np.testing.assert_allclose(mine[mask], theirs[0].numpy()[mask], atol=1e-4)
        assert heads.value == pytest.approx(out.value.item(), abs=1e-4)


def test_padding_changes_nothing_in_torch(tmp_path):
    facts = facts_of(training_cluster(tmp_path))
    sizes = sizes_for("extended", facts)
    network = PolicyNetwork(sizes, torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(0)
    shared, rows = torch.randn(5, sizes.shared, generator=rng), torch.randn(5, 3, sizes.server, generator=rng)
    widths, groups = torch.ones(5, sizes.widths, dtype=torch.bool), torch.ones(5, sizes.groups, dtype=torch.bool)
    there = torch.ones(5, 3, dtype=torch.bool)
    padded = torch.cat((there, torch.zeros(5, 2, dtype=torch.bool)), 1)
    wide = torch.cat((rows, torch.randn(5, 2, sizes.server, generator=rng)), 1)
    small = network(Inputs(shared, rows, there, there, widths, groups))
    large = network(Inputs(shared, wide, padded, padded, widths, groups))
    torch.testing.assert_close(small.server, large.server[:, :3])
    torch.testing.assert_close(small.width, large.width)
    torch.testing.assert_close(small.value, large.value)


def test_the_order_of_servers_permutes_the_choice(tmp_path):
    config = training_cluster(tmp_path)
    facts = facts_of(config)
    network = build_network("extended", random_parameters(sizes_for("extended", facts)))
    encoder = build_encoder("extended", facts, full_batch_time(facts), lambda: Plans(facts, Table()))
    rng = np.random.default_rng(0)
    chosen = set()
    for view in views(config):
        seen = encoder.encode(view)
        order = rng.permutation(3)
        other = Observation(seen.shared, seen.servers[order], seen.server_mask[order], *seen[3:])
        mine, theirs = network.forward(seen), network.forward(other)
        np.testing.assert_allclose(mine.server[order], theirs.server, atol=1e-5)
        np.testing.assert_allclose(mine.width, theirs.width, atol=1e-5)
        np.testing.assert_allclose(mine.group, theirs.group, atol=1e-5)
        chosen.add(int(np.argmax(mine.server)))
    assert len(chosen) > 1  # it is not always the same one


class Fallbacks(Watcher):
    def __init__(self):
        self.found = []

    def step(self, machine, now, event, commands):
        self.found += [command for command in commands if isinstance(command, RouterFellBack)]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_one_extended_policy_serves_any_number_of_servers(tmp_path, count):
    write_random_policy(tmp_path / "policy", training_cluster(tmp_path / "three"), "extended")
    config = training_cluster(tmp_path / "other", ({},) * count, workload={"rate": 100.0, "duration_s": 1.0})
    router = load_router(tmp_path / "policy", facts_of(config), Table)
    fallbacks = Fallbacks()
    simulation = Simulation(config, "ppo", 0, recorder=fallbacks, router=router)
    assert simulation.run().counts["items"]["answered"] > 50
    assert not fallbacks.found


def test_a_paper_policy_in_another_cluster_falls_back_and_is_counted(tmp_path):
    write_random_policy(tmp_path / "policy", training_cluster(tmp_path / "three"), "paper")
    config = training_cluster(tmp_path / "two", ({}, {}))
    router = load_router(tmp_path / "policy", facts_of(config), Table)
    with pytest.raises(RouterError, match="trained for 3 servers, but there are 2"):
        router.decide(next(views(config)), np.random.default_rng(0))
    fallbacks = Fallbacks()
    Simulation(config, "ppo", 0, recorder=fallbacks, router=router).run()
    assert len(fallbacks.found) > 100


def test_nan_falls_back(tmp_path):
    config = training_cluster(tmp_path)
    facts = facts_of(config)
    parameters = random_parameters(sizes_for("extended", facts))
    parameters["server.weight"][0] = np.nan
    encoder = build_encoder("extended", facts, full_batch_time(facts), lambda: Plans(facts, Table()))
    router = LearnedRouter("x", build_network("extended", parameters), encoder, facts.shape.widths, facts.groups)
    with pytest.raises(RouterError, match="NaN"):
        router.decide(next(views(config)), np.random.default_rng(0))


def test_only_what_may_be_chosen_is_chosen(tmp_path):
    config = training_cluster(tmp_path, workload={"rate": 3000.0, "duration_s": 0.3})
    write_random_policy(tmp_path / "policy", config, "extended")
    facts = facts_of(config)
    for sample in (False, True):
        router = load_router(tmp_path / "policy", facts, Table, sample=sample)
        rng = np.random.default_rng(0)
        full = 0
        for view in views(config, count=400):
            decision = router.decide(view, rng)
            assert view.servers[decision.server].available
            assert decision.width in view.head.widths
            full += not all(server.available for server in view.servers.values())
        assert full  # some had no credit


def test_argmax_ignores_what_differs_between_processors(tmp_path):
    config = training_cluster(tmp_path)
    facts = facts_of(config)
    parameters = random_parameters(sizes_for("paper", facts))
    parameters = {name: np.zeros_like(values) for name, values in parameters.items()}
    parameters["width.bias"] = np.array([1.0, 1.0 + 1e-6], np.float32)  # equal but for the seventh digit
    encoder = build_encoder("paper", facts, full_batch_time(facts), lambda: Plans(facts, Table()))
    router = LearnedRouter("x", build_network("paper", parameters), encoder, facts.shape.widths, facts.groups)
    assert router.decide(next(views(config)), np.random.default_rng(0)).width == facts.shape.widths[0]


def test_unknown_is_not_zero(tmp_path):
    facts = facts_of(training_cluster(tmp_path))
    head = Head(0, None, None, 1, 0.0, None, facts.shape.widths)
    servers = {name: ServerView(name, 16, 0, 0.0) for name in facts.servers}
    silent = View(0.0, head, 1, (1, 0), 0, servers, servers)
    unit = full_batch_time(facts)
    paper, extended = (
        build_encoder(kind, facts, unit, lambda: Plans(facts, Table())) for kind in ("paper", "extended")
    )
    assert paper.encode(silent).shared[2:].tolist() == [-1.0] * 9
    before = extended.encode(silent).servers
    for name, server in servers.items():
        server.report = ServerReport(name, 0, 0.0, (0, 0), 0, 0, 0, 100, (), (), utilization=0.0, power_w=0.0)
    assert paper.encode(silent).shared[2:].tolist() == [0.0] * 9
    flags = (before == 1.0).all(axis=0) & (extended.encode(silent).servers == 0.0).all(axis=0)
    assert flags.sum() == 4  # no report, how old it is, utilisation unknown, power unknown


def test_a_policy_is_refused_where_it_does_not_belong(tmp_path):
    config = training_cluster(tmp_path / "cluster")
    facts = write_random_policy(tmp_path / "policy", config, "extended")
    groups = msgspec.structs.replace(facts, groups=(1, 2))
    with pytest.raises(CheckpointError, match=r"groups \(1, 2, 4, 8, 16, 32\), but this run has \(1, 2\)"):
        load_router(tmp_path / "policy", groups, Table)
    other = msgspec.structs.replace(facts, shape=msgspec.structs.replace(facts.shape, name="large"))
    with pytest.raises(CheckpointError, match="is for network small, but this run has large"):
        load_router(tmp_path / "policy", other, Table)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_router(tmp_path / "nothing", facts, Table)


@pytest.mark.parametrize("damage", ["weights", "manifest", "sizes", "format", "layout"])
def test_a_damaged_policy_is_refused(tmp_path, damage):
    facts = write_random_policy(tmp_path / "policy", training_cluster(tmp_path / "cluster"), "extended")
    weights, manifest = tmp_path / "policy" / "policy.safetensors", tmp_path / "policy" / "manifest.json"
    if damage == "weights":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    else:
        tree = json.loads(manifest.read_text())
        if damage == "sizes":
            tree["sizes"]["hidden"] += 1
        else:
            tree[damage] = 99
        manifest.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError):
        load_router(tmp_path / "policy", facts, Table)


def test_weights_of_a_type_that_numpy_lacks_are_refused_by_name(tmp_path):
    facts = write_random_policy(tmp_path / "policy", training_cluster(tmp_path / "cluster"), "extended")
    weights, manifest = tmp_path / "policy" / "policy.safetensors", tmp_path / "policy" / "manifest.json"
    tensors = safetensors.torch.load_file(weights)
    tensors["value.bias"] = tensors["value.bias"].bfloat16()
    weights.write_bytes(safetensors.torch.save(tensors))
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sha256": sha256}))
    with pytest.raises(CheckpointError, match=r"policy/policy\.safetensors has a tensor of type BF16"):
        load_router(tmp_path / "policy", facts, Table)


@pytest.mark.parametrize("name", ["policy.safetensors", "manifest.json"])
def test_a_huge_policy_is_refused_before_it_is_read(tmp_path, name):
    facts = write_random_policy(tmp_path / "policy", training_cluster(tmp_path / "cluster"), "extended")
    with (tmp_path / "policy" / name).open("r+b") as stream:
        stream.truncate(1 << 40)  # sparse: takes no disk, and reading it would take all memory
    with pytest.raises(CheckpointError, match=rf"{name} has 1099511627776 bytes, at most \d+ are read"):
        load_router(tmp_path / "policy", facts, Table)


def test_a_router_is_named_after_its_folder(tmp_path):
    config = training_cluster(tmp_path / "cluster")
    write_random_policy(tmp_path / "policy", config, "paper")
    shape = load_shape(config)
    profiles = load_profiles(config, shape)
    name = f"ppo:{tmp_path / 'policy'}"
    assert build_router(name, config, shape, profiles).name == name
    assert build_dispatcher(config, shape, name, profiles, 0).fifo_length == 0
