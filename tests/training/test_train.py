"""A training run as a user has it: it learns, resumes after SIGKILL to the same policy, and says what it refuses."""

import csv
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tomli_w
import torch

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError, InputError, WorkerLostError
from slim_scheduler.core.router.learned.router import learned_router
from slim_scheduler.core.router.plan.plans import RHO, lp_plans
from slim_scheduler.core.router.plan.waiting import waiting
from slim_scheduler.setup.accuracy_files import TABLE_FILES, write_accuracy
from slim_scheduler.setup.config import TrainingConfig, load_config, with_preset
from slim_scheduler.setup.machines import build_router, load_profiles, load_shape, router_facts
from slim_scheduler.setup.policy_files import read_policy, write_policy
from slim_scheduler.sim.host import Simulation
from slim_scheduler.training.curves import UpdateReport, UpdateStats, warnings
from slim_scheduler.training.ppo import fresh_network, joint_log_prob, tensors, train
from slim_scheduler.training.rollout import Actor, RolloutOrder
from slim_scheduler.training.workers import RolloutWorkers
from tests.core.test_learned import Fallbacks
from tests.training.clusters import small_table, training_cluster

TINY = {
    "decisions": 1_600,
    "workers": 2,
    "rollout_decisions": 100,
    "episode_rollouts": 2,
    "observation": "extended",
    "warm_start": "cost-model:random",
    "warm_start_decisions": 400,
    "loads": [0.5, 1.5],
}
RUN = """
import sys
from pathlib import Path
from slim_scheduler.setup.config import load_config
from slim_scheduler.training.ppo import train

if __name__ == "__main__":
    train(load_config(Path(sys.argv[1])), Path(sys.argv[2]), seed=3, report=lambda r: print(r.update, flush=True))
"""


def config_file(folder: Path, workload=None, **training) -> Path:
    """A configuration on disk, as another process needs it."""
    config = training_cluster(folder, training={**TINY, **training}, **({"workload": workload} if workload else {}))
    tree = msgspec.to_builtins(config)
    file = folder / "cluster.toml"
    file.write_text(tomli_w.dumps(without_none(tree)))
    return file


def without_none(tree):
    if isinstance(tree, dict):
        return {key: without_none(value) for key, value in tree.items() if value is not None}
    return [without_none(value) for value in tree] if isinstance(tree, list | tuple) else tree


def test_a_killed_run_resumes_to_the_same_policy(tmp_path):
    file = config_file(tmp_path / "cluster")
    train(load_config(file), tmp_path / "whole", seed=3)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(file), str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    for line in process.stdout:
        if int(line) == 5:  # in the middle of an episode: updates 4 and 5 were checkpointed, 6 was begun
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    killed = tmp_path / "killed"
    assert not (killed / "curves.csv").read_text().count("\n9,")
    resumed = []
    train(load_config(file), killed, seed=3, report=lambda r: resumed.append(r.update))
    assert 0 < resumed[0] <= 6
    assert (killed / "policy.safetensors").read_bytes() == (tmp_path / "whole" / "policy.safetensors").read_bytes()
    with (killed / "curves.csv").open() as rows:
        updates = [int(row["update"]) for row in csv.DictReader(rows)]
    assert updates == list(range(updates[-1] + 1))  # no row twice, none missing


def test_workers_end_when_the_training_process_is_killed(tmp_path):
    file = config_file(tmp_path / "cluster", decisions=10_000_000)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(file), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "0\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    give_up = time.monotonic() + 20
    while group_is_alive(process.pid):
        assert time.monotonic() < give_up, "a worker outlived the process that started it"
        os.sched_yield()


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):  # those that are only waiting to be reaped are dead
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            return True
    return False


def test_other_settings_do_not_resume(tmp_path):
    train(load_config(config_file(tmp_path / "cluster", decisions=400, warm_start="")), tmp_path / "out")
    with pytest.raises(ConfigError, match="other settings"):
        train(load_config(config_file(tmp_path / "cluster", decisions=800, warm_start="")), tmp_path / "out")


def test_a_ctrl_c_at_the_terminal_does_not_reach_workers_that_start(tmp_path):
    config = load_config(config_file(tmp_path / "cluster", decisions=400))
    parameters = fresh_network(config, 0).arrays()
    with RolloutWorkers(config, 0) as workers:
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGINT)
        order = RolloutOrder(parameters=parameters, update=0, decided=0, decisions=8, teacher="")
        assert len(workers.collect(order)) == config.training.workers


def test_a_worker_that_died_between_updates_is_told(tmp_path):
    config = load_config(config_file(tmp_path / "cluster", decisions=400))
    order = RolloutOrder(fresh_network(config, 0).arrays(), update=0, decided=0, decisions=8)
    with RolloutWorkers(config, 0) as workers:
        killed = multiprocessing.active_children()[0]
        killed.kill()
        killed.join()
        with pytest.raises(WorkerLostError, match="ended with -9; run `slim train` again"):
            workers.collect(order)


def test_a_worker_that_was_told_to_stop_with_the_training_is_an_interruption(tmp_path):
    config = load_config(config_file(tmp_path / "cluster"))

    def stop_all(worker):
        os.kill(os.getpid(), signal.SIGTERM)
        worker.kill()

    def after_the_first(update):
        worker = multiprocessing.active_children()[0]
        os.kill(worker.pid, signal.SIGSTOP)  # the second update never ends
        threading.Timer(0.5, stop_all, (worker,)).start()

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "out", report=after_the_first)
    assert read_policy(tmp_path / "out")[0].training["updates"] == 1


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({"kind": "trace", "trace": "missing.csv", "trace_at_rate": True}, "does not exist"),
        (
            {"rate": 1e-9, "duration_s": 1.0},
            r"100 workloads .* no arrivals, .* workload.rate \(1e-09\)",
        ),
    ],
)
def test_a_workload_that_has_nothing_to_train_on_is_refused_with_what_to_do(tmp_path, workload, said):
    config = load_config(config_file(tmp_path / "cluster", decisions=400, warm_start="", workload=workload))
    with pytest.raises(InputError, match=said):
        train(config, tmp_path / "out")


def test_a_trace_that_is_not_used_need_not_be_there(tmp_path):
    workload = {"kind": "poisson", "trace": "missing.csv"}
    config = load_config(config_file(tmp_path / "cluster", decisions=400, warm_start="", workload=workload))
    assert train(config, tmp_path / "out").training["decided"] > 0


@pytest.mark.parametrize("what", ["table", "profile", "teacher"])
def test_files_that_say_something_else_do_not_resume(tmp_path, what):
    teacher = tmp_path / "teacher"
    config = load_config(config_file(tmp_path / "cluster", decisions=400, warm_start=""))
    train(config, teacher)
    if what == "teacher":
        training = msgspec.structs.replace(config.training, warm_start=f"ppo:{teacher}", warm_start_decisions=400)
        config = msgspec.structs.replace(config, training=training)
    train(config, tmp_path / "out")
    if what == "teacher":
        write_policy(teacher, read_policy(teacher)[0], fresh_network(config, 7).arrays())
    elif what == "table":
        columns = ((0.5, 0.5), (1.0, 0.5), (0.5, 1.0), (1.0, 1.0))
        flipped = {widths: ~small_table().correct(widths) for widths in columns}
        sure = {widths: np.ones(100) for widths in columns}
        table = AccuracyTable(flipped, split="held-out", data="other", margins=sure)
        write_accuracy(table, tmp_path / "cluster" / TABLE_FILES["held-out"])
    else:
        profile = Path(config.servers[0].profile)
        tree = msgspec.json.decode(profile.read_bytes())
        profile.write_bytes(msgspec.json.encode({**tree, "device": "another"}))
    with pytest.raises(ConfigError, match="other settings"):
        train(config, tmp_path / "out")


@pytest.mark.parametrize(("section", "key"), [("training", "warm_start"), ("router", "fallback")])
def test_a_training_does_not_overwrite_a_policy_that_it_depends_on(tmp_path, section, key):
    file = config_file(tmp_path / "cluster", decisions=400, warm_start="")
    out = tmp_path / "out"
    train(load_config(file), out)
    before = (out / "policy.safetensors").read_bytes()
    config = load_config(file, (f"{section}.{key}='ppo:{tmp_path}/cluster/../out'",))
    with pytest.raises(ConfigError, match=f"{section}.{key} is ppo:.*, which the training would overwrite"):
        train(config, out)
    assert (out / "policy.safetensors").read_bytes() == before


def test_a_finished_run_says_what_it_was_however_often_it_is_asked(tmp_path):
    file = config_file(tmp_path / "cluster", decisions=400, warm_start="", recipe="paper", observation=None)
    made = train(load_config(file), tmp_path / "out")
    assert train(load_config(file), tmp_path / "out") == made
    manifest, _ = read_policy(tmp_path / "out")
    assert (manifest.kind, manifest.sizes.servers, manifest.training["decided"]) == ("paper", 3, 400)


def test_a_policy_that_sees_the_plan_is_trained_and_routes(tmp_path):
    held = {"plan_coef": 0.1, "plan_server_coef": 0.1}
    file = config_file(tmp_path / "cluster", warm_start="lp", observation="planned", **held)
    train(load_config(file), tmp_path / "out")
    assert read_policy(tmp_path / "out")[0].kind == "planned"
    config = load_config(file)
    shape = load_shape(config)
    router = build_router(f"ppo:{tmp_path / 'out'}", config, shape, load_profiles(config, shape))
    fallbacks = Fallbacks()
    simulation = Simulation(config, "ppo", 0, recorder=fallbacks, router=router)
    assert simulation.run().counts["items"]["answered"] > 400
    assert not fallbacks.found


def test_a_policy_that_learned_with_second_passes_lets_items_run_again(tmp_path):
    file = config_file(tmp_path / "cluster", warm_start="lp", observation="planned")
    unsure_where_wrong(tmp_path / "cluster")
    train(load_config(file, ("router.escalation=true",)), tmp_path / "out")
    assert read_policy(tmp_path / "out")[0].kind == "escalating"
    config = load_config(file)  # the policy knows it; the configuration need not say so
    sure = np.where(small_table().correct((0.5, 0.5)), 0.9, 0.1).tolist()
    fallbacks = Fallbacks()
    simulation = Simulation(
        config,
        f"ppo:{tmp_path / 'out'}",
        0,
        recorder=fallbacks,
        margin=lambda item, widths: sure[item % 100] if widths == (0.5, 0.5) else 0.9,
    )
    result = simulation.run()
    answered = result.counts["items"]["answered"]
    assert answered > 400
    assert 2 * answered < result.tasks < 4 * answered, "some items ran twice, and not all"
    assert not fallbacks.found


def unsure_where_wrong(folder: Path) -> None:
    """Accuracy files whose narrow answers have a small margin where they are wrong."""
    for split, name in TABLE_FILES.items():
        table = small_table(split)
        columns = {widths: table.correct(widths) for widths in table.tuples}
        margins = {widths: np.where(right, 0.9, 0.1) for widths, right in columns.items()}
        write_accuracy(AccuracyTable(columns, split=split, data="made up", margins=margins), folder / name)


def test_plans_of_policies_from_before_they_said_so_are_todays_default():
    assert TrainingConfig().plan_rho == RHO


@pytest.mark.parametrize(("rho", "queue"), [(1.25, 0.0), ("lp", 0.0), ("lp", 0.2)])
def test_a_policy_says_what_plans_it_saw(tmp_path, rho, queue):
    said = {"plan_rho": rho, "plan_queue_s": queue}
    file = config_file(tmp_path / "cluster", decisions=400, warm_start="", observation="planned", **said)
    train(load_config(file), tmp_path / "out")
    manifest, parameters = read_policy(tmp_path / "out")
    assert (manifest.plan_rho, manifest.plan_queue) == (rho, queue)
    config = load_config(file)
    facts = router_facts(config, load_shape(config), load_profiles(config, load_shape(config)))
    router = learned_router(manifest, parameters, facts, small_table, "x")
    plans = router._encoder._ledger._plans
    if rho == "lp":
        followed = lp_plans(facts, small_table(), waiting=waiting(queue, config.reward))
        key = (plans.whole, plans.steps)
        assert (plans.steps, plans.load(key)) == (followed.steps, followed.load(key))
        assert plans.usual_time(key) == followed.usual_time(key) >= queue
        assert plans.waiting == followed.waiting
    else:
        assert plans.overload == rho


@pytest.mark.parametrize("key", ["plan_coef", "plan_server_coef"])
def test_who_sees_no_plan_cannot_be_held_to_one(tmp_path, key):
    with pytest.raises(ConfigError, match=f"{key} needs the observation planned; this is extended"):
        config_file(tmp_path / "cluster", **{key: 0.1})


@pytest.mark.parametrize("recipe", ["paper", "planned"])
def test_who_acts_and_who_learns_have_one_policy(tmp_path, recipe):
    """Rollouts act in NumPy and PPO reckons in torch: the same likelihood and value of what was done."""
    config = load_config(config_file(tmp_path / "cluster", recipe=recipe, observation=None))
    network = fresh_network(config, 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        steps = Actor(config, 0, 0).collect(RolloutOrder(network.arrays(), 0, 0, 200)).steps
        inputs, action, epsilon, allowed = tensors(steps)
        out = network(inputs)
        likelihood = joint_log_prob(out, action, epsilon, allowed)
    assert len(np.unique(steps.action, axis=0)) > 5
    np.testing.assert_allclose(steps.log_prob, likelihood.numpy(), atol=1e-4)
    np.testing.assert_allclose(steps.value, out.value.numpy(), atol=1e-4)


def test_rollouts_follow_from_seed_and_update(tmp_path):
    config = load_config(config_file(tmp_path / "cluster"))

    order = RolloutOrder(fresh_network(config, 0).arrays(), update=2, decided=400, decisions=100)
    first, again = Actor(config, 5, 1).collect(order), Actor(config, 5, 1).collect(order)
    assert (first.steps.action == again.steps.action).all()
    assert (first.steps.shared == again.steps.shared).all()
    assert first.credits == again.credits
    other = Actor(config, 5, 0).collect(order)
    assert not (first.steps.shared == other.steps.shared).all()


def test_clusters_of_other_sizes_are_drawn_and_padded(tmp_path):
    config = load_config(config_file(tmp_path / "cluster", servers=[2, 5], slowdown=4.0))

    parameters = fresh_network(config, 0).arrays()
    actor = Actor(config, 0, 0)
    sizes = set()
    for update in range(0, 16, 2):
        steps = actor.collect(RolloutOrder(parameters, update, 0, 30)).steps
        assert steps.servers.shape[1] == 5
        assert not (steps.server_mask & ~steps.present).any()
        sizes |= set(steps.present.sum(1).tolist())
    assert len(sizes) > 1
    assert sizes <= {2, 3, 4, 5}


def report(**changes) -> UpdateReport:
    fields = {
        "update": 1, "updates": 2, "decided": 1, "seconds": 1.0, "decisions_per_s": 1.0, "reward": 0.0,
        "accuracy": 0.9, "latency": 0.1, "energy": 1.0, "variance": 0.02, "charged": 0.0, "hoped": 0.0,
        "memory": 0.5, "width_share": (0.4, 0.6), "server_share": (0.5, 0.5), "group_mean": 2.0, "stats": UpdateStats(),
    }  # fmt: skip
    return UpdateReport(**{**fields, **changes})


def test_the_failures_that_the_paper_names_are_noticed():
    assert warnings(report()) == []
    assert "slimmest width" in warnings(report(width_share=(0.99, 0.01)))[0]
    assert "raise reward.delta" in warnings(report(server_share=(0.96, 0.04), variance=0.2))[0]
    assert "memory budget" in warnings(report(memory=0.99))[0]


def test_a_preset_changes_rewards_and_training_and_nothing_else(tmp_path):
    config = load_config(config_file(tmp_path))
    (tmp_path / "thrifty.toml").write_text("[reward]\nalpha = 0.25\n[training]\ndecisions = 7\n")
    changed = with_preset(config, tmp_path, "thrifty")
    assert (changed.reward.alpha, changed.reward.beta) == (0.25, config.reward.beta)
    assert (changed.training.decisions, changed.training.episode_rollouts) == (7, 2)
    assert changed.servers == config.servers
    with pytest.raises(ConfigError, match="does not exist; files beside the configuration: cluster, thrifty"):
        with_preset(config, tmp_path, "lavish")
    (tmp_path / "other.toml").write_text("[workload]\nrate = 1.0\n")
    with pytest.raises(ConfigError, match=r"may hold \[reward\] and \[training\]; it has workload"):
        with_preset(config, tmp_path, "other")


def test_imitation_alone_makes_a_policy_and_nothing_at_all_is_refused(tmp_path):
    manifest = train(load_config(config_file(tmp_path / "cluster", decisions=0)), tmp_path / "out")
    assert manifest.training["decided"] == 0
    assert manifest.training["updates"] == 2
    with pytest.raises(ConfigError, match="decisions is 0 and nothing is imitated"):
        train(load_config(config_file(tmp_path / "cluster", decisions=0, warm_start="")), tmp_path / "none")
