"""Samples on both sides and exact copies: found by their numbers where no ids tell, and never in silence."""

import json

import numpy as np
import pytest
import torch

from mettle.errors import DataError
from mettle.evaluate import audit, identification, probe, retrieval, verification
from mettle.evaluate.diagnostics.duplicates import find_duplicates, hash_rows
from mettle.report.caveats import rank_audit_caveats


def crowd(people=12, each=5, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(people), each)
    return (rng.normal(size=(people, 8))[y] + rng.normal(size=(len(y), 8))).astype(dtype), y


ASK = {
    "verification": lambda a, b: verification(*a, gallery=b),
    "retrieval": lambda a, b: retrieval(*a, gallery=b, k=(1,)),
    "identification": lambda a, b: identification(b, a),
    "probe": lambda a, b: probe(b, a, k=1),
}


@pytest.mark.parametrize("name", ASK)
@pytest.mark.parametrize("kind", ["same object", "copy", "shuffled", "float32 and float64", "tensor", "part"])
def test_a_set_that_is_its_own_gallery_is_a_leak(name, kind):
    x, y = crowd(dtype=np.float32)
    mix = np.random.default_rng(1).permutation(len(y))
    other = {
        "same object": (x, y),
        "copy": (x.copy(), y.copy()),
        "shuffled": (x[mix], y[mix]),
        "float32 and float64": (x.astype(np.float64), y),
        "tensor": (torch.from_numpy(x), torch.from_numpy(y)),
        "part": (np.vstack([x, x + 1, x + 2, x - 1]), np.tile(y, 4)),
    }[kind]
    with pytest.raises(DataError, match="leak: 60 of 60 rows"):
        ASK[name]((x, y), other)


@pytest.mark.parametrize("name", ASK)
def test_a_few_rows_on_both_sides_are_warned_of(name):
    x, y = crowd()
    other = x + 1
    other[:7] = x[:7]
    found = ASK[name]((x, y), (other, y))
    assert any("7 of 60 rows" in text for text in found.warnings)
    clean = ASK[name]((x, y), (x + 1, y))
    assert not any("number for number" in text for text in clean.warnings)


def test_equal_rows_of_other_labels_are_no_leak():
    x, y = crowd()
    assert retrieval(x, y, gallery=(x, (y + 1) % 12), k=(1,)).warnings == ()


def test_ids_say_what_numbers_cannot():
    x, y = crowd()
    ids = np.arange(60)
    apart = retrieval(x, y, ids=ids, gallery=(x, y, None, ids), k=(1,))
    assert apart.recall[1] == retrieval(x, y, k=(1,)).recall[1]
    assert probe((x, y, None, ids), (x, y, None, ids + 60), k=1).knn.accuracy == 1


def test_all_alike_is_a_collapse_and_no_leak():
    y = np.repeat(np.arange(4), 3)
    found = retrieval(np.ones((12, 3)), y, gallery=(np.ones((12, 3)), y), k=(1,))
    assert found.recall[1] == pytest.approx(1 / 4)  # chance, not 1
    assert any("12 of 12 rows" in text for text in found.warnings)


def test_hashes_are_equal_just_for_equal_rows():
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, size=(3000, 4)).astype(float)
    x[::7] *= -0.0 + 1
    keys = hash_rows(x)
    for a, b in rng.integers(0, 3000, size=(3000, 2)):
        assert (keys[a] == keys[b]) == bool((x[a] == x[b]).all())
    assert hash_rows(np.array([[0.0, 1.0]])) == hash_rows(np.array([[-0.0, 1.0]]))


def test_copies_within_equal_a_count_in_plain_python():
    rng = np.random.default_rng(3)
    x, y, ids = rng.integers(0, 3, size=(200, 4)) + 1.0, rng.integers(0, 5, 200), rng.permutation(200)
    ids[:20] = ids[20:40]  # one sample twice is no copy
    x[:20], y[:20] = x[20:40], y[20:40]
    seen: dict = {}
    for k in {int(i): k for k, i in reversed(list(enumerate(ids)))}.values():
        seen.setdefault(tuple(x[k]), []).append(k)
    wanted = [rows for rows in seen.values() if len(rows) > 1]
    found = find_duplicates(x, y, ids)
    assert (found.rows, found.vectors) == (sum(map(len, wanted)), len(wanted))
    assert found.contradictions == sum(len({int(y[k]) for k in rows}) > 1 for rows in wanted)
    assert all((x[list(rows)] == x[rows[0]]).all() and len(rows) > 1 for rows in found.examples)


def test_an_audit_reports_exact_copies():
    x, y = crowd()
    assert audit(x, y).copies.rows == 0
    five = audit(np.repeat(x, 5, axis=0), np.repeat(y, 5))
    text = next(t for t in rank_audit_caveats(five).decisive if "exact copies" in t)
    assert "300 of 300 rows" in text and "60 vectors" in text and "0 and 1" in text
    facts = json.loads(json.dumps(five.summary()))["copies"]
    assert (facts["rows"], facts["vectors"], facts["contradictions"]) == (300, 60, 0)
    assert [one["row"] for one in facts["examples"][0]] == [0, 1, 2, 3]
    one_sample = audit(np.repeat(x, 5, axis=0), np.repeat(y, 5), ids=np.repeat(np.arange(60), 5))
    assert one_sample.copies.rows == 0


def test_copies_under_two_labels_come_first():
    x, y = crowd()
    x[59], x[1] = x[0], x[2]
    found = audit(x, y)
    assert found.copies.examples[0] == (0, 59)
    assert "1 of these vectors carry several labels" in " ".join(rank_audit_caveats(found))
