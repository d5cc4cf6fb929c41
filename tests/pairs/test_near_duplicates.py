"""Distances of points that nearly coincide, in float32: as good as the embeddings themselves are.

The oracle is the same sum written with plain differences of float64 rows.
"""

import pytest
import torch
from torch.nn.functional import normalize

from mettle.losses import Contrastive, LiftedStructure, SelfTriplet, Triplet
from mettle.pairs import Queue
from mettle.pairs.similarity import TileOperands


def twins(noise: float, n: int = 64, d: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Every point has another one at about ``noise``, most of them of another class."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(n // 2, d, generator=generator, dtype=torch.float64)
    moved = base + noise * torch.randn(n // 2, d, generator=generator, dtype=torch.float64)
    return torch.cat([base, moved]).float(), torch.arange(n) // 2


def differences(z: torch.Tensor, unit: bool) -> torch.Tensor:
    """(n, n) distances, by differences; a row has none to itself."""
    z = normalize(z, dim=1) if unit else z
    squared = (z[:, None] - z[None]).square().sum(-1)
    return torch.where(squared > 0, torch.where(squared > 0, squared, 1).sqrt(), 0)


def linear(z: torch.Tensor, y: torch.Tensor, unit: bool) -> torch.Tensor:
    """Contrastive with linear hinges and margins 0 and 1."""
    d, same = differences(z, unit), y[:, None] == y
    pos, neg = same & ~torch.eye(len(y), dtype=torch.bool), ~same
    return ((d * pos).sum(1) / pos.sum(1) + ((1 - d).clamp(min=0) * neg).sum(1) / neg.sum(1)).mean()


def hardest(z: torch.Tensor, y: torch.Tensor, unit: bool) -> torch.Tensor:
    """Batch-hard triplet with margin 1."""
    d, same = differences(z, unit), y[:, None] == y
    far = d.masked_fill(~same, -1).amax(1)
    return (far - d.masked_fill(same, torch.inf).amin(1) + 1).clamp(min=0).mean()


def lifted(z: torch.Tensor, y: torch.Tensor, unit: bool) -> torch.Tensor:
    """Lifted structure with margin 1."""
    d, same = differences(z, unit), y[:, None] == y
    far = (1 - d).masked_fill(same, -torch.inf).logsumexp(1)
    both = torch.logaddexp(far[:, None], far[None])
    pos = same & ~torch.eye(len(y), dtype=torch.bool)
    return ((d + both).clamp(min=0).square() * pos).sum() / (2 * pos.sum())


CASES = {
    "contrastive": (Contrastive(0.0, 1.0, "linear"), linear, True),
    "contrastive raw": (Contrastive(0.0, 1.0, "linear", normalise=False), linear, False),
    "batch-hard": (Triplet(1.0, "hardest"), hardest, True),
    "batch-hard raw": (Triplet(1.0, "hardest", normalise=False), hardest, False),
    "lifted": (LiftedStructure(normalise=True), lifted, True),
    "lifted raw": (LiftedStructure(), lifted, False),
}


@pytest.mark.parametrize(("noise", "most"), [(1e-2, 3e-5), (1e-3, 3e-4), (1e-4, 3e-3)])
@pytest.mark.parametrize("options", [{"engine": "dense"}, {"engine": "tiled", "tile": 16}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_near_points_are_those_of_differences(case, options, noise, most):
    """The error grows with 1 / distance, as the rounding of the rows does, not with its square."""
    loss, oracle, unit = CASES[case]
    z, y = twins(noise)
    single, double = z.clone().requires_grad_(), z.double().requires_grad_()
    value, wanted = loss(single, y, **options), oracle(double, y, unit)
    value.backward()
    wanted.backward()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    assert (single.grad - double.grad).norm() < most * double.grad.norm()


@pytest.mark.parametrize("options", [{"engine": "dense"}, {"engine": "tiled", "tile": 16}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_points_that_coincide_have_no_direction(case, options):
    """Distance exactly 0, gradient finite and small: rounding must not invent a direction."""
    loss, _, _ = CASES[case]
    z, y = twins(0.0)
    leaf = z.clone().requires_grad_()
    loss(leaf, y, **options).backward()
    exact = z.double().requires_grad_()
    loss(exact, y, engine="dense").backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_against_a_reference_set_and_a_queue(engine):
    z, y = twins(1e-3)
    queue = Queue(64, 32)
    queue.push(z[:32] + 1e-3 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), y[32:])
    loss = Contrastive(0.0, 1.0, "linear")
    single, double = z.clone().requires_grad_(), z.double().requires_grad_()
    loss(single, y, **queue.against(single, y), engine=engine, tile=16).backward()
    loss(double, y, **queue.double().against(double, y), engine="dense").backward()
    assert (single.grad - double.grad).norm() < 3e-4 * double.grad.norm()


def test_squared_distances_of_a_tile_and_of_a_list():
    """What a tile can be asked: good to the rounding of the rows, and 0 for equal rows."""
    z, _ = twins(1e-4)
    z = torch.cat([normalize(z, dim=1), normalize(z, dim=1)[:4]])
    wanted = (z.double()[:, None] - z.double()[None]).square().sum(-1)
    found = TileOperands(z, z, slice(0, 68), slice(0, 68), "cosine").squared()
    assert (found[64:, :4].diagonal() == 0).all() and (found.diagonal() == 0).all()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)
    i, j = torch.arange(32), torch.arange(32) + 32
    listed = TileOperands(z, z, i, j, "cosine").squared()
    torch.testing.assert_close(listed.double(), wanted[i, j, None], rtol=1e-4, atol=0)


def test_a_broken_row_stays_broken():
    z, y = twins(1e-3)
    z[3, 2] = torch.nan
    for loss in (Contrastive(), LiftedStructure(), Triplet(0.2, "hardest"), SelfTriplet()):
        for engine in ("dense", "tiled"):
            assert not torch.isfinite(loss(z, y, engine=engine))
