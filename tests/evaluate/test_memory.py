"""Memory that grows neither with the square of the rows nor with the replicates, and numbers that stay the same."""

import time
import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import DataError
from mettle.evaluate import (
    SplitSide,
    assert_no_leakage,
    bootstrap,
    confusion,
    find_leakage,
    hardest_pairs,
    identification,
    protocol,
)
from mettle.evaluate.diagnostics import leakage

MB = 1 << 20


def peak(call):
    """The most that a call holds at a time, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def axes(rng, n, dim=3):
    """Vectors whose cosines are −1, 0 and 1, exactly."""
    return (np.eye(dim) * rng.choice([-1, 1], (n, 1, 1)))[np.arange(n), rng.integers(dim, size=n)]


# The hardest pairs.


def test_hardest_pairs_of_a_collapse_take_little_memory():
    x, y = np.ones((3000, 16), np.float32), np.repeat(np.arange(1500), 2)
    found = []
    assert peak(lambda: found.extend(hardest_pairs(x, y, "impostor"))) < 60 * MB  # all pairs at once were 330 MB
    assert [(p.first, p.second) for p in found] == [(0, j) for j in range(2, 22)]
    y = np.repeat([0, 1], 1500)
    found = hardest_pairs(x, y, "genuine", count=3, each=3)
    assert [(p.first, p.second) for p in found] == [(0, 1), (0, 2), (0, 3)]


# Confusion.


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(4, 50), st.integers(2, 8))
def test_confusion_shares_equal_neighbours_out(seed, n, labels):
    rng = np.random.default_rng(seed)
    x, y = axes(rng, n), np.append([3, 9], rng.integers(10, 10 + labels, size=n - 2))
    found = {c.label: c for c in confusion(x, y)}
    score = x @ x.T
    np.fill_diagonal(score, -9)
    for label in np.unique(y).tolist():
        times = Counter()
        for i in np.flatnonzero(y == label):
            nearest = np.flatnonzero(score[i] == score[i].max())
            for j in nearest:
                times[int(y[j])] += Fraction(1, len(nearest))
        whole = sum(times.values())
        others = {c: t / whole for c, t in times.items() if c != label}
        assert found[label].error == pytest.approx(float(sum(others.values())))
        assert found[label].share == pytest.approx(float(max(others.values(), default=0)))
        assert (found[label].most is None) == (not others)


def test_confusion_of_very_many_labels_takes_little_memory():
    x, y = np.random.default_rng(0).normal(size=(5000, 8)).astype(np.float32), np.repeat(np.arange(2500), 2)
    assert peak(lambda: confusion(x, y)) < 45 * MB  # a table of all labels is 50 MB by itself


def test_confusion_does_not_see_how_rows_are_cut(monkeypatch):
    rng = np.random.default_rng(1)
    x, y = np.round(rng.normal(size=(300, 3))) + 0.5, rng.integers(9, size=300)
    whole = confusion(x, y)
    for cells in (1, 7 * 300, 50 * 300):
        monkeypatch.setattr("mettle.evaluate.diagnostics.label_errors._CELLS", cells)
        assert confusion(x, y) == whole


# Resamples.


@pytest.mark.parametrize(("subjects", "replicates"), [(6, 1), (7, 300), (1000, 257), (30_011, 130)])
def test_draws_are_those_of_one_go(subjects, replicates):
    at_once = np.random.default_rng(5).integers(subjects, size=(replicates, subjects))
    counts = np.stack([np.bincount(row, minlength=subjects) for row in at_once])
    found = bootstrap.bootstrap_weights(subjects, replicates, 5)
    assert found.dtype == np.int8
    assert np.array_equal(found, counts)


class Lopsided:
    """Draws that are spread at first and then all fall on the first subject."""

    def __init__(self):
        self.calls = 0

    def integers(self, subjects, size):
        self.calls += 1
        return np.arange(subjects) + np.zeros(size, np.int64) if self.calls == 1 else np.zeros(size, np.int64)


def test_a_count_that_is_too_large_for_int8(monkeypatch):
    monkeypatch.setattr(bootstrap, "_CELLS", 64 * 300)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Lopsided())
    found = bootstrap.draw_weights(300, 192, 0)
    assert (found[:64] == 1).all()
    assert (found[64:, 0] == 300).all()
    assert not found[64:, 1:].any()


@given(st.integers(1, 5000), st.integers(1, 10**6))
def test_parts_follow_each_other(count, width):
    parts = list(bootstrap.slice_rows(count, width))
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == count
    assert len(parts) == 1 or min(p.stop - p.start for p in parts) >= 64


@pytest.mark.parametrize(("subjects", "replicates"), [(50, 200), (5003, 333), (20_001, 129)])
def test_products_in_parts_are_the_products(subjects, replicates):
    rng = np.random.default_rng(0)
    weights = bootstrap.bootstrap_weights(subjects, replicates, 0)
    whole = weights.astype(np.int64)
    column, table, row = (
        rng.integers(99, size=subjects),
        rng.integers(9, size=(subjects, 5)),
        rng.integers(9, size=replicates),
    )
    assert np.array_equal(bootstrap.weighted_sums(weights, column), whole @ column)  # whole numbers: exact in any order
    assert np.array_equal(bootstrap.weighted_sums(weights, table), whole @ table)
    assert np.array_equal(bootstrap.influence(weights, row.astype(float)), (whole - 1).T @ row)
    floats = rng.random(subjects)
    assert np.allclose(bootstrap.weighted_sums(weights, floats), whole @ floats, rtol=1e-13)


def test_an_interval_of_very_many_subjects_takes_little_memory():
    values = np.random.default_rng(0).random(1000)

    def interval():
        weights = bootstrap.bootstrap_weights(20_000, 1000, 0)
        bootstrap.bca_interval(values, 0.5, weights, 0.95, 0, "", rate=20_000)

    assert peak(interval) < 90 * MB  # 306 MB where weights are int64 and floats


@pytest.fixture(scope="module")
def tied():
    """Known and unknown probes, many of them with equal scores."""
    rng = np.random.default_rng(3)
    centre = rng.normal(size=(900, 5))
    who = rng.integers(900, size=6000)
    gallery, probes = np.round(centre[:150]) + 0.5, np.round(centre[who] + rng.normal(size=(6000, 5))) + 0.5
    return identification((gallery, np.arange(150)), (probes, who))


@pytest.mark.parametrize("name", ["rank@1", "tpir@0.1"])
@pytest.mark.parametrize("replicates", [257, 321])
def test_an_interval_of_identification_does_not_see_how_it_is_cut(monkeypatch, tied, name, replicates):
    assert len(np.unique(tied.tied)) > 2  # fractions, whose sums round
    wanted = tied.interval(name, replicates=replicates)
    monkeypatch.setattr(bootstrap, "_CELLS", 1)
    found = tied.interval(name, replicates=replicates)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-12)


def test_an_interval_of_identification_takes_little_memory(tied):
    assert peak(lambda: tied.interval("tpir@0.1")) < 80 * MB  # 130 MB with all replicates at once


# Leaks.


def test_near_duplicates_are_all_counted_and_some_listed(monkeypatch):
    monkeypatch.setattr(leakage, "LISTED", 25)
    rng = np.random.default_rng(0)
    for n, m in ((9, 7), (30, 20), (3, 2)):
        x, y = axes(rng, n), axes(rng, m)
        wanted = [(i, j) for i in range(n) for j in range(m) if x[i] @ y[j] >= 0.98]
        found = find_leakage(SplitSide(embeddings=x), SplitSide(embeddings=y))
        assert [leak.what for leak in found] == wanted[:25]
        assert sum(leak.count for leak in found) == len(wanted)
        assert {leak.count for leak in found[:-1]} <= {1}


def test_a_million_near_duplicates():
    x = np.ones((1000, 8), np.float32)
    found = []
    assert peak(lambda: found.extend(find_leakage(SplitSide(embeddings=x), SplitSide(embeddings=x)))) < 40 * MB
    assert len(found) == leakage.LISTED
    assert sum(leak.count for leak in found) == 10**6
    with pytest.raises(DataError, match=r"1000000 with the same near-duplicate \(\(0, 0\), \(0, 1\), \(0, 2\), …\)"):
        assert_no_leakage(SplitSide(embeddings=x), SplitSide(embeddings=x))


# Protocols.


def slow_k_shot(ids, labels, k, seed):
    rng, gallery, probes = np.random.default_rng((seed, 1)), [], []
    for person in sorted(set(labels.tolist())):
        own = rng.permutation(sorted(i for i, y in zip(ids.tolist(), labels.tolist(), strict=True) if y == person))
        if len(own) > k:
            gallery += own[:k].tolist()
            probes += own[k:].tolist()
    return tuple(gallery), tuple(probes)


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_k_shot_enrols_the_same_samples_as_ever(seed, k):
    rng = np.random.default_rng(seed)
    ids, labels = rng.permutation(500)[:60], rng.integers(-3, 9, size=60)
    made = protocol.k_shot(ids, labels, k=k, seed=seed)
    assert (made.gallery, made.probes) == slow_k_shot(ids, labels, k, seed)


def test_very_many_people_are_enrolled_in_little_time():
    labels = np.repeat(np.arange(150_000), 2)
    start = time.process_time()
    protocol.known_unknown(np.arange(300_000), labels)
    assert time.process_time() - start < 8  # over half a minute where every person looks through all rows
