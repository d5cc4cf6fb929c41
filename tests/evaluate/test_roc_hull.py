"""EER on the convex hull against every mixture of two operating points, in exact fractions."""

import json
import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.evaluate import NotMeasurable, from_scores, verification
from mettle.evaluate.roc import _intersect_hull
from mettle.evaluate.scoring.bins import EvenBins
from mettle.evaluate.scoring.cpu_passes import FastPasses
from mettle.evaluate.scoring.histogram import HistogramScores, count_scores
from mettle.evaluate.scoring.pair_tiles import PairTiles


def judged(genuine, impostor):
    return from_scores([*genuine, *impostor], [1] * len(genuine) + [0] * len(impostor))


def points(genuine, impostor):
    """(FMR, FNMR) at every distinct finite score and at +∞."""
    for tau in [*{s for s in [*genuine, *impostor] if s != -math.inf}, math.inf]:
        accepted, rejected = sum(s >= tau for s in impostor), sum(s < tau for s in genuine)
        yield Fraction(accepted, len(impostor)), Fraction(rejected, len(genuine))


def best_mixture(found):
    """Least equal error of choosing between two points at random, over all pairs of points; None without one."""
    found = set(found)
    right = [(x, y) for x, y in found if x >= y]
    left = [(x, y) for x, y in found if x <= y]
    met = []
    for (x, y), (u, v) in product(right, left):
        both = (x - y) + (v - u)
        share = (x - y) / both if both else Fraction(0)  # of the point on the left
        met.append(x + share * (u - x))
    return min(met, default=None)


def random_set(seed):
    """Small sets: every other heavily tied, every third with failed templates, some the wrong way round."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 16, size=2)
    genuine, impostor = (rng.normal(shift, 1, n) for shift, n in zip((rng.uniform(-1, 3), 0), sizes, strict=True))
    if seed % 2:
        genuine, impostor = np.round(genuine), np.round(impostor)
    if seed % 3 == 0:
        genuine[rng.random(len(genuine)) < 0.3] = -np.inf
        impostor[rng.random(len(impostor)) < 0.3] = -np.inf
    return genuine.tolist(), impostor.tolist()


def test_no_mixture_of_two_thresholds_does_better():
    lower = refused = 0
    for seed in range(600):
        genuine, impostor = random_set(seed)
        v, wanted = judged(genuine, impostor), best_mixture(points(genuine, impostor))
        if wanted is None:
            refused += 1
            with pytest.raises(NotMeasurable, match="failed templates"):
                _ = v.eer_rocch
            continue
        assert v.eer_rocch == float(wanted)
        assert v.bounds["eer_rocch"] == 0
        assert v.eer_rocch <= v.eer
        lower += v.eer_rocch < v.eer
    assert lower > 200  # the two are different numbers
    assert refused > 5


SCORES = st.lists(st.integers(-6, 6), min_size=1, max_size=20)


@given(SCORES, SCORES)
@settings(max_examples=100, deadline=None)
def test_the_hull_is_invariant_to_what_the_path_is(genuine, impostor):
    wanted = judged(genuine, impostor).eer_rocch
    for g, i in [
        ([math.exp(s) for s in genuine], [math.exp(s) for s in impostor]),  # a monotone map
        (genuine[::-1], sorted(impostor)),  # another order
        (genuine * 3, impostor * 3),  # every score listed three times
        ([-s for s in impostor], [-s for s in genuine]),  # roles swapped, scores negated
    ]:
        assert judged(g, i).eer_rocch == wanted


def test_counts_beyond_int64_stay_exact():
    """Products of counts are compared: 2⁴⁰ impostors and 2³⁰ genuine pairs overflow where they are multiplied."""
    n_i, n_g = 2**40, 2**30
    rng = np.random.default_rng(0)
    accepts, rejects = (np.sort(rng.integers(0, n, 60)) for n in (n_i, n_g))
    accepts, rejects = np.append(n_i, accepts[::-1]), np.append(0, rejects)
    shares = [(Fraction(int(a), n_i), Fraction(int(r), n_g)) for a, r in zip(accepts, rejects, strict=True)]
    assert _intersect_hull(accepts, rejects, n_i, n_g) == best_mixture([*shares, (Fraction(0), Fraction(1))])


def people(seed, n=300, subjects=60, d=16, dtype=np.float32):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % subjects)
    return (rng.normal(size=(subjects, d))[y] + rng.normal(size=(n, d))).astype(dtype), y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bins_keep_to_their_bound_and_bins_at_genuine_scores_are_exact(dtype):
    for seed in range(5):
        x, y = people(seed, dtype=dtype)
        v, w = verification(x, y), verification(x, y, mode="histogram")
        assert abs(v.eer_rocch - w.eer_rocch) <= w.bounds["eer_rocch"] < 1e-3
        design = PairTiles.from_sets(v.source.probe, None, "all", 64)
        sharp = type(v)(count_scores(design, 60, exact=True), "all", "exact")
        assert isinstance(sharp.scores, HistogramScores)
        assert (sharp.eer_rocch, sharp.bounds["eer_rocch"]) == (v.eer_rocch, 0)


@pytest.mark.parametrize("bins", [40, 64, 300])
def test_the_bound_is_not_idle(bins):
    """Bins coarse enough to be wrong, with scores shifted by as much as a fast one may be off."""
    x, y = people(7)
    v = verification(x, y)
    design = PairTiles.from_sets(v.source.probe, None, "all", 64)
    exact, even = count_scores(design, 60, exact=False), EvenBins(-1.0, 1.0, bins)
    for slack in (0.0, 0.02):
        for off in {-slack, slack}:
            tally = np.bincount(even(v.scores.impostor + np.float32(off)), minlength=bins)
            rough = HistogramScores(exact.genuine, tally, even, slack, False, exact.walk, 60, exact.stream)
            w = type(v)(rough, "all", "histogram")
            assert abs(w.eer_rocch - v.eer_rocch) <= w.bounds["eer_rocch"]
            assert w.eer_rocch != v.eer_rocch
    assert np.array_equal(FastPasses(design).count_bins(even), np.bincount(even(v.scores.impostor), minlength=bins))


def test_a_summary_names_it_apart_from_the_eer():
    x, y = people(3)
    v = verification(x, y)
    s = json.loads(json.dumps(v.summary(), allow_nan=False))
    assert (s["eer"]["value"], s["eer_rocch"]["value"]) == (v.eer, v.eer_rocch)
    assert v.eer_rocch < v.eer
    lost = from_scores([-np.inf, -np.inf, 0.9, 0.1, -np.inf, -np.inf], [1, 1, 1, 0, 0, 0]).summary()
    assert (lost["eer"]["value"], lost["eer_rocch"]["value"]) == (None, None)
