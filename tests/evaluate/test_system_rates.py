"""FAR and FRR of a whole system against attempts that are counted one by one."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import InputError
from mettle.evaluate import NotMeasurable, from_scores, verification

SCORE = st.integers(0, 8).map(lambda k: k / 8)


@st.composite
def systems(draw):
    """Some people, each with the same number of enrolments and of probes, some of which gave no template.

    Which fail is the same for everybody, so that shares of samples are shares of pairs. Returns the score of every
    (enrolment, probe) as a list of (same person, score or None).
    """
    who, enrolments, probes = draw(st.integers(2, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dead_e, dead_p = draw(st.integers(0, enrolments - 1)), draw(st.integers(0, probes - 1))
    attempts = []
    for a in range(who):
        for b in range(who):
            for e in range(enrolments):
                for p in range(probes):
                    gone = e < dead_e or p < dead_p
                    attempts.append((a == b, None if gone else draw(SCORE)))
    return attempts, dead_p / probes, dead_e / enrolments


@given(systems(), SCORE)
@settings(max_examples=150, deadline=None)
def test_rates_are_shares_of_attempts_however_failures_are_told(system, tau):
    attempts, fta, fte = system
    strangers = [s for same, s in attempts if not same]
    friends = [s for same, s in attempts if same]
    far = sum(s is not None and s >= tau for s in strangers) / len(strangers)
    frr = sum(s is None or s < tau for s in friends) / len(friends)
    kept = [(same, s) for same, s in attempts if s is not None]
    left_out = from_scores([s for _, s in kept], [int(same) for same, _ in kept])
    found = left_out.system_rates(tau, fta=fta, fte=fte)
    assert (found.far, found.frr) == pytest.approx((far, frr), abs=1e-14)
    assert (found.fmr, found.fnmr) == left_out.rates(tau)
    assert (found.fta_genuine, found.fta_impostor, found.fte) == (fta, fta, fte)
    scored = from_scores([-math.inf if s is None else s for _, s in attempts], [int(same) for same, _ in attempts])
    same = scored.system_rates(tau)
    assert (same.far, same.frr) == (far, frr) == scored.rates(tau)
    assert (same.fmr, same.fnmr) == left_out.rates(tau)
    assert (same.fta_genuine, same.fta_impostor, same.fte) == (
        friends.count(None) / len(friends),
        strangers.count(None) / len(strangers),
        0,
    )


def test_failures_of_the_two_kinds_of_pairs_are_told_apart():
    v = from_scores([0.9, 0.2, -np.inf, 0.8, 0.1, 0.1, -np.inf, 0.3, 0.2], [1, 1, 1, 0, 0, 0, 0, 0, 0])
    r = v.system_rates(0.5)
    assert (r.threshold, r.fmr, r.fnmr) == (0.5, 1 / 5, 1 / 2)
    assert (r.fta_genuine, r.fta_impostor) == (1 / 3, 1 / 6)
    assert (r.far, r.frr) == (1 / 6, 2 / 3) == v.rates(0.5)
    assert json.loads(json.dumps(v.summary(), allow_nan=False))["failed"] == {"genuine": 1, "impostor": 1}
    assert "2 pairs have a failed template" in v.warnings[0]


@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_embeddings_take_failures_as_rates(mode):
    y = np.repeat(np.arange(30), 4)
    x = np.random.default_rng(0).normal(size=(30, 8))[y] + np.random.default_rng(1).normal(size=(120, 8))
    v = verification(x, y, mode=mode)
    fmr, fnmr = v.rates(0.4)
    r = v.system_rates(0.4, fta=0.1, fte=0.02)
    assert r.far == pytest.approx(fmr * 0.9 * 0.98)
    assert r.frr == pytest.approx(0.02 + 0.98 * (0.1 + fnmr * 0.9))
    assert (v.system_rates(0.4).far, v.system_rates(0.4).frr) == (fmr, fnmr)
    assert v.summary()["failed"] == {"genuine": 0, "impostor": 0}


def test_what_would_count_twice_or_rate_nothing_is_refused():
    v = from_scores([0.9, -np.inf, 0.1], [1, 1, 0])
    for told in ({"fta": 0.1}, {"fte": 0.0}):
        with pytest.raises(InputError, match="1 failed pairs .* counted already"):
            v.system_rates(0.5, **told)
    for bad in (-0.1, 1.1, math.nan, "0.1", True):
        with pytest.raises(InputError, match="fta must be a share"):
            from_scores([0.9, 0.1], [1, 0]).system_rates(0.5, fta=bad)
    with pytest.raises(InputError, match="threshold must be a number"):
        v.system_rates(math.nan)
    with pytest.raises(NotMeasurable, match="every genuine pair"):
        from_scores([-np.inf, 0.1], [1, 0]).system_rates(0.5)
    with pytest.raises(NotMeasurable, match="every impostor pair"):
        from_scores([0.3, -np.inf], [1, 0]).system_rates(0.5)
    whole = from_scores([0.9, 0.1], [1, 0]).system_rates(0.5, fta=1.0)
    assert (whole.far, whole.frr) == (0, 1)
