"""Servers that keep failing lose their work for a while and earn it back; there is always somebody left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slim_scheduler.core.dispatch.outliers import OutlierLimits, Outliers

LIMITS = OutlierLimits(failures=3, window=5, base=2.0, longest=10.0, probe_tasks=4)


def three() -> Outliers:
    outliers = Outliers(LIMITS)
    for server in "abc":
        outliers.joined(server, 0.0)
    return outliers


def fail(outliers: Outliers, server: str, now: float, times: int = 3) -> list[bool]:
    return [outliers.failed(server, now) for _ in range(times)]


def test_third_failure_of_five_words_ejects():
    outliers = three()
    assert not outliers.failed("a", 1.0)
    assert not outliers.succeeded("a", 1.1)
    assert not outliers.failed("a", 1.2)
    assert outliers.allowance("a") is None
    assert outliers.failed("a", 1.3)
    assert outliers.allowance("a") == 0
    assert outliers.allowance("b") is None


def test_failures_far_apart_are_forgiven():
    outliers = three()
    for at in range(10):
        assert not outliers.failed("a", at)
        for _ in range(4):
            outliers.succeeded("a", at)


def test_ejected_server_is_probed_with_few_tasks_and_reinstated_by_success():
    outliers = three()
    fail(outliers, "a", 1.0)
    assert outliers.next_check() == 3.0
    assert outliers.probe_due(2.9) == []
    assert outliers.probe_due(3.0) == ["a"]
    assert outliers.allowance("a") == 4
    assert outliers.next_check() == float("inf")
    assert outliers.succeeded("a", 3.1)
    assert outliers.allowance("a") is None


def test_failed_probe_ejects_at_once_and_for_twice_as_long_up_to_the_longest():
    outliers, now = three(), 1.0
    assert fail(outliers, "a", now)[-1]
    for length in (2.0, 4.0, 8.0, 10.0, 10.0):
        assert outliers.next_check() == now + length
        now += length
        assert outliers.probe_due(now) == ["a"]
        assert outliers.failed("a", now)


def test_a_server_that_fails_for_months_is_probed_after_the_longest_time():
    outliers, now = three(), 1.0
    fail(outliers, "a", now)
    for _ in range(2000):
        now = outliers.next_check()
        assert outliers.probe_due(now) == ["a"]
        assert outliers.failed("a", now)
    assert outliers.next_check() == now + LIMITS.longest


def test_old_ejections_count_no_more_after_a_long_good_time():
    outliers = three()
    fail(outliers, "a", 1.0)
    outliers.probe_due(3.0)
    outliers.succeeded("a", 3.0)
    outliers.succeeded("a", 14.0)
    assert fail(outliers, "a", 20.0)[-1]
    assert outliers.next_check() == 22.0


def test_work_from_before_its_ejection_does_not_reinstate():
    outliers = three()
    fail(outliers, "a", 1.0)
    assert not outliers.succeeded("a", 1.1)
    assert outliers.allowance("a") == 0


def test_second_server_is_not_ejected_where_half_would_be_passed():
    outliers = three()
    assert fail(outliers, "a", 1.0)[-1]
    assert not any(fail(outliers, "b", 1.0))
    assert outliers.allowance("b") is None


def test_only_server_is_never_ejected():
    outliers = Outliers(LIMITS)
    outliers.joined("a", 0.0)
    assert not any(fail(outliers, "a", 1.0, times=50))


def test_new_life_starts_without_guilt():
    outliers = three()
    fail(outliers, "a", 1.0)
    outliers.joined("a", 1.5)
    assert outliers.allowance("a") is None


def test_ejected_server_is_reinstated_when_the_last_trusted_one_is_lost():
    outliers = Outliers(LIMITS)
    for server in "ab":
        outliers.joined(server, 0.0)
    fail(outliers, "a", 1.0)
    assert outliers.left("b", 2.0) == ["a"]
    assert outliers.allowance("a") is None


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["failed", "succeeded", "probe"])), max_size=200),
)
def test_there_is_always_a_server_that_is_trusted(servers, words):
    outliers = Outliers(LIMITS)
    for server in range(servers):
        outliers.joined(str(server), 0.0)
    for now, (server, word) in enumerate(words):
        name = str(server % servers)
        if word == "probe":
            outliers.probe_due(float(now))
        else:
            getattr(outliers, word)(name, float(now))
        outliers.check_invariants()


@pytest.mark.parametrize("servers", [2, 4, 7])
def test_at_most_half_are_ejected_together(servers):
    outliers = Outliers(LIMITS)
    names = [str(i) for i in range(servers)]
    for name in names:
        outliers.joined(name, 0.0)
    ejected = [name for name in names if any(fail(outliers, name, 1.0))]
    assert len(ejected) == servers // 2
