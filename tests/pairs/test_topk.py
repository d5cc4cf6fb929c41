"""Neighbours found block by block are those of the whole matrix."""

import numpy as np
import pytest
import torch

from mettle.errors import InputError
from mettle.pairs.similarity import topk


def all_scores(q: np.ndarray, r: np.ndarray, measure: str) -> np.ndarray:
    if measure == "cosine":
        q, r = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, r))
    if measure in ("cosine", "dot"):
        return q @ r.T
    apart = q[:, None] - r[None]
    return -(apart**2).sum(-1) if measure == "squared" else -np.abs(apart).sum(-1)


@pytest.mark.parametrize("measure", ["cosine", "dot", "squared", "l1"])
@pytest.mark.parametrize("k", [1, 7, 23, 40])
def test_running_neighbours_are_the_neighbours(monkeypatch, measure, k):
    monkeypatch.setattr("mettle.pairs.similarity.QUERIES", 8)
    monkeypatch.setattr("mettle.pairs.similarity.GALLERY", 5)
    draw = np.random.default_rng(k)
    q, r = draw.normal(size=(19, 6)), draw.normal(size=(23, 6)) * draw.uniform(0.5, 2, size=(23, 1))
    scores, at = topk(torch.from_numpy(q), torch.from_numpy(r), k, measure=measure)
    wanted = all_scores(q, r, measure)
    order = np.argsort(-wanted, axis=1, kind="stable")[:, :k]
    assert np.array_equal(at.numpy(), order)
    np.testing.assert_allclose(scores.numpy(), np.take_along_axis(wanted, order, 1), rtol=1e-12)


def test_a_broken_query_has_no_score():
    q, r = torch.randn(3, 4), torch.randn(9, 4)
    q[1, 2] = float("nan")
    scores, _ = topk(q, r, 2)
    assert scores.isfinite().all(1).tolist() == [True, False, True] and scores[1].isnan().all()


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"measure": "cosinus"}, {"ref": torch.randn(9, 5)}, {"ref": torch.randn(4)}]
)
def test_what_cannot_be_compared_is_refused(wrong):
    given = {"q": torch.randn(3, 4), "ref": torch.randn(9, 4), "k": 2} | wrong
    with pytest.raises(InputError):
        topk(**given)
