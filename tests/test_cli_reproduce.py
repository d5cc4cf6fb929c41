"""`mettle reproduce`: claims are listed, tried and judged; every claim has a control that could fail."""

import json

import numpy as np
import pytest
import torch

from command_line import mettle, refused
from mettle.cli import claims
from mettle.cli.claims import CLAIMS


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Where the glyphs are kept once they are drawn."""
    return tmp_path_factory.mktemp("cache")


def test_claims_are_listed():
    said = mettle("reproduce")
    assert all(f"  {name} " in said and claim.says in said for name, claim in CLAIMS.items())
    assert json.loads(mettle("reproduce", "--json")) == {name: {"says": claim.says} for name, claim in CLAIMS.items()}


def test_what_cannot_be_tried_is_refused():
    assert refused("reproduce", "nonsense").startswith("no claim 'nonsense': one of literal, stall, ")
    assert refused("reproduce", "stall", "--seeds", "1") == "--seeds must be between 2 and 20, got 1"


def test_some_are_tried_once_each_and_in_their_order():
    said = mettle("reproduce", "stall", "literal", "stall")
    assert [line.split(":")[0] for line in said.splitlines() if not line.startswith(" ")] == ["stall", "literal"]
    assert said.count("  holds\n") == 2
    found = json.loads(mettle("reproduce", "stall", "--json"))["stall"]
    # d [m² − d²] = −2d and d [m − d]² = −2 (m − d): told from the distances alone
    push = found["numbers"]
    assert push["squared"]["0.001"] / push["squared"]["0.5"] == pytest.approx(0.002)
    assert push["hadsell"]["0.001"] / push["hadsell"]["0.5"] == pytest.approx(0.999 / 0.5)


def test_beta_does_nothing_only_where_it_is_said_to():
    numbers = CLAIMS["literal"].trial(2, None).numbers
    assert numbers["literal"] == 0 and numbers["default"] > 0.01


def test_search_finds_the_same(monkeypatch):
    monkeypatch.setattr(claims, "PEOPLE", 500)
    assert CLAIMS["search"].trial(2, None).numbers["same"]


def test_networks_and_metrics_are_compared_for_every_seed(monkeypatch, drawn):
    monkeypatch.setattr(claims, "STEPS", 40)
    for name in ("center", "annealing", "metric"):
        outcome = CLAIMS[name].trial(2, drawn)
        assert [line.split(":")[0] for line in outcome.lines[:2]] == ["seed 0", "seed 1"]
        assert outcome.verdict in ("holds", "contradicted", "not decided")
    again = CLAIMS["annealing"].trial(2, drawn)
    assert again == CLAIMS["annealing"].trial(2, drawn)
    assert again.verdict == "holds"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([1.0, 1.1, 0.9], "holds"), ([-1.0, -1.1, -0.9], "contradicted"), ([1.0, -0.5, 0.2], "not decided")],
)
def test_a_difference_counts_where_its_interval_leaves_out_zero(differences, verdict):
    found = claims._decided([], differences, "x")
    assert found.verdict == verdict
    assert found.numbers["mean"] == pytest.approx(np.mean(differences))
    assert found.numbers["half"] == pytest.approx(4.302653 * np.std(differences, ddof=1) / 3**0.5)  # t of 2 degrees


def test_measures_on_points_whose_answer_is_known():
    z, y = torch.tensor([[0.0, 1], [0, 3], [10, 1], [10, 3]]), torch.tensor([0, 0, 1, 1])
    assert claims._spread(z, y, None) == pytest.approx(4 / 104)
    assert claims._neighbours(z, y) == 100
    assert claims._neighbours(z, torch.tensor([0, 1, 0, 1])) == 0
    vectors = torch.nn.Linear(2, 2, bias=False)
    vectors.weight.data = torch.tensor([[0.0, 5], [1, 0]])
    assert claims._hits(z, y, vectors) == 100


def test_different_seeds_look_at_different_characters(drawn):
    (x, y), (u, v) = (claims._pixels(seed, "train", drawn) for seed in (0, 1))
    assert x.shape[1] == 256 and len(np.unique(y)) == len(np.unique(v)) == 100
    assert 0 <= x.min() < x.max() <= 1
    assert x.shape != u.shape or not np.array_equal(x, u)
