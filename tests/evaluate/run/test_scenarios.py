"""Neighbours inside a domain are looked for inside it: by brute force, and in the scenarios of a test split."""

import numpy as np
import pytest

from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import InputError
from mettle.evaluate import retrieval
from mettle.evaluate.run.scenarios import evaluate_scenarios


def people(seed: int, n: int = 90):
    draw = np.random.default_rng(seed)
    y, where = draw.integers(0, 12, n), draw.integers(0, 4, n)
    x = draw.normal(size=(12, 8))[y] + 0.8 * draw.normal(size=(4, 8))[where] + draw.normal(size=(n, 8))
    return x, y, where


def by_hand(x, y, where, k: int, which: str) -> np.ndarray:
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    hits = []
    for i in range(len(x)):
        there = where == where[i] if which == "within" else where != where[i]
        there = there & (np.arange(len(x)) != i)
        if (y[there] == y[i]).any():
            near = np.argsort(-(u[there] @ u[i]))[:k]
            hits.append(bool((y[there][near] == y[i]).any()))
    return np.array(hits)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", ["within", "across"])
@pytest.mark.parametrize("k", [1, 3])
def test_candidates_are_those_of_the_domain(seed, which, k):
    x, y, where = people(seed)
    asked = {"only_same_domain": True} if which == "within" else {"exclude_same_domain": True}
    found = retrieval(x, y, domains=where, k=k, chunk=17, **asked)
    wanted = by_hand(x, y, where, k, which)
    assert len(found.queries) == len(wanted)
    assert found.recall[k] == pytest.approx(wanted.mean(), abs=1e-12)


def test_a_test_split_with_domains_says_what_its_names_say():
    x, y, where = people(7)
    samples = Samples.of(FeatureArray(x.astype(np.float32)), y, domain=where)
    results = evaluate_scenarios(x, samples, (1, 2))
    assert results.retrievals["in-domain"].recall[1] == pytest.approx(by_hand(x, y, where, 1, "within").mean())
    assert results.retrievals["cross-domain"].recall[1] == pytest.approx(by_hand(x, y, where, 1, "across").mean())


def test_a_small_domain_leaves_the_k_that_it_has_candidates_for():
    x, y, where = people(3)
    where[:3], y[:3] = 9, 2  # three samples of one person, alone in their domain
    samples = Samples.of(FeatureArray(x.astype(np.float32)), y, domain=where)
    found = evaluate_scenarios(x, samples, (1, 2, 4, 8)).retrievals
    assert list(found["in-domain"].recall) == [1, 2] and list(found["cross-domain"].recall) == [1, 2, 4, 8]


def test_it_needs_domains_and_one_wish():
    x, y, where = people(0)
    with pytest.raises(InputError, match="only_same_domain needs domains"):
        retrieval(x, y, only_same_domain=True)
    with pytest.raises(InputError, match="one of them"):
        retrieval(x, y, domains=where, only_same_domain=True, exclude_same_domain=True)
