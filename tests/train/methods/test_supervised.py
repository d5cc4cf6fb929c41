"""One step's parts by themselves: how labels are numbered, which precisions there are."""

import pytest
import torch
from torch import nn

from mettle.errors import InputError
from mettle.losses import ArcFace, Center, Triplet
from mettle.model import Embedder, EmbedderSpec
from mettle.train import HardnessAware, Supervised
from mettle.train.optim import MultiOptimizer, OptimSettings


def model() -> Embedder:
    return Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4), (6,))


def supervised(**options) -> Supervised:
    return Supervised(model(), ArcFace(3, 4), **options)


def test_labels_become_their_places_among_the_classes():
    method = supervised(classes=torch.tensor([0, 2, 4]))
    assert method.class_indices(torch.tensor([4, 0, 2, 2])).tolist() == [2, 0, 1, 1]
    assert supervised().class_indices(torch.tensor([2, 0])).tolist() == [2, 0]


@pytest.mark.parametrize("label", [3, 5, -1, 1 << 40])
def test_a_label_that_is_no_class_is_refused_by_name(label):
    with pytest.raises(InputError, match=f"label {label} is none of the 3 classes"):
        supervised(classes=torch.tensor([0, 2, 4])).class_indices(torch.tensor([0, 2, label]))


@pytest.mark.parametrize("classes", [[4, 0, 2], [0, 2, 2], [[0, 2, 4]], [0.0, 2.0, 4.0]])
def test_classes_that_cannot_be_looked_up_are_refused(classes):
    with pytest.raises(InputError, match="sorted"):
        supervised(classes=torch.tensor(classes))
    with pytest.raises(InputError, match="sorted"):
        HardnessAware(Triplet(), model(), classes=torch.tensor(classes))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "half", "float64", ""])
def test_a_precision_that_is_none_is_refused_and_the_near_one_named(precision):
    with pytest.raises(InputError, match="no precision") as caught:
        supervised(precision=precision)
    assert "float16" in str(caught.value)
    with pytest.raises(InputError, match="no precision"):
        MultiOptimizer({"model": list(model().parameters())}, device="cpu", settings=OptimSettings(precision=precision))


def test_known_precisions_are_what_they_say():
    assert supervised(precision="float32").optimizer.dtype is None
    assert supervised(precision="bfloat16").optimizer.dtype is torch.bfloat16
    assert MultiOptimizer({}, device="cpu", settings=OptimSettings(precision="float16")).dtype is torch.float16


@pytest.mark.parametrize(
    "loss",
    [
        ArcFace(30, 4, sample=0.5, sparse=True),
        Center(30, 4, base=ArcFace(30, 4, sample=0.5, sparse=True)),
        nn.Embedding(30, 4, sparse=True),
    ],
    ids=["own", "inside", "user's"],
)
def test_sparse_gradients_are_refused_by_the_method_too(loss):
    with pytest.raises(InputError, match="no sparse gradients"):
        Supervised(model(), loss)
