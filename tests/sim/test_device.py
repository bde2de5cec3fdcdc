from statistics import fmean, stdev

import msgspec
import pytest
from numpy.random import default_rng

from slim_scheduler.core.errors import ProfileError
from slim_scheduler.core.profile import Curve, Profile
from slim_scheduler.sim.device import SimulatedDevice
from tests.sim.devices import batch, small_profile, small_shape


def device(slowdown: float = 1.0, **profile: object) -> SimulatedDevice:
    return SimulatedDevice(small_profile(**profile), small_shape(), max_batch=8, slowdown=slowdown)


def done(device: SimulatedDevice) -> tuple[float, int]:
    """Lets the device run until its next batch is done, and takes it off."""
    at = device.next_done()
    assert at is not None
    return pytest.approx(at, abs=1e-12), device.finish(at)[0]


def test_a_batch_alone_takes_what_the_profile_says() -> None:
    d = device()
    d.start(batch(1, size=6), False, 1.0)
    assert done(d) == (1.010, 1)
    d.start(batch(2, size=6, width=1.0), False, 2.0)
    assert done(d) == (2.020, 2)
    assert d.next_done() is None


def test_slowdown_of_the_server_multiplies_every_batch() -> None:
    d = device(slowdown=2.5)
    d.start(batch(1, size=6), False, 0.0)
    assert done(d) == (0.025, 1)


def varying_profile() -> Profile:
    """6 items take 12 ms at the mean, although the median says 10, and 3 ms more or less."""
    known = small_profile()
    rows = [
        msgspec.structs.replace(
            row, mean=tuple(1.2 * s for s in row.seconds), deviation=tuple(0.3 * s for s in row.seconds)
        )
        for row in known.latency_rows
    ]
    return msgspec.structs.replace(known, latency_rows=tuple(rows))


def drawn_times(seed: int) -> list[float]:
    d = SimulatedDevice(varying_profile(), small_shape(), max_batch=8, rng=default_rng(seed))
    times, now = [], 0.0
    for i in range(2000):
        d.start(batch(i, size=6), False, now)
        end = d.next_done()
        assert end is not None
        times.append(end - now)
        d.finish(end)
        now = end
    return times


def test_batches_differ_as_much_as_the_profile_says_and_the_same_for_the_same_seed() -> None:
    times = drawn_times(1)
    assert fmean(times) == pytest.approx(0.012, rel=0.02)
    assert stdev(times) == pytest.approx(0.003, rel=0.05)
    assert min(times) > 0
    assert times == drawn_times(1) != drawn_times(2)


def test_without_a_generator_every_batch_takes_its_mean_time() -> None:
    d = SimulatedDevice(varying_profile(), small_shape(), max_batch=8)
    d.start(batch(1, size=6), False, 0.0)
    assert done(d) == (0.012, 1)


def test_a_batch_the_profile_does_not_cover_is_an_error() -> None:
    with pytest.raises(ProfileError, match="batch 9"):
        device().start(batch(1, size=9), False, 0.0)


def test_two_batches_share_the_device_and_the_second_speeds_up_when_the_first_ends() -> None:
    # Together they do 1.6 times the work of one: each goes at 0.8.
    d = device(sharing=(1.0, 1.6))
    d.start(batch(1, size=6), False, 0.0)
    d.start(batch(2, size=6), False, 0.002)
    # 1 has 8 ms of work left, at 0.8: done at 0.012. By then 2 has 2 ms of its 10 left, alone.
    assert done(d) == (0.012, 1)
    assert done(d) == (0.014, 2)


def test_batches_that_end_together_end_in_the_order_they_were_numbered() -> None:
    d = device(sharing=(1.0, 1.0))
    d.start(batch(2), False, 0.0)
    d.start(batch(1), False, 0.0)
    assert done(d) == (0.020, 1)
    assert done(d) == (0.020, 2)


def test_every_change_of_the_running_batches_makes_earlier_announcements_stale() -> None:
    d = device()
    d.start(batch(1), False, 0.0)
    announced = d.version
    d.start(batch(2), False, 0.001)
    assert d.version != announced


def test_first_layers_for_a_new_previous_width_are_built_before_the_batch_runs() -> None:
    d = device()
    # 10 KB of first layers at 1 MB/s are 10 ms.
    d.start(batch(1, size=6, segment=1, previous=1.0), True, 0.0)
    assert done(d) == (0.020, 1)


def test_an_instance_loads_in_the_fixed_time_plus_its_bytes() -> None:
    assert device().load_time(0, 0.5) == pytest.approx(0.2)
    assert device().load_time(1, 1.0) == pytest.approx(0.3)
    assert device().unload_time(1, 1.0) == pytest.approx(0.2)


def test_a_device_that_has_been_busy_slows_down() -> None:
    curve = Curve((0.0, 0.9, 1.0), (1.0, 1.0, 3.0))
    d = SimulatedDevice(small_profile(slowdown=curve), small_shape(), max_batch=8, slowdown=10.0)
    now = 0.0
    for number in range(5):  # 100 ms each; the last begins at utilisation 0.8, still below the knee
        d.start(batch(number), False, now)
        assert done(d) == (now + 0.1, number)
        now += 0.1
    d.start(batch(5), False, now)  # utilisation is 1 now
    assert done(d) == (now + 0.3, 5)


def test_utilisation_is_the_busy_share_of_the_last_half_second() -> None:
    d = device(slowdown=10.0)
    d.start(batch(1), False, 1.0)
    assert d.sample(1.05).utilization == pytest.approx(0.1)
    d.finish(1.1)
    assert d.sample(1.1).utilization == pytest.approx(0.2)
    assert d.sample(1.5).utilization == pytest.approx(0.2)
    assert d.sample(1.55).utilization == pytest.approx(0.1)
    assert d.sample(1.6).utilization == 0.0


def test_two_batches_at_once_are_no_busier_than_one() -> None:
    d = device(slowdown=10.0, sharing=(1.0, 2.0))
    d.start(batch(1), False, 0.0)
    d.start(batch(2), False, 0.0)
    assert d.sample(0.1).utilization == pytest.approx(0.2)


def test_back_to_back_batches_keep_the_device_at_full_utilisation() -> None:
    d = device()
    now = 0.0
    for number in range(200):
        d.start(batch(number), False, now)
        now = d.next_done() or 0.0
        d.finish(now)
    assert d.sample(now).utilization == 1.0


def test_power_follows_utilisation_and_energy_is_its_exact_integral() -> None:
    d = device(slowdown=20.0)
    d.start(batch(1), False, 1.0)  # busy from 1.0 to 1.2, then idle
    d.finish(1.2)
    assert d.sample(1.3).power_w == pytest.approx(140.0)
    # Utilisation rises to 0.4 within 0.2 s, stays for 0.3 s, falls within 0.2 s: 0.2 s at 100 W more than idle.
    assert d.energy(3.0) == pytest.approx(3.0 * 100 + 0.2 * 100)


def test_energy_is_exact_across_the_bends_of_the_power_curve() -> None:
    # 100 W up to half busy, then rising to 300 W: while utilisation goes 0 -> 1 in 0.5 s, mean 150 W; then 300 W.
    d = device(slowdown=100.0, power=Curve((0.0, 0.5, 1.0), (100.0, 100.0, 300.0)))
    d.start(batch(1), False, 0.0)
    assert d.energy(0.5) == pytest.approx(0.5 * 150)
    assert d.energy(1.0) == pytest.approx(0.5 * 150 + 0.5 * 300)


def test_energy_does_not_depend_on_how_often_it_is_read() -> None:
    def run(reads: int) -> float:
        d = device(slowdown=7.0, power=Curve((0.0, 0.3, 1.0), (50.0, 90.0, 250.0)))
        for number in range(10):
            d.start(batch(number), False, 0.2 * number)
            for i in range(reads):
                d.sample(0.2 * number + 0.07 * i / reads)
            d.finish(0.2 * number + 0.07)
        return d.energy(3.0)

    assert run(50) == pytest.approx(run(0), rel=1e-12)


def test_batches_that_run_together_split_the_energy_of_that_time() -> None:
    flat = Curve((0.0, 1.0), (100.0, 100.0))
    d = device(slowdown=10.0, sharing=(1.0, 2.0), power=flat)
    d.start(batch(1), False, 0.0)
    d.start(batch(2), False, 0.04)
    assert d.finish(0.1) == (1, pytest.approx(0.04 * 100 + 0.06 * 50))
    assert d.finish(0.14) == (2, pytest.approx(0.06 * 50 + 0.04 * 100))


def test_a_slowed_device_finishes_what_it_has_at_the_new_speed() -> None:
    d = device()
    d.start(batch(1), False, 0.0)
    d.slow(4.0, 0.005)
    assert done(d) == (0.025, 1)
    d.slow(1.0, 0.030)
    d.start(batch(2), False, 0.030)
    assert done(d) == (0.040, 2)


def test_a_frozen_device_goes_on_where_it_stopped() -> None:
    d = device()
    d.start(batch(1), False, 0.0)
    d.freeze(0.004)
    assert d.next_done() is None
    assert d.sample(0.504).utilization == 0.0
    d.thaw(1.0)
    assert done(d) == (1.006, 1)


def test_a_cleared_device_has_lost_its_batches_but_not_its_energy() -> None:
    d = device()
    d.start(batch(1), False, 0.0)
    d.clear(0.005)
    assert d.next_done() is None
    assert d.energy(1.0) == pytest.approx(100.0 + 0.005 * 100)
