import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.data import Samples, hold_out_domains, identity_disjoint_split, sample_split
from mettle.data.inputs import FeatureArray
from mettle.data.splits import identity_folds
from mettle.errors import DataError, InputError, MettleError


def table(classes=20, each=4):
    labels = np.repeat(np.arange(classes), each)
    domain = np.tile(["in", "out"], len(labels) // 2)
    return Samples.of(
        FeatureArray(np.random.default_rng(0).random((len(labels), 3), np.float32)), labels, domain=domain
    )


def test_class_disjoint_splits_identities():
    split = identity_disjoint_split(table(), val=0.1, test=0.3, seed=1)
    parts = {name: set(split.part(name).labels) for name in ("train", "val", "test")}
    assert [len(parts[name]) for name in parts] == [12, 2, 6]
    assert not (parts["train"] & parts["test"] or parts["train"] & parts["val"] or parts["val"] & parts["test"])
    assert set(identity_disjoint_split(table(), seed=2).part("test").labels) != parts["test"]


def test_class_disjoint_after_a_subset_keeps_codes():
    some = table().where(np.isin(table().labels, [1, 5, 7, 11, 13, 17, 19]))
    split = identity_disjoint_split(some, val=0.0, test=0.5)
    assert set(split.labels) == {1, 5, 7, 11, 13, 17, 19} and len(split.part("test")) in (12, 16)


def test_sample_split_splits_samples():
    split = sample_split(table(), val=0.25, test=0.25)
    assert [len(split.part(name)) for name in ("train", "val", "test")] == [40, 20, 20]


def test_unseen_domain_is_gone_from_training_and_probes_the_rest():
    split = hold_out_domains(identity_disjoint_split(table()), ["out"])
    out = split.domain.names.index("out")
    assert out not in split.part("train").domain.codes and out not in split.part("val").domain.codes
    test = split.part("test")
    assert ((test.domain.codes == out) == (test.role == 1)).all() and (test.role > 0).all()


def test_errors_say_what_to_do():
    with pytest.raises(DataError, match="too few"):
        identity_disjoint_split(table(classes=3))
    with pytest.raises(InputError, match="shares"):
        identity_disjoint_split(table(), val=0.5, test=0.6)
    with pytest.raises(DataError, match="no domain 'elsewhere'"):
        hold_out_domains(identity_disjoint_split(table()), ["elsewhere"])


# Shares of a split: what is none is refused, and something is always left to train on.


NAN = float("nan")


def share_table(n, labels=None):
    return Samples.of(FeatureArray(np.zeros((n, 1))), np.arange(n) % 5 if labels is None else labels)


@pytest.mark.parametrize("split", [identity_disjoint_split, sample_split])
@pytest.mark.parametrize(
    ("val", "test"),
    [(0.8, 0.8), (0.1, -0.2), (-0.1, 0.3), (0.1, 1.5), (0.5, 0.5), (NAN, 0.3), (0.1, NAN), ("x", 0.3), (0.1, None)],
)
def test_shares_that_are_none(split, val, test):
    with pytest.raises(InputError, match=r"val and test must be shares from 0 up with val \+ test < 1"):
        split(share_table(50), val=val, test=test)


def test_a_test_split_of_nobody():
    with pytest.raises(InputError, match="test must be above 0"):
        identity_disjoint_split(share_table(50), test=0)
    assert (sample_split(share_table(50), test=0).split == 2).sum() == 0


def test_so_few_samples_that_none_is_left():
    with pytest.raises(DataError, match="1 samples are too few: shares of 0 and 0.6 leave none to train on"):
        sample_split(share_table(1), val=0, test=0.6)


@given(st.integers(1, 60), st.floats(allow_nan=True), st.floats(allow_nan=True), st.integers(0, 5))
def test_a_split_has_the_shares_or_is_refused(n, val, test, seed):
    try:
        split = sample_split(share_table(n), val=val, test=test, seed=seed).split
    except MettleError:
        return
    counts = np.bincount(split, minlength=3)
    assert counts[0] > 0
    assert abs(counts[1] - val * n) <= 0.5
    assert abs(counts[2] - test * n) <= 0.5


@given(folds=st.integers(2, 6), seed=st.integers(0, 99))
def test_folds_divide_the_training_identities(folds, seed):
    split = identity_disjoint_split(table(), val=0.1, test=0.3, seed=1)
    known = set(split.part("train").labels)
    found = identity_folds(split, folds, seed)
    held = [set(one.part("val").labels) for one in found]
    assert len(found) == folds and sorted(label for fold in held for label in fold) == sorted(known)
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for one, own in zip(found, held, strict=True):
        assert set(one.part("train").labels) == known - own and len(one.part("test")) == 0
        assert set(one.ids) == set(split.part("train").ids)


def test_folds_of_too_few_identities_are_refused():
    split = identity_disjoint_split(table(), val=0.1, test=0.3, seed=1)
    with pytest.raises(DataError, match="12 training identities are too few for 7 folds"):
        identity_folds(split, 7)
    with pytest.raises(InputError, match="at least 2"):
        identity_folds(split, 1)
