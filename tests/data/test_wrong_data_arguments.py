"""Arguments of the wrong kind: one line that says what came and what to give, never an error of Python's own."""

import numpy as np
import pytest
import torch

from mettle.data import PKBatchSampler, Samples, ShuffledBatchSampler, read
from mettle.data.dataset import Column
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.errors import InputError
from mettle.model import SiameseNet

LABELS = np.repeat(np.arange(4), 4)


def said(work) -> str:
    with pytest.raises(InputError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("inputs", [np.zeros((16, 3)), np.zeros((16, 4, 4), np.uint8), torch.zeros(16, 3), None, "x"])
def test_inputs_that_cannot_be_read_from(inputs):
    text = said(lambda: Samples.of(inputs, LABELS))
    assert type(inputs).__name__ in text and "Rows(array)" in text and "ImageArray(array)" in text


def test_an_array_goes_in_as_the_line_says():
    assert Samples.of(FeatureArray(np.zeros((16, 3))), LABELS).read(np.arange(2)).shape == (2, 3)
    assert Samples.of(ImageArray(np.zeros((16, 4, 4), np.uint8)), LABELS).read(np.arange(2)).shape == (2, 4, 4, 1)


@pytest.mark.parametrize("labels", [None, 3, np.array(3)])
def test_labels_that_are_no_list(labels):
    assert said(lambda: Samples.of(FeatureArray(np.zeros((2, 3))), labels)).startswith(
        "label must be a list or an array"
    )


def test_labels_may_be_any_iterable():
    assert Column.of(k % 2 for k in range(4)).codes.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("source", [None, 3, b"x.csv", ["x.csv"], np.zeros(3)])
def test_a_source_that_is_no_path(source):
    text = said(lambda: read(source))
    assert text.startswith("source must be a path") and type(source).__name__ in text


@pytest.mark.parametrize("name", ["classes", "samples", "seed"])
@pytest.mark.parametrize("value", [2.0, 2.5, "2", None, True, np.float64(2)])
def test_class_batches_take_whole_numbers(name, value):
    numbers = {"classes": 2, "samples": 2, "seed": 2} | {name: value}
    assert said(lambda: PKBatchSampler(LABELS, **numbers)) == f"{name} must be a whole number, got {value!r}"


@pytest.mark.parametrize("name", ["count", "size", "seed"])
@pytest.mark.parametrize("value", [4.0, "4", None, True])
def test_sample_batches_take_whole_numbers(name, value):
    numbers = {"count": 8, "size": 4, "seed": 4} | {name: value}
    assert said(lambda: ShuffledBatchSampler(**numbers)) == f"{name} must be a whole number, got {value!r}"


def test_whole_numbers_and_labels_of_any_kind_give_the_same_batches():
    plain = PKBatchSampler(LABELS, 2, 2, 5).epoch_batches(1)
    for labels in (LABELS.tolist(), torch.from_numpy(LABELS), LABELS.astype(np.int16)):
        other = PKBatchSampler(labels, np.int32(2), np.uint8(2), np.int64(5)).epoch_batches(1)
        assert np.array_equal(np.stack(plain), np.stack(other))
    assert said(lambda: PKBatchSampler(LABELS[:, None], 2, 2)).startswith("labels must be one per sample, (n,)")


@pytest.mark.parametrize("head", ["distance", "difference"])
@pytest.mark.parametrize("dim", ["x", 0, -1, 4.0, 2.5, True])
def test_the_dimension_of_a_siamese_net(dim, head):
    text = said(lambda: SiameseNet(torch.nn.Linear(3, 4), head, dim=dim))
    assert text.startswith("dim must be") and repr(dim) in text
    assert SiameseNet(torch.nn.Linear(3, 4), head, dim=4)(torch.zeros(2, 3), torch.zeros(2, 3)).shape == (2,)
