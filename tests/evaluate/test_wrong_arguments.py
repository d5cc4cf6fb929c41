"""Values that are none: one clear line instead of a raw error, or of an answer that says nothing."""

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.evaluate import (
    SplitSide,
    class_size,
    find_leakage,
    from_scores,
    groups,
    identification,
    protocol,
    quantile_bins,
    same_subject,
    verification,
)

NAN, INF = float("nan"), float("inf")
X = np.random.default_rng(0).normal(size=(40, 8))
Y = np.repeat(np.arange(10), 4)
SIDES = ["a"] * 20 + ["b"] * 20


@pytest.mark.parametrize("near", [NAN, 1.5, -1.01, INF, "x", None])
def test_a_leak_from_no_cosine(near):
    with pytest.raises(InputError, match="near must be a cosine from -1 to 1"):
        find_leakage(SplitSide(embeddings=X), SplitSide(embeddings=X), near=near)


def test_leaks_from_the_ends_of_the_range():
    assert sum(leak.count for leak in find_leakage(SplitSide(embeddings=X), SplitSide(embeddings=X), near=-1)) == 1600
    assert len(find_leakage(SplitSide(embeddings=np.eye(3)), SplitSide(embeddings=np.eye(3)), near=1)) == 3


@pytest.mark.parametrize("near", [NAN, INF, "x"])
def test_one_subject_twice_from_no_number(near):
    with pytest.raises(InputError, match="near must be a finite number"):
        same_subject(X, Y, near=near)


@pytest.mark.parametrize("values", [["a"], [[1.0, 2.0]], [NAN, 1.0], [INF, 1.0], [], [1.0, None], [[1], [1, 2]], 3.0])
def test_bands_of_no_numbers(values):
    with pytest.raises(InputError, match="bands cuts a vector of finite numbers|values must be an array"):
        quantile_bins(values)


def test_bands_of_numbers_of_any_kind():
    assert quantile_bins([1, 2, 3, 4], 2).tolist() == quantile_bins(np.float32([1, 2, 3, 4]), 2).tolist()


def test_sizes_of_labels_in_two_dimensions():
    with pytest.raises(InputError, match=r"labels must be a vector.*\(2, 2\)"):
        class_size([[1, 2], [1, 2]])


@pytest.fixture(scope="module")
def found():
    return identification((X[:20], Y[:20]), (X[20:], np.append(Y[:10], Y[20:30])))


@pytest.mark.parametrize("rank", ["1", 0, -1, 1.0, 1.5, NAN, None, True, 6])
def test_a_rank_that_is_none(found, rank):
    with pytest.raises(InputError, match="rank must"):
        found.rank(rank)


@pytest.mark.parametrize("top", ["3", 2.5, 1, NAN, True, 41])
def test_a_cohort_of_no_number(top):
    with pytest.raises(InputError, match="cohort_top must"):
        verification(X, Y, cohort=np.random.default_rng(1).normal(size=(40, 8)), cohort_top=top)


@pytest.mark.parametrize("minimum", ["x", 2.5, -1, NAN, None])
def test_groups_of_no_minimum(found, minimum):
    for result, attribute in ((verification(X, Y), SIDES), (found, SIDES[10:30])):
        with pytest.raises(InputError, match="minimum must be a whole number"):
            groups(result, attribute, far=0.1, minimum=minimum)


@pytest.mark.parametrize("threshold", [NAN, "x", [], (0.1, NAN)])
def test_groups_at_no_threshold(threshold):
    with pytest.raises(InputError, match="threshold must be"):
        groups(verification(X, Y), SIDES, threshold=threshold, minimum=2)


@pytest.mark.parametrize("k", ["1", 0, 1.5, NAN])
def test_enrolment_of_no_number(k):
    with pytest.raises(InputError, match="k must be a whole number from 1 up"):
        protocol.k_shot(np.arange(40), Y, k=k)


def test_ids_and_subjects_beyond_int64():
    large = np.array([[2**63, 1, 0]], np.uint64)
    with pytest.raises(InputError, match="must fit in int64"):
        verification(X, Y, ids=np.arange(40), trials=large)
    with pytest.raises(InputError, match="subjects must fit in int64"):
        from_scores([0.1, 0.2], [1, 0], np.array([[2**63, 2**63], [1, 2]], np.uint64))
