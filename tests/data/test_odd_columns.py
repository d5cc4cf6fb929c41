"""Columns that are not what they seem: text like numbers, NaN as a name, ids beyond int64, numbers that are text."""

import gzip
import importlib
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import mettle, refused
from mettle import data
from mettle.data.check import class_size_problems
from mettle.data.dataset import Column, Samples
from mettle.data.inputs import FeatureArray
from mettle.data.sources.npz import column_with_names
from mettle.data.sources.text_table import is_integer_text, read_table, read_table_header
from mettle.errors import DataError, InputError
from mettle.evaluate.vectors import read_vectors

NAN = float("nan")


def rows(n, width=2):
    return FeatureArray(np.random.default_rng(0).normal(size=(n, width)).astype(np.float32))


# Whole numbers as text.


@given(st.integers(1 - 10**17, 10**17))
def test_a_whole_number_is_one_as_it_is_printed(n):
    assert is_integer_text(str(n))


@given(st.text(st.sampled_from("-+0123456789 ._٣²"), max_size=22))
def test_only_what_prints_back_is_a_whole_number(text):
    try:
        prints_back = str(int(text)) == text
    except ValueError:
        prints_back = False
    assert is_integer_text(text) == (prints_back and len(text) < 19)


@pytest.mark.parametrize("text", ["--5", "---", "-", "", "-0", "007", "5-", "- 5", "+5"])
def test_names_that_look_like_numbers(text):
    assert not is_integer_text(text)


def test_a_label_with_two_signs_is_a_name(tmp_path):
    table = tmp_path / "l.csv"
    table.write_text("label,e0,e1\n--5,1,2\n--5,2,3\n7,1,1\n7,4,5\n")
    assert data.read(table).label.names == ("--5", "7")
    assert read_vectors(table, None, None).columns["label"].tolist() == ["--5", "--5", "7", "7"]
    assert "4 samples" in mettle("data", "check", table)


# NaN is no name.


def test_nan_labels_of_an_npz_are_refused_by_row(tmp_path):
    path = tmp_path / "l.npz"
    np.savez(path, x=np.eye(4, 3, dtype=np.float32), label=np.array([0.0, NAN, 1.0, NAN]))
    with pytest.raises(DataError, match=r"label.* holds NaN in 2 of 4 rows: 1, 3 \(from 0\)"):
        data.read(path)


def test_nan_domains_and_float_labels(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(
        path, x=np.eye(4, 3, dtype=np.float32), label=np.array([0.0, 0.5, 1.0, 0.5]), domain=np.array([1, 2, NAN, 1])
    )
    with pytest.raises(DataError, match=r"domain.* NaN in 1 of 4 rows: 2 "):
        data.read(path)
    assert data.read(path, domain="").label.names == ("0.0", "0.5", "1.0")


@pytest.mark.parametrize(
    "values",
    [[0.0, NAN], ["a", NAN], np.array(["a", NAN], object), np.array([0, NAN], np.float32), ["a", np.float32("nan")]],
)
def test_nan_in_any_kind_of_column(values):
    with pytest.raises(DataError, match="session holds NaN in 1 of 2 rows: 1 "):
        Samples.of(rows(2), ["a", "b"], groups={"session": values})
    with pytest.raises(DataError, match="label holds NaN"):
        Samples.of(rows(2), values)


def test_many_rows_with_nan_are_counted_and_some_named():
    with pytest.raises(DataError, match=r"NaN in 30 of 30 rows: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(from 0\)"):
        Column.of(np.full(30, NAN))


def test_text_that_says_nan_is_text():
    assert Column.of(["nan", "a"]).names == ("a", "nan")


def test_rows_with_nan_may_be_left_out_by_another_column(tmp_path):
    from mettle.evaluate.table import read_embeddings

    path = tmp_path / "e.npz"
    np.savez(path, embeddings=np.eye(4), label=[0, 0, 1, 1], score=np.array([0.5, NAN, 0.5, 0.5]))
    assert len(read_embeddings(path, where=["score=0.5"])) == 3


# Ids.


@pytest.mark.parametrize("ids", [np.array([2**63 + 5, 7], np.uint64), [2**63 + 5, 2**63 + 4]])
def test_ids_beyond_int64_are_refused(ids):
    with pytest.raises(DataError, match=f"fit in int64.*{2**63 + 5}"):
        Samples.of(rows(2), ["a", "b"], ids=ids)


def test_ids_of_uint64_that_fit_are_kept(tmp_path):
    assert Samples.of(rows(2), ["a", "b"], ids=np.array([2**63 - 1, 7], np.uint64)).ids.tolist() == [2**63 - 1, 7]
    np.savez(tmp_path / "c.npz", x=np.eye(3), label=[1, 1, 2], id=np.array([2**63 + 1, 2**63 + 2, 5], np.uint64))
    with pytest.raises(DataError, match="fit in int64"):
        data.read(tmp_path / "c.npz")
    with pytest.raises(DataError, match="first must fit in int64"):
        data.Pairs.of(np.array([2**63], np.uint64), [1], [1.0])


# Pairs, the loader, the check.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([0], [1], ["x"]), "target must be numbers.*'x'"),
        (([0], [1], [1.0]), "weight must be numbers.*'y'"),
        ((0, [1], [1.0]), "first must be a list"),
        (([0], [1], [[1.0], [1.0, 2.0]]), "target must be a list"),
        (([0], [1], 1.0), "target must be a list"),
    ],
)
def test_pairs_of_what_is_no_list_of_numbers(arguments, said):
    weight = ["y"] if "weight" in said else None
    with pytest.raises(InputError, match=said):
        data.Pairs.of(*arguments, weight=weight)


def test_pairs_with_an_empty_side():
    with pytest.raises(DataError, match="second must be sample ids, whole numbers, as many as first"):
        data.Pairs.of([0], [], [1.0])


@pytest.mark.parametrize(("name", "value"), [("workers", -1), ("workers", 1.5), ("workers", "2"), ("views", 0)])
def test_a_loader_of_no_workers_or_views(name, value):
    samples = Samples.of(rows(8), list("aabbccdd"))
    with pytest.raises(InputError, match=f"{name} must be a whole number"):
        data.Loader(samples, data.ShuffledBatchSampler(8, 4), data.Augment(), **{name: value})


@pytest.mark.parametrize("near", ["eror", "", None, "Error"])
def test_a_severity_that_is_none(near):
    with pytest.raises(InputError, match="near must be error or warning, got"):
        data.check(Samples.of(rows(4), list("aabb")), near=near)


def test_a_severity_that_is_none_on_the_command_line(tmp_path):
    table = tmp_path / "l.csv"
    table.write_text("label,e0,e1\na,1,2\na,2,3\nb,1,1\nb,4,5\n")
    assert "near must be error or warning, got 'eror'" in refused("data", "check", table, "--near", "eror")


# Headers.


@pytest.mark.parametrize("read", [read_table, lambda path: read_vectors(path, None, None)])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("label,e0, e1,e0 \na,1,2,3\n", "line 1: two columns are called 'e0'"),
        ("\nlabel,e0,e1\n\na,1,2\nb,1\n", "line 5: 2 fields, but the header has 3"),
        ('label,e0,e1\n"a\nb",1,2\n"c\nd",1,2,3\n', "line 4: 4 fields"),
        ('label,e0,e1\na,1,2\n"b" c,1,2\n', "line 3: "),
    ],
)
def test_headers_and_widths_are_checked_alike(tmp_path, read, text, told):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        read(path)


# Much of everything: work grows with the rows, not with their square. The old code took minutes for each.


def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def test_very_many_columns(tmp_path):
    path, n = tmp_path / "wide.csv", 40_000
    path.write_text("label," + ",".join(f"e{i}" for i in range(n)) + "\na" + ",1" * n + "\n")
    assert seconds(lambda: read_vectors(path, None, None)) < 5
    assert seconds(lambda: read_table(path)) < 5


def test_very_many_names():
    names = np.array([*(f"class {i}" for i in range(100_000)), "class 0"])
    assert seconds(lambda: column_with_names(np.arange(len(names)), names)) < 5
    column = column_with_names(np.array([0, 2, 1]), np.array(["crane", "crane", "heron"]))
    assert column.names == ("crane (0)", "crane (1)", "heron")


def test_very_many_labels_with_one_sample():
    samples = Samples.of(rows(150_000, 1), np.arange(150_000))
    found = []
    assert seconds(lambda: found.extend(class_size_problems(samples))) < 10
    assert [p.id for p in found] == list(range(150_000))


def test_which_sample_is_the_only_one():
    samples = Samples.of(rows(5), list("bacab"), ids=[10, 11, 12, 13, 14])
    (one,) = class_size_problems(samples)
    assert (one.kind, one.id) == ("single", 12)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.parquet"])
def test_a_header_is_that_of_the_table_and_costs_no_rows(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pyarrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.table({"label": ["a"], "e 0": ["1"]}), path)
    else:
        text = "\n label ,e 0\na,1\n".replace(",", "\t" if ".tsv" in name else ",")
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    header = read_table_header(path)
    assert list(header.columns) == list(read_table(path).columns) == ["label", "e 0"]
    assert header.require_column("e 0") == "e 0" and not header.lines
    with pytest.raises(DataError, match="no column 'e0'.*'e 0'"):
        header.require_column("e0")
