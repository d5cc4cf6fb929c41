"""Counts in bins against sorted scores: what is looked into is exact, what is not keeps to its stated bound."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import InputError
from mettle.evaluate import verification
from mettle.evaluate.scoring.bins import EvenBins, GapBins
from mettle.evaluate.scoring.cpu_passes import FastPasses
from mettle.evaluate.scoring.histogram import HistogramScores, count_scores
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.scores import SortedScores


def clusters(seed, n=240, subjects=40, d=16, noise=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % subjects)
    return (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(n, d))).astype(dtype), y


def same(a, b):
    """Everything that must be equal bit for bit, and what must keep to its bound."""
    assert (a.eer, a.eer_bracket, a.genuine, a.impostor) == (b.eer, b.eer_bracket, b.genuine, b.impostor)
    for far in (1.0, 0.1, 0.01, 2 / a.impostor):
        assert a.operating_point(far) == b.operating_point(far)
    assert np.array_equal(a.scores.genuine, b.scores.genuine)
    assert abs(a.auc - b.auc) <= b.bounds["auc"] + 1e-15
    assert -1e-12 <= b.min_dcf - a.min_dcf <= b.bounds["min_dcf"] + 1e-12
    for tau in (-1.0, 0.0, 0.3, float(np.median(a.scores.genuine)), 2.0):
        assert a.rates(tau) == b.rates(tau)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("trials", ["all", "within", "across"])
@pytest.mark.parametrize("shelf", [False, True])
@pytest.mark.parametrize("mode", ["histogram", "exact"])
def test_counts_find_what_sorted_scores_find(dtype, trials, shelf, mode):
    x, y = clusters(0, dtype=dtype)
    domain, ids = np.arange(240) % 3, np.arange(240) // 2 * 0 + np.arange(240)
    given = {"domains": domain, "ids": ids, "trials": trials}
    if shelf:
        given["gallery"] = (x[100:], y[100:], domain[100:], ids[100:])
    sorted_ = verification(x, y, mode="exact", **given)
    memory = 1 << 20 if mode == "exact" else 1 << 28
    if mode == "exact":  # scores that do not fit: bins at the genuine scores
        x, y = np.tile(x, (4, 1)) + clusters(1, n=960, dtype=dtype)[0] / 3, np.tile(y, 4)
        given = {"domains": np.tile(domain, 4), "trials": trials}
        sorted_ = verification(x, y, **given)
    other = verification(x, y, mode=mode, memory=memory, chunk=77, **given)
    assert isinstance(sorted_.scores, SortedScores)
    assert isinstance(other.scores, HistogramScores)
    same(sorted_, other)
    assert (other.bounds["auc"] == 0) == (mode == "exact")


@given(st.integers(0, 10**6), st.sampled_from([np.float32, np.float64]), st.sampled_from(["histogram", "exact"]))
@settings(max_examples=60, deadline=None)
def test_ties_and_few_scores_are_counted_alike(seed, dtype, mode):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(8, 40))
    x = rng.choice([-1.0, 1.0], size=(n, 4)).astype(dtype)
    y = np.arange(n) % int(rng.integers(2, 4))
    a = verification(x, y)
    design = PairTiles.from_sets(a.source.probe, None, "all", int(rng.integers(1, 20)))
    counts = count_scores(design, int(y.max()) + 1, exact=mode == "exact")
    same(a, type(a)(counts, "all", mode))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("how", ["all", "across", "gallery"])
def test_an_accelerator_counts_alike(dtype, how):
    """The code for devices, run on the CPU: the same passes in torch."""
    x, y = clusters(2, dtype=dtype)
    among = {"all": {}, "across": {"domains": np.arange(240) % 2, "trials": "across"}, "gallery": {}}[how]
    if how == "gallery":
        among = {"gallery": (x[50:] + 0.1, y[50:])}
    a = verification(x, y, **among)
    design = PairTiles.from_sets(a.source.probe, a.source.gallery, a.trials, 64)
    same(a, type(a)(count_scores(design, 40, exact=False, device=torch.device("cpu")), a.trials, "histogram"))


def test_perfect_and_inverted_scores_are_exact_in_bins():
    x = np.repeat(np.eye(30), 3, axis=0)
    y = np.repeat(np.arange(30), 3)
    v = verification(x, y, mode="histogram")
    assert (v.eer, v.auc) == (0, 1)
    v = verification(np.tile(np.eye(3), (30, 1)), y, mode="histogram")  # relatives differ, strangers may be equal
    w = verification(np.tile(np.eye(3), (30, 1)), y)
    assert (v.eer, v.tar(0.5)) == (w.eer, w.tar(0.5))
    constant = verification(np.ones((60, 3)), np.arange(60) % 20, mode="histogram")
    assert (constant.eer, constant.auc) == (0.5, 0.5)


def test_the_mode_is_chosen_by_the_number_of_pairs_and_can_be_chosen_by_hand(monkeypatch):
    import importlib

    module = importlib.import_module("mettle.evaluate.verification")
    assert module.EXACT_PAIRS >= 8192 * 8191 // 2
    x, y = clusters(3)
    assert verification(x, y).mode == "exact"
    monkeypatch.setattr(module, "EXACT_PAIRS", 1000)
    v = verification(x, y)
    assert v.mode == "histogram"
    assert verification(x, y, mode="exact").mode == "exact"
    with pytest.raises(InputError, match="did you mean 'histogram'"):
        verification(x, y, mode="histogramm")
    with pytest.raises(InputError, match="memory"):
        verification(x, y, memory=100)


def test_float64_histograms_do_not_depend_on_chunks():
    x, y = clusters(4, n=600, subjects=60, dtype=np.float64)
    found = [verification(x, y, mode="histogram", chunk=c) for c in (7, 64, 600)]
    for v in found[1:]:
        assert v.eer == found[0].eer
        assert v.auc == pytest.approx(found[0].auc, abs=1e-9)
        assert v.min_dcf == pytest.approx(found[0].min_dcf, abs=1e-9)


def test_a_summary_looks_into_all_windows_in_one_pass():
    x, y = clusters(5)
    v = verification(x, y, mode="histogram")
    walks = []
    object.__setattr__(v.scores, "walk", lambda w, walk=v.scores.walk: walks.append(len(w)) or walk(w))
    v.summary()
    assert walks == [4]  # the EER and three rates


def test_curves_of_counts_follow_those_of_sorted_scores():
    x, y = clusters(6, n=900, subjects=90)
    a, b = verification(x, y), verification(x, y, mode="histogram")
    grid = np.linspace(-0.9, 0.9, 50)
    for fmr in (b.roc.fmr, b.roc.subsample(64).fmr, b.roc.full.fnmr[::-1]):
        assert (np.diff(fmr) <= 1e-12).all()
    drawn = [np.interp(grid, v.roc.thresholds[:-1], v.roc.fmr[:-1]) for v in (a, b)]
    close = np.abs(drawn[0] - drawn[1])
    assert close.max() < 1e-3
    h, k = a.histogram(20), b.histogram(20)
    assert (k.genuine.sum(), k.impostor.sum()) == (h.genuine.sum(), h.impostor.sum())
    i, j = a.interval("eer"), b.interval("eer")
    assert (i.low, i.high) == pytest.approx((j.low, j.high), abs=2e-3)


def test_bins_never_decrease_and_gaps_isolate_genuine_scores():
    rng = np.random.default_rng(0)
    s = np.sort(rng.uniform(-1, 1, 5000)).astype(np.float32)
    even = EvenBins(-1.0, 1.0)
    at = even(s)
    assert (np.diff(at) >= 0).all()
    assert at.min() > 0
    assert at.max() < even.count - 1
    assert (np.abs(even.edges[at] - s) < 1e-4).all()
    gaps = GapBins.from_genuine(s[::50])
    place = gaps(s)
    for g in s[::50]:
        inside = gaps(np.asarray([g]))[0]
        assert set(s[place == inside].tolist()) == {float(g)}


def test_the_bound_of_auc_is_not_idle():
    """Bins coarse enough to be wrong: the error shows, and stays inside the bound."""
    x, y = clusters(7, n=300, subjects=60)
    v = verification(x, y)
    design = PairTiles.from_sets(v.source.probe, None, "all", 64)
    found = count_scores(design, 60, exact=False)
    coarse = EvenBins(-1.0, 1.0, 64)
    rough = HistogramScores(
        found.genuine, FastPasses(design).count_bins(coarse), coarse, found.slack, False, found.walk, 60, found.stream
    )
    value, bound = rough.auc()
    assert 1e-9 < abs(value - v.auc) <= bound
    assert rough.count_errors(0.1) == found.count_errors(0.1)
    assert Fraction(*map(int, (rough.count_errors(0.1)[0], rough.impostors))) == Fraction(
        int(np.count_nonzero(v.scores.impostor >= np.float32(0.1))), v.impostor
    )
