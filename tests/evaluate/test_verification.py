"""Verification against exact fractions, laws, other libraries, and rows E1-E10 of the bad-input catalogue."""

import importlib.util
import json
import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import InputError
from mettle.evaluate import NotMeasurable, from_scores, verification
from mettle.evaluate.run.scenarios import measure_thresholds
from mettle.report import audit_page

_spec = importlib.util.spec_from_file_location("oracle_metrics", Path(__file__).parents[1] / "oracles" / "metrics.py")
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def judged(genuine, impostor):
    return from_scores([*genuine, *impostor], [1] * len(genuine) + [0] * len(impostor))


def random_set(seed):
    """Two lists of scores: every other seed heavily tied, every tenth with failed templates."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 25, size=2)
    genuine, impostor = (rng.normal(shift, 1, n) for shift, n in zip((rng.uniform(-1, 3), 0), sizes, strict=True))
    if seed % 2:
        genuine, impostor = np.round(genuine / 2, 1) * 2, np.round(impostor / 2, 1) * 2
    if seed % 10 == 0:
        genuine[rng.random(len(genuine)) < 0.2] = -np.inf
        impostor[rng.random(len(impostor)) < 0.2] = -np.inf
    return genuine.tolist(), impostor.tolist()


def clusters(seed, n=60, subjects=12, d=16, noise=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % subjects)
    return (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(n, d))).astype(dtype), y


@pytest.mark.parametrize("block", range(10))
def test_E5_equals_fractions_on_1200_random_sets_half_of_them_tied(block):
    for seed in range(120 * block, 120 * (block + 1)):
        genuine, impostor = random_set(seed)
        v = judged(genuine, impostor)
        assert v.auc == float(oracle.auc(genuine, impostor))
        wanted = oracle.eer(genuine, impostor)
        if wanted is None:
            with pytest.raises(NotMeasurable, match="failed templates"):
                _ = v.eer
        else:
            assert v.eer == float(wanted)
            lower = max(v.eer_bracket.below[2], v.eer_bracket.above[1])
            assert lower <= v.eer <= lower + 2 * v.eer_bracket.half_gap + 1e-15
        points = oracle.operating_points(genuine, impostor)
        assert v.roc.thresholds.tolist() == [p[0] for p in points]
        assert v.roc.fmr.tolist() == [float(p[1]) for p in points]
        assert v.roc.fnmr.tolist() == [float(p[2]) for p in points]
        for far in ("0.05", "0.1", "0.3", "1.0"):
            point = v.operating_point(float(far))
            if Fraction(far) * len(impostor) < 1:
                assert point.status == "not measurable"
                continue
            tau, tar, fmr = oracle.tar(genuine, impostor, Fraction(far))
            assert (point.threshold, point.tar, point.fmr) == (tau, float(tar), float(fmr))


scores = st.lists(st.integers(-6, 6), min_size=1, max_size=20)


@given(scores, scores)
@settings(max_examples=150, deadline=None)
def test_invariances_hold_exactly(genuine, impostor):
    v = judged(genuine, impostor)
    facts = (v.eer, v.auc, v.eer_bracket.half_gap)
    for g, i in [
        ([math.exp(s) for s in genuine], [math.exp(s) for s in impostor]),  # a monotone map
        (genuine[::-1], sorted(impostor)),  # another order
        (genuine * 3, impostor * 3),  # every score listed three times
        ([-s for s in impostor], [-s for s in genuine]),  # roles swapped, scores negated
    ]:
        w = judged(g, i)
        assert (w.eer, w.auc, w.eer_bracket.half_gap) == facts


@given(scores, scores)
@settings(max_examples=60, deadline=None)
def test_swapping_roles_alone_turns_auc_around(genuine, impostor):
    assert judged(genuine, impostor).auc == pytest.approx(1 - judged(impostor, genuine).auc, abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_scikit_learn_agrees(seed):
    rng = np.random.default_rng(seed)
    target = rng.random(3000) < 0.2
    s = np.round(rng.normal(size=3000) + target, 2 + seed)
    v = from_scores(s, target)
    assert v.auc == pytest.approx(roc_auc_score(target, s), abs=1e-12)
    fpr, tpr, thresholds = roc_curve(target, s, drop_intermediate=False)
    assert np.array_equal(v.roc.thresholds, thresholds[::-1])
    assert np.allclose(v.roc.fmr, fpr[::-1], atol=1e-15)
    assert np.allclose(v.roc.tar, tpr[::-1], atol=1e-15)


@pytest.mark.parametrize("separation", [0.5, 1.0, 2.5])
def test_two_normal_distributions_give_their_closed_forms(separation):
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / 20000) for i in range(20000)])
    v = judged(quantiles + separation, quantiles)
    assert v.eer == pytest.approx(NormalDist().cdf(-separation / 2), abs=1e-4)
    assert v.auc == pytest.approx(NormalDist().cdf(separation / math.sqrt(2)), abs=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_pairs_are_every_unordered_pair_once(dtype):
    x, y = clusters(0, dtype=dtype)
    v = verification(x, y)
    unit = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    pairs = [(float(unit[i] @ unit[j]), y[i] == y[j]) for i, j in combinations(range(len(y)), 2)]
    error = 1e-12 if dtype is np.float64 else 1e-7
    assert np.allclose(v.scores.genuine, sorted(s for s, same in pairs if same), atol=error, rtol=0)
    assert np.allclose(v.scores.impostor, sorted(s for s, same in pairs if not same), atol=error, rtol=0)
    w = from_scores([s for s, _ in pairs], [int(same) for _, same in pairs])
    assert (v.eer, v.auc) == (w.eer, w.auc)
    assert v.scores.genuine.dtype == dtype


def kept_pairs(y, rule):
    return np.array([(i, j, int(y[i] == y[j])) for i, j in combinations(range(len(y)), 2) if rule(i, j)])


@pytest.mark.parametrize("trials", ["all", "within", "across"])
@pytest.mark.parametrize("named", [False, True])
def test_domains_choose_the_pairs_a_list_would_name(trials, named):
    x, y = clusters(1)
    domain = np.arange(len(y)) % 3
    rule = {"all": lambda i, j: True, "within": lambda i, j: domain[i] == domain[j]}
    listed = kept_pairs(y, rule.get(trials, lambda i, j: domain[i] != domain[j]))
    a = verification(x, y, domains=domain.astype(str) if named else domain, trials=trials)
    b = verification(x, y, trials=listed)
    assert np.array_equal(a.scores.genuine, b.scores.genuine)
    assert np.array_equal(a.scores.impostor, b.scores.impostor)
    assert a.interval("eer", replicates=50) == b.interval("eer", replicates=50)


def test_a_gallery_is_compared_probe_by_probe_without_the_same_sample():
    x, y = clusters(2)
    ids = 2**40 + np.arange(len(y))
    probe, shelf = np.arange(0, 40), np.arange(20, 60)
    sides = {"ids": ids[probe], "gallery": (x[shelf], y[shelf], None, ids[shelf])}
    v = verification(x[probe], y[probe], **sides)
    listed = np.array([(ids[i], ids[j], int(y[i] == y[j])) for i in probe for j in shelf if i != j])
    w = verification(x[probe], y[probe], trials=listed, **sides)
    assert np.array_equal(v.scores.genuine, w.scores.genuine)
    assert np.array_equal(v.scores.impostor, w.scores.impostor)
    assert v.interval("auc", replicates=50) == w.interval("auc", replicates=50)


def test_a_list_of_trials_may_name_a_gallery_and_domains_may_cut_it():
    x, y = clusters(3)
    halves = (x[:30], y[:30]), (x[30:], y[30:])
    listed = np.array([(i, j, int(y[i] == y[30 + j])) for i in range(30) for j in range(30)])
    a, b = (
        verification(*halves[0], gallery=halves[1]),
        verification(*halves[0], gallery=halves[1], trials=listed),
    )
    assert (a.eer, a.auc, a.genuine, a.impostor) == (b.eer, b.auc, b.genuine, b.impostor)
    shelf = (*halves[1], np.arange(30) % 2)
    within = verification(*halves[0], domains=np.arange(30) % 2, gallery=shelf, trials="within")
    across = verification(*halves[0], domains=np.arange(30) % 2, gallery=shelf, trials="across")
    assert within.genuine + across.genuine == a.genuine
    assert within.impostor + across.impostor == a.impostor


def test_E3_all_scores_equal_is_chance():
    v = verification(np.ones((20, 3), np.float32), np.arange(20) % 4)
    assert (v.eer, v.auc) == (0.5, 0.5)
    assert v.operating_point(0.5).threshold == math.inf
    assert v.tar(far=0.5) == 0
    assert v.tar(far=1) == 1


@pytest.mark.parametrize(("genuine", "impostor", "eer", "auc"), [([3, 4], [1, 2], 0, 1), ([1, 2], [3, 4], 1, 0)])
def test_E4_perfect_separation_and_inversion_are_exact(genuine, impostor, eer, auc):
    v = judged(genuine, impostor)
    assert (v.eer, v.auc) == (eer, auc)


def test_E6_a_duplicated_picture_under_one_id_is_no_genuine_pair():
    x, y = clusters(4)
    doubled, labels = np.vstack([x, x[:10]]), np.append(y, y[:10])
    ids = np.append(np.arange(60), np.arange(10))
    plain, blind = verification(doubled, labels, ids=ids), verification(doubled, labels)
    assert blind.genuine - plain.genuine == 10
    assert plain.scores.genuine.max() < blind.scores.genuine.max() == 1


def test_E8_a_rate_below_one_in_the_impostors_is_not_measurable():
    v = judged(np.linspace(0.5, 1, 50), np.linspace(0, 0.6, 999))
    for ask in (v.tar, v.threshold):
        with pytest.raises(NotMeasurable, match="at least 1000 are needed"):
            ask(far=1e-3)
    with pytest.raises(NotMeasurable):
        v.interval("tar@1e-3")
    point = v.operating_point(1e-3)
    assert (point.status, point.tar, point.threshold) == ("not measurable", None, None)
    assert [v.operating_point(f).status for f in (0.005, 0.02, 0.1)] == [
        "refused as headline",
        "flagged",
        "ok",
    ]


def test_the_attained_rate_never_exceeds_the_wanted_one_and_decimals_are_meant_as_typed():
    v = judged([0.5], [i / 30 for i in range(30)])
    assert v.operating_point(0.1).false_accepts == 3  # 0.1 · 30 in floats is above 3 only by rounding
    tied = judged([0.5, 0.9], [0.7] * 5 + [0.1] * 95)
    assert tied.operating_point(0.04).false_accepts == 0
    assert tied.operating_point(0.05).false_accepts == 5
    for bad in (0, -0.1, 1.5, math.nan, "1e-3"):
        with pytest.raises(InputError, match="far"):
            v.tar(far=bad)


def test_where_equal_scores_leave_no_threshold_the_point_says_so_and_everybody_repeats_it():
    x, y = np.ones((240, 3), np.float32), np.arange(240) % 40
    v = verification(x, y)  # all alike: any finite threshold accepts all strangers
    point = v.operating_point(0.01)
    assert (point.threshold, point.finite_threshold, point.status) == (math.inf, None, "ok")
    assert point.verdict == "no threshold: equal scores"
    (entry,) = v.summary(0.01)["tar"]
    assert (entry["threshold"], entry["tar"], entry["verdict"]) == (None, 0, point.verdict)
    assert measure_thresholds(x, Samples.of(FeatureArray(x), y), (0.01, 1e-7), "val") == {
        "0.01": {"threshold": None, "status": point.verdict, "impostors": v.impostor},
        "1e-07": {"threshold": None, "status": "not measurable", "impostors": v.impostor},
    }
    facts = {"scenarios": {"all": {"verification": v.summary((0.01, 1e-7))}}}
    assert [p["status"] for p in audit_page.operating_point_rows(facts, "all")] == [point.verdict, "not measurable"]
    usual = judged(np.linspace(0.5, 1, 50), np.linspace(0, 0.6, 2000)).operating_point(0.05)
    assert (usual.finite_threshold, usual.verdict) == (usual.threshold, usual.status) and usual.status == "ok"


def test_E9_a_distance_passed_as_similarity_is_called_out():
    x, y = clusters(5, noise=0.3)
    v = verification(x, y)
    assert v.warnings == ()
    flipped = judged(-v.scores.genuine, -v.scores.impostor)
    assert "orientation" in flipped.warnings[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_E10_chunking_order_and_kind_of_array_change_no_bit(dtype):
    x, y = clusters(6, n=333, subjects=40, d=37, dtype=dtype)
    whole = verification(x, y)
    shuffle = np.random.default_rng(0).permutation(len(y))
    others = [verification(x, y, chunk=c) for c in (1, 2, 7, 64, 1000)]
    others += [
        verification(x[shuffle], y[shuffle], chunk=50),
        verification(torch.from_numpy(x), torch.from_numpy(y)),
    ]
    others += [verification(np.asfortranarray(x), y.astype(np.int16)), verification(x * dtype(4), y)]
    for other in others:
        assert np.array_equal(other.scores.genuine, whole.scores.genuine)
        assert np.array_equal(other.scores.impostor, whole.scores.impostor)
        assert (other.eer, other.auc) == (whole.eer, whole.auc)
        assert other.interval("eer", replicates=40) == whole.interval("eer", replicates=40)


def test_E10_copies_of_a_vector_tie_exactly_whatever_tile_they_fall_into():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(20, 50))[np.arange(300) % 20]
    scaled = x * rng.uniform(0.1, 10, size=(300, 1))  # the same directions, other lengths
    for rows in (x.astype(np.float32), x, scaled):
        v = verification(rows, np.arange(300) // 3, chunk=17)
        assert len(v.roc.thresholds) - 1 == 191  # 20 · 19 / 2 cosines of two vectors, and 1


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_lengths_do_not_matter_however_extreme(scale):
    x, y = clusters(8)
    assert verification((x * scale).astype(np.float32), y).auc == pytest.approx(verification(x, y).auc, abs=1e-6)
    huge = x.astype(np.float64) * scale**9
    assert verification(huge, y).auc == pytest.approx(verification(x, y).auc, abs=1e-6)


def test_a_failed_template_never_matches():
    v = from_scores([0.9, -np.inf, 0.1, -np.inf], [1, 1, 0, 0])
    assert v.roc.fnmr[0] == 0.5
    assert v.tar(far=1) == 0.5
    assert v.threshold(far=1) == 0.1
    assert "failed template" in v.warnings[0]


def test_thinned_curves_keep_the_ends_and_the_points_of_the_full_one():
    x, y = clusters(9, n=400, subjects=50)
    v = verification(x, y)
    thin = v.roc.subsample(64)
    assert 32 <= len(thin.thresholds) <= 140
    at = np.searchsorted(v.roc.thresholds, thin.thresholds)
    assert np.array_equal(v.roc.thresholds[at], thin.thresholds)
    assert np.array_equal(v.roc.fmr[at], thin.fmr)
    assert np.array_equal(v.roc.fnmr[at], thin.fnmr)
    assert (thin.fmr[0], thin.fnmr[0], thin.fmr[-1], thin.fnmr[-1]) == (1, 0, 0, 1)
    few = judged([1, 2, 2], [0, 1, 1])
    assert np.array_equal(few.roc.subsample(64).thresholds, few.roc.thresholds)


def test_histogram_counts_every_score_once():
    x, y = clusters(10)
    v = verification(x, y)
    h = v.histogram(37)
    assert len(h.edges) == 38
    assert (h.genuine.sum(), h.impostor.sum()) == (v.genuine, v.impostor)
    flat = judged([1.0, 1.0], [1.0]).histogram(4)
    assert flat.genuine.tolist() == [2, 0, 0, 0]
    with pytest.raises(InputError, match="bins"):
        v.histogram(0)


def test_summary_is_plain_json_with_intervals():
    x, y = clusters(11)
    s = json.loads(json.dumps(verification(x, y).summary(), allow_nan=False))
    assert s["eer"]["interval"]["low"] <= s["eer"]["value"] <= s["eer"]["interval"]["high"]
    assert [p["status"] for p in s["tar"]] == ["ok", "flagged", "refused as headline"]
    constant = verification(np.ones((20, 3), np.float32), np.arange(20) % 4).summary()
    assert json.dumps(constant, allow_nan=False)
    unknown = from_scores([0.9, 0.1], [1, 0]).summary()
    assert unknown["eer"]["interval"] is None


def test_results_are_frozen_and_show_themselves():
    v = judged([1, 2], [0, 1])
    with pytest.raises(AttributeError):
        v.trials = "other"  # type: ignore[misc]
    assert "genuine=2" in repr(v)


@pytest.mark.parametrize("block", range(4))
def test_min_dcf_equals_fractions(block):
    for seed in range(50 * block, 50 * (block + 1)):
        genuine, impostor = random_set(seed)
        v = judged(genuine, impostor)
        for prior, miss, false_accept in (("0.01", "1", "1"), ("0.5", "10", "1")):
            wanted = oracle.min_dcf(genuine, impostor, *(Fraction(p) for p in (prior, miss, false_accept)))
            found = v.detection_cost(float(prior), miss=float(miss), false_accept=float(false_accept))
            assert found.value == pytest.approx(float(wanted), abs=1e-12)
            assert found.bound == 0
        assert v.min_dcf <= 1
    for bad in ({"prior": 0}, {"prior": 1}, {"miss": 0}, {"false_accept": math.inf}):
        with pytest.raises(InputError, match="prior"):
            v.detection_cost(**bad)


def test_det_axes_are_probits_of_the_rates():
    x, y = clusters(12)
    v = verification(x, y)
    a, b = v.det.probit()
    inside = (v.roc.fmr > 0) & (v.roc.fmr < 1) & (v.roc.fnmr > 0) & (v.roc.fnmr < 1)
    assert a.tolist() == pytest.approx([NormalDist().inv_cdf(p) for p in v.roc.fmr[inside]], abs=1e-9)
    assert b.tolist() == pytest.approx([NormalDist().inv_cdf(p) for p in v.roc.fnmr[inside]], abs=1e-9)


def test_an_interval_can_be_named_by_a_pair():
    x, y = clusters(13)
    v = verification(x, y)
    assert v.interval(("tar", 0.1)) == v.interval("tar@0.1")
    for bad in (("tar",), ("eer",), ("eer", 0.1), ("tar", 0.1, 3), ("tar", None), "tar@", "eer@0.1", "tr@0.1", None):
        with pytest.raises(InputError, match="no metric named"):
            v.interval(bad)
    with pytest.raises(InputError, match="what follows the @ must be a number, as in 'tar@1e-3': got 'x'"):
        v.interval("tar@x")


def test_a_summary_without_an_eer_says_none():
    """So many failed templates that FNMR exceeds FMR even at the lowest score."""
    v = from_scores([-np.inf, -np.inf, 0.9, -np.inf, -np.inf, -np.inf, 0.1], [1, 1, 1, 0, 0, 0, 0])
    with pytest.raises(NotMeasurable):
        _ = v.eer
    s = json.loads(json.dumps(v.summary(), allow_nan=False))
    assert (s["eer"]["value"], s["eer"]["half_gap"], s["eer"]["interval"]) == (None, None, None)
    assert s["auc"]["value"] == v.auc


def test_rates_at_any_threshold_are_counts():
    x, y = clusters(14)
    v = verification(x, y)
    for tau in (-2.0, 0.0, 0.25, 1.5):
        fmr, fnmr = v.rates(tau)
        assert fmr == np.mean(v.scores.impostor >= tau)
        assert fnmr == np.mean(v.scores.genuine < tau)
    a, b = v.intervals_at(0.25)
    assert a.low <= v.rates(0.25)[0] <= a.high
    assert b.low <= v.rates(0.25)[1] <= b.high
