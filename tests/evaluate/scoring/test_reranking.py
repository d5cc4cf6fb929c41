"""Re-ranking against plain loops; whatever a result was ranked by is said."""

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.evaluate import KReciprocal, QueryExpansion, reidentification, retrieval
from mettle.evaluate.scoring.reranking import reciprocal_distances


def clusters(seed, n=60, classes=10, d=8, noise=0.8):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return rng.normal(size=(classes, d))[y] + noise * rng.normal(size=(n, d)), y


def reciprocal_by_loops(distance, queries, k1, k2, weight):
    """The published steps with lists and sets, where no two distances are equal."""
    n = len(distance)
    order = [sorted(range(n), key=lambda j, i=i: distance[i][j]) for i in range(n)]

    def mutual(i, k):
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    member = np.zeros((n, n))
    for i in range(n):
        own = mutual(i, k1)
        grown = set(own)
        for j in own:
            inner = mutual(j, round(k1 / 2))
            if len(inner & own) > 2 / 3 * len(inner):
                grown |= inner
        for j in grown:
            member[i, j] = np.exp(-distance[i][j])
        member[i] /= member[i].sum()
    if k2 > 1:
        member = np.array([np.mean([member[j] for j in order[i][:k2]], axis=0) for i in range(n)])
    found = np.zeros((queries, n))
    for i in range(queries):
        for j in range(n):
            jaccard = 1 - np.minimum(member[i], member[j]).sum() / np.maximum(member[i], member[j]).sum()
            found[i, j] = weight * distance[i][j] + (1 - weight) * jaccard
    return found


@pytest.mark.parametrize(("k1", "k2"), [(8, 3), (5, 1), (20, 6)])
def test_k_reciprocal_distances_equal_plain_loops(k1, k2):
    x, _ = clusters(0)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    distance = np.maximum(2 - 2 * unit @ unit.T, 0)
    np.fill_diagonal(distance, 0)
    distance /= distance.max(axis=1, keepdims=True)
    wanted = reciprocal_by_loops(distance.tolist(), 20, k1, k2, 0.3)
    assert reciprocal_distances(distance, 20, k1, k2, 0.3) == pytest.approx(wanted, abs=1e-9)


def test_query_expansion_equals_plain_loops():
    x, y = clusters(1)
    r = retrieval(x, y, k=1, rerank=QueryExpansion(top=3, alpha=2.0))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for q in range(0, 60, 7):
        s = {c: float(unit[q] @ unit[c]) for c in range(60) if c != q}
        near = sorted(s, key=lambda c: -s[c])[:3]
        moved = unit[q] + sum(max(s[c], 0) ** 2 * unit[c] for c in near)
        again = {c: moved @ unit[c] for c in s}
        assert r.per_query["recall@1"][q] == float(y[max(again, key=lambda c: again[c])] == y[q])


@pytest.mark.parametrize("rerank", [KReciprocal(k1=6, k2=3), QueryExpansion(top=4)])
def test_the_order_of_rows_does_not_matter_and_results_say_what_was_done(rerank):
    x, y = clusters(2)
    x[:4] = x[4:8]  # some distances are equal
    plain, found = retrieval(x, y), retrieval(x, y, rerank=rerank)
    assert type(rerank).__name__ in found.ranking and type(rerank).__name__ in repr(found)
    assert found.summary()["ranking"] == found.ranking and "ranking" not in plain.summary()
    mix = np.random.default_rng(0).permutation(60)
    turned = retrieval(x[mix], y[mix], rerank=rerank)
    for name, values in found.per_query.items():
        assert turned.per_query[name] == pytest.approx(values[mix], abs=1e-12)
    assert found.map > plain.map  # neighbourhoods say more than single cosines here


def test_market_rankings_can_be_changed_too_and_cosines_are_what_it_rests_on():
    x, y = clusters(3)
    sides = (x[:20], y[:20], np.zeros(20, int)), (x[20:], y[20:], np.ones(40, int))
    assert reidentification(*sides, rerank=KReciprocal(6, 3)).map != reidentification(*sides).map
    with pytest.raises(InputError, match="re-ranking rests on cosines"):
        retrieval(x, y, similarity="l2", rerank=KReciprocal())
    with pytest.raises(InputError, match="rerank takes"):
        retrieval(x, y, rerank="k-reciprocal")
    for bad in ({"k1": 0}, {"weight": 1.5}, {"k2": 2.5}):
        with pytest.raises(InputError, match=next(iter(bad))):
            KReciprocal(**bad)
    for bad in ({"top": 0}, {"alpha": -1.0}, {"alpha": float("nan")}):
        with pytest.raises(InputError, match=next(iter(bad))):
            QueryExpansion(**bad)
