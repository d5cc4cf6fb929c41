"""CrossBatchMemory beside that of pytorch-metric-learning, over several batches, and as a module."""

import copy

import pytest
import torch
from pytorch_metric_learning import losses as peers
from pytorch_metric_learning import miners
from pytorch_metric_learning.reducers import MeanReducer

from mettle.errors import InputError, NumericError
from mettle.losses import ArcFace, CrossBatchMemory, InfoNCE, LiftedStructure, MinedLoss, SupCon, WeightedSum

N, D, SIZE = 12, 5, 40  # the fourth batch wraps around
VIEWS = torch.arange(N) >= N // 2  # the second view enters


def batch(k, masked):
    generator = torch.Generator().manual_seed(k)
    z = torch.randn(N, D, generator=generator, dtype=torch.float64)
    if masked:  # labels of their own in every batch, as for samples without labels
        return z, torch.arange(N // 2).repeat(2) + N * k
    return z, torch.arange(N)[torch.randperm(N, generator=generator)] // 2 + k % 2  # classes come again


def value_and_gradient(loss, z, y, **options):
    leaf = z.clone().requires_grad_()
    value = loss(leaf, y, **options)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


class Theirs(torch.nn.Module):
    """A loss of the other library that declares what it takes: means over triplets differ, see `Triplet`."""

    takes_references = True

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, z, y, *, ref, indices_tuple):
        return self.loss(z, y, indices_tuple, ref[0], ref[1])


PEERS = {  # ours, theirs, a miner of both, whether one view enters
    "supcon": (SupCon(0.1), peers.SupConLoss(0.1, reducer=MeanReducer()), None, False),
    "supcon, two views": (SupCon(0.1), peers.SupConLoss(0.1), None, True),
    "infonce, two views": (InfoNCE(0.2), peers.NTXentLoss(0.2), None, True),
    "mined pairs": (SupCon(0.1), peers.SupConLoss(0.1), miners.MultiSimilarityMiner(), False),
    "mined triplets": (
        Theirs(peers.TripletMarginLoss(0.2)),
        peers.TripletMarginLoss(0.2),
        miners.TripletMarginMiner(0.2, type_of_triplets="semihard"),
        False,
    ),
    "mined pairs, two views": (SupCon(0.1), peers.SupConLoss(0.1), miners.MultiSimilarityMiner(), True),
}


def test_a_batch_enters_the_queue_in_training_mode_only():
    memory, (z, y) = CrossBatchMemory(SupCon(0.1), SIZE, D), batch(0, masked=False)
    memory(z, y)
    value = memory.eval()(*batch(1, masked=False))
    assert len(memory.queue) == N
    torch.testing.assert_close(memory.train()(*batch(1, masked=False)), value)
    assert len(memory.queue) == 2 * N


@pytest.mark.parametrize("marked", [True, False])
def test_a_mask_leaves_rows_on_both_sides(marked):
    with pytest.raises(InputError, match="enqueue_mask must mark some rows"):
        CrossBatchMemory(SupCon(0.1), SIZE, D)(*batch(0, True), enqueue_mask=torch.full((N,), marked))


def test_a_class_is_not_taken_for_a_loss():
    with pytest.raises(InputError, match=r"write SupCon\(\.\.\.\)"):
        CrossBatchMemory(SupCon, SIZE, D)


@pytest.mark.parametrize("name", PEERS)
def test_values_and_gradients_are_those_of_the_other_library(name):
    loss, peer, miner, masked = PEERS[name]
    ours = CrossBatchMemory(loss, SIZE, D, miner).double()
    theirs = peers.CrossBatchMemory(peer, D, SIZE, miner)
    options = {"enqueue_mask": VIEWS} if masked else {}
    for k in range(10):
        z, y = batch(k, masked)
        found, wanted = (value_and_gradient(memory, z, y, **options) for memory in (ours, theirs))
        assert wanted[1].abs().sum() > 0
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_it_resumes_from_its_state_and_is_part_of_a_sum():
    memory = CrossBatchMemory(SupCon(0.1), SIZE, D).double()
    for k in range(5):
        memory(*batch(k, False))
    again = CrossBatchMemory(SupCon(0.1), SIZE, D).double()
    again.load_state_dict(copy.deepcopy(memory.state_dict()))
    both = WeightedSum([memory, SupCon(0.2)])
    told = both.statistics(*batch(5, False))  # looking at a batch queues nothing
    assert told["CrossBatchMemory gradient"] > 0
    for k in range(5, 9):
        z, y = batch(k, False)
        torch.testing.assert_close(both(z, y, progress=0.5), again(z, y) + SupCon(0.2)(z, y))
    assert torch.equal(memory.queue.embeddings, again.queue.embeddings)


def test_a_batch_larger_than_the_queue_is_compared_with_itself():
    z, y = batch(0, False)
    memory = CrossBatchMemory(SupCon(0.1), 5, D).double()
    for _ in range(2):
        torch.testing.assert_close(memory(z, y), SupCon(0.1)(z, y))
    assert torch.equal(memory.queue.labels.sort().values, y[-5:].sort().values)


@pytest.mark.parametrize(
    "loss", [LiftedStructure(), ArcFace(4, D), torch.nn.Identity(), MinedLoss(SupCon(), lambda z, y: None)], ids=repr
)
def test_a_loss_without_references_is_refused(loss):
    with pytest.raises(InputError, match=f"{type(loss).__name__} cannot compare a batch with a queue"):
        CrossBatchMemory(loss, SIZE, D)


def test_what_is_broken_is_refused():
    memory, (z, y) = CrossBatchMemory(SupCon(0.1), SIZE, D).double(), batch(0, False)
    with pytest.raises(InputError, match="miner must be callable"):
        CrossBatchMemory(SupCon(), SIZE, D, miner="semihard")
    with pytest.raises(InputError, match="enqueue_mask must be booleans"):
        memory(z, y, enqueue_mask=VIEWS.long())
    with pytest.raises(InputError, match=f"dim {D}, got {D - 1}"):
        memory(z[:, 1:], y)
    z[3] = torch.nan
    with pytest.raises(NumericError, match="not queued"):
        memory(z, y)
    assert len(memory.queue) == 0
