"""A loss at several lengths of the embedding: the sum of the loss on slices, with state for each length."""

import copy

import pytest
import torch
from pytorch_metric_learning import losses as pml_losses

from mettle.difficulty import AdaptiveThreshold, Threshold, curriculum
from mettle.errors import InputError, RecipeError
from mettle.losses import (
    ArcFace,
    Center,
    Contrastive,
    CosFace,
    Matryoshka,
    ProxyAnchor,
    Softmax,
    SoftTriple,
    SupCon,
    Triplet,
    WeightedSum,
)
from mettle.train.recipe import parse_recipe

DIMS = (2, 5, 6)
PAIRWISE = {
    "supcon": SupCon(0.2, difficulty=Threshold()),
    "triplet": Triplet(0.3),
    "contrastive raw": Contrastive(0.4, 3.0, normalise=False),
    "peer": pml_losses.MultiSimilarityLoss(),
    "function": lambda z, y: z.square().mean(),
}
CLASSES = {
    "arcface": ArcFace,
    "cosface": CosFace,
    "softmax": Softmax,
    "soft triple": SoftTriple,
    "anchor": ProxyAnchor,
    "center": Center,
}


def batch(n: int = 24, dim: int = 6):
    torch.manual_seed(0)
    return torch.randn(n, dim, dtype=torch.float64, requires_grad=True), torch.arange(n) // 4


def sum_of_slices(losses, z, y, weights=(1.0, 1.0, 1.0)):
    total = 0.0
    for loss, dim, weight in zip(losses, DIMS, weights, strict=True):
        total = total + weight * loss(torch.stack([z[:, k] for k in range(dim)], dim=1), y)
    return total


def assert_same(found, wanted, z):
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, z)[0], torch.autograd.grad(wanted, z)[0])


@pytest.mark.parametrize("name", PAIRWISE)
def test_it_is_the_sum_of_the_loss_on_slices(name):
    z, y = batch()
    loss = PAIRWISE[name]
    assert_same(Matryoshka(loss, DIMS)(z, y), sum_of_slices([loss] * 3, z, y), z)
    weights = (0.5, 0.0, 2.0)
    assert_same(Matryoshka(loss, DIMS, weights)(z, y), sum_of_slices([loss] * 3, z, y, weights), z)


@pytest.mark.parametrize("name", CLASSES)
def test_every_length_has_class_vectors_of_its_own(name):
    z, y = batch()
    losses = [CLASSES[name](6, dim).double() for dim in DIMS]
    found = Matryoshka(copy.deepcopy(losses), DIMS)
    assert found.num_classes == 6
    assert_same(found.eval()(z, y), sum_of_slices([loss.eval() for loss in losses], z, y), z)
    found.start_from(z, y, centered=True)
    for part, loss, dim in zip(found.losses.values(), losses, DIMS, strict=True):
        loss.start_from(z[:, :dim], y, centered=True)
        assert torch.equal(part.loss.weight, loss.weight)


def test_the_whole_length_alone_is_the_loss_itself():
    z, y = batch()
    assert torch.equal(Matryoshka(SupCon(0.2), [6])(z, y), SupCon(0.2)(z, y))


def test_what_a_loss_remembers_belongs_to_one_length():
    z, y = batch()
    loss = SupCon(difficulty=AdaptiveThreshold(momentum=0.5))
    found = Matryoshka(loss, DIMS)
    found(z, y)
    for part, dim in zip(found.losses.values(), DIMS, strict=True):
        alone = copy.deepcopy(loss)
        alone(z[:, :dim], y)
        for name, value in alone.state_dict().items():
            assert torch.equal(part.loss.state_dict()[name], value)
    other = Matryoshka(loss, DIMS)
    other.load_state_dict(found.state_dict())
    assert torch.equal(other(z, y), copy.deepcopy(found)(z, y))


def test_progress_reaches_the_loss_and_the_weights():
    z, y = batch()
    loss = SupCon(0.2, difficulty=curriculum(Threshold(), end=0.5))
    found = Matryoshka(loss, DIMS, [1.0, {"start": 1.0, "end": 0.0}, 1.0])
    wanted = sum(w * loss(z[:, :d], y, progress=0.25) for w, d in zip((1, 0.75, 1), DIMS, strict=True))
    torch.testing.assert_close(found(z, y, progress=0.25), wanted)


def test_statistics_tell_the_lengths_apart():
    z, y = batch()
    told = Matryoshka(SupCon(0.2), DIMS).statistics(z, y)
    assert set(told) == {f"dim {d} {what}" for d in DIMS for what in ("loss", "gradient")}
    (wanted,) = torch.autograd.grad(SupCon(0.2)(z[:, :2], y), z)
    assert told["dim 2 gradient"] == pytest.approx(wanted.norm().item())


def test_it_is_a_part_of_a_sum_in_the_space_after_a_neck():
    z, y = batch()
    found = WeightedSum([SupCon(0.2), Matryoshka(SupCon(0.2), DIMS)], spaces=["before", "after"])
    wanted = SupCon(0.2)(z, y) + Matryoshka(SupCon(0.2), DIMS)(2 * z.flip(1), y)
    torch.testing.assert_close(found(z, y, after=2 * z.flip(1)), wanted)


def test_nan_in_a_number_that_a_prefix_holds_gives_no_number():
    z, y = batch()
    broken = z.detach().clone()
    broken[0, 1] = torch.nan
    assert not torch.isfinite(Matryoshka(SupCon(0.2), DIMS)(broken, y))


def test_a_recipe_builds_a_loss_for_each_length():
    table = {"loss": {"kind": "Matryoshka", "dims": [2, 8], "loss": {"kind": "CosFace", "scale": 8.0}}}
    recipe = parse_recipe({"model": {"dim": 8}, **table})
    loss = recipe.build_loss(num_classes=4)
    assert [part.loss.weight.shape for part in loss.losses.values()] == [(4, 2), (4, 8)]
    assert "Matryoshka(dims=[2, 8], loss=CosFace(scale=8.0))" in recipe.title()
    with pytest.raises(RecipeError, match="dims reach 8, the embeddings have 4 numbers"):
        parse_recipe({"model": {"dim": 4}, **table})
    with pytest.raises(RecipeError, match="loss.loss: a table such as"):
        parse_recipe({"loss": {"kind": "Matryoshka", "dims": [2], "loss": "SupCon"}})


@pytest.mark.parametrize(
    ("loss", "dims", "said"),
    [
        (SupCon(), (), "lengths of the prefixes"),
        (SupCon(), 16, "lengths of the prefixes"),
        (SupCon(), (4, 2), "must ascend"),
        (SupCon(), (0, 2), "begin at 1"),
        (SupCon(), (2, 2.5), "whole number"),
        ([SupCon()], (2, 4), "1 losses for 2 prefixes"),
        (SupCon, (2, 4), "callable"),
        (3, (2, 4), "callable"),
        (ArcFace(6, 6), (2, 6), r"class vectors of 6 numbers, the prefix has 2.*ArcFace\(6, 2\)"),
        (WeightedSum([SupCon()], spaces=["after"]), (2, 4), "Matryoshka around its parts"),
    ],
)
def test_what_makes_no_prefixes_is_refused(loss, dims, said):
    with pytest.raises(InputError, match=said):
        Matryoshka(loss, dims)


def test_embeddings_that_are_too_short_are_refused():
    z, y = batch()
    with pytest.raises(InputError, match=r"prefix of 8 numbers needs embeddings \(n, 8\) or longer, got \(24, 6\)"):
        Matryoshka(SupCon(), [2, 8])(z, y)
