"""Importance weights too small for float32 still belong to negatives that are there."""

import math

import pytest
import torch

from mettle.difficulty import Importance, Product, Threshold
from mettle.losses import InfoNCE, Triplet

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 4])


def sample():
    return torch.randn(11, 5, generator=torch.Generator().manual_seed(87), dtype=torch.float64)


def hcl(z, y, t, prior, beta):
    """Hard-negative contrastive loss with a prior, pair by pair in float64."""
    z = torch.nn.functional.normalize(z.double())
    x = z @ z.T / t
    rows = []
    for i in range(len(y)):
        negatives = [j for j in range(len(y)) if y[j] != y[i]]
        positives = [j for j in range(len(y)) if y[j] == y[i] and j != i]
        u = [math.exp(beta * (float(x[i, j]) - 1 / t)) for j in negatives]
        n = len(negatives)
        total = sum(n * a / sum(u) * math.exp(float(x[i, j])) for a, j in zip(u, negatives, strict=True))
        values = []
        for p in positives:
            e = math.exp(float(x[i, p]))
            values.append(math.log1p(max((total - prior * n * e) / (1 - prior), n * math.exp(-1 / t)) / e))
        rows.append(sum(values) / len(values) if values else math.nan)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("t", "beta"), [(0.5, 1.0), (0.07, 2.0), (0.07, 6.0), (0.05, 10.0)])
def test_N_counts_every_negative_however_little_it_weighs(t, beta, dtype, engine, detach):
    z = sample().to(dtype)
    got = InfoNCE(t, 0.1, Importance(beta, detach)).per_anchor(z, LABELS, engine=engine, tile=4)
    wanted = hcl(z, LABELS, t, 0.1, beta)
    exact = dtype == torch.float64
    torch.testing.assert_close(
        got.double(), wanted, rtol=1e-9 if exact else 1e-4, atol=1e-12 if exact else 1e-5, equal_nan=True
    )


def test_the_same_inside_a_product():
    z = sample().float()
    one, two = (
        InfoNCE(0.07, 0.1, hard).per_anchor(z, LABELS)
        for hard in (Product(Importance(6.0), Threshold(0.0, 0.0)), Importance(6.0))
    )
    torch.testing.assert_close(one, two, equal_nan=True)


def test_facts_keep_all_of_them():
    for dtype in (torch.float32, torch.float64):
        facts = InfoNCE(0.07, 0.1, Importance(6.0)).statistics(sample().to(dtype), LABELS)
        assert facts.kept_negatives == 1.0


def test_mining_sees_negatives_that_weigh_almost_nothing():
    """Semi-hard mining falls back on the farthest negative, which importance hardly counts."""
    z = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [-1.0, 0.1], [1.0, 0.1], [-1.0, 0.3]]))
    y = torch.tensor([0, 0, 1, 2])
    got = Triplet(0.2, "semihard", difficulty=Importance(200.0)).per_anchor(z, y)
    torch.testing.assert_close(got, Triplet(0.2, "semihard").per_anchor(z, y), equal_nan=True)
