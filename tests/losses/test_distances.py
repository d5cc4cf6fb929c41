"""Losses of distances other than the Euclidean one, against loops and pytorch-metric-learning."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from mettle.errors import InputError
from mettle.losses import Contrastive, Margin, Triplet
from mettle.train.methods.tuple_layouts import PairwiseLayout, TripletLayout, tuple_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_metric_learning import distances, reducers
    from pytorch_metric_learning import losses as peers

METRICS = {"cosine": True, "dot": False, "snr": False}  # whether embeddings are normalised
every_metric = pytest.mark.parametrize("metric", METRICS)
ENGINES = [{}, {"engine": "dense"}, {"engine": "tiled", "tile": 1}, {"engine": "tiled", "tile": 4}]


def batch():
    """Three of each class, in mixed order."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return z.requires_grad_(), (torch.arange(12) % 4)[torch.randperm(12, generator=generator)]


def distance(x, y, metric):
    return {
        "cosine": lambda: 1 - F.cosine_similarity(x, y, 0),
        "dot": lambda: -(x @ y),
        "snr": lambda: (x - y).var() / x.var(),
    }[metric]()


def sides(z, y, k, metric):
    """The distances of anchor k to its positives and to its negatives."""
    near = [distance(z[k], z[j], metric) for j in range(len(y)) if j != k and y[j] == y[k]]
    return torch.stack(near), torch.stack([distance(z[k], z[j], metric) for j in range(len(y)) if y[j] != y[k]])


def assert_alike(found, wanted, z, tolerance=1e-9):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    (a,), (b,) = (torch.autograd.grad(x.sum(), z, retain_graph=True) for x in (found, wanted))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_metric
@pytest.mark.parametrize("form", ["linear", "hadsell"])
def test_contrastive(metric, form):
    z, y = batch()
    loss = Contrastive(0.1, 1.5, form, METRICS[metric], metric=metric)
    power = 2 if form == "hadsell" else 1
    wanted = []
    for k in range(len(y)):
        near, far = sides(z, y, k, metric)
        wanted.append((near - 0.1).clamp(min=0).pow(power).mean() + (1.5 - far).clamp(min=0).pow(power).mean())
    for options in ENGINES:
        assert_alike(loss.per_anchor(z, y, **options), torch.stack(wanted), z)


@every_metric
@pytest.mark.parametrize("mining", ["all", "hardest", "semihard"])
def test_triplet(metric, mining):
    z, y = batch()
    loss = Triplet(0.5, mining, normalise=METRICS[metric], average="all", metric=metric)
    wanted = []
    for k in range(len(y)):
        near, far = sides(z, y, k, metric)
        if mining == "hardest":
            wanted.append((near.max() - far.min() + 0.5).clamp(min=0))
        elif mining == "all":
            wanted.append((near[:, None] - far + 0.5).clamp(min=0).mean())
        else:
            chosen = [far[far > p].min() if (far > p).any() else far.max() for p in near]
            wanted.append((near - torch.stack(chosen) + 0.5).clamp(min=0).mean())
    for options in ENGINES:
        assert_alike(loss.per_anchor(z, y, **options), torch.stack(wanted), z)


@every_metric
def test_margin(metric):
    z, y = batch()
    loss = Margin(0.2, 1.0, boundary="fixed", normalise=METRICS[metric], metric=metric)
    total = active = 0
    for k in range(len(y)):
        near, far = sides(z, y, k, metric)
        pull, push = (near - 0.8).clamp(min=0)[:, None].expand(-1, len(far)), (1.2 - far).clamp(min=0)
        total = total + pull.sum() + push.sum() * len(near)
        active = active + (pull > 0).sum() + (push > 0).sum() * len(near)
    for options in ENGINES:
        assert_alike(loss(z, y, **options), total / active, z)


@every_metric
def test_given_triplets(metric):
    z, _ = batch()
    a, p, n = (torch.tensor(x) for x in ([0, 0, 5, 7], [1, 2, 3, 9], [4, 6, 8, 10]))
    loss = Triplet(0.5, normalise=METRICS[metric], average="all", metric=metric, reduction="pairs")
    pairs = [distance(z[i], z[j], metric) - distance(z[i], z[k], metric) for i, j, k in zip(a, p, n, strict=True)]
    assert_alike(loss(z, None, (a, p, n)), (torch.stack(pairs) + 0.5).clamp(min=0).mean(), z)


PEERS = {
    "cosine": distances.CosineSimilarity(),
    "dot": distances.DotProductSimilarity(normalize_embeddings=False),
    "snr": distances.SNRDistance(normalize_embeddings=False),
}


@every_metric
def test_triplets_of_pytorch_metric_learning(metric):
    z, y = batch()
    theirs = peers.TripletMarginLoss(0.5, distance=PEERS[metric], reducer=reducers.MeanReducer())
    ours = Triplet(0.5, normalise=METRICS[metric], average="all", metric=metric)
    assert_alike(ours(z, y), theirs(z, y), z, 1e-6)


def test_the_signal_to_noise_contrastive_loss_of_pytorch_metric_learning():
    z, y = batch()
    mean = reducers.PerAnchorReducer(reducers.MeanReducer(), lambda losses, count: losses.sum(1) / count.clamp(min=1))
    theirs = peers.ContrastiveLoss(0.1, 1.5, distance=PEERS["snr"], reducer=mean)
    assert_alike(Contrastive(0.1, 1.5, "linear", False, metric="snr")(z, y), theirs(z, y), z, 1e-6)


def test_options_that_do_not_go_together_are_one_line():
    for kind in (Contrastive, Triplet, Margin):
        for metric in ("dot", "snr"):
            with pytest.raises(InputError, match=f"metric '{metric}' is of embeddings as they are: set "):
                kind(metric=metric)
        with pytest.raises(InputError, match="metric must be one of"):
            kind(metric="manhattan")
    with pytest.raises(InputError, match="a squared distance is Euclidean: metric 'cosine' has none"):
        Triplet(squared=True, metric="cosine")
    with pytest.raises(InputError, match="a squared distance is Euclidean"):
        Contrastive(form="squared", metric="cosine")
    with pytest.raises(InputError, match="l1 and metric both name a distance"):
        Contrastive(normalise=False, l1=True, metric="snr")
    assert Contrastive(-3.0, -1.0, "linear", False, metric="dot").negative == -1  # margins of minus a product


def test_hardness_aware_training_takes_another_distance_as_it_takes_any_pairwise_loss():
    assert type(tuple_layout(Triplet())) is TripletLayout  # which computes Euclidean distances of its own
    assert type(tuple_layout(Triplet(metric="cosine"))) is PairwiseLayout
