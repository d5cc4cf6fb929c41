"""On a device that has no float64, no loss makes a float64 number: shown on the CPU, told that it has none."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laws.members import DIFFICULTIES, FORMS, extra, fitting, with_difficulty
from mettle import losses
from mettle.difficulty import DistanceWeightedSampling
from mettle.losses import Margin, SupCon, Triplet
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs import closed_form, similarity

CLASSES, DIM = 7, 5
CLASS_VECTORS = [
    name
    for name in losses.__all__
    if isinstance(kind := getattr(losses, name), type) and issubclass(kind, ClassVectors | losses.Center)
]
SAMPLED = {
    "random negatives": Triplet(0.3, "random"),
    "distance-weighted sampling": Margin(0.2, 1.1, difficulty=DistanceWeightedSampling()),
}


class RefuseFloat64(TorchDispatchMode):
    """An error wherever an operator returns float64 numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        wide = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and x.dtype == torch.float64]
        assert not wide, f"{func} returns float64"
        return found


@pytest.fixture(autouse=True)
def no_float64(monkeypatch):
    monkeypatch.setattr(similarity, "WITHOUT_FLOAT64", {"cpu"})
    monkeypatch.setattr(closed_form, "MAX_ROWS", 0)  # of the processor alone


def loss_and_gradient(loss, embeddings, labels, **options):
    leaf = embeddings.detach().float().requires_grad_()
    with RefuseFloat64():
        value = loss(leaf, labels, **options)
        value.backward()
    assert torch.isfinite(value) and torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("name", [*FORMS, *SAMPLED])
def test_pairwise_losses_make_none(name):
    loss = (FORMS | SAMPLED)[name]
    embeddings, labels = fitting(loss)
    loss_and_gradient(loss, embeddings, labels)


@pytest.mark.parametrize("name", DIFFICULTIES)
def test_difficulties_make_none(name):
    loss = with_difficulty(SupCon(0.2), DIFFICULTIES[name])
    embeddings, labels = fitting(loss)
    options = {key: x.float() for key, x in extra(loss, embeddings).items()}
    loss_and_gradient(loss, embeddings, labels, **options)


@pytest.mark.parametrize("name", CLASS_VECTORS)
def test_losses_with_class_vectors_make_none(name):
    loss = getattr(losses, name)(CLASSES, DIM).to("cpu", torch.float32)
    loss_and_gradient(loss, torch.randn(14, DIM), torch.arange(14) % CLASSES)
