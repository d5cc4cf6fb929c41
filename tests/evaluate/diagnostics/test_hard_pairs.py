"""The search for pairs against every pair in a list, sorted: ties, ids, domains, two sides, ranges, and the cap."""

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import InputError
from mettle.evaluate import hardest_pairs
from mettle.evaluate.diagnostics import hard_pairs
from mettle.evaluate.diagnostics.hard_pairs import PairKind, PairQuery, TopPairs, search_pairs
from mettle.evaluate.inputs import check_embeddings

KINDS: tuple[PairKind, ...] = ("genuine", "impostor")


def take_first(pairs, labels, count, each):
    """Pairs (first, second, hardness) sorted by hardness and then by position; at most so many of two labels."""
    seen, found = Counter(), []
    for i, j, hardness in sorted(pairs, key=lambda p: (-p[2], p[0], p[1])):
        two = frozenset((labels[i], labels[j]))
        seen[two] += 1
        if each is None or seen[two] <= each:
            found.append((i, j, float(hardness)))
    return found[:count]


def axes(rng, n, dim=3):
    """Vectors whose cosines are −1, 0 and 1, exactly."""
    return (np.eye(dim) * rng.choice([-1, 1], (n, 1, 1)))[np.arange(n), rng.integers(dim, size=n)]


def as_tuples(pairs):
    return [(p.first, p.second, p.score) for p in pairs]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(4, 60), st.integers(2, 8), st.integers(1, 5), st.integers(1, 3))
def test_hardest_pairs_among_many_equal_ones(seed, n, labels, count, each):
    rng = np.random.default_rng(seed)
    x, y = axes(rng, n), np.append(np.repeat([0, 1], 2), rng.integers(labels, size=n - 4))
    for query in map(PairQuery.hardest, KINDS):
        kind, sign = query.kind, query.sign
        pairs = [
            (i, j, sign * (x[i] @ x[j])) for i, j in combinations(range(n), 2) if (y[i] == y[j]) == (kind == "genuine")
        ]
        wanted = [(i, j, sign * h) for i, j, h in take_first(pairs, y, count, each)]
        assert as_tuples(hardest_pairs(x, y, kind, count=count, each=each)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_hardest_pairs_equal_a_full_sort(kind):
    rng = np.random.default_rng(2)
    y = np.repeat(np.arange(20), 4)
    x = (rng.normal(size=(20, 32))[y] + rng.normal(size=(80, 32))).astype(np.float32)
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
    s = unit @ unit.T
    i, j = np.triu_indices(len(y), 1)
    keep = (y[i] == y[j]) == (kind == "genuine")
    order = np.argsort(s[i, j][keep] * (1 if kind == "genuine" else -1))[:10]
    found = hardest_pairs(x, y, kind, count=10, each=100)
    assert [(p.first, p.second) for p in found] == list(zip(i[keep][order], j[keep][order], strict=True))
    few = hardest_pairs(x, y, kind, count=10, each=1)
    assert len({tuple(sorted((y[p.first], y[p.second]))) for p in few}) == len(few) == 10


def test_a_cap_does_not_shorten_the_list_where_one_pair_of_labels_has_all_the_hardest():
    y = np.append(np.repeat([0, 1], 60), np.arange(2, 12))
    x = np.vstack([np.tile([1.0, 0.0], (120, 1)), np.stack([np.cos(np.arange(10)), np.sin(np.arange(10))], 1)])
    assert len(hardest_pairs(x, y, "impostor", count=20, each=1)) == 20  # the first 3600 pairs are of labels 0 and 1


QUERIES = st.sampled_from(
    [
        PairQuery.hardest("genuine"),
        PairQuery.hardest("impostor"),
        PairQuery("impostor", lowest=True, low=0.0),
        PairQuery("genuine", lowest=False, high=0.0),
        PairQuery("impostor", lowest=False, low=-0.5, high=0.5),
    ]
)


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    QUERIES,
    st.sampled_from(["all", "within", "across"]),
    st.booleans(),
    st.sampled_from([1, 2, None]),
    st.booleans(),
)
def test_any_search_equals_looking_at_every_pair(seed, query, trials, two_sided, each, ties):
    rng = np.random.default_rng(seed)
    y, domain = rng.integers(5, size=40), rng.integers(3, size=40)
    x = axes(rng, 40) if ties else rng.normal(size=(40, 3)).astype(np.float32)
    ids = np.arange(40)
    ids[1], y[1] = ids[0], y[0]
    order = rng.permutation(40)
    one, two = order[:15], order[15:]
    every = product(one.tolist(), two.tolist()) if two_sided else combinations(range(40), 2)
    rows = check_embeddings(x, y, ids=ids, domains=domain)
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
    pairs = []
    for i, j in every:
        kept = trials == "all" or (domain[i] == domain[j]) == (trials == "within")
        kept &= ids[i] != ids[j] and (y[i] == y[j]) == (query.kind == "genuine")
        if kept and query.low <= unit[i] @ unit[j] < query.high:
            pairs.append((i, j, query.sign * float(unit[i] @ unit[j])))
    blocks = [(one, two)] if two_sided else [(order, None)]
    found = search_pairs(rows, blocks, query, trials=trials, count=7, each=each)
    wanted = take_first(pairs, y, 7, each)
    assert [(p.first, p.second) for p in found] == [(i, j) for i, j, _ in wanted]
    assert [query.sign * p.score for p in found] == pytest.approx([h for *_, h in wanted], abs=1e-6)


def test_several_blocks_are_one_list():
    rng = np.random.default_rng(3)
    x, y = axes(rng, 50), rng.integers(6, size=50)
    rows, half = check_embeddings(x, y), np.arange(50) % 2 == 0
    some, rest = np.flatnonzero(half), np.flatnonzero(~half)
    query = PairQuery.hardest("impostor")
    found = search_pairs(rows, [(some, None), (some, rest), (rest, None)], query, count=200)
    whole = search_pairs(rows, [(np.arange(50), None)], query, count=200)
    assert [p.score for p in found] == [p.score for p in whole]
    assert search_pairs(rows, [(some[:0], None), (some, rest[:0])], query, count=3) == []


def test_a_search_does_not_depend_on_tiles(monkeypatch):
    rng = np.random.default_rng(4)
    x, y = axes(rng, 60), rng.integers(4, size=60)
    whole = [hardest_pairs(x, y, kind, count=9, each=2) for kind in KINDS]
    for name, value in (("_ROWS", 7), ("_OFFERED", 30), ("_SCORED_AT_ONCE", 11), ("_SORTED_AT_ONCE", 5)):
        monkeypatch.setattr(hard_pairs, name, value)
        assert [hardest_pairs(x, y, kind, count=9, each=2) for kind in KINDS] == whole


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-2, 2)), max_size=60),
    st.integers(1, 9),
    st.sampled_from([1, 2, None]),
)
def test_a_list_holds_the_first_of_all_in_any_order(pairs, room, each):
    labels = np.arange(10) % 4
    pairs = list({(i, j): (i, j, h) for i, j, h in pairs}.values())
    for given_ in (pairs, pairs[::-1]):
        best = TopPairs(room, None if each is None else (each, labels))
        for part in (given_[:7], given_[7:]):
            one, two, hard = np.array(part, float).reshape(-1, 3).T
            best.add(one.astype(int), two.astype(int), hard)
        found = zip(best.first.tolist(), best.second.tolist(), best.hardness.tolist(), strict=True)
        assert list(found) == take_first(pairs, labels, room, each)


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="kind"):
        hardest_pairs(np.eye(3), [1, 1, 2], "hard")  # type: ignore[arg-type]
