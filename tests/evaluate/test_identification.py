"""Identification against every order of ties in fractions, and what must be refused."""

import json
from fractions import Fraction

import numpy as np
import pytest

from mettle.errors import DataError, InputError
from mettle.evaluate import NotMeasurable, identification
from oracles import metrics as oracle


def corners(rng, n):
    """Vectors of ±1 in four dimensions: cosines are multiples of a half, so ties abound."""
    return rng.choice([-1, 1], size=(n, 4))


def cosine(a, b):
    return Fraction(int(a @ b), 4)


def crowd(seed, people=40, each=3, d=16, noise=0.8, dtype=np.float32):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(people), each)
    return (rng.normal(size=(people, d))[y] + noise * rng.normal(size=(len(y), d))).astype(dtype), y


@pytest.mark.parametrize("fusion", ["max", "mean"])
@pytest.mark.parametrize("block", range(5))
def test_E5_equals_fractions_over_all_orders_on_small_tied_sets(block, fusion):
    for seed in range(60 * block, 60 * (block + 1)):
        rng = np.random.default_rng(seed)
        gallery, labels = corners(rng, 6), np.append([0, 1, 2], rng.integers(0, 4, 3))
        probes, truth = corners(rng, 8), rng.integers(0, 6, 8)
        if not np.isin(truth, labels).any():
            continue
        dtype = np.float32 if seed % 2 else np.float64
        enrolled = gallery.astype(dtype), labels, None, np.arange(6)  # ids: corners of a cube repeat themselves
        i = identification(enrolled, (probes.astype(dtype), truth, None, np.arange(6, 14)), fusion=fusion, chunk=3)
        lists = [oracle.fused([cosine(p, g) for g in gallery], labels.tolist(), fusion) for p in probes]
        mated = [(int(t), s) for t, s in zip(truth, lists, strict=True) if t in s]
        unknown = [s for t, s in zip(truth, lists, strict=True) if t not in s]
        assert (i.enrolled, len(i.mated), len(i.unknown)) == (len(np.unique(labels)), len(mated), len(unknown))
        for rank in (1, 2, i.enrolled):
            wanted = sum((oracle.among_best(s, t, rank) for t, s in mated), Fraction(0)) / len(mated)
            assert i.rank(rank) == pytest.approx(float(wanted), abs=1e-12)
            for fpir in ("0.5", "1.0"):
                if Fraction(fpir) * len(unknown) < 1:
                    assert i.operating_point(float(fpir)).status == "not measurable"
                    continue
                tpir, tau = oracle.tpir(mated, unknown, Fraction(fpir), rank)
                point = i.operating_point(float(fpir), rank)
                assert point.tpir == pytest.approx(float(tpir), abs=1e-12)
                assert point.threshold == pytest.approx(float(tau), abs=1e-12)
                assert point.attained <= float(fpir)


def test_order_chunks_and_templates_change_no_bit():
    x, y = crowd(0)
    gallery, probes = np.arange(0, 60), np.arange(60, 120)
    known = np.append(np.arange(0, 60, 3), [1, 4, 7])
    probe = np.setdiff1d(np.arange(120), known)
    base = identification((x[known], y[known]), (x[probe], y[probe]))
    mix = np.random.default_rng(1).permutation(len(known))
    for other in (
        identification((x[known][mix], y[known][mix]), (x[probe], y[probe]), chunk=7),
        identification((x[known] * 4, y[known] + 2**53), (x[probe], y[probe] + 2**53)),
    ):
        assert np.array_equal(other.own, base.own)
        assert np.array_equal(other.best, base.best)
        assert other.tpir(0.1) == base.tpir(0.1)
    assert len(gallery) == len(probes)


def test_perfect_and_constant_embeddings():
    who = np.arange(6)
    perfect = identification((np.eye(6)[:4], who[:4], None, who[:4]), (np.eye(6), who, None, who + 6))
    assert (perfect.rank_1, perfect.tpir(0.5)) == (1, 1)
    assert perfect.threshold(0.5) == 1
    constant = identification((np.ones((4, 3)), who[:4]), (np.ones((6, 3)), who))
    assert constant.rank_1 == pytest.approx(1 / 4)
    assert constant.tpir(0.5) == 0  # every stranger is let in with the first
    assert constant.tpir(1.0) == pytest.approx(1 / 4)
    assert constant.rank(4) == 1


def test_strangers_are_needed_for_an_open_set_number():
    x, y = crowd(1)
    shelf = np.arange(0, 120, 3)
    closed = identification((x[shelf], y[shelf]), (np.delete(x, shelf, 0), np.delete(y, shelf)))
    assert "closed-set" in closed.warnings[0]
    with pytest.raises(NotMeasurable, match="unknown probes"):
        closed.tpir(0.1)
    assert closed.summary()["tpir"][0]["status"] == "not measurable"
    assert (np.diff(closed.cmc) >= 0).all()


def test_intervals_resample_probe_subjects():
    x, y = crowd(2, people=80, noise=1.2)
    shelf = np.arange(0, 120, 3)
    i = identification((x[shelf], y[shelf]), (np.delete(x, shelf, 0), np.delete(y, shelf)))
    for name, value in (("rank@1", i.rank_1), ("tpir@0.1", i.tpir(0.1))):
        found = i.interval(name)
        assert found.low < value < found.high
        assert "gallery fixed" in found.method
        assert i.interval(name) == found
    assert i.interval(("tpir", 0.1)) == i.interval("tpir@0.1")
    for bad in ("rank1", "rank", "tpir", ("rank_1", 0.1)):
        with pytest.raises(InputError, match="no metric named"):
            i.interval(bad)
    with pytest.raises(InputError, match="as in 'tpir@0.01': got 'x'"):
        i.interval("tpir@x")
    json.dumps(i.summary(), allow_nan=False)


def test_resampled_thresholds_equal_those_of_repeated_probes():
    x, y = crowd(3, people=12, each=3, noise=1.2)
    shelf, probe = np.arange(0, 18, 3), np.setdiff1d(np.arange(36), np.arange(0, 18, 3))
    i = identification((x[shelf], y[shelf]), (x[probe], y[probe]))
    weights = np.random.default_rng(0).integers(0, 3, size=(20, len(i.unknown)))
    taus = i._bootstrap_thresholds(weights, 0.2)
    for w, tau in zip(weights, taus, strict=True):
        alarms = np.repeat(i.best, w)
        assert (alarms >= tau).mean() <= 0.2
        lower = np.unique(np.append(i.best, i.own))
        lower = lower[lower < tau]
        if len(lower) and len(alarms):
            assert (alarms >= lower[lower <= tau].max()).mean() > 0.2 or lower.max() not in i.best


@pytest.mark.parametrize(
    ("gallery", "probes", "words"),
    [
        ((np.eye(3), [0, 1, 2]), (np.eye(3), [5, 6, 7]), "enrolled identity"),
        ((np.eye(3), [0, 1, 2]), (np.full((1, 3), np.nan), [0]), "finite"),
        ((np.eye(3), [0, 1, 2]), (np.eye(4), [0, 1, 2, 3]), "dimension"),
        (np.eye(3), (np.eye(3), [0, 1, 2]), "tuple"),
        ((np.eye(3)[:0], []), (np.eye(3), [0, 1, 2]), "non-empty"),
    ],
)
def test_what_cannot_be_judged_is_refused(gallery, probes, words):
    with pytest.raises(InputError, match=words):
        identification(gallery, probes)


def test_a_probe_that_is_enrolled_is_a_leak():
    with pytest.raises(DataError, match="id 11"):
        identification((np.eye(2), [0, 1], None, [10, 11]), (np.eye(2), [0, 1], None, [12, 11]))
    with pytest.raises(InputError, match="did you mean 'mean'"):
        identification((np.eye(2), [0, 1]), (np.eye(2), [0, 1]), fusion="maen")
    i = identification((np.eye(2), [0, 1]), (np.eye(2) + 0.1, [0, 1]))
    with pytest.raises(InputError, match="rank"):
        i.rank(3)
