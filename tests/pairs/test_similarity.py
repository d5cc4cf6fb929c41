"""Distances inside the losses (derivatives, what is broken stays broken, how often one walks over a tile); neighbours
that are found block by block.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mettle.errors import InputError
from mettle.losses import Contrastive, LiftedStructure, Triplet
from mettle.pairs.similarity import distance, topk

MEASURES = {"cosine": lambda s: 2 - 2 * s, "squared": lambda s: -s}


@pytest.mark.parametrize("measure", MEASURES)
def test_first_and_second_derivatives(measure):
    s = (-torch.rand(3, 4, dtype=torch.float64) - 0.1).requires_grad_()
    torch.testing.assert_close(distance(s, measure) ** 2, MEASURES[measure](s))
    assert torch.autograd.gradcheck(lambda x: distance(x, measure), s)
    assert torch.autograd.gradgradcheck(lambda x: distance(x, measure), s)


@pytest.mark.parametrize("measure", MEASURES)
def test_points_that_coincide_do_not_move_and_others_do(measure):
    same = 1.0 if measure == "cosine" else 0.0
    s = torch.tensor([[same, same - 0.5]], requires_grad=True)
    d = distance(s, measure)
    (first,) = torch.autograd.grad(d.sum(), s, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), s)
    assert d[0, 0] == first[0, 0] == second[0, 0] == 0
    assert (first[0, 1] < 0) and torch.isfinite(second).all()


@pytest.mark.parametrize("measure", MEASURES)
def test_what_is_no_number_is_no_distance(measure):
    assert distance(torch.tensor([[torch.nan, -1.0]]), measure).isnan().tolist() == [[True, False]]


class Walks(TorchDispatchMode):
    """Counts what is written over a whole tile."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.count += isinstance(found, torch.Tensor) and found.numel() == self.size and not func.is_view
        return found


@pytest.mark.parametrize("measure", MEASURES)
def test_a_distance_and_its_gradient_are_few_walks_over_a_tile(measure):
    """Time goes there: on a processor a loss over distances is little else."""
    s = (-torch.rand(16, 16)).requires_grad_()
    with Walks(s.numel()) as walks:
        distance(s, measure).backward(torch.ones(16, 16))
    assert walks.count <= 11


@pytest.mark.parametrize("margin", [0.0, 0.3, 1.0, 39.0, 60.0])
def test_lifted_on_the_sphere_at_any_margin(margin):
    """Distances end at 2 there, which the sum of exponentials is told; far margins leave no room for that."""
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(24, 5, dtype=torch.float64, generator=generator), torch.arange(24) // 3
    z[5] = -z[0]  # as far as can be
    u = torch.nn.functional.normalize(z, dim=1)
    d = (u[:, None] - u[None]).norm(dim=2)
    same = y[:, None] == y
    far = (margin - d).masked_fill(same, -torch.inf).logsumexp(1)
    both = torch.logaddexp(far[:, None], far[None])
    pos = same & ~torch.eye(24, dtype=torch.bool)
    wanted = ((d + both).clamp(min=0).square() * pos).sum() / (2 * pos.sum())
    for engine in ("dense", "tiled"):
        found = LiftedStructure(margin, normalise=True)(z.float(), y, engine=engine)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("loss", [Triplet(), LiftedStructure(), Contrastive()], ids=lambda x: type(x).__name__)
def test_torch_func_goes_through(loss):
    """Forward and backward through torch's function transforms, as through the ordinary graph."""
    z, y = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(12) // 3
    z[1] = z[0]
    leaf = z.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf, y, engine="dense"), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, y, engine="dense"))(z), wanted)
    way = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, slope = torch.func.jvp(lambda x: loss(x, y, engine="dense"), (z,), (way,))
    torch.testing.assert_close(slope, (wanted * way).sum())


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
