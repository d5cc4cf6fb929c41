"""Thresholds that are set on some people and carried to others: exact counts, the Beta law, and leaks."""

import json

import numpy as np
import pytest
from scipy.stats import beta

from mettle.errors import DataError, InputError
from mettle.evaluate import NotMeasurable, calibrate, from_scores, verification
from mettle.evaluate.calibration import count_allowed_errors, pairs_needed, threshold_above


def people(seed, first=0, subjects=40, each=4, d=16, noise=0.8):
    rng = np.random.default_rng(seed)
    y = first + np.repeat(np.arange(subjects), each)
    return (rng.normal(size=(subjects, d))[y - first] + noise * rng.normal(size=(len(y), d))).astype(np.float32), y


@pytest.mark.parametrize("far", [0.1, 0.01, 0.002])
@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_the_threshold_lies_just_above_the_first_score_that_is_too_many(far, mode):
    v = verification(*people(0), mode=mode)
    t = calibrate(v, far)
    s = np.sort(verification(*people(0)).scores.impostor)[::-1]
    assert t.allowed == int(far * len(s) + 1e-9)
    assert t.threshold > s[t.allowed]
    assert v.rates(t.threshold)[0] <= far
    if mode == "exact":
        assert np.nextafter(np.float32(t.threshold), np.float32(-1)) == s[t.allowed]
    assert t.expected == (t.allowed + 1) / (len(s) + 1)
    assert t.likely[0] < t.expected < t.likely[1]


def test_ties_at_the_edge_are_rejected():
    v = from_scores([0.9, 0.8] + [0.7] * 5 + [0.1] * 95, [1, 1] + [0] * 100)
    assert v.rates(calibrate(v, 0.04).threshold)[0] == 0
    assert v.rates(calibrate(v, 0.05).threshold)[0] == 0.05


def test_carried_over_it_reports_what_it_really_does():
    t = calibrate(verification(*people(1)), 0.01)
    test = verification(*people(2, first=1000))
    found = t.transfer(test)
    assert (found.fmr, found.fnmr) == test.rates(t.threshold)
    assert found.ratio == pytest.approx(found.fmr / 0.01)
    assert found.fmr_interval.low <= found.fmr <= found.fmr_interval.high
    assert found.fnmr_interval.low <= found.fnmr <= found.fnmr_interval.high
    assert "threshold fixed" in found.fmr_interval.method
    assert found.false_accepts == round(found.fmr * test.impostor)
    json.dumps(found.summary(), allow_nan=False)


def test_the_same_people_on_both_sides_are_a_leak():
    t = calibrate(verification(*people(1)), 0.01)
    with pytest.raises(DataError, match="leak: 10 subjects.*first is 30"):
        t.transfer(verification(*people(2, first=30)))


def test_too_few_impostors_are_not_measurable():
    v = verification(*people(3, subjects=5))  # 160 impostor pairs
    with pytest.raises(NotMeasurable, match="at least 1000 are needed"):
        calibrate(v, 1e-3)
    with pytest.raises(NotMeasurable, match="at least 299 are needed"):
        calibrate(v, 0.01, conservative=True)
    with pytest.raises(InputError, match="accepts everybody"):
        calibrate(v, 1.0)


def test_realised_rates_follow_the_beta_law_and_conservative_keeps_its_promise():
    """Independent scores: 400 calibrations of 3000 impostors each, judged by the true rate."""
    rng = np.random.default_rng(0)
    plain, careful = [], []
    for _ in range(400):
        s = rng.uniform(size=3000)
        v = from_scores(np.append(s, 0.5), np.append(np.zeros(3000, int), 1))
        plain.append(1 - calibrate(v, 0.01).threshold)
        careful.append(1 - calibrate(v, 0.01, conservative=True).threshold)
    law = beta(31, 3000 - 30)
    assert np.mean(plain) == pytest.approx(31 / 3001, rel=0.03)
    inside = np.mean((law.ppf(0.05) <= plain) & (plain <= law.ppf(0.95)))
    assert 0.86 < inside < 0.94
    assert np.mean(np.asarray(careful) <= 0.01) >= 0.93
    assert np.mean((np.asarray(plain) / 0.01 >= 0.7) & (np.asarray(plain) / 0.01 <= 1.4)) > 0.9


def test_a_threshold_that_is_no_number_is_refused():
    v = verification(*people(4))
    with pytest.raises(InputError, match="nan"):
        v.rates(float("nan"))
    assert v.rates(np.inf) == (0, 1)
    assert v.rates(-np.inf) == (1, 0)


@pytest.mark.parametrize(
    ("far", "n"), [(0.1, 28), (0.1, 29), (0.1, 500), (0.01, 300), (0.001, 9000), (0.5, 7), (0.9, 3)]
)
def test_a_conservative_budget_is_the_largest_that_keeps_the_rate(far, n):
    """Against trying every count: P(Beta(k + 1, n − k) ≤ far) ≥ 0.95."""
    fits = [k for k in range(int(far * n + 1e-9) + 1) if beta.cdf(far, k + 1, n - k) >= 0.95]
    assert count_allowed_errors(far, n, conservative=True) == max(fits, default=-1)
    assert (n >= pairs_needed(far)) == bool(fits)


def test_a_threshold_lies_just_above_a_score():
    scores = np.array([0.1, 0.7, 0.5, 0.7], np.float32)
    counts = [int((scores >= threshold_above(scores, k)).sum()) for k in range(4)]
    assert counts == [0, 0, 2, 3]  # of two equal scores both are rejected
