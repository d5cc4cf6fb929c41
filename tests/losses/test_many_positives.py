"""Triplets of anchors with many positives: the same numbers as one triplet after the other, in far fewer steps."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from laws.members import Given
from mettle.difficulty import Importance, Threshold
from mettle.losses import Triplet


def problem(dtype=torch.float64, spread=0.0, seed=0):
    """A class of 14, one of 11, one of 3, some alone; with a spread, distances on a coarse grid: ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.zeros(14), torch.ones(11), torch.full((3,), 2), torch.arange(3, 7)]).long()
    y = y[torch.randperm(len(y), generator=generator)]
    z = torch.randn(len(y), 3, generator=generator, dtype=torch.float64)
    z = (z / spread).round() * spread if spread else z
    return z.to(dtype), y


def triplets(z, y, loss, w=None):
    """Every triplet, written down: (n,) and its gradient by autograd."""
    z = torch.nn.functional.normalize(z) if loss.normalise else z
    square = (z[:, None] - z[None]).square().sum(-1)
    d = square if loss.squared else torch.where(square > 0, square.clamp(min=1e-300).sqrt(), 0.0)
    w = torch.ones_like(d) if w is None else w
    rows = []
    for i in range(len(y)):
        near = [j for j in range(len(y)) if y[j] == y[i] and j != i]
        far = [j for j in range(len(y)) if y[j] != y[i]]
        if not near:
            rows.append(d.new_tensor(torch.nan))
            continue
        gap = d[i, near][:, None] - d[i, far][None, :]
        both = w[i, near][:, None] * w[i, far][None, :]
        if loss.mining == "semihard-set":
            both = both * ((gap < 0) & (gap >= -loss.margin))
        if loss.mining == "semihard":
            rows.append(semihard(d[i], near, far, loss, w[i]))
            continue
        miss = (gap + loss.margin).clamp(min=0)
        by = (both * (miss > 0)).sum() if loss.average == "active" else both.sum()
        rows.append((both * miss).sum() / (by if by > 0 else 1))
    return torch.stack(rows)


def semihard(d, near, far, loss, w):
    """Every positive against the closest negative beyond it, the farthest where none is; tied ones share."""
    there, at_each = [j for j in far if w[j] > 0], d.detach().tolist()
    total, by = d.new_zeros(()), d.new_zeros(())
    for k in near:
        beyond = [j for j in there if d[j] > d[k]]
        at = (min if beyond else max)(at_each[j] for j in (beyond or there))
        tied = [j for j in there if at_each[j] == at]
        miss = (d[k] - d[tied].mean() + loss.margin).clamp(min=0) * w[k]
        total, by = total + miss, by + (w[k] * (miss > 0) if loss.average == "active" else w[k])
    return total / (by if by > 0 else 1)


def compare(loss, z, y, engine, w=None, rtol=1e-9, **options):
    mine, leaf = z.clone().requires_grad_(), z.double().requires_grad_()
    got, wanted = loss.per_anchor(mine, y, engine=engine, tile=9, **options), triplets(leaf, y, loss, w)
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=rtol, equal_nan=True)
    there = ~wanted.isnan()
    a, b = (torch.autograd.grad(v[there].sum(), x)[0].double() for v, x in ((got, mine), (wanted, leaf)))
    assert float((a - b).norm()) <= 100 * rtol * float(b.norm())


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("average", ["active", "all"])
@pytest.mark.parametrize("mining", ["all", "semihard-set", "semihard"])
@pytest.mark.parametrize("shape", [{}, {"squared": True}, {"normalise": False}])
def test_every_triplet_counts(mining, average, shape, engine):
    compare(Triplet(0.3, mining, average=average, **shape), *problem(), engine)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("mining", ["all", "semihard-set", "semihard"])
def test_float32_loses_nothing_but_its_rounding(mining, engine):
    compare(Triplet(0.3, mining, squared=True), *problem(torch.float32), engine, rtol=2e-5)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("mining", ["all", "semihard-set", "semihard"])
def test_weights_multiply(mining, engine):
    z, y = problem()
    w = torch.rand(len(y), len(y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w = w * (w > 0.3)
    compare(Triplet(0.3, mining, difficulty=Given(w)), z, y, engine, w)


@pytest.mark.parametrize("mining", ["all", "semihard-set", "semihard"])
@pytest.mark.parametrize("hard", [Threshold(detach=False), Importance(1.0)], ids=str)
def test_engines_agree_through_live_weights(mining, hard):
    z, y = problem()
    found = []
    for engine in ("dense", "tiled"):
        leaf = z.clone().requires_grad_()
        value = Triplet(0.3, mining, difficulty=hard)(leaf, y, engine=engine, tile=9)
        found.append((value, torch.autograd.grad(value, leaf)[0]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("margin", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("mining", ["all", "semihard-set", "semihard"])
def test_exact_ties_are_on_the_right_side(mining, margin, engine):
    """Whole-number coordinates: squared distances are whole numbers, gaps of exactly 0 and of the margin abound."""
    for average in ("active", "all"):
        compare(Triplet(margin, mining, True, False, False, average), *problem(spread=1.0), engine)


def test_a_reference_set_with_many_positives():
    """Of the same rows, with ids that leave a row itself out: as the batch against itself."""
    z, y = problem()
    ids = torch.arange(len(y))
    for mining in ("all", "semihard-set", "semihard"):
        loss = Triplet(0.3, mining)
        for engine in ("dense", "tiled"):
            got = loss.per_anchor(z, y, ref=(z, y, ids), ids=ids, engine=engine, tile=9)
            torch.testing.assert_close(got, triplets(z, y, loss), equal_nan=True)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("mining", ["all", "semihard-set", "semihard"])
def test_broken_embeddings_give_no_finite_loss(mining, engine):
    z, y = problem()
    z[5, 1] = float("nan")
    assert not Triplet(0.3, mining)(z, y, engine=engine, tile=9).isfinite()


class Steps(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mining", ["all", "semihard-set"])
def test_steps_do_not_grow_with_the_number_of_positives(mining):
    counts = []
    for n in (64, 256):
        z = torch.randn(n, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with Steps() as steps:
            Triplet(0.2, mining)(z, torch.arange(n) % 2, engine="dense").backward()
        counts.append(steps.count)
    assert counts[1] <= counts[0] + 10


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that torch makes."""

    def __init__(self):
        super().__init__()
        self.validate_numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else (out,)
        self.validate_numbers = max([self.validate_numbers, *(x.numel() for x in found if isinstance(x, torch.Tensor))])
        return out


def test_semihard_holds_nothing_of_the_size_anchors_x_negatives_x_positives():
    z = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Largest() as largest:
        Triplet(0.2, "semihard")(z, torch.arange(256) % 2, engine="tiled").backward()
    assert largest.validate_numbers <= 8 * 256 * 256
