"""Too few subjects carry no interval: always a typed refusal, never an interval of no width, whatever the seed."""

import json

import numpy as np
import pytest

from command_line import mettle
from mettle.errors import InputError
from mettle.evaluate import (
    NotMeasurable,
    audit,
    calibrate,
    compare,
    from_scores,
    groups,
    identification,
    probe,
    retrieval,
    verification,
)
from mettle.evaluate.bootstrap import LEAST, TOO_FEW, bca_interval, bootstrap_weights
from mettle.report.caveats import rank_audit_caveats

WORDS = "no interval: too few subjects"


def crowd(subjects, each=5, seed=0, noise=1.5):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(subjects), each)
    return rng.normal(size=(subjects, 8))[y] + noise * rng.normal(size=(len(y), 8)), y


def stated(value):
    """Every interval in a summary."""
    if isinstance(value, dict):
        found = [value["interval"]] if "interval" in value else []
        return found + [one for item in value.values() for one in stated(item)]
    return [one for item in value for one in stated(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("subjects", range(2, LEAST))
@pytest.mark.parametrize("seed", range(5))
def test_no_seed_makes_an_interval_of_few_subjects(subjects, seed):
    x, y = crowd(subjects, seed=seed)
    v, r = verification(x, y), retrieval(x, y, k=(1,))
    for ask in (lambda: v.interval("eer", seed=seed), lambda: v.interval("auc"), lambda: v.interval("tar@0.5")):
        with pytest.raises(NotMeasurable, match=WORDS):
            ask()
    for ask in (
        lambda: v.intervals_at(0.5, seed=seed),
        lambda: r.interval("recall@1", seed=seed),
        lambda: compare(v, v, "eer", seed=seed),
        lambda: compare(r, r, "recall@1", seed=seed),
    ):
        with pytest.raises(NotMeasurable, match=WORDS):
            ask()
    assert stated(v.summary()) == [None] * len(stated(v.summary()))
    assert stated(r.summary()) == [None] * len(stated(r.summary()))
    json.dumps(v.summary(), allow_nan=False)


def test_six_subjects_have_an_interval_of_some_width():
    for seed in range(10):
        x, y = crowd(LEAST, seed=seed)
        v, r = verification(x, y), retrieval(x, y, k=(1,))
        for i in (v.interval("eer", seed=seed), v.interval("auc", seed=seed), r.interval("map_at_r", seed=seed)):
            assert i.low < i.high


def test_everybody_must_have_pairs_of_both_kinds():
    """Ten people, of whom four have a second sample: genuine pairs of four subjects say little about misses."""
    x, y = crowd(10)
    keep = (np.arange(len(y)) % 5 == 0) | (y < 4)
    with pytest.raises(NotMeasurable, match="4 subjects with genuine pairs where at least 6"):
        verification(x[keep], y[keep]).interval("eer")
    shelf = np.arange(len(y)) % 5 == 0
    three = verification(x[shelf & (y < 3)], y[shelf & (y < 3)], gallery=(x[~shelf & (y < 3)], y[~shelf & (y < 3)]))
    with pytest.raises(NotMeasurable, match="3 subjects"):
        three.interval("eer")
    pairs = np.array([[k, k] for k in range(8)] + [[0, 1], [0, 1]])
    v = from_scores(np.linspace(1, 0, 10), pairs[:, 0] == pairs[:, 1], pairs)
    with pytest.raises(NotMeasurable, match="2 subjects with impostor pairs"):
        v.interval("auc")


def test_identification_needs_enough_people_of_each_kind():
    x, y = crowd(12)
    first = np.arange(len(y)) % 5 == 0
    few = identification((x[first & (y < 4)], y[first & (y < 4)]), (x[~first], y[~first]))
    with pytest.raises(NotMeasurable, match="4 subjects with mated probes"):
        few.interval("rank@1")
    assert few.summary()["metrics"]["rank@1"]["interval"] is None
    strange = identification((x[first & (y < 9)], y[first & (y < 9)]), (x[~first], y[~first]))
    assert strange.interval("rank@1").low < strange.interval("rank@1").high
    with pytest.raises(NotMeasurable, match="3 subjects with unknown probes"):
        strange.interval("tpir@0.5")
    assert strange.summary((0.5,))["tpir"][0]["interval"] is None


def test_groups_calibrations_and_probes_survive_without_intervals():
    x, y = crowd(9)
    v = verification(x, y)
    found = groups(v, np.where(y < 3, "few", "many"), far=0.5, minimum=2)
    rows = {row["name"]: row["interval"] for row in found.summary()["groups"]}
    assert rows["few"] is None and rows["many"]["low"] < rows["many"]["high"]
    half = verification(x[y < 5], y[y < 5])
    carried = calibrate(verification(x[y >= 5], y[y >= 5]), 0.5).transfer(half)
    assert (carried.fmr_interval, carried.fnmr_interval) == (None, None)
    p = probe((x, y), (x[:4] + 1, y[:4]))
    with pytest.raises(NotMeasurable, match=WORDS):
        p.interval("linear")
    assert p.summary()["linear"]["interval"] is None


def test_a_worst_group_of_few_people_is_not_compared():
    x, y = crowd(20)
    r = retrieval(x, y, k=(1,))
    with pytest.raises(NotMeasurable, match="2 subjects in group 'few'"):
        compare(r, r, groups=np.where(y < 2, "few", "many"))


def test_verifications_are_not_compared_by_groups_in_silence():
    x, y = crowd(20)
    v = verification(x, y)
    with pytest.raises(InputError, match="groups is for two retrievals"):
        compare(v, v, "eer", groups=y % 2)
    a, b = (groups(verification(x + s, y), y % 2, minimum=2)["0"].verification for s in (0, 0.3))
    assert compare(a, b, "eer").interval.low <= compare(a, b, "eer").difference


@pytest.mark.parametrize("replicates", [1, 2, 39])
def test_an_interval_needs_a_replicate_in_each_tail(replicates):
    v = verification(*crowd(12))
    with pytest.raises(InputError, match="replicates must be at least 40"):
        v.interval("eer", replicates=replicates)
    wide = v.interval("eer", level=0.5, replicates=20)
    assert wide.low <= v.eer <= wide.high


@pytest.mark.parametrize("argument", [{"seed": -1}, {"seed": 0.5}, {"replicates": 0}, {"replicates": 99.5}])
def test_what_is_no_whole_number_is_refused(argument):
    v = verification(*crowd(8))
    with pytest.raises(InputError, match="must be a whole number"):
        v.interval("eer", **argument)
    with pytest.raises(InputError, match="must be a whole number"):
        retrieval(*crowd(8), k=(1,)).interval("recall@1", **argument)


def test_people_who_all_do_alike_leave_the_rule_of_three():
    """One of two queries of everybody is right: no resample moves the mean, yet another person may do otherwise."""
    weights = bootstrap_weights(20, 1000, 0)
    i = bca_interval(np.full(1000, 0.5), 0.5, weights, 0.95, 0, "words", rate=40)
    assert (i.low, i.high) == pytest.approx((0.5 - 0.5 * 3 / 20, 0.5 + 0.5 * 3 / 20))
    assert "rule of three" in i.method
    still = bca_interval(np.full(1000, 0.2), 0.3, weights, 0.95, 0, "words")
    assert still.low <= 0.3 <= still.high


def test_an_audit_of_two_people_says_that_there_is_no_interval():
    found = audit(*crowd(2, each=20))
    facts = found.summary()
    assert stated(facts["scenarios"]) == [None] * len(stated(facts["scenarios"]))
    assert any("too few for any interval" in text for text in rank_audit_caveats(found).decisive)
    assert TOO_FEW == WORDS


def test_the_command_prints_no_interval_of_no_width(tmp_path):
    x, y = crowd(2, each=20)
    np.savez(tmp_path / "two.npz", embeddings=x, label=y)
    said = mettle("audit", tmp_path / "two.npz", "-o", tmp_path / "out")
    assert "EER" in said and "[" not in said.partition("note:")[0].split("EER")[1].split("AUC")[0]
    assert WORDS in (tmp_path / "out" / "audit.html").read_text()
