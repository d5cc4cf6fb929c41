"""Retrieval against every order of its ties, other libraries, laws, and the bad inputs E1-E10."""

import importlib.util
import json
import warnings
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score

from mettle.errors import InputError
from mettle.evaluate import retrieval, retrieval_from_scores
from mettle.evaluate.inputs import joint_codes
from mettle.evaluate.ranking_metrics import TieGroups, reciprocal_rank, trapezoid_precision
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.evaluate.scoring.relevant_ranks import FastCosine, Relevance, RelevantRanks, rank_relevant

_spec = importlib.util.spec_from_file_location("oracle_metrics", Path(__file__).parents[1] / "oracles" / "metrics.py")
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

NAMES = ("r_precision", "map_at_r", "map", "mrr", "ndcg")


def clusters(seed, n=120, subjects=15, d=16, noise=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % subjects)
    return (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(n, d))).astype(dtype), y


def cosine(a, b):
    """Exact for the vectors below, whose four entries of ±1 have length two."""
    return Fraction(int(sum(p * q for p, q in zip(a, b, strict=True))), 4)


def small_set(seed):
    """Few vectors: every other set from the corners of a cube (nearly all ties), others scattered."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 7))
    y = rng.integers(0, 3, size=n)
    if seed % 2:
        x = rng.choice([-1, 1], size=(n, 4))
        s = [[cosine(a, b) for b in x.tolist()] for a in x.tolist()]
    else:
        x = rng.normal(size=(n, 4))
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        s = (unit @ unit.T).tolist()
    return x.astype(np.float64 if seed % 3 else np.float32), y.tolist(), s


@pytest.mark.parametrize("block", range(10))
def test_E5_equals_the_mean_over_all_orders_of_ties_on_1200_sets(block):
    for seed in range(120 * block, 120 * (block + 1)):
        x, y, s = small_set(seed)
        n, ks = len(y), (1, 2)
        lists = {
            q: [(s[q][c], y[c] == y[q]) for c in range(n) if c != q]
            for q in range(n)
            if any(y[c] == y[q] for c in range(n) if c != q)
        }
        if not lists:
            with pytest.raises(InputError, match="no query has a relevant candidate"):
                retrieval(x, y, k=ks)
            continue
        if len(set(y)) == 1:  # every neighbour would be right
            with pytest.raises(InputError, match="two labels"):
                retrieval(x, y, k=ks)
            continue
        r = retrieval(x, y, k=ks)
        assert r.queries.tolist() == list(lists)
        assert r.excluded == n - len(lists)
        for at, candidates in enumerate(lists.values()):
            for k in ks:
                wanted = oracle.recall(candidates, k)
                assert wanted == oracle.recall_by_formula(candidates, k)
                assert r.recall_at[k][at] == pytest.approx(float(wanted), abs=1e-12)
            for name, value in [
                ("r_precision", oracle.r_precision),
                ("map_at_r", oracle.map_at_r),
                ("map", oracle.average_precision),
                ("mrr", oracle.reciprocal_rank),
                ("precision@2", lambda c: oracle.precision(c, 2)),
                ("ndcg", lambda c: oracle.ndcg(c, len(c))),
                ("ndcg@2", lambda c: oracle.ndcg(c, 2)),
            ]:
                assert r.per_query[name][at] == pytest.approx(float(value(candidates)), abs=1e-12), name
            assert r.per_query["precision@1"][at] == pytest.approx(r.recall_at[1][at], abs=1e-12)
        for k in ks:
            bounds = [oracle.recall_bounds(c, k) for c in lists.values()]
            assert r.pessimistic[k] == pytest.approx(np.mean([low for low, _ in bounds]))
            assert r.optimistic[k] == pytest.approx(np.mean([high for _, high in bounds]))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7).filter(lambda c: any(r for _, r in c))
)
@settings(max_examples=150, deadline=None)
def test_trapezoid_and_reciprocal_rank_equal_the_mean_over_all_orders(candidates):
    relevant = [s for s, rel in candidates if rel]
    above = np.array([sum(s > one for s, _ in candidates) for one in relevant])
    tied = np.array([sum(s == one for s, _ in candidates) for one in relevant])
    n = np.array([len(candidates)])
    g = TieGroups.from_ranks(RelevantRanks(np.zeros(1, int), n, np.zeros(len(relevant), int), above, tied))
    assert trapezoid_precision(g)[0] == pytest.approx(float(oracle.trapezoid_precision(candidates)), abs=1e-12)
    assert reciprocal_rank(g)[0] == pytest.approx(float(oracle.reciprocal_rank(candidates)), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_pytorch_metric_learning_agrees_where_there_are_no_ties(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN

        x, y = clusters(seed, n=200 + seed, subjects=20)
        wanted = AccuracyCalculator(
            include=(
                "precision_at_1",
                "r_precision",
                "mean_average_precision_at_r",
                "mean_average_precision",
                "mean_reciprocal_rank",
            ),
            k=len(y) - 1,
            device=torch.device("cpu"),
            knn_func=CustomKNN(CosineSimilarity()),
        ).get_accuracy(torch.from_numpy(x), torch.from_numpy(y))
    r = retrieval(x, y)
    assert r.recall[1] == pytest.approx(wanted["precision_at_1"], abs=1e-6)
    assert r.r_precision == pytest.approx(wanted["r_precision"], abs=1e-6)
    assert r.map_at_r == pytest.approx(wanted["mean_average_precision_at_r"], abs=1e-6)
    assert r.map == pytest.approx(wanted["mean_average_precision"], abs=1e-6)
    assert r.mrr == pytest.approx(wanted["mean_reciprocal_rank"], abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_scikit_learn_agrees_on_ndcg_ties_included_and_on_average_precision_without_ties(tied):
    rng = np.random.default_rng(7)
    x = rng.choice([-1.0, 1.0], size=(60, 4)) if tied else rng.normal(size=(60, 4))
    y = np.arange(60) % 7
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    scores = np.round(unit @ unit.T, 12)
    r = retrieval(x, y, k=(1, 3, 59))
    for q in range(60):
        others = np.arange(60) != q
        target, s = (y[others] == y[q])[None].astype(float), scores[q, others][None]
        for name, k in [("ndcg", None), ("ndcg@3", 3), ("ndcg@59", 59)]:
            assert r.per_query[name][q] == pytest.approx(ndcg_score(target, s, k=k), abs=1e-12)
        if not tied:
            assert r.per_query["map"][q] == pytest.approx(average_precision_score(target[0], s[0]), abs=1e-12)


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_E10_order_and_chunking_change_no_value(seed, tied):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(12, 40))
    x = rng.choice([-1.0, 1.0], size=(n, 4)) if tied else rng.normal(size=(n, 4))
    y = np.arange(n) % int(rng.integers(2, 5))
    whole = retrieval(x, y)
    shuffle = rng.permutation(n)
    for other, order in [
        (retrieval(np.asfortranarray(x), y), np.arange(n)),
        (retrieval(x, y, chunk=1), np.arange(n)),
        (retrieval(x, y, chunk=5), np.arange(n)),
        (retrieval(x[shuffle], y[shuffle], chunk=7), shuffle),
        (retrieval(torch.from_numpy(x), torch.from_numpy(y)), np.arange(n)),
    ]:
        for name, values in whole.per_query.items():
            assert np.array_equal(other.per_query[name], values[order])


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_metrics_keep_their_order(seed):
    rng = np.random.default_rng(seed)
    x = rng.choice([-1.0, 0.5, 1.0], size=(30, 5))
    r = retrieval(x, np.arange(30) % 5)
    rising = [r.recall_at[k] for k in (1, 2, 4, 8)]
    assert all((a <= b + 1e-12).all() for a, b in pairwise(rising))
    assert (r.per_query["map_at_r"] <= r.per_query["r_precision"] + 1e-12).all()
    assert (r.per_query["map_at_r"] <= r.per_query["map"] + 1e-12).all()
    assert (r.recall_at[1] <= r.per_query["mrr"] + 1e-12).all()
    for k in (1, 2, 4, 8):
        assert r.pessimistic[k] - 1e-12 <= r.recall[k] <= r.optimistic[k] + 1e-12
    for values in r.per_query.values():
        assert ((values >= -1e-12) & (values <= 1 + 1e-12)).all()


def test_E3_constant_embeddings_give_chance_not_perfection():
    n, per = 40, 4
    r = retrieval(np.ones((n, 8), np.float32), np.arange(n) // per, k=(1, 2, 5))
    for k in (1, 2, 5):
        chance = 1 - np.prod([(n - per - j) / (n - 1 - j) for j in range(k)])
        assert r.recall[k] == pytest.approx(chance, abs=1e-12)
    assert r.recall[1] == pytest.approx((per - 1) / (n - 1))
    assert r.r_precision == pytest.approx((per - 1) / (n - 1))
    assert r.map_at_r < r.r_precision
    assert (r.pessimistic[5], r.optimistic[5]) == (0, 1)
    assert r.warnings[0].startswith("ties")


def test_E4_perfect_and_worst_rankings():
    directions = np.repeat(np.eye(4), 3, axis=0)
    good = retrieval(directions, np.repeat(np.arange(4), 3), k=(1, 2))
    assert good.recall == {1: 1, 2: 1}
    assert [getattr(good, name) for name in NAMES] == [1] * len(NAMES)
    assert [text for text in good.warnings if "exact copies" not in text] == []
    bad = retrieval(directions, np.tile(np.arange(3), 4), k=(1, 2))
    assert bad.recall == {1: 0, 2: 0}


def test_E6_the_query_is_known_by_its_id_not_by_place_or_distance():
    x, y = clusters(0)
    shelf = np.random.default_rng(1).permutation(len(y))
    ids = 2**60 + np.arange(len(y))
    plain = retrieval(x, y)
    moved = retrieval(x, y, ids=ids, gallery=(x[shelf], y[shelf], None, ids[shelf]))
    for name, values in plain.per_query.items():
        assert np.array_equal(moved.per_query[name], values)
    # Twins: the same picture under another id is a fair candidate, under the same id it is the query itself.
    doubled, labels = np.vstack([x, x]), np.append(y, y)
    assert retrieval(doubled, labels).recall[1] == 1
    twice = retrieval(doubled, labels, ids=np.append(ids, ids))
    assert twice.recall[1] == pytest.approx(plain.recall[1])


def test_copies_under_ids_of_their_own_are_taken_as_they_are():
    x, y = clusters(1)
    ids = np.arange(len(y))
    assert retrieval(x, y, ids=ids, gallery=(x, y, None, ids + len(y))).recall[1] == 1


def test_E7_lone_queries_are_left_out_and_counted():
    x, y = clusters(2)
    lonely = np.append(y, [900, 901, 902])
    r = retrieval(np.vstack([x, x[:3] + 1]), lonely)
    assert (r.excluded, len(r.queries)) == (3, len(y))
    assert "3 queries" in r.warnings[-1]


@pytest.mark.parametrize("size", [1, 4])
def test_E7_more_k_than_candidates_is_an_error(size):
    x, y = clusters(3)
    with pytest.raises(InputError, match=f"k=8 exceeds the candidates of query 0, which has {size}"):
        retrieval(x[:1], y[:1], gallery=(x[:size], np.full(size, y[0])))


def test_other_domains_only():
    x, y = clusters(4, n=90, subjects=10)
    domain = np.random.default_rng(0).integers(0, 3, 90)
    r = retrieval(x, y, domains=domain, exclude_same_domain=True)
    for q in (0, 17, 89):
        others = np.flatnonzero(domain != domain[q])
        one = retrieval(x[q : q + 1], y[q : q + 1], gallery=(x[others], y[others]))
        at = r.queries.tolist().index(q)
        for name, values in r.per_query.items():
            assert values[at] == one.per_query[name][0]
    with pytest.raises(InputError, match="domains"):
        retrieval(x, y, exclude_same_domain=True)


def test_duplicates_far_down_the_list_are_ranked_over_the_whole_gallery():
    """A tie group that runs past the short list: its share inside K must still be exact."""
    gallery = np.vstack([np.eye(2)[[0]], np.tile(np.eye(2)[1], (99, 1))])
    labels = np.append(0, np.repeat([1, 0], [9, 90]))
    r = retrieval(np.array([[1.0, 0.0]]), [1], gallery=(gallery, labels), k=(1, 2, 5))
    assert r.recall[1] == 0
    assert r.recall[2] == pytest.approx(9 / 99)
    none = np.prod([(90 - j) / (99 - j) for j in range(4)])
    assert r.recall[5] == pytest.approx(1 - none)


def test_fast_scores_count_what_exact_ones_do():
    """Galleries with near ties everywhere: most queries are in doubt, some are scored exactly as a whole."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        n = 1500
        y = rng.integers(0, 300 if seed % 2 else 60, size=n)
        noise = (1e-6, 1e-4, 0.3)[seed % 3]
        x = (rng.normal(size=(8, 24))[rng.integers(0, 8, n)] + noise * rng.normal(size=(n, 24))).astype(np.float32)
        ids = np.arange(n)
        relevance = Relevance(tuple(joint_codes(y, y)), None, (ids, ids))
        fast = FastCosine.from_sets(*[ExactUnitVectors.from_rows(x, double=False)] * 2)
        found, plain = (list(rank_relevant(relevance, fast.exact_scores, way, chunk=700)) for way in (fast, None))
        for one, two in zip(found, plain, strict=True):
            assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in vars(one))
        for part in plain[:1]:
            s = fast.exact_scores(part.queries)
            for row in range(0, len(s), 97):
                others = ids != part.queries[row]
                own = s[row][others & (y == y[part.queries[row]])]
                mine = part.row == row
                assert part.above[mine].tolist() == [(s[row][others] > v).sum() for v in own]
                assert part.tied[mine].tolist() == [(s[row][others] == v).sum() for v in own]


def test_interval_resamples_query_subjects_and_says_so():
    x, y = clusters(5, noise=1.5)
    r = retrieval(x, y)
    i = r.interval("recall@1")
    assert i.low < r.recall[1] < i.high
    assert (i.replicates, i.seed, i.level) == (1000, 0, 0.95)
    assert "gallery fixed" in i.method
    assert r.interval("recall@1") == i
    values = r.per_query["map_at_r"]
    sums = np.array([values[r.subjects == s].sum() for s in range(15)])
    drawn = np.random.default_rng(0).choice(15, size=(4000, 15))
    means = sums[drawn].sum(axis=1) / len(y)  # every subject has equally many queries
    low, high = np.quantile(means, (0.025, 0.975))
    i = r.interval("map_at_r")
    assert (i.low, i.high) == pytest.approx((low, high), abs=0.3 * (high - low))
    assert i.high - i.low > high - low  # 15 subjects are few
    with pytest.raises(InputError, match="did you mean"):
        r.interval("recall@3")


def test_no_misses_still_leave_the_rule_of_three():
    r = retrieval(np.repeat(np.eye(12), 2, axis=0), np.repeat(np.arange(12), 2), k=(1,))
    assert r.interval("recall@1").low == pytest.approx(1 - 3 / 12)
    assert r.interval("recall@1").high == 1


def test_summary_is_plain_json_and_results_are_frozen():
    x, y = clusters(6)
    r = retrieval(x, y)
    s = json.loads(json.dumps(r.summary(), allow_nan=False))
    assert s["metrics"]["recall@1"]["value"] == r.recall[1]
    assert "map_at_r" in repr(r)
    with pytest.raises(AttributeError):
        r.excluded = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        r.per_query["recall@1"] = None  # type: ignore[index]


def shared_labels(seed, n=50, labels=6):
    rng = np.random.default_rng(seed)
    has = rng.random((n, labels)) < 0.3
    return rng.normal(size=(n, 4)), has, [set(np.flatnonzero(row).tolist()) for row in has]


@pytest.mark.parametrize("seed", range(3))
def test_candidates_that_share_a_label_are_relevant(seed):
    x, has, sets = shared_labels(seed)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    s = np.round(unit @ unit.T, 12)
    found = retrieval(x, sets, k=(1, 3))
    for at, q in enumerate(found.queries):
        others = [(s[q, c], bool(sets[q] & sets[c])) for c in range(50) if c != q]
        ranked = [right for _, right in sorted(others, key=lambda item: -item[0])]
        hits = np.cumsum(ranked)
        wanted = sum(hits[k] / (k + 1) for k in range(49) if ranked[k]) / hits[-1]
        assert found.per_query["map"][at] == pytest.approx(wanted, abs=1e-12)
        assert found.per_query["precision@3"][at] == pytest.approx(np.mean(ranked[:3]))
    lonely = [q for q in range(50) if not any(sets[q] & sets[c] for c in range(50) if c != q)]
    assert sorted(set(range(50)) - set(found.queries.tolist())) == lonely
    for same in (has, [tuple(one) for one in sets], [[f"label {k}" for k in one] for one in sets]):
        assert np.array_equal(retrieval(x, same, k=(1, 3)).per_query["map"], found.per_query["map"])


def test_one_label_in_every_collection_is_a_plain_label_and_kinds_do_not_mix():
    x, y = clusters(8)
    plain, sets = retrieval(x, y), retrieval(x, [[one] for one in y.tolist()])
    for name, values in plain.per_query.items():
        assert np.array_equal(sets.per_query[name], values)
    moved = retrieval(x[:20], [[one] for one in y[:20].tolist()], gallery=(x[20:], [{one} for one in y[20:].tolist()]))
    assert moved.map == retrieval(x[:20], y[:20], gallery=(x[20:], y[20:])).map
    with pytest.raises(InputError, match="of one kind on both sides"):
        retrieval(x[:20], [[one] for one in y[:20].tolist()], gallery=(x[20:], y[20:]))
    with pytest.raises(InputError, match="integers or text"):
        retrieval(x, [[0.5]] * len(x))
    with pytest.raises(InputError, match="empty collections"):
        retrieval(x, [[]] * len(x))


def test_a_matrix_of_scores_is_ranked_as_it_is():
    x, y = clusters(9)
    unit = ExactUnitVectors.from_rows(x, double=False)
    scores, plain = unit.cosine(unit), retrieval(x, y)
    found = retrieval_from_scores(scores, y)
    for name, values in plain.per_query.items():
        assert np.array_equal(found.per_query[name], values)
    assert found.ranking == "given scores"
    other = retrieval_from_scores(scores[:30, 30:], y[:30], y[30:], chunk=7)
    assert np.array_equal(other.per_query["map"], retrieval(x[:30], y[:30], gallery=(x[30:], y[30:])).per_query["map"])
    for bad, problem in [
        (np.where(np.eye(120) > 0, np.nan, scores), "finite"),
        (scores[0], "matrix"),
        (scores[:, 1:], "gallery_labels are missing"),
    ]:
        with pytest.raises(InputError, match=problem):
            retrieval_from_scores(bad, y)


@pytest.mark.parametrize("name", ["dot", "l2", "l1"])
def test_other_similarities_equal_fractions_ties_included(name):
    rng = np.random.default_rng(3)
    x, y = rng.integers(-3, 4, size=(40, 3)), np.arange(40) % 5
    x[~x.any(axis=1)] = 1
    measure = {
        "dot": lambda a, b: a @ b,
        "l2": lambda a, b: -((a - b) ** 2).sum(),
        "l1": lambda a, b: -np.abs(a - b).sum(),
    }[name]
    for kind in (np.float32, np.float64):
        found = retrieval(x.astype(kind), y, k=(1, 4), similarity=name, chunk=9)
        assert found.ranking == name
        for q in range(40):
            candidates = [(int(measure(x[q], x[c])), y[c] == y[q]) for c in range(40) if c != q]
            assert found.per_query["recall@4"][q] == pytest.approx(float(oracle.recall_by_formula(candidates, 4)))
    with pytest.raises(InputError, match="no similarity named .l3.; known are cosine, dot, l1, l2"):
        retrieval(x.astype(float), y, similarity="l3")


def test_macro_is_the_mean_of_classes_and_its_interval_draws_classes():
    x, y = clusters(10, n=90, noise=1.5)
    y[:40] = 0
    found = retrieval(x, y)
    means = [found.per_query["map"][found.subjects == s].mean() for s in range(len(np.unique(y)))]
    assert found.value("map", average="macro") == pytest.approx(np.mean(means))
    assert found.value("map") == found.map != found.value("map", average="macro")
    i = found.interval("map", average="macro")
    assert i.low < np.mean(means) < i.high
    with pytest.raises(InputError, match="did you mean 'macro'"):
        found.value("map", average="macor")
