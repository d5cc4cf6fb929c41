"""Which threshold an answer is given at, and what it stands for."""

import pytest

from mettle.errors import InputError
from mettle.gallery.thresholds import (
    TOO_FEW_MEASURED,
    DecisionThreshold,
    as_thresholds,
    decision_threshold,
    false_accept_bound,
)

TABLE = {
    "0.01": {"threshold": 0.4, "measured_on": "validation identities"},
    "0.001": {"threshold": 0.6, "measured_on": "validation identities"},
    "0.0001": {"threshold": None, "status": "not measurable"},
}


def test_the_wanted_rate_is_found_and_named():
    point = decision_threshold(TABLE, far=1e-2)
    assert (point.threshold, point.far, point.basis) == (0.4, 0.01, "validation identities")


def test_the_default_is_one_in_a_thousand_or_the_lowest_measured():
    assert decision_threshold(TABLE).far == 1e-3
    assert decision_threshold({"0.1": {"threshold": 0.2}, "0.01": {"threshold": 0.3}}).far == 0.01


def test_a_rate_that_was_not_measured_is_refused():
    with pytest.raises(InputError, match="known are 0.001, 0.01"):
        decision_threshold(TABLE, far=1e-4)


def test_a_threshold_of_zero_is_honoured():
    point = decision_threshold(TABLE, threshold=0)
    assert point.threshold == 0
    assert point.far is None


@pytest.mark.parametrize("bad", [1.5, -2, float("nan"), float("inf")])
def test_a_threshold_that_is_no_cosine_is_refused(bad):
    with pytest.raises(InputError, match="cosine"):
        decision_threshold({}, threshold=bad)


@pytest.mark.parametrize("bad", [0, 1, -0.1, float("nan")])
def test_a_rate_that_is_none_is_refused(bad):
    with pytest.raises(InputError, match="between 0 and 1"):
        decision_threshold({}, far=bad)


@pytest.mark.parametrize("far", [None, 0.01, 1e-6])
@pytest.mark.parametrize("table", [{}, {"0.001": {"threshold": None, "status": "not measurable"}}])
def test_what_was_not_measured_is_no_threshold(table, far):
    point = decision_threshold(table, far=far)
    assert point.threshold is None and point.far is None and point.counts is None
    assert "`mettle gallery calibrate`" in point.basis and "threshold=" in point.basis
    assert not any(point.accepts(score) for score in (-1.0, 0.0, 1.0))
    assert false_accept_bound(point, "best", 1, 1) is None


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
    assert decision_threshold({"0.001": entry}) == DecisionThreshold(None, None, TOO_FEW_MEASURED)
    asked = decision_threshold({"0.001": entry}, far=0.001)
    assert asked.threshold == 0.9
    assert asked.basis.startswith("validation identities; uncertain: it rests on only 6 false")
    assert decision_threshold({"0.1": entry | {"status": "ok"}}) == DecisionThreshold(
        None, None, TOO_FEW_MEASURED
    )  # one in ten
    assert decision_threshold({"0.001": entry | {"status": "ok"}}).basis == "validation identities"
