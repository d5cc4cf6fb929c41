"""LFDA against loops, its equations and Fisher's discriminants."""

import math

import numpy as np
import pytest
from scipy.linalg import subspace_angles
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import KNeighborsClassifier

from mettle.errors import InputError
from mettle.metric import LFDA, lfda
from mettle.metric.lfda import local_scatters


def looped(x, y, k):
    """Both scatter matrices, one pair at a time."""
    n, d = x.shape
    within, between = np.zeros((d, d)), np.zeros((d, d))
    sigma = []
    for i in range(n):
        mates = sorted(math.dist(x[i], x[j]) for j in range(n) if j != i and y[j] == y[i])
        sigma.append(mates[min(k, len(mates)) - 1] if mates else 0.0)
    for i in range(n):
        for j in range(n):
            outer = np.outer(x[i] - x[j], x[i] - x[j])
            if y[i] != y[j]:
                between += outer / n / 2
            elif i != j:
                a = math.exp(-(math.dist(x[i], x[j]) ** 2) / (sigma[i] * sigma[j]))
                size = sum(1 for c in y if c == y[i])
                within += a / size * outer / 2
                between += a * (1 / n - 1 / size) * outer / 2
    return within, between


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    y = np.array([0, 1, 2] * 8 + [0] * 5 + [3])
    return rng.normal(size=(4, 5))[y] * 2 + rng.normal(size=(30, 5)) + 7, y


@pytest.mark.parametrize("k", [1, 3, 7, 50])
def test_the_scatter_matrices_are_their_formulas(data, k):
    for ours, wanted in zip(local_scatters(*data, k), looped(*data, k), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-10)


def test_rows_solve_the_generalized_eigenvalue_problem(data):
    x, y = data
    found = LFDA(shrinkage=0, embedding="plain").fit(x, y)
    within, between = looped(x, y, 7)
    rows = found.components_
    np.testing.assert_allclose(rows @ between @ rows.T, np.diag(found.eigenvalues_), atol=1e-8)
    np.testing.assert_allclose(rows @ within @ rows.T, np.eye(5), atol=1e-8)
    assert (np.diff(found.eigenvalues_) <= 0).all()


def test_the_embeddings_share_their_directions(data):
    plain, weighted, basis = (LFDA(3, embedding=e).fit(*data) for e in ("plain", "weighted", "orthonormal"))
    ratio = np.linalg.norm(weighted.components_, axis=1) / np.linalg.norm(plain.components_, axis=1)
    np.testing.assert_allclose(ratio**2, weighted.eigenvalues_)
    np.testing.assert_allclose(basis.components_ @ basis.components_.T, np.eye(3), atol=1e-12)
    assert subspace_angles(basis.components_.T, plain.components_.T).max() < 1e-8


def test_where_all_of_a_class_is_near_it_is_fishers(data, monkeypatch):
    x, y = (values[data[1] < 3] for values in data)  # scikit-learn warns of a class of one sample
    monkeypatch.setattr(lfda, "local_affinity", lambda members, k: np.ones((len(members),) * 2))
    ours = LFDA(2, shrinkage=0).fit(x, y).components_
    theirs = LinearDiscriminantAnalysis(solver="eigen").fit(x, y).scalings_[:, :2]
    assert subspace_angles(ours.T, theirs).max() < 1e-6


def test_a_class_of_two_clusters_is_not_torn_together():
    """One class on both sides of another: one direction tells them apart, and Fisher's takes another one."""
    rng = np.random.default_rng(0)
    y = np.arange(300) % 2
    side = np.where(y == 0, rng.choice([-6.0, 6.0], size=300), 0.0)
    x = np.c_[side + 0.5 * rng.normal(size=300), 3 * rng.normal(size=(300, 3))]
    fisher = LinearDiscriminantAnalysis(solver="eigen", n_components=1).fit(x[:200], y[:200])
    scores = [
        KNeighborsClassifier(5).fit(m.transform(x[:200]), y[:200]).score(m.transform(x[200:]), y[200:])
        for m in (LFDA(1).fit(x[:200], y[:200]), fisher)
    ]
    assert scores[0] > 0.95 and scores[0] > scores[1] + 0.2


def test_copies_of_points_do_no_harm(data):
    x, y = data
    found = LFDA(k=2).fit(np.repeat(x, 5, 0), np.repeat(y, 5))
    assert np.isfinite(found.components_).all()


@pytest.mark.parametrize("unit", [1e-140, 1e-3, 1e140])
def test_one_unit_for_all_features_changes_no_distance(data, unit):
    x, y = data
    one, other = LFDA(embedding="plain").fit(x, y), LFDA(embedding="plain").fit(x * unit, y)
    np.testing.assert_allclose(one.transform(x), other.transform(x * unit), rtol=1e-8)


def test_a_feature_that_never_varies_has_no_weight(data):
    x, y = data
    found = LFDA().fit(np.insert(x, 2, 7.0, axis=1), y)
    assert (found.components_[:, 2] == 0).all()
    np.testing.assert_allclose(np.delete(found.components_, 2, 1), LFDA().fit(x, y).components_)


X, Y = np.random.default_rng(1).normal(size=(12, 3)), np.arange(12) % 3
BAD = {
    "embedding": (lambda: LFDA(embedding="heavy").fit(X, Y), "embedding"),
    "k": (lambda: LFDA(k=0).fit(X, Y), "k must be at least 1"),
    "shrinkage": (lambda: LFDA(shrinkage=2).fit(X, Y), "shrinkage"),
    "components": (lambda: LFDA(4).fit(X, Y), "n_components=4"),
    "no inverse": (lambda: LFDA(shrinkage=0).fit(X[:4], [0, 0, 1, 1]), "shrinkage above 0"),
    "NaN": (lambda: LFDA().fit(X * np.nan, Y), "NaN"),
    "no labels": (lambda: LFDA().fit(X), "requires y"),
    "one class": (lambda: LFDA().fit(X, Y * 0), "one class"),
    "singletons": (lambda: LFDA().fit(X, np.arange(12)), "two or more samples"),
    "one point": (lambda: LFDA().fit(np.ones((12, 3)), Y), "the same"),
    "classes without spread": (lambda: LFDA().fit(np.repeat(X[:4], 3, 0), np.arange(12) // 3), "no inverse"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_typed_errors(name):
    act, words = BAD[name]
    with pytest.raises(InputError) as caught:
        act()
    assert words in str(caught.value)
