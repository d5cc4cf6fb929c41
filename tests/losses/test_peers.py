"""Losses that pytorch-metric-learning has too: equal in value and gradient, or different as their pages say."""

import math
import warnings

import pytest
import torch

from mettle.difficulty import Threshold
from mettle.losses import (
    ArcFace,
    Circle,
    CosFace,
    Margin,
    MultiSimilarity,
    NormFace,
    ProxyAnchor,
    ProxyNCA,
    SmoothAP,
    SoftTriple,
    SubCenterArcFace,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_metric_learning import losses as peers

C, D = 6, 5
SIZES = {"num_classes": C, "embedding_size": D}


@pytest.fixture(params=range(3))
def batch(request):
    """Two to five samples of each class, in mixed order."""
    torch.manual_seed(request.param)
    y = torch.cat([torch.full((2 + k % 4,), k) for k in range(C)])
    y = y[torch.randperm(len(y))]
    return torch.randn(len(y), D, dtype=torch.float64, requires_grad=True), y


def assert_equal(ours, theirs, inputs, tolerance=1e-6):
    """Both values, and their gradients with respect to each of the inputs."""
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)
    mine, other = (torch.autograd.grad(value, inputs, retain_graph=True) for value in (ours, theirs))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def share_vectors(ours, theirs, name):
    """Give ours the class vectors of the other, which are columns in some losses, as one leaf."""
    vectors = getattr(theirs, name).detach().double()
    leaf = torch.nn.Parameter(vectors.T.contiguous() if name in ("W", "fc") else vectors)
    ours.weight = leaf
    del theirs._parameters[name]
    setattr(theirs, name, leaf.T if name in ("W", "fc") else leaf)
    theirs.cast_types = lambda *_: None
    return leaf


@pytest.mark.parametrize("settings", [(2.0, 50.0, 0.5), (18.0, 75.0, 0.77)])
def test_multi_similarity(batch, settings):
    z, y = batch
    assert_equal(MultiSimilarity(*settings)(z, y), peers.MultiSimilarityLoss(*settings)(z, y), z)


def test_multi_similarity_leaves_out_anchors_without_positives(batch):
    """There they count with their negatives; so that the sums differ by those rows and the divisor by their number."""
    z, y = batch
    y = y.clone()
    y[0] = C  # alone
    s = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(z).T
    alone = [k for k in range(len(y)) if (y == y[k]).sum() == 1]
    rest = sum((50 * (s[k][y != y[k]] - 0.5)).exp().sum().log1p() / 50 for k in alone)
    total = MultiSimilarity()(z, y) * (len(y) - len(alone)) + rest
    assert 0 in alone
    assert_equal(total / len(y), peers.MultiSimilarityLoss()(z, y), z)


@pytest.mark.parametrize("settings", [(0.4, 80.0), (0.25, 256.0)])
def test_circle_with_its_stopped_gradients(batch, settings):
    z, y = batch
    assert_equal(Circle(*settings)(z, y), peers.CircleLoss(*settings)(z, y), z)


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_margin_with_a_fixed_and_one_learned_boundary(batch, nu):
    z, y = batch
    assert_equal(Margin(0.2, 1.25, boundary="fixed")(z, y), peers.MarginLoss(0.2, 0, 1.25)(z, y), z)
    ours, theirs = Margin(0.2, 1.25, nu).double(), peers.MarginLoss(0.2, nu, 1.25, learn_beta=True).double()
    value, other = ours(z, y), theirs(z, y)
    torch.testing.assert_close(value, other.squeeze())
    for a, b in zip(
        torch.autograd.grad(value, (z, *ours.parameters())),
        torch.autograd.grad(other.squeeze(), (z, theirs.beta)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_margin_with_a_boundary_per_class(batch, nu):
    """The pull on boundaries counts triplets there, active or not, over active terms; here it is a mean of anchors."""
    z, y = batch
    beta = torch.linspace(1.0, 1.5, C, dtype=torch.float64)
    ours = Margin(0.2, 1.2, nu, "class", C).double()
    theirs = peers.MarginLoss(0.2, nu, 1.2, learn_beta=True, num_classes=C).double()
    with torch.no_grad():
        ours.boundaries.copy_(beta), theirs.beta.copy_(beta)
    value, other = ours(z, y), theirs(z, y)
    rows = ours.row_values(z, y)
    active = ours.anchor_weight(rows)
    same = y[:, None] == y
    triplets = (same.sum(1) - 1) * (~same).sum(1)
    pulled = nu * (beta[y] * triplets).sum() / active.sum()
    mean = nu * (beta[y] * active).sum() / active.sum()
    torch.testing.assert_close(value - mean, (other - pulled).squeeze())
    if nu == 0:
        assert_equal(value, other.squeeze(), z)
        slopes = (torch.autograd.grad(x, leaf)[0] for x, leaf in ((value, ours.boundaries), (other, theirs.beta)))
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)


def test_smooth_ap_against_a_set_that_holds_the_query():
    """There the query is found by itself, first; `ref=(z, y)` without ids says so. Theirs wants as many classes as
    samples of each, one class behind the other."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # it collects its values in this type
    try:
        z, y = torch.randn(16, D, requires_grad=True), torch.arange(16) // 4
        for temperature in (0.01, 0.1):
            theirs = peers.SmoothAPLoss(temperature)(z, y)
            assert_equal(SmoothAP(temperature)(z, y, ref=(z, y)), theirs, z)
            assert SmoothAP(temperature)(z, y) > theirs  # without that gift
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("difficulty", [None, Threshold(0.0, 0.0)], ids=["plain", "engine"])
def test_proxy_anchor(batch, difficulty):
    z, y = batch
    ours, theirs = ProxyAnchor(C + 2, D, 0.1, 32, difficulty=difficulty), peers.ProxyAnchorLoss(C + 2, D, 0.1, 32)
    W = share_vectors(ours, theirs, "proxies")
    assert_equal(ours(z, y), theirs(z, y), (z, W))


@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_proxy_nca(batch, scale):
    z, y = batch
    ours, theirs = ProxyNCA(C, D, scale), peers.ProxyNCALoss(C, D, softmax_scale=scale)
    W = share_vectors(ours, theirs, "proxies")
    assert_equal(ours(z, y), theirs(z, y), (z, W))


def test_soft_triple_without_its_regulariser(batch):
    z, y = batch
    ours, theirs = SoftTriple(C, D, tau=0.0, vectors_per_class=4), peers.SoftTripleLoss(C, D, 4)
    W = share_vectors(ours, theirs, "fc")
    assert_equal(ours(z, y), theirs(z, y), (z, W))


def test_soft_triple_with_its_regulariser(batch):
    """There it is a regularizer of weights, of one's own; here it is part of the loss."""
    z, y = batch
    ours, theirs = SoftTriple(C, D, tau=0.2, vectors_per_class=4), peers.SoftTripleLoss(C, D, 4)
    W = share_vectors(ours, theirs, "fc")
    unit = torch.nn.functional.normalize(W).unflatten(0, (C, 4))
    spread = sum((unit[:, k] - unit[:, m]).norm(dim=1).sum() for k in range(4) for m in range(k))
    assert_equal(ours(z, y), theirs(z, y) + 0.2 * spread / (C * 4 * 3), (z, W))


@pytest.mark.parametrize("difficulty", [None, Threshold(0.0, 0.0)], ids=["plain", "engine"])
def test_subcenter_arcface_and_its_outliers(batch, difficulty):
    """A margin in degrees there, in radians here."""
    z, y = batch
    theirs = peers.SubCenterArcFaceLoss(margin=28.6, scale=16, sub_centers=3, **SIZES)
    ours = SubCenterArcFace(C, D, 16.0, math.radians(28.6), difficulty=difficulty)
    W = share_vectors(ours, theirs, "W")
    assert_equal(ours(z, y), theirs(z, y), (z, W))
    for degrees in (40, 75):
        outliers, _ = theirs.get_outliers(z, y, threshold=degrees)
        assert ours.find_outliers(z, y, degrees).nonzero().flatten().tolist() == sorted(outliers.tolist())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda: CosFace(C, D, 16.0, 0.35),
            lambda: peers.CosFaceLoss(num_classes=C, embedding_size=D, margin=0.35, scale=16),
        ),
        (lambda: ArcFace(C, D, 16.0, math.radians(28.6)), lambda: peers.ArcFaceLoss(C, D, 28.6, 16)),
        (lambda: NormFace(C, D, 20.0), lambda: peers.NormalizedSoftmaxLoss(C, D, temperature=0.05)),
    ],
    ids=["cosface", "arcface", "normface"],
)
def test_other_class_vectors(batch, ours, theirs):
    z, y = batch
    mine, other = ours(), theirs()
    W = share_vectors(mine, other, "W")
    assert_equal(mine(z, y), other(z, y), (z, W))
