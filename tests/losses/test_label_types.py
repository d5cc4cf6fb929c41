"""Whole-number labels of any type mean what int64 labels mean; class vectors that change too early are noticed."""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from mettle.difficulty import Threshold
from mettle.losses import AdaCos, ArcFace, Center, CosFace, InfoNCE, NPair, Softmax, SphereFace, SupCon, Triplet

TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32]
LOSSES = {
    "softmax": lambda: Softmax(5, 6),
    "cosface": lambda: CosFace(5, 6),
    "arcface": lambda: ArcFace(5, 6),
    "sphereface": lambda: SphereFace(5, 6),
    "adacos": lambda: AdaCos(5, 6),
    "center": lambda: Center(5, 6, weight=0.5),
    "weighed": lambda: CosFace(5, 6, difficulty=Threshold()),
    "sampled": lambda: CosFace(5, 6, sample=0.6),
}


def problem():
    torch.manual_seed(3)
    return torch.randn(9, 6), torch.tensor([1, 0, 4, 1, 2, 3, 1, 0, 4])


@pytest.mark.parametrize("dtype", TYPES)
def test_cosface_with_any_labels_is_its_formula(dtype):
    z, y = problem()
    loss = CosFace(5, 6, scale=20.0, margin=0.3)
    logits = 20 * (normalize(z) @ normalize(loss.weight).T - 0.3 * torch.eye(5)[y])
    torch.testing.assert_close(loss(z, y.to(dtype)), cross_entropy(logits, y))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_every_class_vector_loss_takes_any_whole_numbers(name, dtype):
    z, y = problem()
    found = []
    for labels in (y, y.to(dtype)):
        torch.manual_seed(0)
        loss = LOSSES[name]()
        leaf = z.clone().requires_grad_()
        value = loss(leaf, labels)
        value.backward()
        state = [value.detach(), leaf.grad, *(p.grad for p in loss.parameters()), *loss.buffers()]
        rows = loss.per_anchor(z, labels).detach()
        facts = loss.statistics(z, labels)
        loss.start_from(z, labels)
        found.append([*state, rows, *loss.parameters(), *loss.buffers(), facts])
    for a, b in zip(*found, strict=True):
        assert a == b if isinstance(a, dict) else torch.equal(a, b)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_pairwise_losses_too(engine, dtype):
    z, y = problem()
    for loss in (SupCon(), InfoNCE(), Triplet(), Triplet(mining="semihard")):
        a, b = (loss.per_anchor(z, labels, engine=engine, tile=4) for labels in (y, y.to(dtype)))
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    pairs = torch.arange(4).repeat(2)
    torch.testing.assert_close(NPair()(z[:8], pairs.to(dtype)), NPair()(z[:8], pairs))


@pytest.mark.parametrize("make", [lambda: CosFace(5, 6), lambda: Softmax(5, 6, bias=False), lambda: AdaCos(5, 6)])
def test_class_vectors_that_change_before_the_way_back_are_noticed(make):
    z, y = problem()
    loss = make()
    value = loss(z.requires_grad_(), y)
    with torch.no_grad():
        loss.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_so_are_embeddings_of_losses_that_use_them_as_they_are():
    z, y = problem()
    loss = Softmax(5, 6, bias=False)
    value = loss(z, y)
    z *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
