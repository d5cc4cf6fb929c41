"""Probes against votes in loops and scikit-learn, and the worst class."""

import json
import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from mettle.errors import DataError, InputError, NumericError
from mettle.evaluate import knn_accuracy, probe
from oracles import metrics as oracle


def halves(seed, n=120, classes=4, d=8, noise=1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    x = rng.normal(size=(classes, d))[y] + noise * rng.normal(size=(n, d))
    return (x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("k", [1, 3, 7])
def test_votes_equal_a_loop_with_ties(seed, k):
    rng = np.random.default_rng(seed)
    train, test = (rng.choice([-1, 1], size=(n, 4)) for n in (12, 6))
    labels, truth = np.append([0, 1, 2], rng.integers(0, 3, 9)), rng.integers(0, 3, 6)
    ids = np.arange(18)  # corners of a cube repeat themselves
    p = probe((train * 1.0, labels, None, ids[:12]), (test * 1.0, truth, None, ids[12:]), k=k, temperature=0.3)
    for at in range(6):
        scores = [int(test[at] @ t) / 4 for t in train]
        wanted = oracle.votes(scores, labels.tolist(), int(truth[at]), k, lambda s: math.exp(s / 0.3))
        assert p.knn.correct[at] == pytest.approx(wanted, abs=1e-12)


def test_scikit_learn_agrees():
    train, test = halves(0)
    p = probe(train, test, k=5, temperature=0.1)
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x, _ in (train, test)]
    linear = LogisticRegression(max_iter=1000).fit(units[0], train[1]).predict(units[1])
    assert p.linear.accuracy == pytest.approx((linear == test[1]).mean(), abs=1e-9)
    near = KNeighborsClassifier(5, weights=lambda d: np.exp((1 - d**2 / 2) / 0.1)).fit(units[0], train[1])
    assert p.knn.accuracy == pytest.approx((near.predict(units[1]) == test[1]).mean(), abs=1e-9)


def test_the_worst_class_is_named():
    train, test = halves(1, noise=0.2)
    x = test[0].copy()
    x[test[1] == 2] *= -1  # one class is turned away
    p = probe(train, (x, test[1]))
    assert p.linear.worst_class == (2, 0.0)
    assert p.knn.worst_class == (2, 0.0)
    assert p.linear.balanced == pytest.approx(0.75)
    assert p.interval("linear").low < p.linear.accuracy < p.interval("linear").high
    json.dumps(p.summary(), allow_nan=False)


def test_order_of_training_rows_does_not_matter_for_votes():
    train, test = halves(2)
    mix = np.random.default_rng(0).permutation(60)
    a, b = probe(train, test), probe((train[0][mix], train[1][mix]), test)
    assert np.array_equal(a.knn.correct, b.knn.correct)


def test_what_cannot_be_judged_is_refused():
    train, test = halves(3)
    with pytest.raises(InputError, match="never occurs in train"):
        probe(train, (test[0], test[1] + 1))
    with pytest.raises(InputError, match="two labels"):
        probe((train[0], np.zeros(60, int)), (test[0], np.zeros(60, int)))
    with pytest.raises(InputError, match="finite"):
        probe((np.full_like(train[0], np.inf), train[1]), test)
    with pytest.raises(InputError, match="k must be a whole number from 1 up: got 0"):
        probe(train, test, k=0)
    with pytest.raises(InputError, match="above 0"):
        probe(train, test, temperature=0)
    with pytest.raises(DataError, match="leak: 1 samples are in train and in test"):
        probe((*train, None, np.arange(60)), (*test, None, np.append(np.arange(60, 119), 3)))


def test_a_fit_that_has_not_converged_gives_no_number():
    train, test = halves(3)
    with pytest.raises(NumericError, match="strength 1e\\+06 has not converged after 1 steps: pass more iterations="):
        probe(train, test, strength=1e6, iterations=1)


@pytest.mark.parametrize("strength", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("classes", [2, 40])
def test_a_fit_that_is_accepted_is_at_the_optimum(classes, strength):
    # scikit-learn's own tolerance is absolute: with many classes, or a weak probe, its fit stops after a step or two
    train, test = halves(4, n=400, classes=classes, noise=1.5)
    found = probe(train, test, strength=strength)
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x, _ in (train, test)]
    exact = LogisticRegression(C=strength, tol=1e-10, max_iter=100_000, solver="newton-cg").fit(units[0], train[1])
    assert np.mean(found.linear.correct != (exact.predict(units[1]) == test[1])) <= 0.01


@pytest.mark.parametrize("k", [1, 5])
def test_plain_knn_is_that_of_scikit_learn_where_votes_differ(k):
    from sklearn.neighbors import KNeighborsClassifier

    train, test = halves(3, noise=1.2)
    found = knn_accuracy(train, test, k=k)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train[0], test[0])]
    rival = KNeighborsClassifier(k, algorithm="brute").fit(unit[0], train[1])
    votes = rival.predict_proba(unit[1])
    clear = (votes == votes.max(axis=1, keepdims=True)).sum(axis=1) == 1
    assert np.array_equal(found.correct[clear], (rival.predict(unit[1]) == test[1])[clear])
    assert probe(train, test, k=k).uniform.accuracy == found.accuracy
    shared = found.correct[~clear]
    assert ((shared == 0) | (shared <= 0.5)).all()
