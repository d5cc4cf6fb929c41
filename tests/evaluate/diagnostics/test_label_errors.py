"""Suspects with planted errors: how many of the first ones are real."""

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.evaluate import confusion, label_errors, retrieval, same_subject, sample_difficulty
from mettle.evaluate.diagnostics.label_errors import _check_classes, _class_sums, _score_planted_errors


def crowd(seed, subjects=60, each=8, d=32, noise=1.0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(subjects), each)
    return (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(len(y), d))).astype(np.float32), y, rng


@pytest.mark.parametrize(("noise", "wanted"), [(0.5, 0.99), (1.0, 0.9), (1.5, 0.6)])
def test_planted_label_errors_come_first(noise, wanted):
    """24 of 480 labels are wrong: the precision among the first 24, over five draws (1.00, 0.95, 0.82 when written)."""
    shares, named = [], []
    for seed in range(5):
        x, y, rng = crowd(seed, noise=noise)
        wrong = rng.choice(len(y), 24, replace=False)
        labels = y.copy()
        labels[wrong] = (y[wrong] + rng.integers(1, 60, 24)) % 60
        found = label_errors(x, labels)
        first = found.order[:24]
        shares.append(np.isin(first, wrong).mean())
        named.append((found.suggested[:24] == y[first])[np.isin(first, wrong)].mean())
        assert (np.diff(found.suspicion) <= 0).all()
    assert np.mean(shares) >= wanted
    assert np.mean(named) >= wanted


def test_clean_labels_raise_little_suspicion():
    x, y, _ = crowd(0, noise=0.5)
    assert label_errors(x, y).count == 0


def planted(seed, noise, wrong=60, classes=40, each=30):
    """1,200 samples of 40 classes with 60 wrong labels."""
    x, y, rng = crowd(seed, classes, each, noise=noise)
    at = rng.choice(len(y), wrong, replace=False)
    labels = y.copy()
    labels[at] = (y[at] + rng.integers(1, classes, wrong)) % classes
    return x, labels, at


@pytest.mark.parametrize(("noise", "precise", "complete"), [(0.5, 0.98, 0.88), (1.0, 0.9, 0.85), (1.5, 0.8, 0.75)])
def test_the_number_of_wrong_labels_is_estimated(noise, precise, complete):
    shares, said = [], []
    for seed in range(6):
        x, labels, wrong = planted(seed, noise)
        found = label_errors(x, labels)
        assert 40 <= found.noise.wrong <= 90 and found.noise.low <= 60 <= found.noise.high  # a factor of 1.5
        hits = np.isin(found.suspects, wrong)
        shares.append((hits.mean(), hits.sum() / 60))
        assert (found.suspicion[: len(found.suspects)] >= found.noise.cut).all()
        said.append((found.noise.precision, found.noise.recall))
    assert np.mean(shares, axis=0)[0] >= precise and np.mean(shares, axis=0)[1] >= complete
    assert np.abs(np.mean(said, axis=0) - np.mean(shares, axis=0)).max() < 0.15


def test_hundreds_that_fit_elsewhere_by_nature_are_not_listed():
    x, labels, _ = planted(0, noise=2.0)
    found = label_errors(x, labels)
    assert found.count > 500 and 40 <= found.noise.wrong <= 90 and len(found.suspects) < 70


@pytest.mark.parametrize("wrong", [0, 60])
def test_where_wrong_and_clean_look_alike_it_cannot_be_told(wrong):
    for seed in range(3):
        found = label_errors(*planted(seed, noise=3.0, wrong=wrong)[:2])
        assert found.count > 700 and found.noise.wrong is None and len(found.suspects) == 0
        assert "cannot be told" in str(found.noise) and "cannot be told" in repr(found)


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_clean_labels_are_not_estimated_to_be_wrong(noise):
    for seed in range(3):
        found = label_errors(*planted(seed, noise, wrong=0)[:2])
        assert found.noise.wrong == 0 and len(found.suspects) == 0 and found.noise.high <= 3
        assert str(found.noise).startswith("no label looks wrong")


def test_the_estimate_depends_on_no_order_and_no_names():
    x, labels, _ = planted(1, 1.5)
    mix = np.random.default_rng(0).permutation(len(labels))
    names = np.array([f"class {k:02}" for k in range(40)])
    wanted = label_errors(x, labels).noise
    assert label_errors(x[mix], labels[mix]).noise == wanted == label_errors(x, names[labels]).noise


def test_pretended_errors_are_what_relabelling_gives():
    """The suspicion of a sample under another label, against carrying that label out."""
    x, y, _ = crowd(5, subjects=5, each=4)
    _, unit, label, people = _check_classes(x, y)
    sums, size = _class_sums(unit, label, len(people))
    values, weights = _score_planted_errors(unit, label, np.arange(3), sums, size)
    expected = []
    for row in range(3):
        for other in np.setdiff1d(people, y[row]):
            moved = y.copy()
            moved[row] = other
            found = label_errors(x, moved)
            expected.append(found.suspicion[found.order == row][0])
    assert values == pytest.approx(expected, abs=1e-6)
    assert weights == pytest.approx(4 / 16)


def test_people_under_two_labels_come_first():
    """6 of 60 people are split in two: precision among the first 6."""
    x, y, rng = crowd(1)
    split = rng.choice(60, 6, replace=False)
    labels = np.where(np.isin(y, split) & (np.arange(len(y)) % 2 == 0), y + 1000, y)
    found = same_subject(x, labels, count=6)
    assert {(t.first, t.second) for t in found} == {(int(s), int(s) + 1000) for s in split}
    assert found[0].suspicion >= found[-1].suspicion


def test_confusion_adds_up_to_the_nearest_neighbour_error():
    x, y, _ = crowd(3, noise=1.5)
    found = confusion(x, y)
    assert [f.error for f in found] == sorted((f.error for f in found), reverse=True)
    assert np.mean([f.error for f in found]) == pytest.approx(1 - retrieval(x, y).recall[1])
    twins = np.vstack([x, x])
    same = confusion(twins, np.append(y, y + 100))  # every nearest neighbour is the twin under another label
    assert all(f.error == 1 and f.most == (f.label + 100 if f.label < 100 else f.label - 100) for f in same)


def test_difficulty_is_above_zero_where_the_nearest_neighbour_is_a_stranger():
    x, y, _ = crowd(4, noise=1.3)
    wrong = sample_difficulty(x, y) > 0
    assert np.array_equal(retrieval(x, y, k=(1,)).recall_at[1] == 0, wrong)


@pytest.mark.parametrize("ask", [label_errors, same_subject, confusion, sample_difficulty])
def test_what_cannot_be_judged_is_refused(ask):
    with pytest.raises(InputError):
        ask(np.eye(3), [1, 1, 1])
    with pytest.raises(InputError):
        ask(np.full((4, 2), np.nan), [1, 1, 2, 2])
    if ask in (label_errors, same_subject):
        with pytest.raises(InputError, match="two samples"):
            ask(np.eye(3), [1, 2, 3])
