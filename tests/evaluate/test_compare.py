"""Paired comparison: the same subjects in every replicate, against replicates drawn one by one."""

import json

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.evaluate import compare, from_scores, retrieval, verification
from mettle.evaluate.bootstrap import bootstrap_weights


def two_models(seed, subjects=60, each=4, d=16, noise=(1.0, 1.1), shared=0.9):
    """Two embeddings of the same people whose errors go together."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(subjects), each)
    base = rng.normal(size=(subjects, d))[y]
    common = rng.normal(size=base.shape)
    found = []
    for scale in noise:
        own = rng.normal(size=base.shape)
        found.append((base + scale * (shared * common + (1 - shared) * own)).astype(np.float32))
    return *found, y


def test_a_paired_interval_is_shorter_than_two_separate_ones():
    a, b, y = two_models(0)
    v, w = verification(a, y), verification(b, y)
    c = compare(v, w, "eer")
    assert c.difference == pytest.approx(v.eer - w.eer)
    alone = [i.high - i.low for i in (v.interval("eer"), w.interval("eer"))]
    assert c.interval.high - c.interval.low < 0.7 * np.hypot(*alone)
    assert "paired" in c.interval.method
    json.dumps(c.summary(), allow_nan=False)


@pytest.mark.parametrize("name", ["eer", "auc", ("tar", 0.1), "tar@0.01"])
def test_a_model_against_itself_has_no_difference(name):
    a, _, y = two_models(1)
    c = compare(verification(a, y), verification(a, y), name)
    assert (c.difference, c.interval.low, c.interval.high) == (0, 0, 0)
    assert not c.excludes_zero


def test_a_clear_difference_is_decided_and_changes_sign_when_turned_round():
    a, b, y = two_models(2, noise=(0.6, 1.6))
    v, w = verification(a, y), verification(b, y)
    one, two = compare(v, w), compare(w, v)
    assert one.excludes_zero
    assert one.difference < 0
    assert (one.interval.low, one.interval.high) == pytest.approx((-two.interval.high, -two.interval.low))


def test_retrievals_are_paired_query_by_query():
    a, b, y = two_models(3, noise=(1.0, 1.3))
    r, q = retrieval(a, y), retrieval(b, y)
    c = compare(r, q, "map_at_r")
    d = r.per_query["map_at_r"] - q.per_query["map_at_r"]
    assert c.difference == pytest.approx(d.mean())
    sums = np.bincount(r.subjects, weights=d)
    drawn = bootstrap_weights(60, 1000, 0) @ sums / len(y)
    low, high = np.quantile(drawn, (0.025, 0.975))
    assert (c.interval.low, c.interval.high) == pytest.approx((low, high), abs=0.25 * (high - low))


def test_the_worst_group_is_found_anew_in_every_replicate():
    a, b, y = two_models(4, noise=(1.0, 1.4))
    kind = np.where(y % 2, "odd", "even")
    r, q = retrieval(a, y), retrieval(b, y)
    c = compare(r, q, "recall@1", groups=kind)
    worst = [min(s.recall_at[1][kind == k].mean() for k in ("odd", "even")) for s in (r, q)]
    assert (c.first, c.second) == pytest.approx(worst)
    assert c.name == "worst group recall@1"


def test_only_the_same_people_and_pairs_can_be_compared():
    a, b, y = two_models(5)
    v = verification(a, y)
    for other in (verification(b[:-1], y[:-1]), verification(b, y + 1), verification(b, y, gallery=(a, y))):
        with pytest.raises(InputError, match="same labels and the same pairs"):
            compare(v, other)
    with pytest.raises(InputError, match="two verifications, two retrievals or two probes"):
        compare(v, retrieval(b, y))
    with pytest.raises(InputError, match="no metric named"):
        compare(v, v, "err")
    loose = from_scores([0.9, 0.1], [1, 0])
    with pytest.raises(InputError, match="subjects"):
        compare(loose, loose)
    with pytest.raises(InputError, match="same queries"):
        compare(retrieval(a, y), retrieval(b[4:], y[4:]))
