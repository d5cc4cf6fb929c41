"""Reductions against the reducers of pytorch-metric-learning, where both have one value per anchor or sample."""

import math
import warnings

import pytest
import torch

from mettle.losses import ArcFace, Contrastive, CosFace, MultiSimilarity, SupCon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_metric_learning import losses as peers
    from pytorch_metric_learning import reducers

REDUCERS = {
    "mean": reducers.MeanReducer,
    "nonzero": reducers.AvgNonZeroReducer,
    "sum": reducers.SumReducer,
    "none": reducers.DoNothingReducer,
}
every = pytest.mark.parametrize("reduction", REDUCERS)


def batch():
    torch.manual_seed(0)
    y = torch.cat([torch.full((2 + k % 3,), k) for k in range(5)])[torch.randperm(14)]
    return torch.randn(14, 6, dtype=torch.float64, requires_grad=True), y


def assert_equal(ours, theirs, inputs):
    if isinstance(theirs, dict):
        theirs = theirs["loss"]["losses"].flatten()
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=1e-6)
    share = torch.linspace(0.5, 1.5, max(1, ours.numel()), dtype=ours.dtype).reshape(ours.shape)
    (a,), (b,) = (torch.autograd.grad((x * share).sum(), inputs, retain_graph=True) for x in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@every
def test_supcon(reduction):
    z, y = batch()
    assert_equal(SupCon(0.2, reduction=reduction)(z, y), peers.SupConLoss(0.2, reducer=REDUCERS[reduction]())(z, y), z)


@every
def test_multi_similarity(reduction):
    z, y = batch()
    peer = peers.MultiSimilarityLoss(reducer=REDUCERS[reduction]())
    assert_equal(MultiSimilarity(reduction=reduction)(z, y), peer(z, y), z)


@every
def test_class_vectors(reduction):
    z, y = batch()
    degrees = math.degrees(0.4)
    for kind, peer, margin in ((CosFace, peers.CosFaceLoss, 0.4), (ArcFace, peers.ArcFaceLoss, degrees)):
        theirs = peer(5, 6, margin=margin, scale=8.0, reducer=REDUCERS[reduction]()).double()
        ours = kind(5, 6, scale=8.0, margin=0.4, reduction=reduction).double()
        ours.weight = torch.nn.Parameter(theirs.W.detach().T.clone())
        assert_equal(ours(z, y), theirs(z, y), z)


def test_a_mean_over_nonzero_leaves_finished_anchors_out():
    """Both sides of a contrastive loss, each averaged over the pairs of an anchor first."""
    z, y = batch()

    def mean_over_pairs(losses, count):
        return losses.sum(1) / count.clamp(min=1)

    inner = reducers.MeanReducer()
    peer = peers.ContrastiveLoss(0.3, 0.9, reducer=reducers.PerAnchorReducer(inner, mean_over_pairs))
    assert_equal(Contrastive(0.3, 0.9, "linear")(z, y), peer(z, y), z)
    values = Contrastive(1.4, 0.3, "linear").per_anchor(z, y)
    assert 0 < (values > 0).sum() < len(y)
    assert_equal(Contrastive(1.4, 0.3, "linear", reduction="nonzero")(z, y), values[values > 0].mean(), z)


def test_the_mean_over_pairs_is_that_of_the_reducer_over_pairs():
    """Positives alone: one value for each pair, the mean over all of them at once."""
    z, y = batch()
    peer = peers.ContrastiveLoss(0.3, -10.0, reducer=reducers.MeanReducer())  # no negative is nearer than -10
    assert_equal(Contrastive(0.3, 1e-9, "linear", reduction="pairs")(z, y), peer(z, y), z)
