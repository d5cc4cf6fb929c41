import numpy as np
import pytest

from mettle.data import Column, Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import DataError, InputError


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
