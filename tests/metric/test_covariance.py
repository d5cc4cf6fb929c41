"""Metrics from the data alone, against NumPy, SciPy and scikit-learn's own covariance estimators."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.covariance import LedoitWolf
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from mettle.metric import Mahalanobis


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    y = np.arange(120) % 4
    mix = rng.normal(size=(6, 6)) * [1, 10, 100, 1, 0.1, 1]
    return rng.normal(size=(4, 6))[y] @ mix * 2 + rng.normal(size=(120, 6)) @ mix + 50, y


def within(x, y):
    return sum((x[y == c] - x[y == c].mean(0)).T @ (x[y == c] - x[y == c].mean(0)) for c in set(y)) / (len(x) - 4)


def test_without_shrinkage_it_is_the_textbook_distance(data):
    x, _ = data
    metric = Mahalanobis("covariance", shrinkage=0).fit(x)
    np.testing.assert_allclose(metric.get_mahalanobis_matrix() @ np.cov(x.T), np.eye(6), atol=1e-8)
    z = metric.transform(x)
    np.testing.assert_allclose(cdist(z, z), cdist(x, x, "mahalanobis", VI=np.linalg.inv(np.cov(x.T))))
    np.testing.assert_allclose(np.cov(z.T), np.eye(6), atol=1e-8)


def test_shrinkage_is_ledoit_and_wolfs_on_features_of_unit_variance(data):
    x, _ = data
    metric = Mahalanobis("covariance").fit(x)
    scale = x.std(0)
    wanted = LedoitWolf().fit(x / scale)
    assert metric.shrinkage_ == pytest.approx(wanted.shrinkage_)
    m = metric.get_mahalanobis_matrix() * np.outer(scale, scale)
    np.testing.assert_allclose(m, wanted.precision_ * (len(x) - 1) / len(x))


def test_full_shrinkage_leaves_independent_features(data):
    x, _ = data
    m = Mahalanobis("covariance", shrinkage=1.0).fit(x).get_mahalanobis_matrix()
    np.testing.assert_allclose(m, np.diag(1 / x.var(0, ddof=1)), atol=1e-12)


def test_within_is_the_pooled_covariance_of_the_classes(data):
    x, y = data
    m = Mahalanobis("within_class", shrinkage=0).fit(x, y).get_mahalanobis_matrix()
    np.testing.assert_allclose(m @ within(x, y), np.eye(6), atol=1e-8)


def test_few_directions_of_within_are_fishers(data):
    x, y = data
    ours = Mahalanobis("within_class", shrinkage=0, n_components=3).fit(x, y).transform(x)
    theirs = LinearDiscriminantAnalysis(solver="eigen").fit(x, y).transform(x)  # three: four classes
    theirs = theirs * np.sqrt((120 - 4) / 120)  # scikit-learn divides by n
    np.testing.assert_allclose(cdist(ours, ours), cdist(theirs, theirs), rtol=1e-6)


def test_few_directions_of_covariance_are_the_widest(data):
    x, _ = data
    u = (x - x.mean(0)) / x.std(0)
    left, values, _ = np.linalg.svd(u, full_matrices=False)
    metric = Mahalanobis("covariance", shrinkage=0, n_components=2).fit(x)
    z = left[:, :2] * np.sqrt(len(x) - 1)
    np.testing.assert_allclose(cdist(metric.transform(x), metric.transform(x)), cdist(z, z), atol=1e-8)
    assert values[1] > values[2]


@pytest.mark.parametrize("method", ["covariance", "within_class", "learned"])
def test_units_do_not_matter(data, method):
    x, y = data
    units = np.array([1e-6, 1.0, 1e3, 1e6, 2.0, 1e-3])
    plain, scaled = Mahalanobis(method).fit(x, y), Mahalanobis(method).fit(x * units, y)
    first, second = x[:60], x[60:]
    wanted = plain.pair_distance(first, second)
    np.testing.assert_allclose(scaled.pair_distance(first * units, second * units), wanted, rtol=1e-4)


@pytest.mark.parametrize("method", ["covariance", "within_class", "learned"])
def test_where_the_origin_lies_does_not_matter(data, method):
    x, y = data
    plain, moved = Mahalanobis(method).fit(x, y), Mahalanobis(method).fit(x + 1e5, y)
    np.testing.assert_allclose(moved.components_, plain.components_, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", ["covariance", "within_class", "learned"])
def test_a_feature_that_never_varies_has_no_weight(data, method):
    x, y = data
    wide = np.insert(x, 2, 7.0, axis=1)
    metric = Mahalanobis(method).fit(wide, y)
    assert metric.components_.shape == (6, 7) and (metric.components_[:, 2] == 0).all()
    np.testing.assert_allclose(np.delete(metric.components_, 2, 1), Mahalanobis(method).fit(x, y).components_)


@pytest.mark.parametrize("method", ["covariance", "within_class", "learned"])
def test_more_features_than_samples(method):
    rng = np.random.default_rng(1)
    y = np.arange(20) % 2
    metric = Mahalanobis(method, tol=1e-3).fit(rng.normal(size=(20, 50)) + y[:, None], y)
    assert np.isfinite(metric.components_).all() and np.linalg.eigvalsh(metric.get_mahalanobis_matrix()).min() > -1e-9


def test_pairs_of_one_class_show_its_covariance():
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(3, 3))
    centres = 10 * rng.normal(size=(4000, 3))
    pairs = centres[:, None] + rng.normal(size=(4000, 2, 3)) @ mix
    pairs[1::2, 1] = 10 * rng.normal(size=(2000, 3))  # every second pair is unalike
    metric = Mahalanobis("within_class").fit(pairs, np.arange(4000) % 2 == 0)
    np.testing.assert_allclose(metric.get_mahalanobis_matrix() @ (mix.T @ mix), np.eye(3), atol=0.15)


def test_covariance_of_pairs_is_that_of_their_points(data):
    x, _ = data
    one, other = Mahalanobis("covariance").fit(x.reshape(60, 2, 6)), Mahalanobis("covariance").fit(x)
    np.testing.assert_allclose(one.get_mahalanobis_matrix(), other.get_mahalanobis_matrix())
