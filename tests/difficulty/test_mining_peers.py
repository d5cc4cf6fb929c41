"""The miners of pytorch-metric-learning choose the same pairs and triplets, and its training scripts run with ours."""

import math

import pytest
import torch

from mettle import difficulty
from mettle.difficulty import (
    Angular,
    DistanceWeighted,
    DistanceWeightedSampling,
    EasyHard,
    Hardest,
    MultiSimilarityMining,
    PairMargin,
    TripletMarginMining,
)
from mettle.losses import Contrastive
from mettle.pairs import pair_weights

pytest.importorskip("pytorch_metric_learning")
from pytorch_metric_learning import distances, miners

SIZES = [(8, 3, 3), (24, 6, 6), (33, 16, 20), (48, 2, 4)]
BATCHES = [(seed, n, d, classes) for seed, (n, d, classes) in enumerate(SIZES)]
STRATEGIES = ("easy", "semihard", "hard", "all")
EASY_HARD = [(p, n) for p in STRATEGIES for n in STRATEGIES if "semihard" not in (p, n) or {p, n} & {"easy", "hard"}]
EQUAL = {
    "multi-similarity": (MultiSimilarityMining(), miners.MultiSimilarityMiner()),
    "multi-similarity 0.5": (MultiSimilarityMining(0.5), miners.MultiSimilarityMiner(epsilon=0.5)),
    "multi-similarity 0": (MultiSimilarityMining(0.0), miners.MultiSimilarityMiner(epsilon=0.0)),
    "pair margin": (PairMargin(), miners.PairMarginMiner()),
    "pair margin wide": (PairMargin(0.6, 0.1), miners.PairMarginMiner(math.sqrt(0.8), math.sqrt(1.8))),
    "pair margin of cosines": (
        PairMargin(0.6, 0.1),
        miners.PairMarginMiner(0.6, 0.1, distance=distances.CosineSimilarity()),
    ),
    "batch hard": (EasyHard("hard", "hard"), miners.BatchHardMiner()),
}
EQUAL |= {f"{p} {n}": (EasyHard(p, n), miners.BatchEasyHardMiner(p, n)) for p, n in EASY_HARD}
EQUAL_TRIPLETS = {
    kind: (TripletMarginMining(0.3, kind), miners.TripletMarginMiner(0.3, kind))
    for kind in ("all", "hard", "semihard", "easy")
}
EQUAL_TRIPLETS |= {f"angle {a}": (Angular(a), miners.AngularMiner(a)) for a in (20, 35, 60)}


def draw(seed, n, d, classes, dtype=torch.float64):
    """Classes of different sizes, some of one sample; rows of length 1, which PML's angular miner expects."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=generator)
    z = torch.randn(classes, d, generator=generator, dtype=torch.float64)[y]
    z = z + torch.randn(n, d, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(z, dim=1).to(dtype), y


def columns(*tensors):
    return set(zip(*(x.tolist() for x in tensors), strict=True))


def as_pairs(listed):
    positives, negatives = (listed[:2], listed[2:]) if len(listed) == 4 else (listed[:2], listed[::2])
    return columns(*positives), columns(*negatives)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", EQUAL)
def test_pairs_equal_pml(name, batch):
    ours, theirs = EQUAL[name]
    for dtype in (torch.float64, torch.float32):
        z, y = draw(*batch, dtype)
        found = ours(z, y)
        assert as_pairs(found) == as_pairs(theirs(z, y))
        assert all(a.dtype == b.dtype and a.device == b.device for a, b in zip(found, theirs(z, y), strict=False))


@pytest.mark.parametrize("name", EQUAL)
def test_pairs_equal_pml_against_references(name):
    ours, theirs = EQUAL[name]
    (z, y), (ref, ref_y) = draw(7, 20, 4, 6), draw(8, 30, 4, 6)
    wanted = as_pairs(theirs(z, y, ref, ref_y))
    assert as_pairs(ours(z, y, ref, ref_y)) == wanted == as_pairs(ours(z, y, ref_emb=ref, ref_labels=ref_y))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", EQUAL_TRIPLETS)
def test_triplets_equal_pml(name, batch):
    ours, theirs = EQUAL_TRIPLETS[name]
    z, y = draw(*batch)
    found, wanted = ours(z, y), theirs(z, y)
    assert columns(*found) == columns(*wanted) and len(found[0]) == len(wanted[0])
    ref, ref_y = draw(9, 20, z.shape[1], batch[3])
    assert columns(*ours(z, y, ref, ref_y)) == columns(*theirs(z, y, ref, ref_y))


def test_angles_of_raw_rows():
    """PML's angular miner compares rows as they are; ours does where the loss does."""
    z, y = draw(1, 20, 4, 5)
    z = 3 * z * torch.rand(20, 1, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    wanted = columns(*miners.AngularMiner(30)(z, y))
    assert columns(*Angular(30)(z, y, measure="squared")) == wanted != columns(*Angular(30)(z, y))


@pytest.mark.parametrize("labels", [torch.zeros(6).long(), torch.arange(6), torch.tensor([0, 0, 1, 2, 3, 4])], ids=str)
def test_batches_without_positives_or_negatives(labels):
    """PML keeps no pair of an anchor that lacks one side, in all miners that compare the two; so do ours."""
    z, _ = draw(3, 6, 4, 2)
    for name, (ours, theirs) in EQUAL.items():
        if "all" not in name:
            assert as_pairs(ours(z, labels)) == as_pairs(theirs(z, labels)), name
    for name, (ours, theirs) in EQUAL_TRIPLETS.items():
        assert columns(*ours(z, labels)) == columns(*theirs(z, labels)), name
    positives, negatives = as_pairs(Hardest()(z, labels))  # asks no more than its own side
    assert len({i for i, _ in positives}) == sum((labels == y).sum() > 1 for y in labels)
    assert len({i for i, _ in negatives}) == (6 if len(labels.unique()) > 1 else 0)


@pytest.mark.parametrize("name", ["hard hard", "easy hard", "hard easy", "easy easy", "multi-similarity"])
def test_ties(name):
    """Of pairs that tie PML keeps one, ours all of them: equally similar up to a rounding."""
    ours, theirs = EQUAL[name]
    z, y = draw(5, 12, 5, 3)
    z, y = z.repeat(3, 1), y.repeat(3)
    if name.startswith("easy"):  # a copy of the anchor is the easiest positive
        y = torch.cat([y[:24], y[24:] + 10])
    found, wanted = as_pairs(ours(z, y)), as_pairs(theirs(z, y))
    s = z @ z.T
    for side, theirs_side in zip(found, wanted, strict=True):
        assert theirs_side <= side
        extremes = {}
        for i, j in side:
            extremes.setdefault(i, []).append(float(s[i, j]))
        if name != "multi-similarity":
            assert all(max(x) - min(x) < 1e-12 for x in extremes.values())
            for i, j in theirs_side:
                assert abs(float(s[i, j]) - extremes[i][0]) < 1e-12


def test_distance_weighted_draws_equal_in_distribution():
    """PML draws with replacement, also its positives; how often each negative comes follows the same weights."""
    z, y = draw(2, 16, 5, 3)
    w = pair_weights(Contrastive(), z, y, difficulty=DistanceWeighted()) * (y[:, None] != y)
    share = w / w.sum(1, keepdim=True).clamp(min=1e-12)
    torch.manual_seed(0)
    for miner, draws in ((miners.DistanceWeightedMiner(), 300), (DistanceWeightedSampling(), 150)):
        counts = torch.zeros(16, 16)
        for _ in range(draws):
            anchors, _, negatives = miner(z, y)
            counts.index_put_((anchors, negatives), torch.ones(()), accumulate=True)
        assert ((counts.sum(1) == 0) == (share.sum(1) == 0)).all()
        expected = share * counts.sum(1, keepdim=True)
        often = expected > 5
        assert ((counts - expected)[often] ** 2 / expected[often]).mean() < 1.5


def test_many_dimensions_underflow_in_pml_and_not_here():
    """Its weights are divided by the largest of the batch: one close negative leaves other anchors without any."""
    z = torch.eye(512)[:40] + 0.5 * torch.eye(512)[40]  # every negative at cosine 0.2
    z[1] = z[0] + 0.01 * torch.eye(512)[100]
    y = torch.arange(40).roll(1) // 2
    assert y[0] != y[1]
    torch.manual_seed(0)
    assert set(DistanceWeightedSampling()(z, y)[0].tolist()) == set(range(40))
    assert len(set(miners.DistanceWeightedMiner()(z, y)[0].tolist())) < 5


SCRIPT = """
import torch
from {losses} import {loss} as Loss
from {miners} import {miner} as Miner

torch.manual_seed(0)
data, labels = torch.randn(64, 12) + 2 * torch.randn(8, 12).repeat(8, 1), torch.arange(8).repeat(8)
model = torch.nn.Linear(12, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_func = Loss({loss_arguments})
mining_func = Miner({miner_arguments})

for step in range(30):
    optimizer.zero_grad()
    embeddings = model(data)
    indices_tuple = mining_func(embeddings, labels)
    loss = loss_func(embeddings, labels, indices_tuple)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
"""
MULTI_SIMILARITY = "MultiSimilarityLoss", "MultiSimilarity", "MultiSimilarityMiner", "MultiSimilarityMining"
TRIPLET = "TripletMarginLoss", "Triplet"
SCRIPTS = {
    "multi-similarity": (*MULTI_SIMILARITY, "", "2.0"),
    "multi-similarity mined": (*MULTI_SIMILARITY, "alpha=2, beta=50, base=0.5", "epsilon=0.1"),
    "triplet": (*TRIPLET, "TripletMarginMiner", "TripletMarginMining", "margin=0.2", "0.2, 'semihard'"),
    "angular": (*TRIPLET, "AngularMiner", "Angular", "margin=0.1", "angle=20"),
    "contrastive": ("ContrastiveLoss", "Contrastive", "PairMarginMiner", "PairMargin", "", ""),
    "easy-hard": ("SupConLoss", "SupCon", "BatchEasyHardMiner", "EasyHard", "temperature=0.1", "'hard', 'hard'"),
    "distance-weighted": (*TRIPLET, "DistanceWeightedMiner", "DistanceWeightedSampling", "margin=0.2", ""),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_training_script_runs_after_changing_its_imports(name):
    their_loss, our_loss, their_miner, our_miner, loss_arguments, miner_arguments = SCRIPTS[name]
    assert hasattr(difficulty, our_miner)
    histories = []
    for losses, loss, mining, miner in (
        ("pytorch_metric_learning.losses", their_loss, "pytorch_metric_learning.miners", their_miner),
        ("mettle.losses", our_loss, "mettle.difficulty", our_miner),
    ):
        history: list[float] = []
        script = SCRIPT.format(
            losses=losses,
            loss=loss,
            miners=mining,
            miner=miner,
            loss_arguments=loss_arguments,
            miner_arguments=miner_arguments,
        )
        exec(script, {"history": history})
        assert len(history) == 30 and all(map(math.isfinite, history))
        histories.append(history)
    if name == "multi-similarity":  # every anchor has a pair here, so that both take the same mean
        assert histories[1] == pytest.approx(histories[0], rel=1e-3)
    assert min(histories[1][-5:]) < histories[1][0]
