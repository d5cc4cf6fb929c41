"""NCA against loops, finite differences and scikit-learn's estimator."""

import math

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.neighbors import NeighborhoodComponentsAnalysis

from mettle.errors import InputError
from mettle.metric import NCA, nca
from mettle.metric.nca import expected_accuracy


def looped(factor, x, y):
    """The objective, one point and one pair at a time."""
    n, total = len(x), 0.0
    z = [[sum(a * b for a, b in zip(row, point, strict=True)) for row in factor] for point in x]
    for i in range(n):
        near = [
            math.exp(-sum((a - b) ** 2 for a, b in zip(z[i], z[j], strict=True))) if j != i else 0 for j in range(n)
        ]
        total += sum(near[j] for j in range(n) if y[j] == y[i]) / sum(near)
    return total / n


@pytest.fixture
def few():
    rng = np.random.default_rng(0)
    return rng.normal(size=(17, 4)), np.array([0, 1, 2] * 5 + [0, 3]), rng.normal(size=(3, 4))


@pytest.mark.parametrize("tile", [5, 1024])
def test_the_objective_is_its_formula(few, tile, monkeypatch):
    monkeypatch.setattr(nca, "TILE", tile)
    x, y, factor = few
    assert expected_accuracy(factor, x, y)[0] == pytest.approx(looped(factor, x, y), rel=1e-12)


@pytest.mark.parametrize("tile", [5, 1024])
def test_the_gradient_is_the_slope(few, tile, monkeypatch):
    monkeypatch.setattr(nca, "TILE", tile)
    x, y, factor = few
    gradient = expected_accuracy(factor, x, y)[1]
    for i, j in np.ndindex(factor.shape):
        step = np.zeros_like(factor)
        step[i, j] = 1e-5
        slope = (looped(factor + step, x, y) - looped(factor - step, x, y)) / 2e-5
        assert gradient[i, j] == pytest.approx(slope, abs=1e-8)


def test_far_points_neither_overflow_nor_become_nan(few):
    x, y, factor = few
    value, gradient = expected_accuracy(1e6 * factor, x, y)
    assert 0 <= value <= 1 and np.isfinite(gradient).all()


def test_it_ends_no_lower_than_scikit_learns():
    x, y = load_iris(return_X_y=True)
    theirs = NeighborhoodComponentsAnalysis(n_components=2, init="pca", max_iter=200, random_state=0).fit(x, y)
    ours = NCA(2, max_iter=200).fit(x, y)
    assert ours.objective_ >= expected_accuracy(theirs.components_, x - x.mean(0), y)[0] - 0.01
    # In the features as they came the objective is the same number: the unit of the search is in the components.
    assert expected_accuracy(ours.components_, x, y)[0] == pytest.approx(ours.objective_)


def test_a_penalty_shortens_the_map():
    x, y = load_iris(return_X_y=True)
    sizes = [np.linalg.norm(NCA(penalty=p, max_iter=200).fit(x, y).components_) for p in (0.001, 0.1)]
    assert sizes[1] < sizes[0]


def test_a_search_cut_short_says_so():
    x, y = load_iris(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="raise max_iter"):
        assert NCA(max_iter=2).fit(x, y).n_iter_ == 2


@pytest.mark.parametrize("unit", [1e-140, 1e-3, 1e140])
def test_one_unit_for_all_features_changes_no_distance(unit):
    x, y = load_iris(return_X_y=True)
    plain, scaled = NCA(2, max_iter=200, tol=1e-4).fit(x, y), NCA(2, max_iter=200, tol=1e-4).fit(x * unit, y)
    assert scaled.objective_ == pytest.approx(plain.objective_, abs=1e-3)


X, Y = np.random.default_rng(1).normal(size=(12, 3)), np.arange(12) % 3
BAD = {
    "init": (lambda: NCA(init="lda").fit(X, Y), "init"),
    "components": (lambda: NCA(4).fit(X, Y), "n_components=4"),
    "no components": (lambda: NCA(0).fit(X, Y), "n_components"),
    "penalty": (lambda: NCA(penalty=-1).fit(X, Y), "penalty"),
    "max_iter": (lambda: NCA(max_iter=0).fit(X, Y), "max_iter"),
    "NaN": (lambda: NCA().fit(X * np.nan, Y), "NaN"),
    "no labels": (lambda: NCA().fit(X), "requires y"),
    "one class": (lambda: NCA().fit(X, Y * 0), "one class"),
    "singletons": (lambda: NCA().fit(X, np.arange(12)), "two or more samples"),
    "one point": (lambda: NCA().fit(np.ones((12, 3)), Y), "the same"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_typed_errors(name):
    act, words = BAD[name]
    with pytest.raises(InputError) as caught:
        act()
    assert words in str(caught.value)
