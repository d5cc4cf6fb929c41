"""Few-shot episodes against scikit-learn's nearest centroids, and intervals that resample classes."""

import json

import numpy as np
import pytest
from sklearn.neighbors import NearestCentroid

from mettle.errors import InputError
from mettle.evaluate import few_shot


def clusters(seed=0, classes=12, each=8, d=6, noise=0.7, names=None):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), each)
    x = rng.normal(size=(classes, d))[y] + noise * rng.normal(size=(len(y), d))
    return x, y if names is None else np.array(names)[y]


def test_episodes_are_those_of_nearest_centroids():
    x, y = clusters()
    found = few_shot(x, y, ways=4, shots=2, queries=3, episodes=40, seed=5)
    unit, rng = x / np.linalg.norm(x, axis=1, keepdims=True), np.random.default_rng(5)
    for episode in range(40):  # the draws are those of the function: classes first, then the samples of each
        chosen = rng.choice(12, 4, replace=False)
        drawn = [rng.permutation(np.flatnonzero(y == one))[:5] for one in chosen]
        shots, queries = (np.concatenate([one[part] for one in drawn]) for part in (slice(2), slice(2, None)))
        means = NearestCentroid().fit(unit[shots], y[shots])
        centers = means.centroids_ / np.linalg.norm(means.centroids_, axis=1, keepdims=True)
        right = means.classes_[np.argmax(unit[queries] @ centers.T, axis=1)] == y[queries]
        assert found.classes[episode].tolist() == chosen.tolist()
        assert found.correct[episode] == pytest.approx(right.reshape(4, 3).mean(axis=1))
    assert found.accuracy == pytest.approx(found.per_episode.mean())


def test_constant_embeddings_are_chance_and_separate_ones_perfect():
    same = few_shot(np.ones((40, 4)), np.arange(40) // 8, ways=5, shots=1, queries=7, episodes=5)
    assert same.accuracy == pytest.approx(1 / 5)
    apart = few_shot(np.repeat(np.eye(6), 8, axis=0), np.arange(48) // 8, ways=5, queries=7, episodes=5)
    assert apart.accuracy == 1


def test_more_episodes_of_the_same_classes_do_not_narrow_an_interval_to_nothing():
    x, y = clusters(noise=1.5)
    few, many = (few_shot(x, y, ways=3, queries=4, episodes=n) for n in (300, 3000))
    widths = [found.interval("accuracy").high - found.interval("accuracy").low for found in (few, many)]
    assert widths[1] > 0.7 * widths[0]
    naive = 2 * 1.96 * many.per_episode.std() / np.sqrt(3000)
    assert widths[1] > 3 * naive
    assert "class bootstrap" in many.interval("accuracy").method


def test_labels_with_too_few_samples_are_left_out_and_counted():
    x, y = clusters(names=[f"class {k}" for k in range(12)])
    y[:5] = "rare"
    found = few_shot(x, y, ways=3, shots=1, queries=7, episodes=4)
    assert found.left_out == 2 and "2 labels have fewer than 8 samples" in found.warnings[0]
    json.dumps(found.summary(), allow_nan=False)
    with pytest.raises(InputError, match="12 ways need as many labels with 8 samples"):
        few_shot(x, y, ways=12, queries=7)
    for bad in ({"ways": 1}, {"shots": 0}, {"queries": 0}, {"episodes": 0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            few_shot(x, y, **bad)
