"""Mined triplets equal those of slow loops, value for value, under every rule; and what holds for all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mettle
from mettle.errors import InputError, UnknownArgument
from mettle.mining import Guards, mine
from mettle.mining.neighbors import NegativeSearch
from oracles.mining import mine as mine_slowly

N = 60


def drawn_set(seed=0, n=N, spread=0.55):
    """Rows of 9 labels of several sizes, with copies within and across labels; cameras, ids, and a second model."""
    rng = np.random.default_rng(seed)
    y = np.sort(rng.integers(0, 9, n))
    centers = rng.normal(size=(9, 6))
    x = (centers[y] + spread * rng.normal(size=(n, 6))).astype(np.float32)
    x[7], x[40] = x[50], x[41]
    z = centers[y] + 0.5 * rng.normal(size=(n, 6))
    order = rng.permutation(n)
    return x[order], y[order], rng.integers(0, 3, n), z[order]


CASES = {
    "plain": {},
    "two negatives": {"negatives": 2, "depth": 7},
    "all positives": {"positives": "all", "negatives": 2},
    "skip": {"skip": 3, "depth": 9},
    "margin": {"margin": 0.1},
    "negative margin": {"margin": -0.2, "negatives": 3},
    "relative margin": {"relative_margin": 0.3, "depth": 20},
    "maximum score": {"max_score": 0.4, "depth": 30},
    "minimum score": {"min_score": 0.5, "negatives": 4},
    "second model": {"second_margin": 0.05, "with_second": True, "depth": 15},
    "across cameras": {"with_cameras": True, "depth": 8},
    "ids": {"with_ids": True, "positives": "all"},
    "everything": {
        "margin": 0.02,
        "relative_margin": 0.1,
        "max_score": 0.9,
        "min_score": -0.2,
        "second_margin": 0.01,
        "with_second": True,
        "with_cameras": True,
        "positives": "all",
        "negatives": 3,
        "skip": 1,
        "depth": 15,
    },
}
RULES = ("margin", "relative_margin", "max_score", "min_score", "second_margin")


@pytest.mark.parametrize("case", CASES)
def test_the_triplets_and_the_account_are_those_of_slow_loops(case):
    options = {"depth": 10} | CASES[case]
    x, y, camera, z = drawn_set()
    given = {"second": z} if options.pop("with_second", False) else {}
    given |= {"across": camera} if options.pop("with_cameras", False) else {}
    given |= {"ids": one_id_for_some(y)} if options.pop("with_ids", False) else {}
    slow, counts = mine_slowly(x.tolist(), y.tolist(), **{k: v.tolist() for k, v in given.items()}, **options)
    guards = Guards(**{key: options.pop(key) for key in RULES if key in options})
    found = mine(x, y, guards=guards, **given, **options)
    assert len(slow) > 10
    rows = zip(found.anchors.tolist(), found.positives.tolist(), found.negatives.tolist(), strict=True)
    assert list(rows) == [t[:3] for t in slow]
    np.testing.assert_allclose(found.positive_scores, [t[3] for t in slow], atol=1e-6)
    np.testing.assert_allclose(found.negative_scores, [t[4] for t in slow], atol=1e-6)
    account = found.account
    rules = dict(account.dropped)
    assert rules == {name: counts.get(name, 0) for name in rules}
    assert set(counts) - {"candidates", "spare"} <= set(rules)
    assert (account.candidates, account.spare, account.mined) == (counts["candidates"], counts["spare"], len(slow))
    assert account.candidates == sum(rules.values()) + account.spare + account.mined


def one_id_for_some(y):
    """Two rows of one label are one sample, here and there."""
    ids = np.arange(len(y))
    for label in (2, 4):
        ids[np.flatnonzero(y == label)[:2]] = ids[np.flatnonzero(y == label)[0]]
    return ids


@given(st.integers(0, 10**6), st.sampled_from(["top", "random"]), st.sampled_from(["hardest", "random", "all"]))
@settings(max_examples=25)
def test_no_negative_has_the_label_of_its_anchor_and_every_positive_has(seed, sampling, positives):
    x, y, camera, _ = drawn_set(seed)
    found = mine(x, y, ids=one_id_for_some(y), sampling=sampling, positives=positives, negatives=3, seed=seed)
    assert len(found)
    assert (y[found.anchors] == y[found.positives]).all()
    assert (y[found.anchors] != y[found.negatives]).all()
    assert (one_id_for_some(y)[found.anchors] != one_id_for_some(y)[found.positives]).all()
    apart = mine(x, y, across=camera, sampling=sampling, positives=positives, seed=seed)
    assert (camera[apart.anchors] != camera[apart.positives]).all()
    assert (camera[apart.anchors] == camera[apart.negatives]).all()


def test_what_is_drawn_is_a_function_of_the_seed_and_lies_among_the_candidates():
    x, y, _, _ = drawn_set()
    options = {"sampling": "random", "positives": "random", "negatives": 2, "depth": 12}
    one, same, other = (mine(x, y, seed=seed, **options) for seed in (5, 5, 6))
    assert one.negatives.tolist() == same.negatives.tolist() and one.positives.tolist() == same.positives.tolist()
    assert one.negatives.tolist() != other.negatives.tolist() and one.positives.tolist() != other.positives.tolist()
    every = mine(x, y, positives="all", negatives=12, depth=12)
    triplets = {*zip(every.anchors.tolist(), every.positives.tolist(), every.negatives.tolist(), strict=True)}
    assert {*zip(one.anchors.tolist(), one.positives.tolist(), one.negatives.tolist(), strict=True)} <= triplets


def test_draws_are_even():
    """Each of three positives and of four candidates is drawn about equally often."""
    x = np.random.default_rng(0).normal(size=(8, 3))
    y = np.repeat([0, 1], 4)
    found = [mine(x, y, sampling="random", positives="random", depth=4, seed=seed) for seed in range(300)]
    positive = np.bincount([m.positives[0] for m in found], minlength=8)
    negative = np.bincount([m.negatives[0] for m in found], minlength=8)
    assert positive[0] == 0 and positive[1:4].min() > 70
    assert negative[4:].min() > 45


def test_rows_that_are_equal_under_two_labels_are_told_and_never_mined():
    x, y, _, _ = drawn_set()
    found = mine(x, y, negatives=5)
    pairs = {tuple(sorted(pair)) for pair in found.copies.tolist()}
    equal = {(i, j) for i in range(N) for j in range(i) if y[i] != y[j] and (x[i] == x[j]).all()}
    assert pairs == {tuple(sorted(pair)) for pair in equal} and pairs
    assert found.account.dropped["copies"] > 0
    assert not pairs & {tuple(sorted(p)) for p in zip(found.anchors.tolist(), found.negatives.tolist(), strict=True)}


def test_pairs_hold_each_pair_once_with_its_target():
    x, y, _, _ = drawn_set()
    found = mine(x, y, negatives=2)
    pairs = found.pairs()
    keys = [tuple(sorted(pair)) for pair in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)]
    assert len(set(keys)) == len(keys) == len(pairs)
    assert (pairs.target == (y[pairs.first] == y[pairs.second])).all()
    wanted = {tuple(sorted(p)) for p in zip(found.anchors.tolist(), found.positives.tolist(), strict=True)}
    wanted |= {tuple(sorted(p)) for p in zip(found.anchors.tolist(), found.negatives.tolist(), strict=True)}
    assert set(keys) == wanted


def test_the_hardest_pairs_show_no_row_more_than_twice():
    x, y, _, _ = drawn_set()
    found = mine(x, y, negatives=2, positives="all", guards=Guards(margin=0.1))
    hard = found.hardest_negatives(6)
    assert hard.scores[0] == found.negative_scores.max() and (np.diff(hard.scores) <= 0).all() and len(hard) == 6
    assert np.unique([hard.first, hard.second], return_counts=True)[1].max() == 2
    assert (y[hard.first] != y[hard.second]).all()
    lowest = found.hardest_positives(6)
    assert lowest.scores[0] == found.positive_pairs.scores.min() < found.positive_scores.min()
    assert (np.diff(lowest.scores) >= 0).all() and (y[lowest.first] == y[lowest.second]).all()
    alone = {*zip(found.positive_pairs.anchors.tolist(), found.positive_pairs.positives.tolist(), strict=True)}
    assert (int(lowest.first[0]), int(lowest.second[0])) in alone


@pytest.mark.parametrize("across", [False, True])
def test_an_approximate_search_finds_nearly_all_and_says_how_much(across):
    rng = np.random.default_rng(0)
    n = 6000
    y = np.repeat(np.arange(n // 4), 4)
    x = rng.normal(size=(n // 4, 24))[y] + 0.8 * rng.normal(size=(n, 24))
    options = {"negatives": 3, "across": np.tile([0, 0, 1, 1], n // 4) if across else None}
    exact = mine(x, y, search="exact", **options)
    found = mine(x, y, search="approximate", **options)
    assert (exact.search.kind, exact.search.recall) == ("exact", 1.0)
    assert found.search.kind == "approximate" and 0.95 <= found.search.recall <= 1 and found.search.sampled == n
    assert found.positives[:100].tolist() == exact.positives[:100].tolist()
    both = [{*zip(m.anchors.tolist(), m.negatives.tolist(), strict=True)} for m in (exact, found)]
    assert len(both[0] & both[1]) / len(both[0]) > 0.95
    assert mine(x, y, search="approximate", **options).negatives.tolist() == found.negatives.tolist()


def test_anchors_whose_cells_hold_their_own_label_only_are_compared_with_all_rows():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(2), 1500)
    x = np.where(y[:, None] == 0, 4.0, -4.0) * np.ones((3000, 8)) + rng.normal(size=(3000, 8))
    exact, found = (mine(x, y, search=search, depth=5, negatives=5) for search in ("exact", "approximate"))
    assert found.negatives.tolist() == exact.negatives.tolist()
    assert found.account == exact.account
    assert found.search.rescued > 0 and "were compared with all rows" in str(found.search)


def test_small_tiles_change_nothing(monkeypatch):
    x, y, camera, z = drawn_set()
    options = {"second": z, "negatives": 3, "positives": "all", "across": camera}
    whole = mine(x, y, **options)
    monkeypatch.setattr("mettle.mining.neighbors.TILE", (7, 11))
    monkeypatch.setattr("mettle.mining.triplets.CANDIDATES", 13)
    monkeypatch.setattr("mettle.mining.positives.CELLS", 10)
    parts = mine(x, y, **options)
    assert parts.negatives.tolist() == whole.negatives.tolist()
    assert parts.account == whole.account


def test_recall_is_that_of_the_rows_that_exact_search_finds():
    truth, found = np.asarray([[1, 2, 3], [4, 5, -1]]), np.asarray([[3, 9, 1], [5, -1, -1]])
    assert NegativeSearch._hits(truth, found).tolist() == [2 / 3, 1 / 2]


def test_text_labels_and_tensors_do():
    x, y, _, _ = drawn_set()
    plain = mine(x, y)
    named = mettle.mine(torch.from_numpy(x), [f"who {k}" for k in y])
    assert named.negatives.tolist() == plain.negatives.tolist()


X, Y, *_ = drawn_set()
HOLE = X.copy()
HOLE[3, 1] = np.nan
WRONG = {
    "NaN": ((HOLE, Y), {}, "1 of 60 rows hold NaN or infinity, the first is row 3"),
    "lengths": ((X, Y[:-1]), {}, "labels must have one entry per embedding"),
    "one label": ((X, 0 * Y), {}, "all 60 rows have one label: there is no negative to mine"),
    "singletons": ((X, np.arange(N)), {}, "no label has two samples"),
    "one camera": ((X, Y), {"across": 0 * Y}, "all rows have one value of across"),
    "deep": ((X, Y), {"depth": 60}, "depth must be a whole number from skip + negatives = 1 to the"),
    "shallow": ((X, Y), {"depth": 3, "negatives": 4}, "from skip + negatives = 4"),
    "far": ((X, Y), {"skip": 60}, "skip=60 passes over all"),
    "second": ((X, Y), {"second": X[1:]}, "second must hold the same rows as the embeddings: got 59 rows for 60"),
    "word": ((X, Y), {"positives": "hard"}, "positives must be hardest, random or all, got 'hard'"),
    "negatives": ((X, Y), {"negatives": 0}, "negatives must be a whole number from 1 on: got 0"),
    "ids": ((X, Y), {"ids": 0 * Y}, "sample id 0 carries two labels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_mined_is_refused_in_one_line(case):
    given, options, said = WRONG[case]
    with pytest.raises(InputError) as problem:
        mine(*given, **options)
    assert said in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"margin": float("nan")}, "margin must be a number between -2 and 2"),
        ({"max_score": "high"}, "max_score must be a number"),
        ({"relative_margin": -0.1}, "relative_margin must be a share"),
        ({"min_score": 0.5, "max_score": 0.2}, "nothing is between them"),
        ({"second_margin": None}, "second_margin must be a number"),
    ],
)
def test_guards_out_of_range_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        Guards(**options)


def test_the_names_of_sentence_transformers_are_answered_with_ours():
    with pytest.raises(UnknownArgument, match="negatives"):
        mine(X, Y, num_negatives=3)  # type: ignore[call-arg]
    with pytest.raises(UnknownArgument, match="depth"):
        mine(X, Y, range_max=30)  # type: ignore[call-arg]
