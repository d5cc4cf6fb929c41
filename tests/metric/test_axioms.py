"""The four axioms, against loops that share nothing with the check."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mettle.errors import InputError
from mettle.metric import LFDA, Mahalanobis, check_axioms

AXIOMS = ("non_negativity", "identity", "symmetry", "triangle_inequality")
POINTS = np.random.default_rng(0).normal(size=(12, 3))
POINTS[5, 0] = POINTS[3, 0]  # distinct, but not in their first feature


def looped(distance, points):
    """What holds, one pair and one triple at a time."""
    d = [[float(distance(a, b)) for b in points] for a in points]
    n = range(len(points))
    slack = 1e-9 * max(abs(v) for row in d for v in row)
    holds = dict.fromkeys(AXIOMS, True)
    for i, j in itertools.product(n, n):
        equal = all(a == b for a, b in zip(points[i], points[j], strict=True))
        if d[i][j] < -slack:
            holds["non_negativity"] = False
        if (equal and abs(d[i][j]) > slack) or (not equal and abs(d[i][j]) <= slack):
            holds["identity"] = False
        if abs(d[i][j] - d[j][i]) > slack:
            holds["symmetry"] = False
        for k in n:
            if d[i][k] > d[i][j] + d[j][k] + slack:
                holds["triangle_inequality"] = False
    return holds


DISTANCES = {
    "euclid": (lambda a, b: math.dist(a, b), set()),
    "manhattan": (lambda a, b: np.abs(a - b).sum(), set()),
    "discrete": (lambda a, b: float((a != b).any()), set()),
    "bounded": (lambda a, b: math.dist(a, b) / (1 + math.dist(a, b)), set()),
    "squared": (lambda a, b: math.dist(a, b) ** 2, {"triangle_inequality"}),
    "one feature": (lambda a, b: abs(a[0] - b[0]), {"identity"}),
    "one way": (lambda a, b: math.dist(a, b) + max(0, a[0] - b[0]), {"symmetry"}),
    "dot product": (lambda a, b: a @ b, {"non_negativity", "identity", "triangle_inequality"}),
    "minus": (lambda a, b: -math.dist(a, b), {"non_negativity", "triangle_inequality"}),
    "from afar": (lambda a, b: 1 + math.dist(a, b), {"identity"}),
    "nothing": (lambda a, b: 0, {"identity"}),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_each_axiom_is_judged_as_by_loops(name):
    distance, broken = DISTANCES[name]
    found, wanted = check_axioms(distance, POINTS), looped(distance, POINTS)
    assert {a: found.holds(a) for a in AXIOMS} == wanted
    assert {a for a in AXIOMS if not found.holds(a)} == broken and found.is_metric == (not broken)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_counterexample_can_be_replayed(name):
    distance, _ = DISTANCES[name]
    for axiom, found in check_axioms(distance, POINTS).counterexamples.items():
        if found is None:
            continue
        ends = [POINTS[row] for row in found.rows]
        d = [float(distance(a, b)) for a, b in itertools.pairwise(ends)]
        if axiom == "non_negativity":
            assert d[0] < 0 and found.distances == (d[0],)
        elif axiom == "identity":
            assert (d[0] == 0) == (found.rows[0] != found.rows[1]) and found.distances == (d[0],)
        elif axiom == "symmetry":
            assert d[0] != float(distance(*reversed(ends))) and found.distances[0] == d[0]
        else:
            whole = float(distance(ends[0], ends[2]))
            assert whole > sum(d) and found.distances == (whole, *d)
        assert f"d({found.rows[0]}, " in str(found)


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, (4, 4), elements=st.integers(-3, 3).map(float)))
def test_any_matrix_of_distances_is_judged_as_by_loops(d):
    points = [(float(i),) for i in range(4)]
    found = check_axioms(d)
    if np.abs(d).max() > 0:
        assert {a: found.holds(a) for a in AXIOMS} == looped(lambda a, b: d[int(a[0]), int(b[0])], points)


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, (3, 3), elements=st.integers(-4, 4).map(float)))
def test_every_full_rank_factor_is_a_metric_and_every_other_a_pseudo_metric(factor):
    if not factor.any():
        return
    found = check_axioms(Mahalanobis.from_components(factor), POINTS)
    full = np.linalg.matrix_rank(factor) == 3
    assert found.is_pseudo_metric and (found.is_metric or not full)
    assert check_axioms(factor.T @ factor, POINTS).is_pseudo_metric


def test_a_rank_deficient_metric_confuses_points_that_differ_in_the_lost_direction():
    points = np.array([[0.0, 0.0], [0.0, 5.0], [1.0, 0.0]])
    for distance in (np.diag([1.0, 0.0]), Mahalanobis.from_matrix(np.diag([1.0, 0.0]))):
        found = check_axioms(distance, points)
        assert not found.is_metric and found.is_pseudo_metric
        assert set(found.counterexamples["identity"].rows) == {0, 1}


def test_an_indefinite_matrix_is_negative_somewhere():
    found = check_axioms(np.diag([1.0, -1.0]), [[0.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    assert set(found.counterexamples["non_negativity"].rows) == {0, 1}
    assert found.counterexamples["non_negativity"].distances == (-2.0,)


def test_what_was_fitted_is_a_metric():
    rng = np.random.default_rng(1)
    y = np.arange(60) % 6
    x = rng.normal(size=(6, 4))[y] * 3 + rng.normal(size=(60, 4))
    for metric in (Mahalanobis("within_class"), Mahalanobis("likelihood_ratio", shrinkage=0.5), LFDA()):
        assert check_axioms(metric.fit(x, y), x).is_metric
        assert check_axioms(metric.get_metric(), x[:15]).is_metric
        squared = metric.get_metric()
        assert not check_axioms(lambda a, b, d=squared: d(a, b, squared=True), x[:15]).holds("triangle_inequality")


def test_near_points_are_not_taken_for_one():
    points = np.array([[0.0], [1e-13], [1.0]])
    assert check_axioms(lambda a, b: abs(float(a[0] - b[0])), points).is_metric


def test_equal_rows_are_one_point():
    points = np.array([[0.0], [0.0], [1.0]])
    assert check_axioms(lambda a, b: abs(float(a[0] - b[0])), points).is_metric
    found = check_axioms([[0.0, 1.0], [1.0, 0.0]])
    assert found.is_metric and found.n_points == 2


BAD = {
    "NaN in points": (lambda: check_axioms(math.dist, [[0.0], [np.nan]]), "points must be finite"),
    "infinity in points": (lambda: check_axioms(math.dist, [[0.0], [np.inf]]), "points must be finite"),
    "NaN in a matrix": (lambda: check_axioms([[0.0, np.nan], [1.0, 0.0]]), "must be finite"),
    "NaN distances": (lambda: check_axioms(lambda a, b: np.nan, POINTS), "points 0 and 0 is nan"),
    "infinite distances": (lambda: check_axioms(lambda a, b: np.inf, POINTS), "points 0 and 0 is inf"),
    "vectors": (lambda: check_axioms(lambda a, b: a - b, POINTS), "one real number"),
    "words": (lambda: check_axioms(lambda a, b: "far", POINTS), "one real number"),
    "matrix of another size": (lambda: check_axioms(np.eye(4), POINTS), "(3, 3)"),
    "flat points": (lambda: check_axioms(math.dist, [0.0, 1.0]), "(n, d)"),
    "no points": (lambda: check_axioms(math.dist, np.empty((0, 2))), "(n, d)"),
    "not square": (lambda: check_axioms(np.ones((2, 3))), "(n, n)"),
    "a name": (lambda: check_axioms("euclidean", POINTS), "array of numbers"),
    "a function without points": (lambda: check_axioms(math.dist), "array of numbers"),
    "tolerance": (lambda: check_axioms(math.dist, POINTS, tolerance=-1), "tolerance"),
    "axiom": (lambda: check_axioms(math.dist, POINTS).holds("transitivity"), "no axiom"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_refused_in_one_line(name):
    act, words = BAD[name]
    with pytest.raises(InputError) as caught:
        act()
    assert words in str(caught.value) and "\n" not in str(caught.value)
