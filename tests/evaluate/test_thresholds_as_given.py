"""A threshold accepts what reaches it, whatever numbers the scores are made of; a rate k / n allows k errors of n."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mettle import evaluate


def coarse(dtype):
    """Cosines that are multiples of 1/8 in any precision, and all pairs of them."""
    draw = np.random.default_rng(0)
    y = np.repeat(np.arange(60), 4)
    x = np.sign(draw.normal(size=(60, 16))[y] + 1.2 * draw.normal(size=(240, 16)))
    a, b = np.tril_indices(240, -1)
    scores = np.einsum("id,id->i", x[a], x[b]) / 16
    return x.astype(dtype), y, scores, y[a] == y[b]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("mode", ["exact", "histogram"])
@pytest.mark.parametrize("tau", [0.5 - 1e-9, 0.5, 0.5 + 1e-9, 0.5 + 1e-15, 1e-60, -1e-60, -np.inf, -2.0, 1.5, np.inf])
def test_what_scores_less_is_not_accepted(dtype, mode, tau):
    x, y, scores, same = coarse(dtype)
    found = evaluate.verification(x, y, mode=mode).rates(tau)
    wanted = np.mean(scores[~same] >= tau), np.mean(scores[same] < tau)
    assert found == pytest.approx(wanted, abs=1e-12)


def test_intervals_and_thresholds_carried_over_follow():
    x, y, _, _ = coarse(np.float64)
    one, other = y < 30, y >= 30
    set_on = evaluate.calibrate(evaluate.verification(x[one], y[one]), 0.02)
    exact, rounded = (
        set_on.transfer(evaluate.verification(x[other].astype(t), y[other])) for t in (np.float64, np.float32)
    )
    assert (exact.fmr, exact.fnmr) == (rounded.fmr, rounded.fnmr)
    wide, narrow = (evaluate.verification(x.astype(t), y).intervals_at(0.5 + 1e-9) for t in (np.float64, np.float32))
    for one, other in zip(wide, narrow, strict=True):
        assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=1e-12)


def test_failed_templates_are_accepted_at_no_threshold():
    v = evaluate.from_scores([-np.inf, 0.5, 0.1, -np.inf, 0.05], [1, 1, 0, 0, 0])
    assert v.rates(-np.inf) == pytest.approx((2 / 3, 1 / 2))


@pytest.mark.parametrize("n", [2, 3, 6, 7, 30, 49, 98, 103, 187, 997])
def test_a_rate_from_a_count_allows_that_count(n):
    v = evaluate.from_scores(np.r_[np.full(5, 9e9), np.arange(float(n))], np.r_[np.ones(5, int), np.zeros(n, int)])
    for k in range(1, n + 1):
        point = v.operating_point(k / n)
        assert point.false_accepts == k and point.fmr == k / n
        if k < n:
            assert evaluate.calibrate(v, k / n).allowed == k


@pytest.mark.parametrize("far", [0.1, 0.01, 0.3, 0.7, 1e-3, 0.123456789])
def test_a_rate_as_typed_allows_what_its_decimals_say(far):
    for n in (10, 30, 70, 100, 1000, 1001):
        v = evaluate.from_scores(np.r_[[9e9], np.arange(float(n))], np.r_[[1], np.zeros(n, int)])
        allowed = math.floor(Fraction(str(far)) * n)
        assert v.operating_point(far).false_accepts == (allowed or None)


def test_how_many_pairs_are_needed_is_told():
    v = evaluate.from_scores(np.r_[[9.0], np.arange(5.0)], np.r_[[1], np.zeros(5, int)])
    with pytest.raises(evaluate.NotMeasurable, match="at least 6 are needed"):
        evaluate.calibrate(v, 1 / 6)
    with pytest.raises(evaluate.NotMeasurable, match="at least 6 are needed"):
        v.threshold(1 / 6)
