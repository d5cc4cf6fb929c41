"""Sums of losses, and losses with a miner of another library."""

import copy

import pytest
import torch
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners as pml_miners
from torch import nn

from mettle.difficulty import AdaptiveThreshold
from mettle.errors import InputError
from mettle.losses import ArcFace, MinedLoss, SupCon, Triplet, WeightedSum


def batch(n: int = 24, dim: int = 6):
    torch.manual_seed(0)
    return torch.randn(n, dim, dtype=torch.float64, requires_grad=True), torch.arange(n) // 4


def test_the_sum_has_the_value_and_the_gradient_of_its_parts():
    z, y = batch()
    one, two = SupCon(0.2), Triplet()
    found = WeightedSum([one, two], [0.5, 2.0])
    (wanted,) = torch.autograd.grad(0.5 * one(z, y) + 2 * two(z, y), z)
    torch.testing.assert_close(found(z, y), 0.5 * one(z, y) + 2 * two(z, y))
    torch.testing.assert_close(torch.autograd.grad(found(z, y), z)[0], wanted)


def test_weights_may_follow_progress_and_reach_the_parts():
    z, y = batch()
    found = WeightedSum({"a": SupCon(0.2), "b": lambda z, y: z.square().mean()}, {"a": 1.0, "b": lambda done: 3 * done})
    torch.testing.assert_close(found(z, y, progress=0.0), SupCon(0.2)(z, y))
    torch.testing.assert_close(found(z, y, progress=1.0), SupCon(0.2)(z, y) + 3 * z.square().mean())


def test_parts_are_trained_saved_and_copied_with_the_sum():
    z, y = batch()
    found = WeightedSum([ArcFace(6, 6).double(), SupCon(difficulty=AdaptiveThreshold())])
    assert found.num_classes == 6
    assert len(list(found.parameters())) == 1
    found(z, y).backward()
    other = copy.deepcopy(WeightedSum([ArcFace(6, 6).double(), SupCon(difficulty=AdaptiveThreshold())]))
    other.load_state_dict(found.state_dict())
    for name, value in found.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    assert not hasattr(WeightedSum([SupCon()]), "num_classes")


def test_statistics_say_which_loss_moves_the_embeddings():
    z, y = batch()
    told = WeightedSum({"supcon": SupCon(0.2), "nothing": lambda z, y: torch.zeros((), dtype=z.dtype)}).statistics(z, y)
    assert set(told) == {"supcon loss", "supcon gradient", "nothing loss", "nothing gradient"}
    (wanted,) = torch.autograd.grad(SupCon(0.2)(z, y), z)
    assert told["supcon gradient"] == pytest.approx(float(wanted.norm()))
    assert told["nothing gradient"] == 0


def test_statistics_change_nothing_that_training_remembers():
    z, y = batch()
    found = WeightedSum([SupCon(difficulty=AdaptiveThreshold())])
    before = {name: value.clone() for name, value in found.state_dict().items()}
    found.statistics(z, y)
    for name, value in found.state_dict().items():
        assert torch.equal(value, before[name])
    found(z, y)
    assert any(not torch.equal(value, before[name]) for name, value in found.state_dict().items())


def test_a_miner_of_another_library_chooses_the_pairs():
    z, y = batch()
    loss, miner = pml_losses.TripletMarginLoss(), pml_miners.BatchHardMiner()
    found = MinedLoss(loss, miner)
    torch.testing.assert_close(found(z, y), loss(z, y, miner(z, y)))
    assert isinstance(found, nn.Module) and not hasattr(found, "num_classes")


@pytest.mark.parametrize(
    ("losses", "weights", "said"),
    [
        ([], None, "at least one"),
        ([SupCon(), 3], None, "must be callable"),
        ([SupCon()], [1, 2], "2 weights for 1 losses"),
        ([SupCon()], [-1.0], "from 0 up"),
        ([SupCon()], [float("nan")], "from 0 up"),
        ({"a": SupCon()}, {"b": 1.0}, "weights are for 'b'"),
        ("SupCon", None, "several losses"),
    ],
)
def test_what_makes_no_sum_is_refused(losses, weights, said):
    with pytest.raises(InputError, match=said):
        WeightedSum(losses, weights)
