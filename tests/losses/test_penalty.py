"""SupCon's penalty on negatives against its definition, where one negative takes all of a row too."""

import pytest
import torch

from mettle.difficulty import Threshold
from mettle.losses import SupCon


def definition(z, y, temperature, w):
    """(1/|N|) Σ_n (w − 1)·log(D / (D − e^{x_n})), in float64, every D − e^{x_n} a sum over the others; NaN if no p."""
    z = torch.nn.functional.normalize(z.double())
    x = z @ z.T / temperature
    rows = []
    for i in range(len(y)):
        others = [a for a in range(len(y)) if a != i]
        negatives = [a for a in others if y[a] != y[i]]
        if len(negatives) == len(others):
            rows.append(x.new_tensor(torch.nan))
            continue
        part = x.new_zeros(())
        for n in negatives:
            rest = torch.logsumexp(torch.stack([x[i, a] for a in others if a != n]), 0)
            every = torch.logsumexp(torch.stack([x[i, a] for a in others]), 0)
            # log D − log rest, from the larger side: both differences are exact in float64 where they are used
            gap = torch.nn.functional.softplus(x[i, n] - rest, threshold=700) if x[i, n] > rest else every - rest
            part = part + (w[i, n] - 1) * gap
        rows.append(part / max(len(negatives), 1))
    return torch.stack(rows)


def weights(z, beta=2.0, negative=0.3, detach=True):
    z = torch.nn.functional.normalize(z.double())
    s = z @ z.T
    w = 1 + beta * ((s - negative) / (1 - negative)).clamp(min=0)
    return w.detach() if detach else w


def penalty(z, y, temperature, engine, detach=True):
    hard = Threshold(0.0, 2.0, detach=detach)
    with_it = SupCon(temperature, difficulty=hard, neg_weight="penalty").per_anchor(z, y, engine=engine, tile=3)
    return with_it - SupCon(temperature, difficulty=hard, neg_weight="none").per_anchor(z, y, engine=engine, tile=3)


def test_a_negative_harder_than_every_positive_is_pushed():
    z = torch.tensor([[1.0, 0.0], [0.5, 0.87], [0.98, 0.2]], requires_grad=True)
    y = torch.tensor([0, 0, 1])
    found = SupCon(0.03, difficulty=Threshold(0.0, 2.0), neg_weight="penalty").per_anchor(z, y)[0]
    found = found - SupCon(0.03).per_anchor(z, y)[0]
    (gradient,) = torch.autograd.grad(found, z)
    assert abs(found.item() - 31.1752) < 1e-3
    assert abs(gradient.norm().item() - 71.847) < 1e-2


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.03, 0.01])
def test_value_and_gradient_are_those_of_the_definition(temperature, engine, dtype, detach):
    generator = torch.Generator().manual_seed(5)
    y = torch.tensor([0, 0, 1, 1, 1, 2, 3, 0, 2])
    z = torch.randn(9, 3, generator=generator).to(dtype)
    z[2] = z[0] + 0.05 * z[1]  # a negative beside row 0: it takes nearly all of that row
    mine, leaf = z.clone().requires_grad_(), z.double().requires_grad_()
    got, wanted = (
        penalty(mine, y, temperature, engine, detach),
        definition(leaf, y, temperature, weights(leaf, detach=detach)),
    )
    exact = dtype == torch.float64
    close = {"rtol": 1e-9 if exact else 2e-5, "atol": 1e-9 if exact else 2e-5 / temperature, "equal_nan": True}
    torch.testing.assert_close(got.double(), wanted, **close)
    there = ~wanted.isnan()
    (a,), (b,) = (torch.autograd.grad(v[there].sum(), x) for v, x in ((got, mine), (wanted, leaf)))
    assert float((a.double() - b).norm() / b.norm()) < (1e-9 if exact else 1e-4)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_two_equal_negatives_share_a_row(engine):
    y = torch.tensor([0, 0, 1, 2])
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    mine, leaf = z.clone().requires_grad_(), z.clone().requires_grad_()
    got, wanted = penalty(mine, y, 0.05, engine), definition(leaf, y, 0.05, weights(leaf))
    torch.testing.assert_close(got, wanted, equal_nan=True)
    (a,), (b,) = (torch.autograd.grad(v[:2].sum(), x) for v, x in ((got, mine), (wanted, leaf)))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_rows_without_positives_or_negatives_stay_finite(engine):
    hard = Threshold(0.0, 2.0)
    for y in ([0, 0, 0], [0, 1, 1], [0, 0, 1]):
        z = torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = SupCon(0.01, difficulty=hard, neg_weight="penalty", mean_all=True)
        value = loss(z, torch.tensor(y), engine=engine)
        assert value.isfinite() and torch.autograd.grad(value, z)[0].isfinite().all()
