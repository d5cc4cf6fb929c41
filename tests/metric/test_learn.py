"""Learning: that it helps and when it cannot, that any loss will do, that equal seeds give equal metrics."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis

from mettle.difficulty import AdaptiveThreshold, Threshold
from mettle.losses import MCML, Contrastive, DASupCon, InfoNCE, LiftedStructure, NPair, SelfTriplet, SupCon, Triplet
from mettle.metric import Mahalanobis

LOSSES = {
    "Contrastive": Contrastive(normalise=False),
    "DASupCon": DASupCon(),
    "InfoNCE": InfoNCE(0.1),
    "LiftedStructure": LiftedStructure(),
    "SelfTriplet": SelfTriplet(form="mean"),
    "SupCon": SupCon(0.1),
    "SupCon, hard pairs": SupCon(0.1, difficulty=Threshold()),
    "Triplet": Triplet(1.0, normalise=False, squared=True, mining="semihard"),
    "Triplet, hardest": Triplet(1.0, normalise=False, squared=True, mining="hardest", soft=True),
    "Triplet, random": Triplet(1.0, normalise=False, mining="random"),
}

# Nothing is learned but by the loss: the search begins at plain Euclid and ends at the minimum.
FROM_EUCLID = {"shrinkage": 1.0, "early_stopping": False}


def noisy(seed, n, classes=5, told=4, noise=12):
    """Classes that differ in 4 directions, hidden by a rotation among 12 others that are eight times as loud."""
    rng = np.random.default_rng(seed)
    centres, turn = rng.normal(size=(classes, told)) * 2.5, np.linalg.qr(rng.normal(size=(told + noise,) * 2))[0]

    def draw(k):
        y = np.arange(k) % classes
        return np.c_[centres[y] + rng.normal(size=(k, told)), 8 * rng.normal(size=(k, noise))] @ turn, y

    return *draw(n), *draw(300)


def accuracy(metric, x, y, x2, y2):
    return KNeighborsClassifier(5).fit(metric.transform(x), y).score(metric.transform(x2), y2)


def euclid(x):
    return Mahalanobis.from_matrix(np.eye(x.shape[1]))


def test_learning_finds_the_directions_that_tell_where_euclid_and_covariance_do_not():
    for seed in range(3):
        x, y, x2, y2 = noisy(seed, 200, noise=30)
        found = accuracy(Mahalanobis().fit(x, y), x, y, x2, y2)
        for other in (euclid(x), Mahalanobis("covariance").fit(x), Mahalanobis("within_class").fit(x, y)):
            assert found > accuracy(other, x, y, x2, y2) + 0.35


def test_control_shuffled_labels_teach_far_less():
    """Not nothing: the noise is loud, and seeing that takes no labels."""
    gaps = []
    for seed in range(3):
        x, y, x2, y2 = noisy(seed, 200, noise=30)
        wrong = np.random.default_rng(0).permutation(y)
        right, wrong = (accuracy(Mahalanobis().fit(x, labels), x, y, x2, y2) for labels in (y, wrong))
        gaps.append(right - wrong)
    assert min(gaps) > 0.15 and np.mean(gaps) > 0.25


def test_control_without_noise_there_is_nothing_to_gain():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(5, 16))
    y = np.arange(500) % 5
    x = centres[y] + rng.normal(size=(500, 16))
    split = x[:200], y[:200], x[200:], y[200:]
    plain, learned = (accuracy(m, *split) for m in (euclid(x), Mahalanobis().fit(*split[:2])))
    assert plain > 0.9 and abs(learned - plain) < 0.05


def test_it_is_no_worse_than_a_neighbour_of_its_kind():
    x, y, x2, y2 = noisy(1, 200)
    theirs = NeighborhoodComponentsAnalysis(init="pca", max_iter=50, random_state=0).fit(x, y)
    assert accuracy(Mahalanobis().fit(x, y), x, y, x2, y2) > accuracy(theirs, x, y, x2, y2)


@pytest.mark.parametrize("name", LOSSES)
def test_any_pairwise_loss_teaches(name):
    x, y, x2, y2 = noisy(0, 150)
    metric = Mahalanobis(loss=LOSSES[name], tol=1e-3, random_state=0, **FROM_EUCLID).fit(x, y)
    assert accuracy(metric, x, y, x2, y2) > accuracy(euclid(x), x, y, x2, y2) + 0.2


def test_n_pair_teaches_in_batches_of_two():
    x, y, x2, y2 = noisy(0, 150)
    x = x - x.mean(0)
    metric = Mahalanobis(loss=NPair(), batch=(5, 2), tol=1e-3, random_state=0, **FROM_EUCLID).fit(x, y)
    assert accuracy(metric, x, y, x2, y2) > accuracy(euclid(x), x, y, x2, y2) + 0.2


def test_a_plain_function_is_a_loss():
    def spread_ratio(z, y):
        same = y[:, None] == y
        d = torch.cdist(z, z).square()
        return d[same].mean() / d[~same].mean()

    x, y, x2, y2 = noisy(0, 150)
    assert accuracy(Mahalanobis(loss=spread_ratio, n_components=4).fit(x, y), x, y, x2, y2) > 0.6


def test_batches_come_near_to_everything_at_once():
    x, y, x2, y2 = noisy(2, 400)
    batches = Mahalanobis(batch=(5, 32), random_state=0).fit(x, y)
    at_once = Mahalanobis(batch=None).fit(x, y)
    assert accuracy(batches, x, y, x2, y2) == pytest.approx(accuracy(at_once, x, y, x2, y2), abs=0.06)


def test_many_points_are_learned_from_in_batches():
    x, y, x2, y2 = noisy(0, 3000)
    metric = Mahalanobis(random_state=0, max_iter=20, tol=1e-2).fit(x, y)
    assert accuracy(metric, x, y, x2, y2) > accuracy(euclid(x), x, y, x2, y2) + 0.3


@pytest.mark.parametrize("options", [{}, {"batch": (5, 8)}, {"loss": LOSSES["Triplet, random"]}])
def test_equal_seeds_give_equal_metrics_and_leave_torchs_stream_alone(options):
    x, y, *_ = noisy(0, 80)
    torch.manual_seed(1)
    first = Mahalanobis(random_state=3, tol=1e-2, **options).fit(x, y)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    second = Mahalanobis(random_state=3, tol=1e-2, **options).fit(x, y)  # torch's own stream is elsewhere by now
    np.testing.assert_array_equal(first.components_, second.components_)


def test_a_loss_with_a_memory_forgets_between_fits():
    x, y, *_ = noisy(0, 80)
    metric = Mahalanobis(loss=SupCon(0.1, difficulty=AdaptiveThreshold()), tol=1e-2, random_state=0)
    first = metric.fit(x, y).components_
    np.testing.assert_array_equal(metric.fit(x, y).components_, first)


def test_another_seed_gives_other_batches():
    x, y, *_ = noisy(0, 80)
    one, two = (
        Mahalanobis(batch=(5, 8), tol=1e-2, early_stopping=False, random_state=seed).fit(x, y) for seed in (0, 1)
    )
    assert np.abs(one.components_ - two.components_).max() > 1e-6


def test_the_search_ends_at_a_minimum():
    x, y, *_ = noisy(0, 100)
    metric = Mahalanobis(penalty=0, tol=1e-6, max_iter=500, early_stopping=False).fit(x, y)
    z = torch.from_numpy(x - x.mean(0))
    labels = torch.from_numpy(y)
    best = float(MCML()(z @ torch.from_numpy(metric.components_).T, labels))
    assert best == pytest.approx(metric.loss_)
    rng = np.random.default_rng(0)
    for size in (1e-1, 1e-2, 1e-3):  # the loss is convex in M: nothing nearby is lower, nothing at all is
        step = torch.from_numpy(metric.components_ * (1 + size * rng.normal(size=metric.components_.shape)))
        assert float(MCML()(z @ step.T, labels)) > best
    for start in ("likelihood_ratio", "within_class", "covariance"):
        other = torch.from_numpy(Mahalanobis(start).fit(x, y).components_)
        assert float(MCML()(z @ other.T, labels)) > best


def test_a_strong_penalty_leaves_the_metric_where_it_started():
    x, y, *_ = noisy(0, 100)
    held, free = (Mahalanobis(penalty=penalty, early_stopping=False).fit(x, y) for penalty in (1e6, 0.01))
    start = Mahalanobis("likelihood_ratio").fit(x, y).components_
    scale = (held.components_ * start).sum() / (start**2).sum()
    assert np.log2(scale) == pytest.approx(round(np.log2(scale)), abs=1e-2)  # the size of distances is the loss's
    np.testing.assert_allclose(held.components_ / scale, start, atol=3e-3)
    assert np.abs(free.components_ / scale - start).max() > 0.01


def test_everything_is_float64_whatever_came_in():
    x, y, *_ = noisy(0, 60)
    metric = Mahalanobis(n_components=3, early_stopping=False).fit(x.astype(np.float32), y)
    assert metric.components_.dtype == metric.transform(x.astype(np.float32)).dtype == np.float64
    assert metric.components_.shape == (3, 16) and metric.n_iter_ > 1 and np.isfinite(metric.loss_)
