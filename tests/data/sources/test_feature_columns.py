"""A table for a model that is trained already: matched by the names of its columns and by its categories."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.data import read
from mettle.data.sources.feature_columns import Feature, features_from_json
from mettle.data.sources.manifest import read_manifest
from mettle.errors import DataError

FIRST = "age,colour,height,label\n30,red,1.5,a\n40,blue,1.7,b\n50,green,1.6,c\n60,red,1.8,d\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="t.csv"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def kept(samples):
    """What a run keeps of the columns, by way of its JSON."""
    return json.loads(json.dumps([feature.to_json() for feature in samples.inputs.features]))


def rows(samples):
    return samples.read(np.arange(len(samples))).tolist()


def test_what_is_kept_of_a_table(write):
    samples = read(write(FIRST))
    assert kept(samples) == [
        {"name": "age"},
        {"name": "colour", "categories": ["blue", "green", "red"]},
        {"name": "height"},
    ]
    assert features_from_json(kept(samples)) == samples.inputs.features
    assert samples.inputs.take(np.array([1])).features == samples.inputs.features


def test_columns_in_another_order_are_the_same_columns(write):
    like = kept(read(write(FIRST)))
    other = read(write("height,label,colour,age\n1.5,a,red,30\n1.7,b,blue,40\n"), like=like)
    assert rows(other) == rows(read(write(FIRST)))[:2]
    assert other.inputs.names == ("age", "colour=blue", "colour=green", "colour=red", "height")


def test_categories_keep_their_places(write):
    like = kept(read(write(FIRST)))
    other = read(write("age,colour,height,label\n30,red,1.5,a\n"), like=like)  # alone, red would be the first of one
    assert rows(other) == [[30, 0, 0, 1, 1.5]]


def test_a_new_category_is_refused_with_its_line(write):
    like = kept(read(write(FIRST)))
    path = write("age,colour,height,label\n30,red,1.5,a\n31,amber,1.5,a\n")
    with pytest.raises(
        DataError, match=r"line 3, column 'colour': 'amber' is a category that the model was not trained"
    ):
        read(path, like=like)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("years,colour,height,label\n1,red,2,a\n", "no column 'age' in .*trained on; "),
        ("agee,colour,height,label\n1,red,2,a\n", "no column 'age' .*did you mean 'agee'"),
        (
            "age,colour,height,weight,label\n1,red,2,3,a\n",
            "'weight' .*none that the model was trained on .age, colour, h",
        ),
        ("age,colour,height,label\nold,red,2,a\n", "line 2, column 'age': 'old' is not a number; the model"),
        ("age,colour,height,label\n,red,2,a\n", "line 2, column 'age': no number"),
    ],
)
def test_other_columns_are_refused(text, problem, write):
    like = kept(read(write(FIRST)))
    with pytest.raises(DataError, match=problem):
        read(write(text), like=like)


def test_where_features_were_chosen_others_may_be_there(write):
    like = kept(read(write(FIRST), features=["height", "colour"]))
    assert [one["name"] for one in like] == ["height", "colour"]
    assert rows(read(write(FIRST), like=like, features=["height", "colour"]))[0] == [1.5, 0, 0, 1]


def test_a_column_that_was_a_feature_is_no_group_later(write):
    text = "g,v,label\n1,2,a\n3,4,b\n"
    first = read(write(text), groups=[])
    assert first.inputs.names == ("g", "v")
    assert rows(read(write(text), like=kept(first))) == [[1, 2], [3, 4]]


def test_codes_and_means_are_those_of_the_first_table(write):
    first = read_manifest(write(FIRST), text="code", missing="mean")
    other = read_manifest(write("age,colour,height,label\n,green,1,a\n20,red,2,b\n"), like=kept(first))
    assert rows(other) == [[45, 1, 1], [20, 2, 2]]


def test_what_has_no_column_names_is_refused(write, tmp_path):
    like = kept(read(write(FIRST)))
    np.savez(tmp_path / "x.npz", x=np.ones((3, 5), np.float32), label=[0, 1, 2])
    with pytest.raises(DataError, match=r"no named columns.*age, colour, height.*give a table"):
        read(tmp_path / "x.npz", like=like)


@pytest.mark.parametrize("damaged", [[{}], ["age"], [{"name": "a", "categories": 3}], [{"name": "a", "fill": "x"}]])
def test_a_damaged_list_is_one_line(damaged, write):
    with pytest.raises(DataError, match="trained on cannot be read"):
        read_manifest(write(FIRST), like=damaged)


values = st.sampled_from(["red", "blue", "green", "", "Red", "naïve", "a b"])


@given(
    table=st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), values, values), min_size=2, max_size=20),
    order=st.permutations(range(3)),
    some=st.data(),
)
def test_any_part_of_a_table_in_any_order_reads_as_it_did(table, order, some, tmp_path_factory):
    folder = tmp_path_factory.mktemp("like")
    titles = ("u", "v", "w")

    def written(name, rows, columns):
        lines = [",".join([titles[k] for k in columns] + ["label"])]
        lines += [",".join([repr(row[k]) if k == 0 else row[k] for k in columns] + ["x"]) for row in rows]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return folder / name

    first = read(written("a.csv", table, range(3)))
    at = some.draw(st.lists(st.sampled_from(range(len(table))), min_size=1, max_size=8))
    other = read(written("b.csv", [table[i] for i in at], order), like=kept(first))
    assert rows(other) == [rows(first)[i] for i in at]


def test_features_say_what_their_numbers_are_called():
    assert Feature("a").output_names == ["a"]
    assert Feature("a", ("x", "y")).output_names == ["a=x", "a=y"]
    assert Feature("a", ("x", "y"), coded=True).output_names == ["a"]


def test_names_are_no_part_of_the_fingerprint(write):
    """Runs of versions that did not keep names must know their data again; names are compared by the contract."""
    same, renamed = read(write(FIRST)), read(write(FIRST.replace("age", "years"), "u.csv"))
    assert same.fingerprint() == renamed.fingerprint()
    assert [one.to_json() for one in same.inputs.features] != [one.to_json() for one in renamed.inputs.features]
