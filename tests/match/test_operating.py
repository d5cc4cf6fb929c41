"""Which threshold an answer is given at, and what it stands for."""

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.match.operating import as_thresholds, isotropic, operating

TABLE = {
    "0.01": {"threshold": 0.4, "measured_on": "validation identities"},
    "0.001": {"threshold": 0.6, "measured_on": "validation identities"},
    "0.0001": {"threshold": None, "status": "not measurable"},
}


def test_the_wanted_rate_is_found_and_named():
    point = operating(TABLE, 64, far=1e-2)
    assert (point.threshold, point.far, point.basis) == (0.4, 0.01, "validation identities")


def test_the_default_is_one_in_a_thousand_or_the_lowest_measured():
    assert operating(TABLE, 64).far == 1e-3
    assert operating({"0.1": {"threshold": 0.2}, "0.01": {"threshold": 0.3}}, 64).far == 0.01


def test_a_rate_that_was_not_measured_is_refused():
    with pytest.raises(InputError, match="known are 0.001, 0.01"):
        operating(TABLE, 64, far=1e-4)


def test_a_threshold_of_zero_is_honoured():
    point = operating(TABLE, 64, threshold=0)
    assert point.threshold == 0
    assert point.far is None


@pytest.mark.parametrize("bad", [1.5, -2, float("nan"), float("inf")])
def test_a_threshold_that_is_no_cosine_is_refused(bad):
    with pytest.raises(InputError, match="cosine"):
        operating({}, 8, threshold=bad)


@pytest.mark.parametrize("bad", [0, 1, -0.1, float("nan")])
def test_a_rate_that_is_none_is_refused(bad):
    with pytest.raises(InputError, match="between 0 and 1"):
        operating({}, 8, far=bad)


@pytest.mark.parametrize("dim", [2, 3, 16, 128])
def test_independent_directions_exceed_the_assumed_threshold_as_often_as_said(dim):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 200_000, dim))
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    rate = (cosines >= isotropic(dim, 0.01)).mean()
    assert rate == pytest.approx(0.01, abs=0.001)  # four standard deviations


def test_without_thresholds_the_answer_says_that_nothing_was_measured():
    assert "assumed" in operating({}, 32).basis


def test_thresholds_come_as_numbers_or_as_a_contract_writes_them():
    assert as_thresholds({1e-3: 0.5}) == {"0.001": {"threshold": 0.5}}
    assert as_thresholds(TABLE)["0.01"]["measured_on"] == "validation identities"
    assert as_thresholds(None) == {}


@pytest.mark.parametrize("bad", [{"often": 0.5}, {2: 0.5}, {1e-3: 7}, {1e-3: {"threshold": 0.5, "per": "person"}}])
def test_thresholds_that_make_no_sense_are_refused(bad):
    with pytest.raises(InputError):
        as_thresholds(bad)


def test_thresholds_that_rise_with_the_rate_are_refused():
    with pytest.raises(InputError, match="swapped"):
        as_thresholds({1e-3: 0.2, 1e-2: 0.6})
    as_thresholds({1e-3: 0.6, 1e-2: 0.6, 1e-1: {"threshold": None}})


def test_a_threshold_that_rests_on_little_says_so():
    entry = {
        "threshold": 0.9,
        "measured_on": "validation identities",
        "impostors": 6000,
        "status": "refused as headline",
    }
    assert operating({"0.001": entry}, 8).basis.startswith("validation identities; uncertain: it rests on only 6 false")
    assert operating({"0.001": entry | {"status": "ok"}}, 8).basis == "validation identities"
