"""Who earned what: eq. 7 by hand on a cluster of round numbers, and the environment any learner can use."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import ConfigError
from slim_scheduler.core.router.escalation import FixedEscalation
from slim_scheduler.core.types import Decision
from slim_scheduler.training.environment import ENV_ID, ClusterEnv
from slim_scheduler.training.episode import Episode
from slim_scheduler.training.scenario import Scenarios
from tests.training.clusters import small_table, training_cluster

ONE_ITEM = {"workload": {"kind": "trace", "trace": "", "duration_s": 2.0}}


def one_item(folder, **sections):
    """One server, and one request at 0.5 s."""
    trace = folder / "one.csv"
    trace.write_text("arrival_s\n0.5\n")
    workload = {"kind": "trace", "trace": str(trace), "duration_s": 2.0}
    return training_cluster(folder, ({},), workload=workload, **sections)


@pytest.mark.parametrize(
    ("training", "said"),
    [({"loads": [0.5, 1.5]}, r"loads is 0\.5 to 1\.5"), ({"servers": [2, 3]}, "servers is 2 to 3")],
)
def test_a_load_cannot_be_drawn_for_arrivals_as_they_were_recorded(tmp_path, training, said):
    with pytest.raises(ConfigError, match=rf"training\.{said}, .*set workload\.trace_at_rate=true"):
        Scenarios(one_item(tmp_path, training=training))
    Scenarios(one_item(tmp_path))


def test_a_block_earns_eq_7(tmp_path):
    weights = {"alpha": 2.0, "beta": 0.5, "gamma": 0.01, "delta": 3.0, "center_accuracy": True}
    episode = Episode(one_item(tmp_path, reward=weights), small_table(), seed=0, expected=True)
    assert episode.decide(Decision("a", 1.0, 1)) == 1
    assert episode.decide(Decision("a", 0.5, 1)) == 2
    first, second = episode.take_credits()
    # Segment 0 at width 1: the instance loads for 0.1 s + 0.2 s, the batch of one takes 10 ms.
    assert (first.decision, first.tasks) == (1, 1)
    assert first.latency == pytest.approx(0.310, abs=1e-4)
    assert first.accuracy == pytest.approx((0.8 + 0.9) / 2)  # the mean over what may follow width 1
    assert first.variance == 0.0  # of one server
    assert first.energy == pytest.approx(100.0 * first.latency, rel=0.02)  # the device idled but for the last 10 ms
    mean_top1 = (0.7 + 0.8 + 0.85 + 0.9) / 4
    eq_7 = 2.0 * (first.accuracy - mean_top1) - 0.5 * first.latency - 0.01 * first.energy
    assert first.reward == pytest.approx(eq_7)
    assert second.accuracy == 0.8  # the table's share for (1, 0.5)
    assert episode.view is None


def test_outcomes_of_items_decide_where_the_method_wants_them(tmp_path):
    episode = Episode(one_item(tmp_path), small_table(), seed=0)
    episode.decide(Decision("a", 1.0, 1))
    episode.decide(Decision("a", 1.0, 1))
    assert episode.take_credits()[1].accuracy in (0.0, 1.0)


def test_the_end_charges_unfinished_blocks_for_their_age(tmp_path):
    config = training_cluster(tmp_path, reward={"beta": 1.0, "gamma": 0.0, "delta": 0.0})
    episode = Episode(config, small_table(), seed=0)
    for _ in range(20):
        episode.decide(Decision("c", 1.0, 1) if episode.view.servers["c"].available else Decision("b", 1.0, 1))
    finished = {credit.decision for credit in episode.take_credits()}
    episode.end()
    charged = episode.take_credits()
    assert {credit.decision for credit in charged} == set(range(1, 21)) - finished
    assert all(credit.reward == pytest.approx(-credit.latency) for credit in charged)
    assert max(credit.latency for credit in charged) > 0


@pytest.mark.parametrize(("margin", "passes"), [(0.1, 2), (0.9, 1)])
def test_only_the_answer_that_is_given_counts(tmp_path, margin, passes):
    table = small_table()
    columns = {widths: table.correct(widths) for widths in table.tuples}
    table = AccuracyTable(columns, split="held-out", data="x", margins=dict.fromkeys(columns, np.full(100, margin)))
    episode = Episode(one_item(tmp_path), table, seed=0, escalation=FixedEscalation((1.0, 1.0), 0.5))
    passed = []
    while episode.view is not None:
        passed.append(episode.view.head.again)
        episode.decide(Decision("a", episode.view.head.widths[0], 1))
    earned = [credit.accuracy for credit in episode.take_credits()]
    mean = np.mean([table.top1(widths) for widths in table.tuples])
    sample = episode._samples[0]
    if passes == 2:
        assert passed == [False, False, True, True]
        assert earned[1] == pytest.approx(mean), "the first pass is no answer"
        assert earned[3] == table.correct((1.0, 1.0))[sample]
    else:
        assert passed == [False, False]
        assert earned[1] == table.correct((0.5, 0.5))[sample]


class Ledger:
    """Which server was decided on, and which the credited block went to."""

    def __init__(self):
        self.chosen, self.went, self.full = {}, {}, 0

    def decided(self, number, view, decision):
        self.chosen[number] = decision.server
        self.full += not view.servers[decision.server].available

    def started(self, server, batch): ...

    def worth(self, number, ran):
        return 0.125 if ran else None

    def charged(self, number, block):
        self.went[number] = block.server
        return 0.0


def test_what_the_plan_can_make_of_widths_counts_instead_of_the_prior(tmp_path):
    config = training_cluster(tmp_path, reward={"alpha": 2.0, "beta": 0.0, "gamma": 0.0, "delta": 0.0, "bonus": 0.0})
    episode = Episode(config, small_table(), seed=0, charges=Ledger())
    while episode.view is not None:
        episode.decide(Decision(next(iter(episode.view.choices)), 0.5, 1))
    credits = episode.take_credits()
    assert credits
    assert [credit.net for credit in credits] == pytest.approx([2.0 * 0.125] * len(credits))


def test_a_decision_that_was_held_earns_what_its_block_does_and_one_that_was_dropped_nothing(tmp_path):
    crash = {"kind": "crash", "server": "c", "at_s": 0.3}
    config = training_cluster(tmp_path, faults=[crash], workload={"rate": 2000.0})
    ledger, rng = Ledger(), np.random.default_rng(0)
    episode = Episode(config, small_table(), seed=0, charges=ledger)
    episode._choice.chooses_full = True
    while episode.view is not None:
        view = episode.view
        episode.decide(Decision(str(rng.choice(list(view.choices))), 0.5, 8))
    assert ledger.full > 20
    assert ledger.went.items() <= ledger.chosen.items()
    assert ledger.chosen.keys() - ledger.went.keys(), "a head held for the server that crashed"


def test_the_environment_passes_gymnasiums_checker(tmp_path):
    env = gymnasium.make(ENV_ID, config=training_cluster(tmp_path), disable_env_checker=True)
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("observation", ["paper", "extended"])
def test_every_decision_is_credited_once_and_step_returns_the_sum(tmp_path, observation):
    config = training_cluster(tmp_path, training={"observation": observation})
    env = ClusterEnv(config)
    state, info = env.reset(seed=3)
    rng = np.random.default_rng(0)
    credited, decisions = [], 0
    while True:
        action = np.array([rng.choice(np.flatnonzero(mask)) for mask in info["masks"]])
        state, reward, terminated, _, info = env.step(action)
        decisions += 1
        assert reward == pytest.approx(sum(value for _, value in info["credits"]))
        assert env.observation_space.contains(state)
        credited += [number for number, _ in info["credits"]]
        if terminated:
            break
    assert sorted(credited) == list(range(1, decisions + 1))


def test_the_environment_pays_what_training_credits(tmp_path):
    def earned(**training):
        config = training_cluster(tmp_path, workload={"rate": 50_000.0}, training=training)
        env = ClusterEnv(config, max_decisions=20)
        env.reset(seed=5)
        steps = [env.step(np.array([i % 3, 0, 0])) for i in range(20)]
        return dict(credit for _, _, _, _, info in steps for credit in info["credits"])

    whole, left = earned(), earned(target_delay_s=0.01)
    assert whole.keys() == left.keys() == set(range(1, 21))
    assert all(left[number] <= whole[number] for number in whole), "the same, less the price of what it used"
    assert sum(left.values()) < sum(whole.values())


def test_the_same_seed_gives_the_same_episode(tmp_path):
    env = ClusterEnv(training_cluster(tmp_path), max_decisions=50)

    def rewards():
        env.reset(seed=7)
        return [env.step(np.array([i % 3, i % 2, 0]))[1] for i in range(50)]

    assert rewards() == rewards()


def test_an_episode_has_something_to_decide(tmp_path):
    env = ClusterEnv(training_cluster(tmp_path, workload={"rate": 1.0, "duration_s": 1.0}))
    for seed in range(8):
        env.reset(seed=seed)
        assert env.step(np.array([0, 0, 0]))[4]["decision"] == 1


def test_masked_actions_are_replaced_as_live(tmp_path):
    env = ClusterEnv(training_cluster(tmp_path, workload={"rate": 3000.0, "duration_s": 0.5}))
    env.reset(seed=0)
    for _ in range(60):  # all to the slowest server, also when it is full
        _, _, terminated, _, info = env.step(np.array([2, 0, 0]))
        assert not terminated
    assert not info["masks"][0][2] or env.action_masks().shape == (3 + 2 + 6,)
