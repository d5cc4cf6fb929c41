"""The distance: its axioms, its identities, its search; and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

from mettle.errors import InputError, MettleError
from mettle.losses import Contrastive, NPair
from mettle.metric import Mahalanobis, squared_form

D = 4
numbers = st.floats(-100, 100, allow_nan=False, width=32)
point = arrays(np.float64, (1, D), elements=numbers)
factor = st.integers(1, 6).flatmap(lambda r: arrays(np.float64, (r, D), elements=numbers))  # r < D: rank-deficient


def distance(metric, x, y):
    return float(metric.pair_distance(x, y)[0])


def slack(metric, *points):
    """What rounding may add: relative to the longest vectors involved, not to their difference."""
    return 1e-12 * np.linalg.norm(metric.components_) * max(np.abs(p).max() for p in points) * 100


@given(factor, point, point)
def test_axiom_1_no_distance_is_negative(factor, x, y):
    assert distance(Mahalanobis.from_components(factor), x, y) >= 0


@given(factor, point)
def test_axiom_2_a_point_is_at_distance_0_from_itself(factor, x):
    assert distance(Mahalanobis.from_components(factor), x, x) == 0


@given(st.integers(0, 2**32 - 1), point, point)
def test_axiom_2_distinct_points_are_apart_when_the_rank_is_full(seed, x, y):
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(D, D)))
    metric = Mahalanobis.from_components(np.diag(rng.uniform(0.5, 2, D)) @ turn)
    apart = np.linalg.norm(x - y)
    assert 0.499 * apart <= distance(metric, x, y) <= 2.001 * apart


@given(factor, point, point)
def test_axiom_3_both_ways_are_equally_long(factor, x, y):
    metric = Mahalanobis.from_components(factor)
    assert distance(metric, x, y) == distance(metric, y, x)


@given(factor, point, point, point)
def test_axiom_4_no_detour_is_shorter(factor, x, y, z):
    metric = Mahalanobis.from_components(factor)
    assert distance(metric, x, z) <= distance(metric, x, y) + distance(metric, y, z) + slack(metric, x, y, z)


@pytest.mark.parametrize("method", ["learned", "within_class", "covariance"])
@settings(max_examples=25)
@given(arrays(np.float64, (3, D), elements=numbers))
def test_the_axioms_hold_for_what_was_fitted(method, fitted, points):
    metric = fitted[method]
    x, y, z = points[:, None]
    assert distance(metric, x, x) == 0
    assert distance(metric, x, y) == distance(metric, y, x) >= 0
    assert distance(metric, x, z) <= distance(metric, x, y) + distance(metric, y, z) + slack(metric, x, y, z)


@pytest.fixture(scope="module")
def cloud():
    rng = np.random.default_rng(3)
    y = np.arange(90) % 3
    return rng.normal(size=(3, D))[y] * 2 + rng.normal(size=(90, D)) * [1, 3, 0.2, 1], y


@pytest.fixture(scope="module")
def fitted(cloud):
    return {method: Mahalanobis(method).fit(*cloud) for method in ("learned", "within_class", "covariance")}


def test_a_rank_deficient_metric_is_a_pseudo_metric():
    metric = Mahalanobis.from_matrix(np.diag([1.0, 0.0, 4.0]))
    assert metric.components_.shape == (2, 3)
    x, y = np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, 9.0, 3.0]])
    assert (x != y).any() and distance(metric, x, y) == 0
    assert distance(metric, x, x + np.array([[3.0, 5.0, 2.0]])) == 5


def test_the_squared_form_breaks_the_triangle_inequality():
    metric = Mahalanobis.from_matrix([[1.0]])
    a, b, c = ([[v]] for v in (0.0, 1.0, 2.0))

    def square(x, y):
        return float(metric.pair_distance(x, y, squared=True)[0])

    assert square(a, c) == 4 > square(a, b) + square(b, c) == 2
    assert distance(metric, a, c) == distance(metric, a, b) + distance(metric, b, c) == 2


def test_row_21_the_identity_is_squared_euclid_and_a_factor_its_image():
    rng = np.random.default_rng(0)
    x, y, factor = rng.normal(size=(30, 5)), rng.normal(size=(30, 5)), rng.normal(size=(3, 5))
    plain = Mahalanobis.from_matrix(np.eye(5)).pair_distance(x, y, squared=True)
    np.testing.assert_allclose(
        plain, [sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for p, q in zip(x, y, strict=True)]
    )
    metric = Mahalanobis.from_components(factor)
    m = metric.get_mahalanobis_matrix()
    np.testing.assert_allclose(m, factor.T @ factor)
    wanted = [(p - q) @ m @ (p - q) for p, q in zip(x, y, strict=True)]
    np.testing.assert_allclose(metric.pair_distance(x, y, squared=True), wanted)
    np.testing.assert_allclose(
        [np.linalg.norm(factor @ p - factor @ q) ** 2 for p, q in zip(x, y, strict=True)], wanted
    )
    np.testing.assert_allclose(Mahalanobis.from_matrix(m).pair_distance(x, y, squared=True), wanted)


def test_the_gradient_of_the_square_is_twice_the_factor_times_the_outer_product():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(2, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    delta = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(squared_form, (delta, factor))
    assert torch.autograd.gradgradcheck(squared_form, (delta, factor))
    (g,) = torch.autograd.grad(squared_form(delta, factor), factor)
    torch.testing.assert_close(g, 2 * factor @ torch.outer(delta, delta))
    (zero,) = torch.autograd.grad(squared_form(torch.zeros_like(delta), factor), factor)
    assert bool((zero == 0).all())  # coincident points: no gradient, and no NaN


@pytest.mark.parametrize("method", ["learned", "within_class", "covariance"])
@pytest.mark.parametrize("r", [2, None])
def test_plain_l2_search_of_transformed_points_is_mahalanobis_search(cloud, method, r):
    x, y = cloud
    metric = Mahalanobis(method, n_components=r).fit(x, y)
    m, queries = metric.get_mahalanobis_matrix(), x[:20] + 0.3
    brute = np.array([[(q - p) @ m @ (q - p) for p in x] for q in queries])
    z, zq = metric.transform(x), metric.transform(queries)
    plain = ((zq[:, None] - z[None]) ** 2).sum(-1)
    np.testing.assert_array_equal(np.argsort(plain, 1)[:, :10], np.argsort(brute, 1)[:, :10])
    np.testing.assert_allclose(plain, brute)
    single = ((zq.astype(np.float32)[:, None] - z.astype(np.float32)[None]) ** 2).sum(-1)  # what an index would store
    np.testing.assert_array_equal(single.argmin(1), brute.argmin(1))


def test_pairs_are_one_array_or_two(cloud, fitted):
    x, _ = cloud
    metric = fitted["within_class"]
    first, second = x[:40], x[40:80]
    two = metric.pair_distance(first, second)
    np.testing.assert_array_equal(metric.pair_distance(np.stack([first, second], axis=1)), two)
    np.testing.assert_array_equal(metric.pair_score(first, second), -two)
    np.testing.assert_allclose(two, np.diag(cdist(first, second, "mahalanobis", VI=metric.get_mahalanobis_matrix())))
    np.testing.assert_array_equal(metric.pair_distance(torch.from_numpy(first), second.tolist()), two)


def test_a_metric_is_kept_by_its_components(cloud, fitted):
    kept = Mahalanobis.from_components(fitted["learned"].components_)
    np.testing.assert_array_equal(kept.transform(cloud[0]), fitted["learned"].transform(cloud[0]))


X, Y = np.random.default_rng(1).normal(size=(12, 3)), np.arange(12) % 3
BAD = {
    "method": (lambda: Mahalanobis("learnt").fit(X, Y), "did you mean 'learned'"),
    "components": (lambda: Mahalanobis(n_components=4).fit(X, Y), "n_components=4"),
    "no components": (lambda: Mahalanobis(n_components=0).fit(X, Y), "n_components"),
    "shrinkage": (lambda: Mahalanobis(shrinkage=1.5).fit(X, Y), "shrinkage"),
    "penalty": (lambda: Mahalanobis(penalty=float("nan")).fit(X, Y), "penalty"),
    "max_iter": (lambda: Mahalanobis(max_iter=0).fit(X, Y), "max_iter"),
    "batch": (lambda: Mahalanobis(batch=(2, 1)).fit(X, Y), "batch"),
    "batch of too many": (lambda: Mahalanobis(batch=(4, 2)).fit(X, Y), "lower the first number"),
    "loss": (lambda: Mahalanobis(loss="SupCon").fit(X, Y), "loss"),
    "loss with parameters": (lambda: Mahalanobis(loss=torch.nn.Linear(3, 1)).fit(X, Y), "parameters of its own"),
    "N-pair at once": (lambda: Mahalanobis(loss=NPair()).fit(X, Y), "two rows of every class"),
    "NaN": (lambda: Mahalanobis().fit(np.where(X > 2, np.nan, X) * np.nan, Y), "NaN"),
    "sparse": (lambda: Mahalanobis().fit(csr_array(X), Y), "dense"),
    "no labels": (lambda: Mahalanobis().fit(X), "requires y"),
    "lengths": (lambda: Mahalanobis().fit(X, Y[:5]), "12 and 5"),
    "targets that are no labels": (lambda: Mahalanobis().fit(X, X[:, 0]), "continuous"),
    "one class": (lambda: Mahalanobis().fit(X, Y * 0), "one class"),
    "singletons": (lambda: Mahalanobis().fit(X, np.arange(12)), "two or more samples"),
    "one point": (lambda: Mahalanobis("covariance").fit(np.ones((5, 3))), "the same"),
    "classes without spread": (
        lambda: Mahalanobis("within_class").fit(np.repeat(X[:4], 3, 0), np.arange(12) // 3),
        "inverse",
    ),
    "no inverse": (lambda: Mahalanobis("covariance", shrinkage=0).fit(X[:3]), "shrinkage='auto'"),
    "triples": (lambda: Mahalanobis().fit(np.ones((4, 3, 2)), [0, 1, 0, 1]), "(n, 2, d)"),
    "pairs of one kind": (lambda: Mahalanobis().fit(X.reshape(6, 2, 3), np.ones(6)), "both of them"),
    "grades of pairs": (lambda: Mahalanobis().fit(X.reshape(6, 2, 3), [0, 1, 2, 0, 1, 2]), "1 for alike"),
    "one alike pair": (lambda: Mahalanobis().fit(X.reshape(6, 2, 3), [1, 0, 0, 0, 0, 0]), "at least two"),
    "batches of pairs": (lambda: Mahalanobis(batch=(2, 2)).fit(X.reshape(6, 2, 3), [1, 0] * 3), "pairs have none"),
    "N-pair of pairs": (lambda: Mahalanobis(loss=NPair()).fit(X.reshape(6, 2, 3), [1, 0] * 3), "NPair"),
    "other width": (lambda: Mahalanobis("within_class").fit(X, Y).pair_distance(X[:, :2], X[:, :2]), "3 features"),
    "other width of pairs": (
        lambda: Mahalanobis("within_class").fit(X, Y).pair_distance(np.ones((4, 2, 5))),
        "5 features",
    ),
    "other length": (lambda: Mahalanobis("within_class").fit(X, Y).pair_distance(X, X[:4]), "row by row"),
    "no pairs": (lambda: Mahalanobis("within_class").fit(X, Y).pair_distance(X), "(n, 2, d)"),
    "not square": (lambda: Mahalanobis.from_matrix(np.ones((2, 3))), "square"),
    "asymmetric": (lambda: Mahalanobis.from_matrix([[1.0, 1.0], [0.0, 1.0]]), "symmetric"),
    "indefinite": (lambda: Mahalanobis.from_matrix(np.diag([1.0, -1.0])), "negative eigenvalue"),
    "nothing": (lambda: Mahalanobis.from_matrix(np.zeros((2, 2))), "zeros"),
    "broken components": (lambda: Mahalanobis.from_components([[np.nan, 1.0]]), "finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_typed_errors_that_say_what_to_do(name):
    act, words = BAD[name]
    with pytest.raises(MettleError) as caught:
        act()
    assert isinstance(caught.value, InputError) and isinstance(caught.value, ValueError)
    assert words in str(caught.value)


def test_no_metric_gives_a_finite_number_for_nan(fitted):
    for bad in (np.nan, np.inf):
        with pytest.raises(InputError):
            fitted["learned"].transform([[0.0, bad, 0.0, 0.0]])
        with pytest.raises(InputError):
            fitted["learned"].pair_score(np.full((1, 2, D), bad))


def test_a_loss_that_is_no_number_stops_the_search():
    def broken(z, y):
        return z.sum() * float("nan")

    with pytest.raises(MettleError, match="NaN"):
        Mahalanobis(loss=broken).fit(X, Y)


def test_a_loss_that_only_pulls_is_caught_collapsing():
    with pytest.raises(MettleError, match="collapsed"):
        Mahalanobis(loss=lambda z, y: z.square().sum(), penalty=0, early_stopping=False).fit(X, Y)


def test_the_loss_is_not_a_stranger_to_l1():
    assert Mahalanobis(loss=Contrastive(l1=True, normalise=False), n_components=2).fit(X, Y).components_.shape == (2, 3)
