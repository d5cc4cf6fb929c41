"""Which question a run answers, and what follows for the numbers of a closed set."""

import numpy as np
import pytest

from mettle.errors import DataError
from mettle.evaluate.run.probes import compare_correct, interval_over_samples, lowest_means
from mettle.evaluate.run.question import RETRIEVAL_LOSSES, choose_question
from mettle.losses import __all__ as LOSSES
from mettle.train.recipe import parse_recipe

OPEN = {"data": {"shared_identities": 0, "test_identities": 5}}
CLOSED = {"data": {"shared_identities": 5, "test_identities": 5}, "probe": {"labels": {"status": "ok"}}}
MIXED = {"data": {"shared_identities": 2, "test_identities": 5}, "probe": {"labels": {"status": "ok"}}}


def recipe(**tables):
    return parse_recipe(tables)


@pytest.mark.parametrize(
    ("tables", "metrics", "expected"),
    [
        ({}, OPEN, "verification"),
        ({}, CLOSED, "closed-set"),
        ({}, MIXED, "verification"),
        ({"loss": {"kind": "ProxyAnchor"}}, OPEN, "retrieval"),
        ({"loss": {"kind": "ProxyAnchor"}}, CLOSED, "closed-set"),
        ({"loss": {"kind": "ProxyAnchor"}, "train": {"select": "eer"}}, OPEN, "verification"),
        ({"train": {"select": "map@r"}}, OPEN, "retrieval"),
        ({"train": {"select": "worst recall@1 by domain"}}, OPEN, "retrieval"),
        ({"train": {"select": "tar@1e-3"}}, OPEN, "verification"),
        ({"loss": {"kind": "Triplet"}, "train": {"method": "hardness-aware"}}, OPEN, "retrieval"),
        ({"loss": {"kind": "ProxyAnchor"}, "evaluate": {"question": "verification"}}, CLOSED, "verification"),
        ({"evaluate": {"question": "retrieval"}}, OPEN, "retrieval"),
    ],
)
def test_the_first_rule_that_applies_decides_and_the_recipe_before_it(tables, metrics, expected):
    found = choose_question(recipe(**tables), metrics)
    assert found.name == expected and found.reason


def test_a_closed_set_cannot_be_asked_of_identities_that_are_new():
    with pytest.raises(DataError, match="evaluate.question"):
        choose_question(recipe(evaluate={"question": "closed-set"}), OPEN)


def test_every_retrieval_loss_is_a_loss():
    assert set(RETRIEVAL_LOSSES) <= set(LOSSES)


def test_the_lowest_mean_is_that_of_a_plain_loop():
    rng = np.random.default_rng(0)
    correct, groups = rng.integers(0, 2, 60), rng.choice([3, 7, 8], 60)
    weights = rng.multinomial(60, np.full(60, 1 / 60), 250)
    expected = [
        min(np.average(correct[groups == g], weights=w[groups == g]) for g in np.unique(groups) if w[groups == g].sum())
        for w in weights
    ]
    np.testing.assert_allclose(lowest_means(correct, groups, weights), expected)


def test_two_classes_are_enough_for_intervals_over_samples():
    rng = np.random.default_rng(1)
    y = np.repeat([0, 1], 150)
    first, second = (rng.random(300) < p for p in (0.9, 0.6))
    found = compare_correct(first.astype(float), second.astype(float), y)
    assert found["top_1"]["difference"] == pytest.approx(first.mean() - second.mean())
    band = found["top_1"]["interval"]
    spread = np.std(first.astype(float) - second) / np.sqrt(300)  # the paired standard error
    assert band["low"] == pytest.approx(found["top_1"]["difference"] - 1.96 * spread, abs=0.01)
    assert band["high"] == pytest.approx(found["top_1"]["difference"] + 1.96 * spread, abs=0.01)
    worst = interval_over_samples(first.astype(float), y)
    lowest = min(first[y == k].mean() for k in (0, 1))
    assert worst["low"] < lowest < worst["high"]
    same = compare_correct(first.astype(float), first.astype(float), y)["worst_class"]
    assert same["difference"] == 0 and same["interval"]["low"] == same["interval"]["high"] == 0
