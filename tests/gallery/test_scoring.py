"""Several templates, one score: each rule against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import InputError
from mettle.gallery.scoring import FUSION_RULES, check_rule, fused_rows, fused_score

sizes = st.tuples(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**32 - 1))


def units(count: int, dim: int, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=(count, dim))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def expected(rule: str, probe: np.ndarray, templates: np.ndarray) -> float:
    """By the words of the table, in double precision."""
    p, t = probe.astype(float), templates.astype(float)
    if rule == "best":
        return max(float(np.dot(p, row)) for row in t)
    if rule == "mean":
        return sum(float(np.dot(p, row)) for row in t) / len(t)
    centre = sum(t)
    return float(np.dot(p, centre) / np.sqrt(np.dot(centre, centre)))


@pytest.mark.parametrize("rule", FUSION_RULES)
@given(size=sizes)
def test_a_rule_is_its_definition(rule, size):
    count, dim, seed = size
    *templates, probe = units(count + 1, dim, seed)
    found = fused_score(rule, probe, np.stack(templates))
    assert found == pytest.approx(np.clip(expected(rule, probe, np.stack(templates)), -1, 1), abs=1e-5)


@pytest.mark.parametrize("rule", FUSION_RULES)
def test_one_template_gives_the_same_score_under_every_rule(rule):
    template, probe = units(2, 16, 3)
    assert fused_score(rule, probe, template[None]) == pytest.approx(float(template.astype(float) @ probe), abs=1e-6)


@pytest.mark.parametrize("rule", FUSION_RULES)
@given(size=sizes)
def test_order_of_templates_does_not_matter(rule, size):
    count, dim, seed = size
    templates, probe = units(count, dim, seed), units(1, dim, seed + 1)[0]
    assert fused_score(rule, probe, templates) == pytest.approx(fused_score(rule, probe, templates[::-1]), abs=1e-6)


def test_templates_that_cancel_out_are_near_nobody():
    row = units(1, 8, 0)
    opposite = np.concatenate([row, -row])
    assert fused_score("centroid", row[0], opposite) == 0
    assert fused_score("mean", row[0], opposite) == pytest.approx(0, abs=1e-6)
    assert fused_score("best", row[0], opposite) == pytest.approx(1)


def test_rows_of_best_are_the_templates_themselves():
    templates = units(4, 8, 1)
    assert fused_rows("best", templates) is templates
    assert fused_rows("mean", templates).shape == fused_rows("centroid", templates).shape == (1, 8)


def test_an_unknown_rule_is_told_with_the_nearest_name():
    with pytest.raises(InputError, match="did you mean 'centroid'"):
        check_rule("centriod")
