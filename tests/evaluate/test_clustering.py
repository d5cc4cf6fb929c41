"""Clustering against scikit-learn's scores, pair-by-pair F1, and chance."""

import json

import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from mettle.errors import InputError
from mettle.evaluate import clustering
from mettle.evaluate.clustering import pair_f1
from oracles import metrics as oracle


def blobs(seed, n=120, classes=6, d=8, noise=0.3):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % classes)
    return (rng.normal(size=(classes, d))[y] + noise * rng.normal(size=(n, d))).astype(np.float32), y


@pytest.mark.parametrize("seed", range(50))
def test_pair_f1_equals_a_count_pair_by_pair(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 4, 15), rng.integers(0, 5, 15)
    assert pair_f1(a, b) == pytest.approx(float(oracle.pair_f1(a.tolist(), b.tolist())), abs=1e-15)


def test_perfect_clusters_random_labels_and_ranges():
    x, y = blobs(0)
    c = clustering(x, y)
    assert c.per_seed["nmi"].shape == (5,)
    assert c.range("nmi")[0] <= c.nmi <= c.range("nmi")[1]
    assert c.nmi > 0.9
    shuffled = clustering(x, np.random.default_rng(1).permutation(y))
    assert abs(shuffled.ami) < 0.1
    assert shuffled.nmi > shuffled.ami  # which is why both are given
    perfect = clustering(np.repeat(np.eye(5), 6, axis=0), np.repeat(np.arange(5), 6))
    assert (perfect.nmi, perfect.ami, perfect.f1) == (1, 1, 1)
    json.dumps(c.summary(), allow_nan=False)


def test_scores_are_scikit_learns_with_the_arithmetic_mean():
    from sklearn.cluster import KMeans

    x, y = blobs(2, noise=1.0)
    c = clustering(x, y, seeds=1, seed=3)
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
    found = KMeans(6, n_init=1, random_state=3).fit_predict(unit)
    assert c.nmi == pytest.approx(normalized_mutual_info_score(y, found), abs=1e-6)
    assert c.ami == pytest.approx(adjusted_mutual_info_score(y, found), abs=1e-6)


def test_label_names_and_lengths_do_not_matter():
    x, y = blobs(3)
    a, b = clustering(x, y), clustering(x * 4, 2**53 + 1 - y)
    assert np.array_equal(a.per_seed["f1"], b.per_seed["f1"])


def test_collapse_is_said_and_one_class_refused():
    c = clustering(np.ones((12, 3)), np.arange(12) % 4)
    assert "collapse" in c.warnings[0]
    assert c.ami == pytest.approx(0, abs=1e-9)
    with pytest.raises(InputError, match="two labels"):
        clustering(np.eye(3), [1, 1, 1])
    with pytest.raises(InputError, match="clusters"):
        clustering(np.eye(3), [1, 1, 2], clusters=4)
    with pytest.raises(InputError, match="finite"):
        clustering(np.full((3, 3), np.nan), [1, 1, 2])
