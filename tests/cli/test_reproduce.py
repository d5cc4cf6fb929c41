"""`mettle reproduce`: claims are listed, tried and judged; every claim has a control that could fail."""

import json

import numpy as np
import pytest
import torch

from mettle.cli import reproduce as claims
from mettle.cli.reproduce import CLAIMS
from tests.command_line import mettle, refused


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Where the glyphs are kept once they are drawn."""
    return tmp_path_factory.mktemp("cache")


def test_claims_are_listed():
    said = mettle("reproduce")
    assert all(f"  {name} " in said and claim.says in said for name, claim in CLAIMS.items())
    listed = json.loads(mettle("reproduce", "--json"))
    assert {name: one["says"] for name, one in listed.items()} == {name: claim.says for name, claim in CLAIMS.items()}
    assert [name for name, one in listed.items() if one.get("withdrawn")] == ["metric"]
    assert said.count("(verdict withdrawn, being measured again)") == 1


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
    found = CLAIMS["search"].trial(3, None)
    assert found.numbers["same"]
    controls = ["argpartition", "partition leaves above", "a full sort", "one matrix product"]
    assert all(any(word in line and "ms a probe, Faiss" in line for line in found.lines) for word in controls)
    assert "against the fastest of NumPy" in found.lines[-1]


def test_search_is_judged_against_the_fastest_way_of_numpy(monkeypatch):
    spent = {claims.ARGPARTITION: 4.0, claims.PARTITION: 2.5, claims.SORT: 20.0, claims.PRODUCT: 5.0}
    spent |= {claims.FAISS: 1.0, claims.FAISS_BATCH: 1.0}
    rows = np.arange(10)[None]
    monkeypatch.setattr(claims, "PEOPLE", 50)
    monkeypatch.setattr(claims, "_time_search", lambda way, probes: (way, rows))
    monkeypatch.setattr(claims, "_search_ways", lambda people: spent)  # as fast as it says
    found = CLAIMS["search"].trial(2, None)
    assert found.verdict == "contradicted" and "2.50 times as fast [2.50, 2.50], 3 wanted" in found.lines[-1]
    spent[claims.PARTITION] = 3.5
    assert CLAIMS["search"].trial(2, None).verdict == "holds"
    spent[claims.PRODUCT] = 2.0
    assert CLAIMS["search"].trial(2, None).verdict == "contradicted"


def test_a_withdrawn_claim_shows_its_numbers_and_why_they_decide_nothing():
    tried = claims.Outcome(["seed 0: 1"], "contradicted", {"mean": 1.0})
    found = claims.Claim("it is better", lambda seeds, cache: tried, "it was not tuned").judge(2, None)
    assert found.verdict == "withdrawn" and found.numbers == tried.numbers
    assert found.lines == ["seed 0: 1", "verdict withdrawn, being measured again: it was not tuned"]
    assert CLAIMS["metric"].withdrawn.startswith("one estimator at its defaults, not tuned")


def test_networks_and_metrics_are_compared_for_every_seed(monkeypatch, drawn):
    monkeypatch.setattr(claims, "STEPS", 40)
    tried = {}
    for name in ("center", "annealing", "metric"):
        tried[name] = outcome = CLAIMS[name].trial(2, drawn)
        assert [line.split(":")[0] for line in outcome.lines[:2]] == ["seed 0", "seed 1"]
        assert outcome.verdict in ("holds", "contradicted", "not decided")
    assert tried["annealing"] == CLAIMS["annealing"].trial(2, drawn)
    assert tried["annealing"].verdict == "holds"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([1.0, 1.1, 0.9], "holds"), ([-1.0, -1.1, -0.9], "contradicted"), ([1.0, -0.5, 0.2], "not decided")],
)
def test_a_difference_counts_where_its_interval_leaves_out_zero(differences, verdict):
    found = claims._judge_difference([], differences, "x")
    assert found.verdict == verdict
    assert found.numbers["mean"] == pytest.approx(np.mean(differences))
    assert found.numbers["half"] == pytest.approx(4.302653 * np.std(differences, ddof=1) / 3**0.5)  # t of 2 degrees


def test_measures_on_points_whose_answer_is_known():
    z, y = torch.tensor([[0.0, 1], [0, 3], [10, 1], [10, 3]]), torch.tensor([0, 0, 1, 1])
    assert claims._within_class_share(z, y, None) == pytest.approx(4 / 104)
    assert claims._nearest_accuracy(z, y) == 100
    assert claims._nearest_accuracy(z, torch.tensor([0, 1, 0, 1])) == 0
    vectors = torch.nn.Linear(2, 2, bias=False)
    vectors.weight.data = torch.tensor([[0.0, 5], [1, 0]])
    assert claims._class_accuracy(z, y, vectors) == 100


def test_different_seeds_look_at_different_characters(drawn):
    (x, y), (u, v) = (claims._glyph_pixels(seed, "train", drawn) for seed in (0, 1))
    assert x.shape[1] == 256 and len(np.unique(y)) == len(np.unique(v)) == 100
    assert 0 <= x.min() < x.max() <= 1
    assert x.shape != u.shape or not np.array_equal(x, u)
