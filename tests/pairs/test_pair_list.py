"""PairwiseLoss losses on lists of pairs, against loops."""

import numpy as np
import pytest
import torch

from mettle.difficulty import Hardest
from mettle.losses import MCML, Contrastive, InfoNCE, LiftedStructure, SelfTriplet, SupCon, Triplet
from mettle.metric import Mahalanobis
from mettle.pairs.pair_list import as_pair_list_loss

LOSSES = {
    "Contrastive": Contrastive(normalise=False),
    "Contrastive on the sphere": Contrastive(),
    "L1": Contrastive(l1=True, normalise=False),
    "Triplet": Triplet(normalise=False),
    "hardest": Triplet(normalise=False, mining="hardest"),
    "SupCon": SupCon(),
    "InfoNCE": InfoNCE(),
    "lifted": LiftedStructure(),
    "SelfTriplet": SelfTriplet(form="mean"),
    "MCML": MCML(),
}


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(9, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return first, second, torch.tensor([1, 0, 0, 1, 1, 0, 0, 0, 1])


def test_contrastive_is_a_mean_over_each_kind(pairs):
    first, second, alike = pairs
    d = [float((a - b).norm()) for a, b in zip(first, second, strict=True)]
    near = [v**2 for v, k in zip(d, alike, strict=True) if k]
    far = [max(0.0, 2.0 - v) ** 2 for v, k in zip(d, alike, strict=True) if not k]
    found = as_pair_list_loss(Contrastive(negative=2.0, normalise=False))(*pairs)
    assert float(found) == pytest.approx(sum(near) / len(near) + sum(far) / len(far))


def test_triplet_compares_every_alike_pair_with_every_unalike_pair(pairs):
    first, second, alike = pairs
    d = (first - second).square().sum(1)
    gaps = [max(0.0, float(p - n) + 0.2) for p in d[alike == 1] for n in d[alike == 0]]
    loss = Triplet(0.2, squared=True, normalise=False, average="all")
    assert float(as_pair_list_loss(loss)(*pairs)) == pytest.approx(np.mean(gaps))


def test_infonce_sets_every_alike_pair_against_the_unalike_ones(pairs):
    first, second, alike = pairs
    s = torch.cosine_similarity(first, second) / 0.5
    wanted = torch.stack([torch.logsumexp(torch.cat([p[None], s[alike == 0]]), 0) - p for p in s[alike == 1]]).mean()
    torch.testing.assert_close(as_pair_list_loss(InfoNCE(0.5))(*pairs), wanted)


def test_a_difficulty_mines_among_the_pairs(pairs):
    first, second, alike = pairs
    d = (first - second).norm(dim=1)
    wanted = max(0.0, float(d[alike == 1].max() - d[alike == 0].min()) + 0.2)
    loss = Triplet(0.2, normalise=False, difficulty=Hardest())
    assert float(as_pair_list_loss(loss)(*pairs)) == pytest.approx(wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_slopes(pairs, name):
    first, second, alike = pairs
    form = as_pair_list_loss(LOSSES[name])
    assert torch.autograd.gradcheck(lambda a, b: form(a, b, alike), (first.requires_grad_(), second.requires_grad_()))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_from_pairs(name):
    rng = np.random.default_rng(0)
    pairs, alike = drawn(rng, 150)
    plain = {"shrinkage": 1.0, "standardize": True, "early_stopping": False}  # nothing but the loss knows of the pairs
    metric = Mahalanobis(loss=LOSSES[name], tol=1e-3, penalty=0.001, **plain).fit(pairs, alike)
    unseen, truth = drawn(rng, 400)
    euclid = auc(-np.linalg.norm(unseen[:, 0] - unseen[:, 1], axis=1), truth)
    # Losses on cosines shape angles, so distances gain less.
    assert auc(metric.pair_score(unseen), truth) > (0.88 if metric.loss.measure == "cosine" else 0.95) and euclid < 0.7


def test_a_loss_of_two_sides_and_a_target_is_taken_as_it_is():
    seen = []

    def logistic(a, b, target):
        seen.append((a.shape, target.dtype))
        d = (a - b).square().sum(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(2 - d, target)

    rng = np.random.default_rng(0)
    pairs, alike = drawn(rng, 150)
    metric = Mahalanobis(loss=logistic, early_stopping=False).fit(
        pairs, np.where(alike, 1, -1)
    )  # −1 and 1 are as good as 0 and 1
    assert auc(metric.pair_score(pairs), alike) > 0.95
    assert seen[0] == ((150, 6), torch.float64)


def drawn(rng, n):
    """Alike pairs agree in the first two features; four louder ones say nothing."""
    alike = np.arange(n) % 2 == 0
    base = rng.normal(size=(n, 2)) * 3
    other = np.where(alike[:, None], base, rng.normal(size=(n, 2)) * 3)
    told = np.stack([base, other], axis=1) + 0.3 * rng.normal(size=(n, 2, 2))
    return np.concatenate([told, 10 * rng.normal(size=(n, 2, 4))], axis=2), alike


def auc(score, truth):
    return (score[truth][:, None] > score[~truth][None]).mean()
