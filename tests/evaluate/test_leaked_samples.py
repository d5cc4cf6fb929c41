"""Numbers that look right and are not: other pairs, other people, scaled copies, one label, repeats."""

import json

import numpy as np
import pytest
import torch

from mettle.errors import DataError, InputError
from mettle.evaluate import (
    calibrate,
    clustering,
    compare,
    from_scores,
    identification,
    probe,
    retrieval,
    verification,
)
from mettle.evaluate.diagnostics.duplicates import COSINE, check_shared_samples, find_duplicates, hash_rows
from mettle.evaluate.inputs import EmbeddingSet

Y = np.repeat(np.arange(30), 4)
IDS = np.arange(120) + 2**60
BY_ID = np.array([2**60, 2**60, 0])  # added to trials of rows


def crowd(seed, d=16):
    rng = np.random.default_rng(1)
    base = rng.normal(size=(30, d))[Y]
    return base + np.random.default_rng(seed).normal(size=base.shape)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


Z, W = crowd(2), crowd(3)  # two models
PAIRS = np.array([(a, b, int(Y[a] == Y[b])) for a in range(120) for b in range(a)])
SCORES = (unit(Z) @ unit(Z).T)[PAIRS[:, 0], PAIRS[:, 1]]
GENUINE = np.flatnonzero(PAIRS[:, 2])
IMPOSTOR = np.flatnonzero(PAIRS[:, 2] == 0)[np.argsort(SCORES[PAIRS[:, 2] == 0])]
EASY, HARD = np.r_[GENUINE, IMPOSTOR[:3000]], np.r_[GENUINE, IMPOSTOR[-3000:]]


def scored(at, labels=Y, turn=False):
    pairs = labels[PAIRS[at, :2]]
    return from_scores(SCORES[at], PAIRS[at, 2], pairs[:, ::-1] if turn else pairs)


DOMAINS = np.tile([0, 1, 0, 1], 30), np.tile([0, 0, 1, 1], 30)
Q = np.arange(120) % 4 == 0


def ranked(x, labels=Y, extra=0, ids=True, domains=None, **how):
    """Queries in a gallery with so many strangers."""
    more = np.random.default_rng(5).normal(size=(extra, 16))
    shelf = np.r_[x[~Q], more], np.r_[labels[~Q], 1000 + np.arange(extra)]
    d = None if domains is None else (domains[Q], np.r_[domains[~Q], np.zeros(extra, int)])
    names = (IDS[Q], np.r_[IDS[~Q], np.arange(extra)]) if ids else (None, None)
    gallery = (*shelf, None if d is None else d[1], names[1])
    return retrieval(x[Q], labels[Q], k=1, ids=names[0], domains=None if d is None else d[0], gallery=gallery, **how)


UNEQUAL = {
    "easy and hard trials": lambda: (
        verification(Z, Y, trials=PAIRS[EASY]),
        verification(Z, Y, trials=PAIRS[HARD]),
        "subjects of the trials",
    ),
    "trials of the same people on other samples": lambda: (
        verification(Z, Y, trials=np.array([(0, 1, 1), (0, 4, 0)])),
        verification(Z, Y, trials=np.array([(0, 2, 1), (0, 4, 0)])),
        "samples of the trials",
    ),
    "trials of other ids": lambda: (
        verification(Z, Y, ids=IDS, trials=np.array([(0, 1, 1), (0, 4, 0)]) + BY_ID),
        verification(Z, Y, ids=IDS, trials=np.array([(0, 2, 1), (0, 4, 0)]) + BY_ID),
        "samples of the trials",
    ),
    "easy and hard scores": lambda: (scored(EASY), scored(HARD), "subjects of the pairs"),
    "scores of other people": lambda: (scored(EASY), scored(EASY, Y + 1000), "subjects of the pairs"),
    "scores of other pairs than those embedded": lambda: (verification(Z, Y, trials=PAIRS[EASY]), scored(HARD), "sub"),
    "other domains across": lambda: (
        *(verification(Z, Y, domains=d, trials="across") for d in DOMAINS),
        "domains",
    ),
    "other domains across, by id": lambda: (
        *(verification(Z, Y, domains=d, ids=IDS, trials="across") for d in DOMAINS),
        "domains",
    ),
    "other ids": lambda: (verification(Z, Y, ids=IDS), verification(Z, Y, ids=IDS + 1), "sample ids"),
    "within and across": lambda: (
        *(verification(Z, Y, domains=DOMAINS[0], trials=t) for t in ("within", "across")),
        "trials",
    ),
    "two galleries": lambda: (ranked(Z), ranked(Z, extra=50), "gallery labels"),
    "two galleries without ids": lambda: (ranked(Z, ids=False), ranked(Z, extra=50, ids=False), "gallery labels"),
    "other labels": lambda: (retrieval(Z, Y, k=1), retrieval(Z, Y + 1000, k=1), "queries"),
    "other sample ids": lambda: (retrieval(Z, Y, k=1, ids=IDS), retrieval(Z, Y, k=1, ids=IDS + 1), "query ids"),
    "its own candidate": lambda: (
        retrieval(Z, Y, k=1),
        retrieval(Z, Y, k=1, gallery=(W, Y)),
        "candidates that are the query itself",
    ),
    "one leaves out a domain": lambda: (
        retrieval(Z, Y, k=1, domains=DOMAINS[0]),
        retrieval(Z, Y, k=1, domains=DOMAINS[0], exclude_same_domain=True),
        "exclude_same_domain",
    ),
    "other domains left out": lambda: (
        *(retrieval(Z, Y, k=1, domains=d, exclude_same_domain=True) for d in DOMAINS),
        "query domains",
    ),
    "other domains of the gallery": lambda: (
        *(
            ranked(Z, ids=False, domains=np.where(Q, 0, d), exclude_same_domain=True)
            for d in (np.tile([9, 0, 1, 1], 30), np.tile([9, 1, 0, 1], 30))
        ),
        "gallery domains",
    ),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_what_was_not_measured_on_the_same_is_not_compared(case):
    first, second, words = UNEQUAL[case]()
    for a, b in ((first, second), (second, first)):
        with pytest.raises(InputError, match=f"compare needs .*{words}.* differ") as caught:
            compare(a, b)
        assert "\n" not in str(caught.value)


MIX, MIXED = (np.random.default_rng(4).permutation(n) for n in (120, 900))
EQUAL = {
    "one protocol": lambda: (verification(Z, Y), verification(W, Y)),
    "ids on one side": lambda: (verification(Z, Y, ids=IDS), verification(W, Y)),
    "rows in another order": lambda: (verification(Z, Y), verification(W[MIX], Y[MIX])),
    "ids in another order": lambda: (verification(Z, Y, ids=IDS), verification(W[MIX], Y[MIX], ids=IDS[MIX])),
    "domains in another order": lambda: (
        verification(Z, Y, domains=DOMAINS[0], ids=IDS, trials="across"),
        verification(W[MIX], Y[MIX], domains=DOMAINS[0][MIX], ids=IDS[MIX], trials="across"),
    ),
    "domains as text": lambda: (
        verification(Z, Y, domains=DOMAINS[0], trials="across"),
        verification(W, Y, domains=DOMAINS[0].astype(str), trials="across"),
    ),
    "domains that do not choose": lambda: (verification(Z, Y, domains=DOMAINS[0]), verification(W, Y)),
    "trials in another order": lambda: (
        verification(Z, Y, trials=PAIRS[EASY]),
        verification(W, Y, trials=PAIRS[EASY][::-1][:, [1, 0, 2]]),
    ),
    "trials by id and by row": lambda: (
        verification(Z, Y, trials=PAIRS[EASY]),
        verification(W, Y, ids=IDS, trials=PAIRS[EASY] + BY_ID),
    ),
    "modes": lambda: (verification(Z, Y), verification(W, Y, mode="histogram")),
    "a cohort": lambda: (verification(Z, Y), verification(Z, Y, cohort=np.random.default_rng(0).normal(size=(9, 16)))),
    "scores in another order": lambda: (scored(EASY), scored(EASY[::-1], turn=True)),
    "scores and trials": lambda: (scored(EASY), verification(W, Y, trials=PAIRS[EASY])),
    "scores and all pairs": lambda: (scored(np.arange(len(PAIRS))), verification(W, Y)),
    "scores and all pairs, counted": lambda: (
        scored(np.arange(len(PAIRS))),
        verification(W, Y, mode="histogram"),
    ),
    "retrievals": lambda: (ranked(Z), ranked(W)),
    "retrievals with and without ids": lambda: (retrieval(Z, Y, k=1), retrieval(W, Y, k=(1, 2), ids=IDS)),
    "its own gallery": lambda: (retrieval(Z, Y, k=1), retrieval(W, Y, k=1, ids=IDS, gallery=(W, Y, None, IDS))),
}


@pytest.mark.parametrize("case", EQUAL)
def test_what_was_measured_on_the_same_is_compared(case):
    c = compare(*EQUAL[case]())
    assert c.interval.low <= c.difference <= c.interval.high


def test_a_threshold_is_not_judged_on_the_people_it_was_set_on_whatever_the_scores_came_from():
    v = scored(EASY)
    with pytest.raises(DataError, match="leak: 30 subjects.*first is 0"):
        calibrate(v, 0.01).transfer(v)
    with pytest.raises(DataError, match="leak: 30 subjects"):
        calibrate(v, 0.01).transfer(verification(Z, Y))
    assert calibrate(v, 0.01).transfer(scored(HARD, Y + 1000)).notes == ()


def test_people_who_are_in_no_trial_are_on_no_side():
    low, high = (np.isin(Y[PAIRS[:, :2]], half).all(axis=1) for half in (np.arange(15), np.arange(15, 30)))
    found = calibrate(verification(Z, Y, trials=PAIRS[low]), 0.01).transfer(verification(Z, Y, trials=PAIRS[high]))
    assert found.notes == ()


@pytest.mark.parametrize("side", ["calibration", "test"])
def test_where_nobody_knows_the_people_a_note_says_so(side):
    known, loose = scored(EASY), from_scores(SCORES[EASY], PAIRS[EASY, 2])
    found = calibrate(loose if side == "calibration" else known, 0.01).transfer(
        known if side == "calibration" else loose
    )
    (note,) = found.notes
    assert note.startswith("disjointness not checked")
    assert side in note
    assert json.loads(json.dumps(found.summary()))["notes"] == [note]


ASK = {
    "verification": lambda a, b: verification(*a, gallery=b),
    "retrieval": lambda a, b: retrieval(*a, gallery=b, k=1),
    "identification": lambda a, b: identification(b, a),
    "probe": lambda a, b: probe(b, a, k=1),
}
SCALED = {
    "normalised": unit,
    "normalised in float32": lambda x: unit(x.astype(np.float32)),
    "doubled": lambda x: 2 * x,
    "row by row": lambda x: x * np.random.default_rng(0).uniform(1e-3, 1e3, size=(len(x), 1)),
    "float16": lambda x: unit(x).astype(np.float16),
    "tiny": lambda x: x * 1e-200,
}


@pytest.mark.parametrize("name", ASK)
@pytest.mark.parametrize("kind", SCALED)
def test_a_set_that_is_its_own_gallery_up_to_length_is_a_leak(name, kind):
    with pytest.raises(DataError, match="leak: 120 of 120 rows.*up to their length"):
        ASK[name]((Z, Y), (SCALED[kind](Z)[MIX], Y[MIX]))


@pytest.mark.parametrize("name", ASK)
def test_a_few_scaled_rows_are_warned_of_and_others_are_not(name):
    other = W.copy()
    other[:7] = 3 * Z[:7]
    warned = [t for t in ASK[name]((Z, Y), (other, Y)).warnings if "up to their length" in t]
    assert len(warned) == 1
    assert "7 of 120 rows" in warned[0]
    assert not any("equal a row" in t for t in ASK[name]((Z, Y), (W, Y)).warnings)
    assert not any("equal a row" in t for t in ASK[name]((Z, Y), (-Z, Y)).warnings)  # the opposite direction


def test_scaled_copies_are_those_that_a_loop_finds():
    """All pairs by their cosine, with noise of every size: none is missed, wherever it falls."""
    rng = np.random.default_rng(7)
    y = np.r_[rng.integers(0, 6, 400), np.full(500, 6)]
    x = rng.normal(size=(900, 64))
    x[:400] += 2 * rng.normal(size=(6, 64))[y[:400]]
    z = unit(x) + 10.0 ** rng.uniform(-7, -1, size=(900, 1)) * unit(rng.normal(size=x.shape))
    z[400:] = rng.normal(size=(500, 64))  # others, so that it is no set used twice
    z *= rng.uniform(0.1, 9, size=(900, 1))
    away = np.stack([((unit(x) - row) ** 2).sum(axis=1) / 2 for row in unit(z)])  # 1 − cos, without its rounding
    twins = ((away <= 1 - COSINE) & (y[:, None] == y[None])).any(axis=1)
    assert 150 < twins.sum() < 350
    (text,) = check_shared_samples(EmbeddingSet(x, y), EmbeddingSet(z[MIXED], y[MIXED]), "one", "two")
    assert f"{twins.sum()} of 900 rows of two" in text


def test_people_or_samples_that_all_share_a_direction_are_no_leak():
    rng = np.random.default_rng(0)
    near = 1 + 1e-5 * rng.normal(size=(2, 120, 16))  # a network that gives everybody one vector, nearly
    assert not any("equal a row" in t for t in verification(near[0], Y, gallery=(near[1], Y)).warnings)
    tight = np.random.default_rng(1).normal(size=(30, 16))[Y] + 1e-5 * rng.normal(size=(2, 120, 16))
    assert not any("equal a row" in t for t in verification(tight[0], Y, gallery=(tight[1], Y)).warnings)
    one = rng.uniform(1, 2, size=(2, 120, 1)) * np.ones(16)  # multiples of one vector
    assert not any("equal a row" in t for t in verification(one[0], Y, gallery=(one[1], Y)).warnings)


@pytest.mark.parametrize("ask", [verification, lambda x, y, **how: retrieval(x, y, k=1, **how)])
def test_copies_in_one_set_are_told(ask):
    x = Z.copy()
    x[1::2] = x[::2]
    (text,) = ask(x, Y).warnings
    assert "120 of 120 rows are exact copies" in text
    assert "60 vectors" in text
    assert "rows 0 and 1" in text
    assert ask(x, Y, ids=np.arange(120) // 2).warnings == ()
    assert ask(Z, Y).warnings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_hash_as_arrays_do(dtype):
    x = torch.from_numpy(Z.copy()).to(dtype)
    x[3] = x[9]
    x[4, 0], x[5, 0] = 0.0, -0.0
    for double in (True, False):
        assert (hash_rows(x, double) == hash_rows(x.numpy(), double)).all()
    assert find_duplicates(x, Y, IDS).examples == ((3, 9),)


def test_a_gallery_of_one_label_is_refused():
    noise = np.random.default_rng(0).normal(size=(60, 8))
    with pytest.raises(InputError, match="at least two labels among the candidates"):
        retrieval(noise[:30], np.arange(30) % 5, k=1, gallery=(noise[30:], np.zeros(30, int)))
    with pytest.raises(InputError, match="at least two labels"):
        retrieval(noise, np.zeros(60, int), k=1)


def test_one_enrolled_identity_is_told():
    noise = np.random.default_rng(0).normal(size=(60, 8))
    found = identification((noise[:5], np.zeros(5, int)), (noise[5:], np.arange(55) % 5))
    assert any("one identity is enrolled" in t for t in found.warnings)
    assert 0 < found.tpir(0.1) < 1
    two = identification((noise[:5], np.arange(5) % 2), (noise[5:], np.arange(55) % 5))
    assert not any("enrolled" in t for t in two.warnings)


def test_labels_that_never_occur_twice_are_no_clusters():
    noise = np.random.default_rng(0).normal(size=(60, 8))
    for how in ({}, {"clusters": 5}):
        with pytest.raises(InputError, match="a label that occurs twice"):
            clustering(noise, np.arange(60), **how)
    assert clustering(noise, np.r_[0, np.arange(59)], seeds=1).f1 < 1


def test_repeated_trials_are_refused():
    few = PAIRS[np.r_[GENUINE[:50], IMPOSTOR[:180]]]
    assert verification(Z, Y, trials=few).operating_point(1e-3).status == "not measurable"
    with pytest.raises(InputError, match="trial 230 repeats trial 0, ids 1 and 0.*45770 of 46000"):
        verification(Z, Y, trials=np.tile(few, (200, 1)))
    turned = np.r_[few, few[[7]][:, [1, 0, 2]], few[[3]]]
    with pytest.raises(InputError, match="trial 230 repeats trial 7, .*2 of 232"):
        verification(Z, Y, trials=turned)
    with pytest.raises(InputError, match=f"ids {few[7, 1] + 2**60} and {few[7, 0] + 2**60}"):
        verification(Z, Y, ids=IDS, trials=turned + BY_ID)
    assert verification(Z, Y, gallery=(W, Y), trials=turned[:-1]).genuine == 51  # two sides: two pairs


@pytest.mark.parametrize("scale", [1, 5])
def test_a_cohort_of_those_who_are_compared_is_told(scale):
    strangers = np.random.default_rng(9).normal(size=(50, 16))
    assert verification(Z, Y, cohort=strangers).warnings == ()
    (text,) = verification(Z, Y, cohort=scale * Z).warnings
    assert "120 of 120 members of the cohort" in text
    (text,) = verification(Z, Y, gallery=(W, Y), cohort=np.r_[strangers, scale * W[:3]]).warnings
    assert "3 of 53 members" in text
