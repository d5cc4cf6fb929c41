"""The default loss against loops, finite differences and its claim of convexity."""

import math

import pytest
import torch

from mettle.difficulty import Threshold
from mettle.errors import InputError
from mettle.losses import MCML


def looped(z, y):
    """One value per anchor, written out."""
    n, found = len(z), []
    for i in range(n):
        d = [sum((float(a) - float(b)) ** 2 for a, b in zip(z[i], z[j], strict=True)) for j in range(n)]
        others = [j for j in range(n) if j != i]
        near = [j for j in others if y[j] == y[i]]
        below = math.log(sum(math.exp(-d[j]) for j in others))
        found.append(sum(d[j] for j in near) / len(near) + below if near else math.nan)
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(14, 3, dtype=torch.float64, generator=generator), torch.tensor(
        [0, 1, 2, 3, 4] * 2 + [0, 1, 1, 5]
    )


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_it_is_its_formula(batch, engine):
    z, y = batch
    torch.testing.assert_close(MCML().per_anchor(z, y, engine=engine), looped(z, y), equal_nan=True)
    torch.testing.assert_close(MCML()(z, y, engine=engine), looped(z, y)[:-1].mean())


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_its_gradient_is_the_slope(batch, engine):
    z, y = batch
    assert torch.autograd.gradcheck(lambda x: MCML()(x, y, engine=engine, tile=4), z.clone().requires_grad_())


def test_it_is_convex_in_the_matrix(batch):
    x, y = batch
    generator = torch.Generator().manual_seed(1)

    def value(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return float(MCML()(x @ (vectors * values.clamp(min=0).sqrt()), y))

    for _ in range(20):
        first, second = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(2))
        first, second = first @ first.T, second @ second.T
        assert value((first + second) / 2) <= (value(first) + value(second)) / 2 + 1e-12


def test_far_points_neither_overflow_nor_lose_their_gradient(batch):
    z, y = batch
    z = (z * 1e3).requires_grad_()
    value = MCML()(z, y)
    value.backward()
    assert bool(torch.isfinite(value)) and bool(torch.isfinite(z.grad).all()) and float(z.grad.abs().max()) > 0


def test_one_class_and_nan(batch):
    z, y = batch
    assert bool(torch.isfinite(MCML()(z, y * 0)))
    assert bool(torch.isnan(MCML()(torch.where(z > 2, torch.nan, z) * torch.nan, y)))
    with pytest.raises(InputError, match="no anchor has a positive"):
        MCML()(z, torch.arange(14))


def test_weights_of_one_change_nothing_and_others_do(batch):
    z, y = batch
    plain = MCML()(z, y)
    torch.testing.assert_close(MCML(Threshold(0, 0))(z, y), plain)
    assert float(MCML(Threshold(1, 1))(z, y)) != float(plain)
