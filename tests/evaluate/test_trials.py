"""Trials by id, trials files, matrices of domains, cohort normalisation."""

import json
from itertools import combinations

import numpy as np
import pytest

from mettle.errors import DataError, InputError
from mettle.evaluate import domain_matrix, from_scores, read_trials, verification
from oracles import metrics as oracle


def crowd(seed, subjects=20, each=4, d=12, noise=0.9, dtype=np.float64):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(subjects), each))
    return (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(len(y), d))).astype(dtype), y


def test_a_trials_file_names_samples_by_id(tmp_path):
    x, y = crowd(0)
    ids = 2**60 + np.random.default_rng(0).permutation(len(y))
    pairs = [(i, j) for i, j in combinations(range(len(y)), 2) if (i + j) % 3]
    for separator, head in ((",", "first,second,target\n"), ("\t", ""), (" ", "# trials\n\n")):
        lines = [separator.join(map(str, (ids[i], ids[j], int(y[i] == y[j])))) for i, j in pairs]
        path = tmp_path / "trials.txt"
        path.write_text(head + "\r\n".join(lines) + "\n", encoding="utf-8-sig")
        trials = read_trials(path)
        assert trials.dtype == np.int64
        by_id = verification(x, y, ids=ids, trials=trials)
        by_row = verification(x, y, trials=np.array([(i, j, int(y[i] == y[j])) for i, j in pairs]))
        assert np.array_equal(by_id.scores.impostor, by_row.scores.impostor)
        assert by_id.eer == by_row.eer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,1\n3,4\n", "line 2"),
        ("1,2,1\nx,y,z\n", "line 2"),
        ("1,2,5\n", "line 1: the target"),
        ("1.5,2,1\n", "line 1"),
        (f"{2**63},2,1\n", "int64"),
        ("id,id,target\n", "no trials"),
        ("", "no trials"),
    ],
)
def test_a_wrong_line_is_named(text, words, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_trials(path)


def test_trials_that_name_nobody_are_refused(tmp_path):
    x, y = crowd(1)
    ids = np.arange(len(y)) + 100
    with pytest.raises(InputError, match="trial 1 names id 7 on its second side"):
        verification(x, y, ids=ids, trials=np.array([[100, 101, int(y[0] == y[1])], [100, 7, 0]]))
    with pytest.raises(InputError, match="occur twice"):
        verification(x, y, ids=y, trials=np.array([[0, 1, 0]]))
    with pytest.raises(DataError, match="cannot read"):
        read_trials(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read"):
        read_trials(tmp_path / "binary")
    with pytest.raises(InputError, match="path must be that of a trials file, got NoneType"):
        read_trials(None)


def test_a_matrix_of_domains_holds_within_and_across():
    x, y = crowd(2, each=6)
    d = np.random.default_rng(0).choice(["left", "right", "top"], len(y))
    m = domain_matrix(x, y, d)
    assert m.domains == ("left", "right", "top")
    for a in m.domains:
        for b in m.domains:
            if a == b:
                wanted = verification(x[d == a], y[d == a])
            else:
                wanted = verification(x[d == b], y[d == b], gallery=(x[d == a], y[d == a]))
            assert m[a, b].eer == wanted.eer
            assert m[a, b].auc == m[b, a].auc
    assert np.asarray(m.values("tar@0.1")).shape == (3, 3)
    json.dumps(m.summary(), allow_nan=False)


def test_a_cell_without_genuine_pairs_is_none_and_says_why():
    x, y = crowd(3)
    d = np.where(y < 10, "a", "b")  # nobody is in both
    m = domain_matrix(x, y, d)
    assert m["a", "b"] is None
    assert "genuine" in m.why_not["a", "b"]
    assert m.values()[0][1] is None
    json.dumps(m.summary(), allow_nan=False)
    with pytest.raises(InputError, match="domains"):
        domain_matrix(x, y, None)


@pytest.mark.parametrize("top", [None, 7])
@pytest.mark.parametrize("mode", ["exact", "histogram"])
def test_cohort_scores_normalise_pair_by_pair(top, mode):
    x, y = crowd(4)
    cohort = np.random.default_rng(1).normal(size=(25, 12))
    unit, others = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, cohort))
    against = [sorted((others @ u).tolist())[-(top or 25) :] for u in unit]
    pairs = list(combinations(range(len(y)), 2))
    s = [oracle.normalised(float(unit[i] @ unit[j]), against[i], against[j]) for i, j in pairs]
    wanted = from_scores(s, [int(y[i] == y[j]) for i, j in pairs])
    v = verification(x, y, cohort=cohort, cohort_top=top, mode=mode, chunk=13)
    assert np.allclose(v.scores.genuine, wanted.scores.genuine, atol=1e-9)
    assert v.eer == pytest.approx(wanted.eer, abs=1e-12)
    assert abs(v.auc - wanted.auc) <= v.bounds["auc"] + 1e-12
    assert v.threshold(0.05) == pytest.approx(wanted.threshold(0.05), abs=1e-9)
    trials = np.array([(i, j, y[i] == y[j]) for i, j in pairs])
    listed = verification(x, y, cohort=cohort, cohort_top=top, trials=trials)
    assert listed.eer == pytest.approx(wanted.eer, abs=1e-12)
    shelf = verification(x[:40], y[:40], gallery=(x[40:], y[40:]), cohort=cohort, cohort_top=top, mode=mode)
    assert shelf.genuine + shelf.impostor == 1600


def test_a_cohort_evens_out_samples_that_score_high_with_everybody():
    rng = np.random.default_rng(5)
    y = np.repeat(np.arange(40), 4)
    x = rng.normal(size=(40, 16))[y] + 0.7 * rng.normal(size=(160, 16))
    mean = rng.normal(size=16) * 2
    pulled = np.where((np.arange(160) % 2 == 0)[:, None], x + mean, x)  # half of the samples lean one way
    cohort = rng.normal(size=(200, 16)) + np.where((np.arange(200) % 2 == 0)[:, None], mean, 0)
    assert verification(pulled, y, cohort=cohort).eer < verification(pulled, y).eer - 0.01


def test_a_cohort_that_cannot_normalise_is_refused():
    x, y = crowd(6)
    for cohort, words in [
        (np.ones((1, 12)), "at least two"),
        (np.ones((5, 3)), "at least two"),
        (np.ones((5, 12)), "alike"),
        (np.full((5, 12), np.nan), "finite"),
    ]:
        with pytest.raises(InputError, match=words):
            verification(x, y, cohort=cohort)
    with pytest.raises(InputError, match="cohort_top"):
        verification(x, y, cohort=np.eye(12), cohort_top=13)


class Read:
    """Numbers that know how often they were read."""

    def __init__(self, values):
        self.values, self.times = values, 0

    def __array__(self, dtype=None, copy=None):
        self.times += 1
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_cohort_is_read_and_checked_once(dtype):
    x, y = crowd(7)
    plain = np.random.default_rng(2).normal(size=(25, 12)).astype(dtype)
    cohort = Read(plain)
    v = verification(x, y, cohort=cohort, cohort_top=9)
    assert cohort.times == 1
    assert v.eer == verification(x, y, cohort=plain, cohort_top=9).eer
