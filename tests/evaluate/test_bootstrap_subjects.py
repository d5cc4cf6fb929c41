"""Whom an interval counts: people who could make no error say nothing about errors.

`python tests/evaluate/test_bootstrap_subjects.py 400` prints how often 95 % intervals of FNMR hold the truth, with and
without people who have no genuine pair.
"""

import sys
from itertools import combinations, product

import numpy as np
import pytest

from mettle.evaluate import from_scores, groups, identification, probe, retrieval, verification

SETTINGS = {  # people with genuine pairs, people without, how their miss rates are spread
    "8 people, always or never": (8, 0, "always or never"),
    "8 people and 300 others, always or never": (8, 300, "always or never"),
    "15 people, always or never": (15, 0, "always or never"),
    "15 people and 300 others, always or never": (15, 300, "always or never"),
    "8 people, now and then": (8, 0, "now and then"),
    "8 people and 300 others, now and then": (8, 300, "now and then"),
    "8 people and 2000 others, now and then": (8, 2000, "now and then"),
}
EACH = 20  # genuine pairs of a person


def crowd(able, others, seed=0, noise=0.1):
    """People of two samples, and people of one."""
    rng = np.random.default_rng(seed)
    y = np.r_[np.repeat(np.arange(able), 2), np.arange(able, able + others)]
    return rng.normal(size=(able + others, 64))[y] + noise * rng.normal(size=(len(y), 64)), y


def bounds(interval):
    return interval.low, interval.high


@pytest.mark.parametrize("others", [0, 60, 600])
def test_no_misses_are_counted_among_those_who_have_genuine_pairs(others):
    x, y = crowd(6, others)
    v = verification(x, y)
    assert (v.eer, v.auc) == (0, 1)
    assert bounds(v.interval("tar@0.1")) == bounds(v.interval("auc")) == (0.5, 1)
    assert bounds(v.interval("eer")) == bounds(v.intervals_at(0.5)[1]) == (0, 0.5)
    assert bounds(v.interval("tar@0.1")) == bounds(retrieval(x, y, k=1).interval("recall@1"))
    assert "no errors among 6 subjects" in v.interval("eer").method


def test_each_rate_is_counted_among_people_with_its_own_kind_of_pairs():
    """Twenty people have genuine pairs, seven of them impostor pairs, and the other way round."""
    for genuine, impostor in ((20, 7), (7, 20)):
        pairs = [(s, s) for s in range(genuine)] + list(combinations(range(impostor), 2))
        same = np.array([s == t for s, t in pairs])
        v = from_scores(np.where(same, 0.9, 0.1), same, np.array(pairs))
        fmr, fnmr = v.intervals_at(0.5)
        assert bounds(fmr) == pytest.approx((0, 3 / impostor))
        assert bounds(fnmr) == pytest.approx((0, 3 / genuine))
        assert bounds(v.interval("tar@0.1")) == pytest.approx((1 - 3 / genuine, 1))
        assert bounds(v.interval("eer")) == pytest.approx((0, 3 / 7))
        assert bounds(v.interval("auc")) == pytest.approx((1 - 3 / 7, 1))


@pytest.mark.parametrize("others", [0, 300])
def test_people_who_all_miss_alike_are_counted_the_same_way(others):
    """Everybody is missed in one of two pairs: the rate does not move, and twelve people are no three hundred."""
    pairs = [(s, s) for s in range(12)] * 2 + [(s, (s + 1) % (12 + others)) for s in range(12 + others)]
    scores = np.r_[np.full(12, 0.9), np.full(12, 0.4), np.full(12 + others, 0.1)]
    v = from_scores(scores, [s == t for s, t in pairs], np.array(pairs))
    assert bounds(v.intervals_at(0.5)[1]) == pytest.approx((0.5 - 0.5 * 3 / 12, 0.5 + 0.5 * 3 / 12))


@pytest.mark.parametrize("strangers", [10, 300])
def test_strangers_say_nothing_about_who_is_found(strangers):
    rng = np.random.default_rng(0)
    c = rng.normal(size=(8 + strangers, 64))
    probes = c + 0.1 * rng.normal(size=c.shape)
    i = identification((c[:8], np.arange(8)), (probes, np.arange(8 + strangers)))
    assert (i.rank_1, i.tpir(0.1)) == (1, 1)
    assert bounds(i.interval("rank@1")) == bounds(i.interval("tpir@0.1")) == pytest.approx((1 - 3 / 8, 1))
    alone = identification((c[:8], np.arange(8)), (probes[:8], np.arange(8)))
    assert bounds(alone.interval("rank@1")) == bounds(i.interval("rank@1"))


def test_bystanders_make_no_interval_shorter():
    """The interval of some misses is about as wide beside two thousand people who cannot be missed as without them."""
    widths = {others: [] for others in (0, 300, 2000)}
    for seed in range(12):
        for others, found in widths.items():
            low, high = bounds(missed(8, others, "now and then", seed)[0])
            found.append(high - low)
    alone = np.mean(widths[0])
    assert alone < np.mean(widths[300]) < 1.4 * alone
    assert alone < np.mean(widths[2000]) < 1.4 * alone


def counted(y, other, kept):
    """Subjects with genuine pairs, and with impostor pairs, of pairs of rows."""
    genuine, impostor = set(), set()
    for i, j in kept:
        (genuine if y[i] == other[j] else impostor).update((y[i], other[j]))
    return len(genuine), len(impostor)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("trials", ["all", "within", "across", "listed"])
@pytest.mark.parametrize("shelf", [False, True])
def test_a_group_has_as_many_subjects_as_have_pairs(seed, trials, shelf):
    """Against a walk through all pairs of rows: with domains, with ids on both sides, with a list."""
    rng = np.random.default_rng((seed, shelf))
    n, m = 24, 18
    y, z = rng.integers(0, 14, n), rng.integers(0, 14, m)
    places, theirs = rng.integers(0, 6, n), rng.integers(0, 6, m)
    ids, shelved = np.arange(n), 100 + np.arange(m)
    if shelf:  # some samples are on both sides
        z[:5], shelved[:5], theirs[:5] = y[:5], ids[:5], places[:5]
    else:
        z, theirs, shelved = y, places, ids
    every = product(range(n), range(m)) if shelf else combinations(range(n), 2)
    kept = [(i, j) for i, j in every if ids[i] != shelved[j]]
    if trials in ("within", "across"):
        kept = [(i, j) for i, j in kept if (places[i] == theirs[j]) == (trials == "within")]
    if trials == "listed":
        some = [kept[k] for k in rng.permutation(len(kept))[:40]]
        kept = list(dict.fromkeys(some + [(i, j) for i, j in kept if y[i] == z[j]][:2]))  # a pair counts once
    wanted = counted(y, z, kept)
    assert min(wanted) > 0
    x, w = rng.normal(size=(n, 8)), rng.normal(size=(m, 8))
    listed = np.array([(ids[i], shelved[j], y[i] == z[j]) for i, j in kept])
    gallery = (w, z, theirs, shelved) if shelf else None
    given = listed if trials == "listed" else trials
    v = verification(x, y, ids=ids, domains=places, gallery=gallery, trials=given)
    if not shelf and trials != "listed":  # without ids nothing changes: a row is no pair with itself
        bare = groups(verification(x, y, domains=places, trials=trials), {"g": np.ones(n, bool)}, threshold=0.5)
        assert bare["g"].subjects == min(wanted)
    inside, theirs_inside = {"g": np.ones(n, bool)}, {"g": np.ones(m, bool)} if shelf else None
    found = {
        metric: groups(v, inside, metric=metric, threshold=0.5, gallery_attribute=theirs_inside)["g"].subjects
        for metric in ("eer", "auc", "fnmr", "fmr")
    }
    assert found == {"eer": min(wanted), "auc": min(wanted), "fnmr": wanted[0], "fmr": wanted[1]}


def test_a_group_with_one_genuine_pair_is_not_the_worst():
    rng = np.random.default_rng(0)
    y = np.r_[np.repeat(np.arange(60), 3), 100, 100, np.arange(101, 160)]
    x = rng.normal(size=(200, 16))[y] + 0.6 * rng.normal(size=(len(y), 16))
    x[181] = -x[180]
    kind, v = np.where(y < 60, "a", "b"), verification(x, y)
    g = groups(v, kind)
    assert g["b"].values["eer"] == 1
    assert (g.worst.name, g.small_groups, g["b"].subjects, g["a"].subjects) == ("a", ("b",), 1, 60)
    assert any("the 1 of its 60 subjects that have genuine pairs" in text for text in g.warnings)
    for metric in ("auc", "fnmr"):
        assert groups(v, kind, metric=metric).worst.name == "a"
    ranked = groups(v, kind, metric="fmr")  # everybody has impostor pairs
    assert {one.name for one in ranked.rank_groups()} == {"a", "b"} and ranked.warnings == ()
    assert groups(v, kind, minimum=1).worst.name == "b"


def test_a_probe_counts_test_samples():
    """Two classes of a closed set: what is drawn, and resampled, are samples."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    x = np.eye(2)[y] + 0.3 * rng.normal(size=(400, 2))
    kind = np.where(np.arange(200) < 120, "sharp", "blurred")
    x[200:][kind == "blurred"] += 2 * rng.normal(size=(80, 2))
    g = groups(probe((x[:200], y[:200]), (x[200:], y[200:])), kind)
    assert (g.worst.name, g["sharp"].subjects, g["blurred"].subjects) == ("blurred", 120, 80)


def missed(people, others, spread, seed, replicates=1000):
    """The interval of FNMR at a fixed threshold, and the truth, for people whose own rates differ."""
    rng = np.random.default_rng((people, seed))
    truth, rates = (0.1, rng.random(people) < 0.1) if spread == "always or never" else (0.2, rng.beta(0.5, 2, people))
    genuine = np.repeat(np.arange(people), EACH)
    hits = rng.random(len(genuine)) >= np.repeat(rates, EACH)
    everybody = np.arange(people + others)
    pairs = np.stack([np.r_[genuine, everybody], np.r_[genuine, np.roll(everybody, 1)]], axis=1)
    scores = np.r_[np.where(hits, 0.9, 0.3), np.full(len(everybody), 0.1)]
    v = from_scores(scores, pairs[:, 0] == pairs[:, 1], pairs)
    return v.intervals_at(0.5, replicates=replicates, seed=seed)[1], truth


def coverage(setting, simulations):
    """Share of simulations whose interval holds the truth."""
    held = 0
    for seed in range(simulations):
        i, truth = missed(*SETTINGS[setting], seed)
        held += i.low <= truth <= i.high
    return held / simulations


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_intervals_hold_the_truth_with_and_without_bystanders(setting):
    share = coverage(setting, 300)
    print(f"{setting}: {share:.3f}")
    assert share >= 0.91, share  # 0.95 less three standard errors


if __name__ == "__main__":
    for key in SETTINGS:
        print(f"{key}: {coverage(key, int(sys.argv[1])):.3f}", flush=True)
