"""Tuples of pytorch-metric-learning's miners in our losses: its values, its gradients, its training scripts."""

import math

import pytest
import torch

from mettle import losses

pml = pytest.importorskip("pytorch_metric_learning")
from pytorch_metric_learning import distances, miners, reducers  # noqa: E402
from pytorch_metric_learning import losses as pml_losses  # noqa: E402

MINERS = {
    "multi-similarity": miners.MultiSimilarityMiner(epsilon=0.3),
    "pair margin": miners.PairMarginMiner(pos_margin=0.4, neg_margin=1.3),
    "batch hard": miners.BatchHardMiner(),
    "triplet margin": miners.TripletMarginMiner(margin=0.3),
}


@pytest.fixture
def batch():
    z = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return z.requires_grad_(), torch.arange(24) % 6


def single_values(loss, z, y, pairs):
    """What PML has before it reduces: every part's values and the indices that they belong to."""
    loss.reducer = reducers.DoNothingReducer()
    found = loss(z, y, pairs)
    return {name: (part["losses"], part["indices"]) for name, part in found.items() if part["losses"] is not None}


def mean_by_anchor(values, anchors, n, active=False):
    """Mean over the values of each anchor, or over those above 0."""
    counts = (values.detach() > 0).to(values.dtype) if active else torch.ones_like(values)
    total, count = (values.new_zeros(n).index_add(0, anchors, x) for x in (values, counts))
    return total / count.clamp(min=1)


def assert_same_rows(found, wanted, z):
    """Where ours is defined: the same values, and the same gradient of one combination of them."""
    there = ~found.isnan()
    assert bool(there.any())
    torch.testing.assert_close(found[there], wanted[there], rtol=1e-6, atol=1e-9)
    mix = torch.linspace(1, 2, len(z), dtype=z.dtype)[there]
    ours, theirs = (torch.autograd.grad((mix * x[there]).sum(), z)[0] for x in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MINERS)
def test_losses_over_pairs_equal_pml_on_its_tuples(name, batch):
    z, y = batch
    pairs = MINERS[name](z, y)
    values = single_values(pml_losses.ContrastiveLoss(), z, y, pairs)
    wanted = sum(mean_by_anchor(x, indices[0], len(z)) for x, indices in values.values())
    assert_same_rows(losses.Contrastive(form="linear").per_anchor(z, y, pairs), wanted, z)
    ((x, indices),) = single_values(pml_losses.NTXentLoss(0.2), z, y, pairs).values()
    wanted = mean_by_anchor(x, indices[0], len(z))
    ours = losses.InfoNCE(0.2).per_anchor(z, y, pairs)
    anchors = (
        indices[0] if len(pairs) == 3 else torch.tensor([i for i in indices[0].tolist() if i in pairs[2].tolist()])
    )
    has_negatives = torch.zeros(len(z), dtype=torch.bool).index_fill(0, anchors, True)
    assert_same_rows(torch.where(has_negatives, ours, torch.nan), wanted, z)


@pytest.mark.parametrize("name", MINERS)
def test_losses_over_rows_equal_pml_on_its_tuples(name, batch):
    """PML marks the pairs of these losses in a table, where a pair is there once: so are they here."""
    z, y = batch
    pairs = MINERS[name](z, y)
    if len(pairs) == 3:
        a, p, n = pairs
        pairs = (*torch.stack([a, p]).unique(dim=1), *torch.stack([a, n]).unique(dim=1))
    ((x, _),) = single_values(pml_losses.MultiSimilarityLoss(), z, y, pairs).values()
    assert_same_rows(losses.MultiSimilarity().per_anchor(z, y, pairs), x.squeeze(1), z)
    ((x, _),) = single_values(pml_losses.SupConLoss(0.2), z, y, pairs).values()
    assert_same_rows(losses.SupCon(0.2).per_anchor(z, y, pairs), x, z)


@pytest.mark.parametrize("name", MINERS)
def test_triplets_equal_pml_on_its_tuples(name, batch):
    z, y = batch
    pairs = MINERS[name](z, y)
    ((x, indices),) = single_values(pml_losses.TripletMarginLoss(margin=0.2), z, y, pairs).values()
    wanted = mean_by_anchor(x, indices[0], len(z), active=True)
    ours = losses.Triplet(margin=0.2).per_anchor(z, y, pairs)
    there = torch.zeros(len(z), dtype=torch.bool).index_fill(0, indices[0], True)
    assert_same_rows(torch.where(there, ours, torch.nan), wanted, z)


def test_references_and_given_weights_of_a_miner(batch):
    z, y = batch
    ref, ref_y = torch.randn(15, 6, dtype=z.dtype), torch.arange(15) % 6
    pairs = miners.MultiSimilarityMiner(epsilon=0.3)(z, y, ref, ref_y)
    loss = pml_losses.MultiSimilarityLoss(reducer=reducers.DoNothingReducer(), distance=distances.CosineSimilarity())
    wanted = loss(z, y, pairs, ref, ref_y)["loss"]["losses"].squeeze(1)
    assert_same_rows(losses.MultiSimilarity().per_anchor(z, y, pairs, ref=(ref, ref_y)), wanted, z)


SCRIPT = """
import torch
from pytorch_metric_learning import miners
from {module} import {name} as Loss

torch.manual_seed(0)
data, labels = torch.randn(64, 12) + 2 * torch.randn(8, 12).repeat(8, 1), torch.arange(8).repeat(8)
model = torch.nn.Linear(12, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_func = Loss({arguments})
mining_func = miners.{miner}

for step in range(30):
    optimizer.zero_grad()
    embeddings = model(data)
    indices_tuple = mining_func(embeddings, labels)
    loss = loss_func(embeddings, labels, indices_tuple)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
"""


@pytest.mark.parametrize(
    ("theirs", "ours", "arguments", "miner"),
    [
        ("MultiSimilarityLoss", "MultiSimilarity", "alpha=2, beta=50, base=0.5", "MultiSimilarityMiner()"),
        ("MultiSimilarityLoss", "MultiSimilarity", "", "MultiSimilarityMiner(epsilon=2.0)"),
        ("TripletMarginLoss", "Triplet", "margin=0.2", "TripletMarginMiner(margin=0.2, type_of_triplets='semihard')"),
        ("SupConLoss", "SupCon", "temperature=0.1", "BatchEasyHardMiner()"),
    ],
)
def test_a_training_script_runs_after_changing_its_imports(theirs, ours, arguments, miner):
    histories = []
    for module, name in (("pytorch_metric_learning.losses", theirs), ("mettle.losses", ours)):
        history: list[float] = []
        exec(SCRIPT.format(module=module, name=name, arguments=arguments, miner=miner), {"history": history})
        assert len(history) == 30 and all(map(math.isfinite, history))
        histories.append(history)
    if "epsilon" in miner:  # every anchor has a pair here, so that both take the same mean
        assert histories[1] == pytest.approx(histories[0], rel=1e-3)
    assert min(histories[1][-5:]) < histories[1][0]
