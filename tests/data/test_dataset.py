import numpy as np
import pytest
import torch

from mettle.data import Column, PKBatchSampler, Samples, ShuffledBatchSampler, read
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.errors import DataError, InputError
from mettle.model import SiameseNet


def table(n=6, **options):
    rows = FeatureArray(np.arange(n * 2, dtype=np.float32).reshape(n, 2))
    return Samples.of(rows, options.pop("labels", list("aabbcc"[:n])), **options)


def test_a_subset_of_a_subset_reads_the_right_rows():
    part = table().take(np.array([5, 3, 1])).where(np.array([True, False, True]))
    assert part.ids.tolist() == [5, 1]
    assert part.read(np.array([1, 0])).tolist() == [[2, 3], [10, 11]]
    assert part.label.values().tolist() == ["c", "a"]


def test_codes_of_whole_numbers_follow_their_value_and_text_its_order():
    assert Column.of([10, 9, 10]).names == ("9", "10")
    assert Column.of(["b", "a"]).codes.tolist() == [1, 0]


def test_a_table_of_any_length_is_printed_in_one_line():
    many = table(2000, labels=[f"person {i}" for i in range(2000)], split=["train"] * 1500 + ["test"] * 500)
    assert repr(many) == "Samples(2000 samples of row 2, 2000 labels, train 1500, test 500)"
    assert repr(table(domain=list("xyxyxy"), source_name="t.csv")) == (
        "Samples(6 samples of row 2, 3 labels, 2 domains, from 't.csv')"
    )
    assert repr(many.label) == "Column(2000 samples, 2000 names)"


def test_ids_above_two_to_the_24_stay_exact():
    big = [2**53 + 1, 2**53 + 2, 3]
    assert table(3, ids=big).ids.tolist() == big


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a"]}, "labels has 1 entries for 6 samples"),
        ({"ids": [1, 1, 2, 3, 4, 5]}, "sample id 1 occurs more than once"),
        ({"ids": [0.5] * 6}, "whole numbers"),
        ({"split": ["train"] * 5}, "split has 5 entries"),
        ({"split": ["train"] * 5 + ["tset"]}, "'tset'"),
        ({"split": [0, 1, 2, 3, 0, 0]}, "got 3 at row 3"),
        ({"role": ["qeury"] * 6}, "role must be one of"),
        ({"domain": ["x"]}, "domain has 1 entries"),
    ],
)
def test_contradictions_are_named(options, message):
    with pytest.raises(DataError, match=message):
        table(**options)


def test_columns_by_name():
    t = table(domain=list("xxyyzz"), groups={"sex": list("fmfmfm")})
    assert t.column("sex").names == ("f", "m")
    with pytest.raises(DataError, match="did you mean 'sex'"):
        t.column("sxe")
    with pytest.raises(InputError, match="did you mean 'train'"):
        t.part("trian")


def test_fingerprint_changes_with_content_labels_split_and_order():
    base = table().fingerprint()
    assert base == table().fingerprint()
    assert len({base, table(split=["test"] * 6).fingerprint(), table(labels=list("aabbca")).fingerprint()}) == 3
    assert table().take(np.arange(5)).fingerprint() != base


# Arguments of the wrong kind: one line that says what came and what to give, never an error of Python's own.


LABELS = np.repeat(np.arange(4), 4)


def said(work) -> str:
    with pytest.raises(InputError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("inputs", [np.zeros((16, 3)), np.zeros((16, 4, 4), np.uint8), torch.zeros(16, 3), None, "x"])
def test_inputs_that_cannot_be_read_from(inputs):
    text = said(lambda: Samples.of(inputs, LABELS))
    assert type(inputs).__name__ in text and "FeatureArray(array)" in text and "ImageArray(array)" in text


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
