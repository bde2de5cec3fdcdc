"""What a margin says: the calibration curve, its inverse, and how far confidence is from being right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slim_scheduler.core.confidence import Calibration, Logistic, calibration_error, calibration_errors
from slim_scheduler.model.calibration import fit_calibration

curves = st.builds(Logistic, st.floats(0.1, 5.0), st.floats(-3.0, 3.0), st.floats(0.0, 2.0))


def test_with_scale_1_and_no_offset_confidence_is_the_higher_of_two_probabilities():
    assert Logistic(1.0, 0.0).confidence([0.0, 0.5, 0.98]) == pytest.approx([0.5, 0.75, 0.99])


@given(curves, st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20))
def test_more_margin_is_never_less_confidence(curve, margins):
    found = curve.confidence(np.sort(np.float16(margins)))
    assert np.all(np.diff(found) >= 0)
    assert np.all((found >= 0) & (found <= 1))


@given(curves, st.floats(0.01, 0.999))
def test_the_margin_of_a_confidence_is_the_least_that_has_it(curve, confidence):
    margin = curve.margin(confidence)
    if margin == 0.0:
        assert curve.confidence(0.0) >= confidence
    elif margin > 1.0:
        assert curve.confidence(1.0) < confidence
    else:
        assert curve.confidence(margin) == pytest.approx(confidence, abs=1e-6)
        assert curve.confidence(0.99 * margin) < confidence


def test_the_calibration_error_is_the_weighted_gap_of_each_bin():
    confidence = np.array([0.9, 0.9, 0.9, 0.9, 0.1, 0.1])
    right = np.array([True, True, True, False, False, False])
    assert calibration_error(confidence, right) == pytest.approx(4 / 6 * 0.15 + 2 / 6 * 0.1)


def test_the_fit_finds_the_curve_that_the_answers_follow():
    generator = np.random.default_rng(3)
    truth = {0.5: Logistic(1.4, -0.7), 0.75: Logistic(0.4, -0.7, 0.5), 1.0: Logistic(2.5, 0.2)}
    margins = {(w, v): generator.random(20_000).astype(np.float16) for w in truth for v in truth}
    right = {t: generator.random(20_000) < truth[t[-1]].confidence(margins[t]) for t in margins}
    fitted = fit_calibration(right, margins, "held-out")
    assert fitted.split == "held-out"
    for width, curve in truth.items():
        assert fitted.by_width[width].scale == pytest.approx(curve.scale, abs=0.1)
        assert fitted.by_width[width].offset == pytest.approx(curve.offset, abs=0.1)
        assert fitted.by_width[width].curve == pytest.approx(curve.curve, abs=0.1)
    assert max(calibration_errors(fitted, right, margins).values()) < 0.02


def test_answers_that_are_all_right_can_be_fitted():
    right, margins = {(1.0,): np.ones(50, bool)}, {(1.0,): np.linspace(0, 1, 50).astype(np.float16)}
    assert fit_calibration(right, margins, "test").confidence(1.0, 0.0) > 0.9


def test_a_calibration_answers_per_width():
    calibration = Calibration({0.5: Logistic(1.0, 0.0), 1.0: Logistic(1.0, 1.0)}, "held-out")
    assert calibration.confidence(0.5, 0.5) == pytest.approx(0.75)
    assert calibration.confidence(1.0, 0.5) > 0.75
    assert calibration.margin(0.5, 0.75) == pytest.approx(0.5)
