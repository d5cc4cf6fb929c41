"""Sums of losses, and losses with a miner of another library."""

import copy

import pytest
import torch
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners as pml_miners
from torch import nn

from mettle.difficulty import AdaptiveThreshold
from mettle.errors import InputError
from mettle.losses import ArcFace, MinedLoss, SupCon, Triplet, WeightedSum, WeightSchedule


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


def center(z: torch.Tensor) -> torch.Tensor:
    return z - z.mean(0)


def test_losses_in_two_spaces_have_the_value_and_the_gradient_of_their_parts():
    z, y = batch()
    one, two = SupCon(0.2), ArcFace(6, 6).double()
    found = WeightedSum([one, two], [0.5, 2.0], ["before", "after"])
    assert found.takes_after and not WeightedSum([one, two]).takes_after
    wanted = 0.5 * one(z, y) + 2 * two(center(z), y)
    torch.testing.assert_close(found(z, y, after=center(z)), wanted)
    gradient = torch.autograd.grad(found(z, y, after=center(z)), z)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, z)[0])
    named = WeightedSum({"a": one, "b": two}, {"a": 0.5, "b": 2.0}, {"b": "after"})
    torch.testing.assert_close(named(z, y, after=center(z)), wanted)


def test_gradient_norms_of_both_spaces_are_with_respect_to_the_embeddings_before_the_neck():
    z, y = batch()
    classes = ArcFace(6, 6).double()
    found = WeightedSum({"pairs": SupCon(0.2), "classes": classes}, spaces={"classes": "after"})
    told = found.statistics(z, y, neck=center)
    for name, value in (("pairs", SupCon(0.2)(z, y)), ("classes", classes(center(z), y))):
        (wanted,) = torch.autograd.grad(value, z)
        assert told[f"{name} loss"] == pytest.approx(value.item())
        assert told[f"{name} gradient"] == pytest.approx(float(wanted.norm()))


def test_class_vectors_start_at_the_means_of_their_own_space():
    z, y = batch()
    found = WeightedSum([ArcFace(6, 6).double(), ArcFace(6, 6).double()], spaces=["before", "after"])
    found.start_from(z, y, after=2 * z.flip(1))
    before, after = found.losses.values()
    assert torch.equal(before.weight, ArcFace(6, 6).double().start_from(z, y).weight)
    assert torch.equal(after.weight, ArcFace(6, 6).double().start_from(2 * z.flip(1), y).weight)
    assert not hasattr(WeightedSum([SupCon()]), "start_from")


@pytest.mark.parametrize(
    ("kind", "progress", "wanted"),
    [
        ("linear", 0.1, 1.0),
        ("linear", 0.4, 0.8),
        ("linear", 0.9, 0.3),
        ("cosine", 0.2, 1.0),
        ("cosine", 0.4, 0.8828427),
    ],
)
def test_a_weight_may_be_a_table_of_a_schedule(kind, progress, wanted):
    table = {"kind": kind, "start": 1.0, "end": 0.2, "since": 0.2, "until": 1.0}
    z, y = batch()
    found = WeightedSum([SupCon(0.2)], [table])
    assert found.weight("SupCon", progress) == pytest.approx(wanted)
    torch.testing.assert_close(found(z, y, progress=progress), found.weight("SupCon", progress) * SupCon(0.2)(z, y))
    assert WeightedSum([SupCon(0.2)], [WeightSchedule(**table)]).weight("SupCon", progress) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spaces": ["after", "before"]}, "2 spaces for 1 losses"),
        ({"spaces": ["behind"]}, "'before' or 'after', got 'behind'"),
        ({"spaces": {"b": "after"}}, "spaces names 'b', the losses are SupCon"),
        ({"weights": 3}, "weights must be a list"),
        ({"spaces": "after"}, "spaces must be a list"),
        ({"weights": [{"kind": "square"}]}, "'linear' or 'cosine', got 'square'"),
        ({"weights": [{"stop": 0.2}]}, "has no 'stop'"),
        ({"weights": [{"end": -1.0}]}, "from 0 up"),
        ({"weights": [{"end": float("nan")}]}, "finite"),
        ({"weights": [{"since": 0.5, "until": 0.5}]}, "since < until"),
    ],
)
def test_spaces_and_schedules_that_make_no_sense_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        WeightedSum([SupCon()], **options)


def test_a_function_that_gives_no_weight_is_refused():
    for bad in (-1.0, float("inf")):
        with pytest.raises(InputError, match="from 0 up, its function gives"):
            WeightedSum([SupCon()], [lambda progress, bad=bad: bad])(torch.eye(4), torch.tensor([0, 0, 1, 1]))


def test_a_part_of_several_numbers_is_refused():
    with pytest.raises(InputError, match=r"part must give one number, got shape \(24,\)"):
        WeightedSum({"part": lambda z, y: z.sum(1)})(*batch())


def test_a_loss_after_the_neck_needs_the_embeddings_there():
    z, y = batch()
    with pytest.raises(InputError, match="SupCon is in the space after a neck: give after="):
        WeightedSum([SupCon()], spaces=["after"])(z, y)
