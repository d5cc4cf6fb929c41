"""The subject bootstrap against scores repeated by weight, its approximation against its exact form."""

import importlib.util
import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm, t

from mettle.errors import InputError
from mettle.evaluate import NotMeasurable, from_scores, verification
from mettle.evaluate import bootstrap as counting
from mettle.evaluate.bootstrap import METHOD, bca_interval, bootstrap_curves, bootstrap_weights, count_by_subject
from mettle.evaluate.roc import (
    resampled_auc,
    resampled_eer,
    resampled_eer_rocch,
    resampled_min_dcf,
    resampled_tar,
    threshold_grid,
)
from mettle.evaluate.scoring.bins import Binning

_spec = importlib.util.spec_from_file_location("oracle_metrics", Path(__file__).parents[1] / "oracles" / "metrics.py")
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def clusters(seed, n=60, subjects=12, d=16, noise=1.5):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % subjects)
    spread = noise * rng.uniform(0.5, 1.5, size=subjects)  # some subjects are harder than others
    return (rng.normal(size=(subjects, d))[y] + spread[y, None] * rng.normal(size=(n, d))).astype(np.float32), y


def pairs_of(v):
    """All pairs of a result as Python lists: genuine (score, s) and impostor (score, s, t)."""
    genuine, impostor = [], []
    for b in v.scores.stream(True):
        genuine += list(zip(b.genuine.tolist(), b.genuine_subject.tolist(), strict=True))
        columns = np.broadcast_arrays(b.impostor, *b.impostor_subjects)
        impostor += list(zip(*(column.ravel().tolist() for column in columns), strict=True))
    return genuine, impostor


@pytest.mark.parametrize("seed", range(6))
def test_replicates_equal_scores_repeated_by_weight(seed):
    rng = np.random.default_rng(seed)
    s, t = rng.integers(0, 8, size=(2, 150))
    scores = np.round(rng.normal(size=150) + (s == t), 1)
    v = from_scores(scores, s == t, np.stack([s, t], axis=1))
    drawn = bootstrap_curves(v.scores, replicates=25, seed=seed)
    assert drawn.is_exact
    weights = [w for w in bootstrap_weights(v.subjects, 25, seed)]
    pairs = pairs_of(v)
    expected = [oracle.resampled(*pairs, w) for w in weights]
    expected = [(g, i) for g, i in expected if g and i]
    assert len(resampled_eer(drawn)) == 1 + len(expected)
    for row, (g, i) in enumerate(expected, start=1):
        assert resampled_eer(drawn)[row] == pytest.approx(float(oracle.eer(g, i)), abs=1e-9)
        assert resampled_auc(drawn)[row] == pytest.approx(float(oracle.auc(g, i)), abs=1e-9)
        one = from_scores(g + i, [1] * len(g) + [0] * len(i))
        assert resampled_eer_rocch(drawn)[row] == pytest.approx(one.eer_rocch, abs=1e-9)
        assert resampled_min_dcf(drawn)[row] == pytest.approx(float(oracle.min_dcf(g, i, 0.01, 1, 1)), abs=1e-9)
        assert resampled_tar(drawn, 0.1)[row] == pytest.approx(float(oracle.tar(g, i, Fraction("0.1"))[1]), abs=1e-9)
    assert (resampled_eer(drawn)[0], resampled_auc(drawn)[0]) == pytest.approx((v.eer, v.auc))


def test_a_grid_follows_the_exact_replicates_closely():
    x, y = clusters(0, n=300, subjects=100)
    v = verification(x, y)
    drawn = bootstrap_curves(v.scores, replicates=30, seed=1)
    assert not drawn.is_exact
    genuine, impostor = (np.array(p) for p in pairs_of(v))
    exact = []
    for w in bootstrap_weights(v.subjects, 30, 1):
        g = np.repeat(genuine[:, 0], w[genuine[:, 1].astype(int)])
        i = np.repeat(impostor[:, 0], w[impostor[:, 1].astype(int)] * w[impostor[:, 2].astype(int)])
        one = from_scores(np.append(g, i), np.repeat([1, 0], [len(g), len(i)]))
        exact.append((one.eer, one.auc, one.tar(0.01)))
    on_grid, points = (
        (resampled_eer(drawn), resampled_auc(drawn), resampled_tar(drawn, 0.01)),
        (v.eer, v.auc, v.tar(0.01)),
    )
    for wanted, got, point in zip(np.transpose(exact), on_grid, points, strict=True):
        error = got[1:] + (point - got[0]) - wanted
        assert np.std(error) < 0.08 * np.std(wanted)
        assert abs(error.mean()) < 0.08 * np.std(wanted)


def test_expansion_and_products_agree_at_400_subjects():
    x, y = clusters(1, n=1600, subjects=400)
    v = verification(x, y)
    dense, sparse = (bootstrap_curves(v.scores, replicates=400, seed=0, dense=d) for d in (True, False))
    for a, b, slack in [
        (resampled_eer(dense), resampled_eer(sparse), 0.03),
        (resampled_auc(dense), resampled_auc(sparse), 0.03),
        (resampled_tar(dense, 1e-2), resampled_tar(sparse, 1e-2), 0.05),
        (resampled_tar(dense, 1e-3), resampled_tar(sparse, 1e-3), 0.08),
        (resampled_eer_rocch(dense), resampled_eer_rocch(sparse), 0.03),
        (resampled_min_dcf(dense), resampled_min_dcf(sparse), 0.08),
    ]:
        width = np.subtract(*np.quantile(a[1:], (0.975, 0.025)))
        assert np.subtract(*np.quantile(b[1:], (0.975, 0.025))) == pytest.approx(width, rel=slack)
        assert abs(np.mean(a[1:] - a[0]) - np.mean(b[1:] - b[0])) < 0.1 * width
    assert (dense.method, sparse.method) == (METHOD, f"{METHOD}, first-order impostor weights")
    assert v.interval("eer", replicates=50).method == METHOD


def test_more_than_512_subjects_take_the_expansion():
    x, y = clusters(2, n=1200, subjects=600)
    v = verification(x, y)
    assert "first-order" in v.interval("eer", replicates=50).method
    assert v.interval("eer").low < v.eer < v.interval("eer").high


@pytest.mark.parametrize("name", ["eer", "auc", "tar@1e-2", "tar@0.1"])
def test_an_interval_holds_its_value_and_repeats_itself(name):
    x, y = clusters(3, n=200, subjects=40)
    v = verification(x, y)
    value = v.tar(float(name[4:])) if name.startswith("tar") else getattr(v, name)
    i = v.interval(name)
    assert i.low <= value <= i.high
    assert (i.level, i.replicates, i.seed) == (0.95, 1000, 0)
    assert verification(x, y).interval(name) == i
    narrow = v.interval(name, level=0.5)
    assert i.low <= narrow.low <= narrow.high <= i.high
    assert v.interval(name, seed=1) != i


def test_ends_are_quantiles_at_corrected_tails():
    """The formula of the docstring, term by term in plain Python."""
    rng = np.random.default_rng(0)
    weights = bootstrap_weights(20, 300, 1)
    own = rng.exponential(size=20) * 0.02
    values = weights @ own / 20 + 0.1
    point = float(own.mean() + 0.1)
    found = bca_interval(values, point, weights, 0.9, 1, "words", rate=400)
    scaled = [math.log(v / (1 - v)) for v in values.tolist()]
    centre, mean = math.log(point / (1 - point)), sum(scaled) / 300
    moved = [sum((weights[b, s] - 1) * (scaled[b] - mean) for b in range(300)) / 300 for s in range(20)]
    second, third, fourth = (sum(u**p for u in moved) for p in (2, 3, 4))
    a, kappa = third / (6 * second**1.5), 20 * fourth / second**2
    nu = min(19, max(2, 40 / (kappa - 1)))
    z0 = norm.ppf(sum(s < centre for s in scaled) / 300)
    z = math.sqrt(20 / 19) * t.ppf(0.05, nu)
    tails = [norm.cdf(z0 + (z0 + q) / (1 - a * (z0 + q))) for q in (z, -z)]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, tails)), abs=1e-12)
    assert bca_interval(values * 0 + 0.3, 0.3, weights, 0.9, 1, "words").low == pytest.approx(0.3)


def test_nothing_is_resampled_before_an_interval_is_asked_for():
    x, y = clusters(4)
    v = verification(x, y)
    assert (v.eer, v.auc, v.tar(0.1), v._kept)[-1] == {}
    v.interval("eer")
    assert list(v._kept) == [(1000, 0)]
    v.interval("auc")
    assert list(v._kept) == [(1000, 0)]


def test_pairs_of_one_subject_stand_together():
    """Copying every sample adds pairs but no subjects: the interval must not shrink."""
    x, y = clusters(5, n=120, subjects=30, noise=2.0)
    v, doubled = verification(x, y), verification(np.repeat(x, 2, axis=0) + 1e-3, np.repeat(y, 2))
    a, b = v.interval("auc"), doubled.interval("auc")
    assert b.high - b.low > 0.85 * (a.high - a.low)


def test_no_errors_leave_the_rule_of_three():
    x = np.repeat(np.eye(20), 3, axis=0)
    v = verification(x, np.repeat(np.arange(20), 3))
    assert v.interval("eer").high == pytest.approx(3 / 20)
    assert v.interval("auc").low == pytest.approx(1 - 3 / 20)
    assert v.interval("tar@1e-2").low == pytest.approx(1 - 3 / 20)
    assert "rule of three" in v.interval("eer").method


def test_what_cannot_be_resampled_is_refused():
    v = from_scores([0.9, 0.2, 0.1], [1, 0, 0])
    with pytest.raises(InputError, match="pass subjects"):
        v.interval("eer")
    x, y = clusters(6)
    v = verification(x, y)
    for name in ("err", "tar", "eer@1e-3", "tar@x", "tar@2"):
        with pytest.raises(InputError):
            v.interval(name)
    for level in (0, 1, 95):
        with pytest.raises(InputError, match="level"):
            v.interval("eer", level=level)
    one_genuine = from_scores([0.9, 0.2, 0.1], [1, 0, 0], [[0, 0], [1, 2], [1, 3]])
    with pytest.raises(NotMeasurable, match="too few subjects"):
        one_genuine.interval("auc")


def test_weights_are_draws_with_replacement():
    w = bootstrap_weights(50, 2000, seed=3)
    assert (w.sum(axis=1) == 50).all()
    assert w.mean() == 1
    assert w.var() == pytest.approx(1 - 1 / 50, abs=0.02)
    assert np.array_equal(w, bootstrap_weights(50, 2000, seed=3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_the_table_bins_as_bisection_does(dtype, spread):
    rng = np.random.default_rng(0)
    scores = (spread * rng.normal(size=3000)).astype(dtype)
    thresholds = np.unique(np.append(scores[:200], scores[:5] * dtype(1.0000001)))
    probes = np.concatenate([scores, thresholds, [-np.inf]]).astype(dtype)
    wanted = np.searchsorted(thresholds, probes, side="right")
    assert np.array_equal(Binning.from_thresholds(thresholds)(probes), wanted)
    assert np.array_equal(
        Binning.from_thresholds(thresholds[:1])(probes), np.searchsorted(thresholds[:1], probes, side="right")
    )


def test_a_grid_is_complete_or_says_that_it_is_not():
    few = from_scores([1, 2, 2], [1, 0, 0]).scores
    assert threshold_grid(few, 2)[0].tolist() == [1, 2]
    assert threshold_grid(few, 2)[1]
    many = from_scores(np.arange(1000.0), np.arange(1000) % 2).scores
    values, complete = threshold_grid(many, 64)
    assert not complete
    assert values[0] == 0
    assert 32 < len(values) < 130


def test_an_interval_of_a_demonstration_set_takes_seconds():
    x, y = clusters(7, n=2800, subjects=280, d=64)
    start = time.process_time()
    v = verification(x, y)
    v.interval("eer"), v.interval("tar@1e-3")
    assert v.impostor == 3_906_000
    assert time.process_time() - start < 10  # about 1.5 s on an idle core


@pytest.mark.parametrize("how", ["all", "across", "gallery"])
def test_histograms_of_subjects_from_some_partners(monkeypatch, how):
    """With every row as a partner the counts are those of all pairs; with some, intervals are about as wide."""
    x, y = clusters(0, n=3000, subjects=600)
    among = {
        "across": {"domains": np.arange(3000) % 3, "trials": "across"},
        "gallery": {"gallery": (x[::2] + 0.1, y[::2])},
    }
    v = verification(x, y, mode="histogram", **among.get(how, {}))
    thresholds = threshold_grid(v.scores, 64)[0]
    full = count_by_subject(v.scores, thresholds, False)
    wide = v.interval("tar@1e-2")
    monkeypatch.setattr(counting, "MANY", 1000)
    same = count_by_subject(v.scores, thresholds, False)
    assert np.array_equal(full[0], same[0])
    assert full[1].sum() == same[1].sum()
    assert np.abs(np.cumsum(full[1] - same[1], axis=1)).max() <= 3  # fast scores may round to either side of an edge
    monkeypatch.setattr(counting, "PARTNERS", 600)
    some = count_by_subject(v.scores, thresholds, False)[1]
    assert some.sum() == pytest.approx(full[1].sum(), rel=0.05)
    object.__setattr__(v, "_kept", {})
    drawn = v.interval("tar@1e-2")
    assert 0.8 < (drawn.high - drawn.low) / (wide.high - wide.low) < 1.3
