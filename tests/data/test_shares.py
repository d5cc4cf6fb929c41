"""Shares of a split: what is none is refused, and something is always left to train on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.data import Samples, identity_disjoint_split, sample_split
from mettle.data.inputs import FeatureArray
from mettle.errors import DataError, InputError, MettleError

NAN = float("nan")


def table(n, labels=None):
    return Samples.of(FeatureArray(np.zeros((n, 1))), np.arange(n) % 5 if labels is None else labels)


@pytest.mark.parametrize("split", [identity_disjoint_split, sample_split])
@pytest.mark.parametrize(
    ("val", "test"),
    [(0.8, 0.8), (0.1, -0.2), (-0.1, 0.3), (0.1, 1.5), (0.5, 0.5), (NAN, 0.3), (0.1, NAN), ("x", 0.3), (0.1, None)],
)
def test_shares_that_are_none(split, val, test):
    with pytest.raises(InputError, match=r"val and test must be shares from 0 up with val \+ test < 1"):
        split(table(50), val=val, test=test)


def test_a_test_split_of_nobody():
    with pytest.raises(InputError, match="test must be above 0"):
        identity_disjoint_split(table(50), test=0)
    assert (sample_split(table(50), test=0).split == 2).sum() == 0


def test_so_few_samples_that_none_is_left():
    with pytest.raises(DataError, match="1 samples are too few: shares of 0 and 0.6 leave none to train on"):
        sample_split(table(1), val=0, test=0.6)


@given(st.integers(1, 60), st.floats(allow_nan=True), st.floats(allow_nan=True), st.integers(0, 5))
def test_a_split_has_the_shares_or_is_refused(n, val, test, seed):
    try:
        split = sample_split(table(n), val=val, test=test, seed=seed).split
    except MettleError:
        return
    counts = np.bincount(split, minlength=3)
    assert counts[0] > 0
    assert abs(counts[1] - val * n) <= 0.5
    assert abs(counts[2] - test * n) <= 0.5
