import gzip
import importlib
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import mettle, refused
from mettle import data
from mettle.data.check import class_size_problems
from mettle.data.dataset import Column, Samples
from mettle.data.embeddings import read_vectors
from mettle.data.inputs import FeatureArray
from mettle.data.sources.manifest import read_manifest
from mettle.data.sources.npz import column_with_names
from mettle.data.sources.text_table import is_integer_text, read_table, read_table_header
from mettle.errors import DataError, InputError, MissingExtra
from tests.data import corpus

PNG = corpus.encoded(corpus.BASE, "PNG")


@pytest.fixture
def write(tmp_path):
    def write(text, name="m.csv"):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(data)
        for picture in ("a.png", "b.png", "c d.png"):
            (tmp_path / picture).write_bytes(PNG)
        return tmp_path / name

    return write


def test_pictures_with_every_column(write):
    path = write(
        "path,label,id,domain,split,role,device,weight\n"
        "a.png,ann,7,lab,train,,phone,1.5\n"
        "b.png,bob,5,van,test,query,phone,2.5\n"
        "c d.png,ann,9,lab,validation,gallery,tablet,3\n"
    )
    samples = read_manifest(path, size=(6, 4))
    assert samples.ids.tolist() == [7, 5, 9]
    assert samples.label.values().tolist() == ["ann", "bob", "ann"]
    assert samples.domain.values().tolist() == ["lab", "van", "lab"]
    assert samples.split.tolist() == [0, 2, 1]
    assert samples.role.tolist() == [0, 1, 2]
    assert list(samples.groups) == ["device"]  # numbers are no groups unless asked for
    assert samples.groups["device"].values().tolist() == ["phone", "phone", "tablet"]
    assert samples.read(np.array([2])).shape == (1, 6, 4, 3)
    assert list(read_manifest(path, groups=["weight"]).groups) == ["weight"]
    assert read_manifest(path, label="device").label.names == ("phone", "tablet")


def test_paths_may_be_absolute_or_lead_out_of_the_folder(write, tmp_path):
    write("x")
    (tmp_path / "sub").mkdir()
    path = write(f"path,label\n../a.png,1\n{tmp_path}/b.png,2\n", "sub/m.csv")
    assert len(read_manifest(path)) == 2


def test_query_and_gallery_flags(write):
    rows = "a.png,1,train,,\na.png,1,val,True,False\na.png,2,val,False,True\na.png,2,val,1,1\n"
    samples = read_manifest(write("path,label,split,is_query,is_gallery\n" + rows))
    assert samples.role.tolist() == [0, 1, 2, 0]
    path = write("path,label,split,is_query,is_gallery\n" + rows + "a.png,3,validation,False,False\n")
    with pytest.raises(DataError, match=r"line 6, column 'is_query': neither"):
        read_manifest(path)


def test_distractors_are_nobody_in_particular(write):
    samples = read_manifest(write("path,label,role\na.png,5,query\nb.png,0,distractor\nb.png,0,3\n"))
    assert samples.role.tolist() == [1, 2, 2]
    assert samples.label.names == ("5", "distractor 1", "distractor 2")


def test_whole_numbers_are_labels_in_order_of_value_and_007_is_a_name(write):
    samples = read_manifest(write("path,label\na.png,10\na.png,9\n"))
    assert samples.label.names == ("9", "10")
    samples = read_manifest(write("path,label\na.png,007\na.png,7\n"))
    assert samples.label.names == ("007", "7")


TABLE = "age,job,y,g,split\n30,cook,1,0,0\n40,nurse,0,1,0\n50,cook,0,1,2\n"


def test_tables_become_rows(write):
    samples = read_manifest(write(TABLE))
    assert samples.inputs.names == ("age", "job=cook", "job=nurse")
    assert samples.read(np.arange(3)).tolist() == [[30, 1, 0], [40, 0, 1], [50, 1, 0]]
    assert samples.label.values().tolist() == ["1", "0", "0"]
    assert samples.groups["g"].values().tolist() == ["0", "1", "1"]
    assert samples.split.tolist() == [0, 0, 2]


def test_table_columns_can_be_chosen(write):
    path = write(TABLE)
    assert read_manifest(path, text="code").read(np.arange(3)).tolist() == [[30, 0], [40, 1], [50, 0]]
    assert read_manifest(path, features=["job"]).inputs.names == ("job=cook", "job=nurse")
    assert read_manifest(path, groups=["job"]).inputs.names == ("age", "g")
    assert read_manifest(path, label="job").inputs.names == ("age", "y")
    assert read_manifest(path, categories=["age"]).inputs.names[:3] == ("age=30", "age=40", "age=50")
    with pytest.raises(DataError, match=r"no column 'jb'.*did you mean 'job'"):
        read_manifest(path, features=["jb"])
    with pytest.raises(DataError, match=r"label: no column 'agee'.*did you mean 'age'"):
        read_manifest(path, label="agee")
    with pytest.raises(InputError, match="text must be"):
        read_manifest(path, text="hot")


def test_categories_do_not_depend_on_the_order_of_rows(write):
    lines = TABLE.splitlines()
    forward = read_manifest(write(TABLE)).inputs.names
    assert read_manifest(write("\n".join([lines[0], *reversed(lines[1:])]))).inputs.names == forward


def test_missing_numbers_are_named_or_filled_from_train_rows(write):
    path = write("v,y,split\n1,0,train\n3,1,train\n?,1,test\n11,0,test\n")
    with pytest.raises(DataError, match=r"line 4, column 'v': no number.*data\.missing='mean' in a recipe"):
        read_manifest(path)
    assert read_manifest(path, missing="mean").read(np.arange(4)).ravel().tolist() == [1, 3, 2, 11]
    path = write("v,y\n1,0\n,1\n5,0\n")
    assert read_manifest(path, missing="mean").read(np.arange(3)).ravel().tolist() == [1, 3, 5]


def test_too_many_distinct_texts_are_refused(write):
    path = write("name,y\n" + "".join(f"n{i},0\n" for i in range(1001)))
    with pytest.raises(DataError, match=r"'name' has 1001 distinct texts.*features"):
        read_manifest(path)
    assert read_manifest(path, text="code").inputs.shape == (1,)


def test_d8_bom_crlf_blank_lines_and_quotes_are_read(write):
    text = 'path,label\r\n"a.png","x, ""y"""\r\n\r\n"c d.png","two\r\nlines"\r\n'
    samples = read_manifest(write(b"\xef\xbb\xbf" + text.encode()))
    assert samples.label.values().tolist() == ['x, "y"', "two\r\nlines"]
    assert samples.inputs.paths == ("a.png", "c d.png")


def test_d8_gz_is_read_and_a_damaged_one_refused(write):
    path = write(gzip.compress(TABLE.encode()), "m.csv.gz")
    assert len(read_manifest(path)) == 3
    for damaged in (gzip.compress(TABLE.encode())[:-12], b"no gzip"):
        with pytest.raises(DataError, match="cannot read"):
            read_manifest(write(damaged, "m.csv.gz"))


HEAD = "path,label,id,split\na.png,x,1,train\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD + "a.png,x,2\n", "line 3: 3 fields, but the header has 4"),
        (HEAD + "a.png,x,2,train,more\n", "line 3: 5 fields"),
        (HEAD + "\n\na.png,,2,train\n", "line 5, column 'label': empty"),
        (HEAD + ",x,2,train\n", "line 3, column 'path': empty"),
        (HEAD + "gone.png,x,2,train\n", "line 3, column 'path': no file 'gone.png'"),
        (HEAD + "http://x/a.png,x,2,train\n", "line 3, column 'path': .*address"),
        (HEAD + "a.png,x,two,train\n", "line 3, column 'id': 'two' is not a whole number"),
        (HEAD + "a.png,x,1,train\n", "line 3, column 'id': 1 is already on line 2"),
        (HEAD + "a.png,x,2,trian\n", "line 3, column 'split': 'trian' is none of train, val, test"),
        (HEAD + 'a.png,"x\ny",2,train\na.png,x,3\n', "line 5: 3 fields"),
        (HEAD + 'a.png,"x,2,train\n', "line 3: "),
        (HEAD + 'a.png,"x"y,2,train\n', "line 3: "),
        (HEAD + "a.png,x\0,2,train\n", "line 3: a NUL byte"),
        (HEAD.encode() + b"a.png,caf\xe9,2,train\n", "line 3: byte 10 is not UTF-8"),
        (HEAD + f"a.png,{'x' * 1_100_000},2,train\n", "line 3: .*field"),
        ("path,label,path\na.png,x,b.png\n", "line 1: two columns are called 'path'"),
        ("path,who\na.png,x\n", "no column label.*who"),
        ("path,label\n", "no rows"),
        ("", "no rows|no column"),
        ("y\n1\n", "neither a column path nor feature columns"),
        ("v,y\n1,0\ninf,1\n", "line 3, column 'v': inf is too large, or not finite"),
        ("v,y\n1,0\n1e39,1\n", "line 3, column 'v': 1e.39 is too large"),
        ("v,y\n" + "1,0\n" * 20 + "oops,1\n", "line 22, column 'v': 'oops' is not a number"),
        ("path,label,role\na.png,x,probe\n", "line 2, column 'role': 'probe' is none of"),
    ],
)
def test_d8_errors_name_the_line(text, problem, write):
    with pytest.raises(DataError, match=problem) as caught:
        read_manifest(write(text))
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_d1_bad_pictures_follow_the_policy(write, tmp_path):
    path = write("path,label\n" + "a.png,x\n" * 150 + "bad.png,x\n")
    (tmp_path / "bad.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 of 151 pictures .*'bad\.png'"):
        read_manifest(path)
    samples = read_manifest(path, policy="skip")
    assert len(samples) == 150
    assert "bad.png" in samples.skipped[0]


def test_parquet_reads_like_csv(write, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"v": [1.5, 2.25], "job": ["cook", None], "flag": [True, False], "y": [3, 4], "split": [0, 2]}
    parquet.write_table(arrow.table(columns), tmp_path / "m.parquet")
    ours = read_manifest(tmp_path / "m.parquet")
    csv = read_manifest(write("v,job,flag,y,split\n1.5,cook,true,3,0\n2.25,,false,4,2\n"))
    assert ours.inputs.names == csv.inputs.names
    assert np.array_equal(ours.inputs.read(np.arange(2)), csv.inputs.read(np.arange(2)))
    assert ours.label.names == csv.label.names == ("3", "4")
    assert ours.split.tolist() == [0, 2]


def test_d8_parquet_errors_name_the_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "m.parquet"
    parquet.write_table(arrow.table({"v": [1.0, None], "y": [0, 1]}), path)
    with pytest.raises(DataError, match="row 2, column 'v': no number"):
        read_manifest(path)
    parquet.write_table(arrow.table({"v": ["a", "b\0"], "y": [0, 1]}), path)
    with pytest.raises(DataError, match="row 2, column 'v': NUL"):
        read_manifest(path)
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match="cannot read"):
        read_manifest(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "m.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"pip install pyarrow"):
        read_manifest(tmp_path / "m.parquet")


def test_other_files_are_no_manifests(tmp_path):
    (tmp_path / "m.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match="not a manifest"):
        read_manifest(tmp_path / "m.xlsx")
    with pytest.raises(DataError, match="no file"):
        read_manifest(tmp_path / "absent.csv")


CELL = st.text(st.sampled_from('ab1 ,"\n\r\0é.-?'), max_size=5)


@given(st.one_of(st.binary(max_size=120), st.lists(st.lists(CELL, max_size=4).map(",".join), max_size=6)))
def test_d8_any_bytes_are_a_table_or_a_data_error(content):
    data = content if isinstance(content, bytes) else ("label,v\n" + "\n".join(content)).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.csv")
        path.write_bytes(data)
        try:
            samples = read_manifest(path)
        except DataError:
            return
    assert len(samples) == len(samples.inputs) > 0
    assert np.isfinite(samples.inputs.read(np.arange(len(samples)))).all()


@given(st.lists(st.tuples(st.floats(-1e30, 1e30), st.integers(-5, 5)), min_size=1, max_size=20))
def test_numbers_survive_the_trip(rows):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.csv")
        path.write_text("v,y\n" + "".join(f"{v!r},{y}\n" for v, y in rows))
        samples = read_manifest(path)
    assert np.array_equal(samples.inputs.read(np.arange(len(rows)))[:, 0], np.float32([v for v, _ in rows]))
    assert [int(name) for name in samples.label.values()] == [y for _, y in rows]


@pytest.mark.parametrize("name", ["file", "filename", "image", "image_path", "img", "Image", "file_path", "photo"])
def test_the_usual_names_of_a_picture_column(name, write):
    samples = read_manifest(write(f"{name},label\na.png,ann\nc d.png,bob\n"))
    assert samples.inputs.kind == "image" and samples.inputs.paths == ("a.png", "c d.png")
    assert name not in samples.groups


def test_path_goes_before_other_names_and_numbers_are_no_pictures(write):
    samples = read_manifest(write("file,path,label\na.png,b.png,ann\nb.png,b.png,bob\n"))
    assert samples.inputs.paths == ("b.png", "b.png") and list(samples.groups) == ["file"]
    assert read_manifest(write("image,v,label\n3,1,ann\n4,2,bob\n")).inputs.names == ("image", "v")


def test_a_column_of_picture_files_is_no_feature(write):
    path = write("scan,age,label\na.png,3,ann\nb.png,4,bob\n")
    with pytest.raises(DataError, match=r"'scan' holds names of picture files.*rename it to path.*image='scan'"):
        read_manifest(path)
    assert read_manifest(path, image="scan").inputs.paths == ("a.png", "b.png")
    assert read_manifest(path, features=["age"]).inputs.names == ("age",)
    assert read_manifest(path, image="").inputs.names == ("scan=a.png", "scan=b.png", "age")
    with pytest.raises(DataError, match="image: no column 'scam'.*did you mean 'scan'"):
        read_manifest(path, image="scam")


def test_chosen_features_of_a_table_that_names_pictures_too(write):
    path = write("image,age,label\na.png,3,ann\nb.png,4,bob\n")
    assert read_manifest(path, features=["age"]).inputs.names == ("age",)


def test_an_error_names_the_picture_column_as_the_table_does(write):
    with pytest.raises(DataError, match="line 3, column 'file': no file 'gone.png'"):
        read_manifest(write("file,label\na.png,x\ngone.png,y\n"))


@pytest.mark.parametrize(("mark", "name"), [(";", "m.csv"), ("\t", "m.csv"), ("\t", "m.tsv")])
def test_tables_parted_by_semicolons_and_tabs(mark, name, write):
    lines = [["path", "label", "domain"], ["a.png", "ann, the first", "lab"], ["b.png", "bob", "van"]]
    samples = read_manifest(write("\n".join(mark.join(line) for line in lines), name))
    assert samples.label.names == ("ann, the first", "bob")
    assert samples.domain.values().tolist() == ["lab", "van"]


def test_a_tsv_may_be_packed_and_has_no_other_marks(write):
    path = write(gzip.compress(b"path\tlabel,\na.png\tx;y,z,\n"), "m.tsv.gz")
    assert read_manifest(path, label="label,").label.names == ("x;y,z,",)


def test_the_line_is_right_after_blank_lines_and_a_quoted_mark(write):
    with pytest.raises(DataError, match="line 5: 1 fields, but the header has 2"):
        read_manifest(write('\n"la;bel,";v\n\nx;1\ny\n'), label="la;bel,")


def test_a_decimal_comma_is_named_and_never_a_category(write):
    with pytest.raises(DataError, match=r"line 2, column 'v': '1,5' has a decimal comma; write 1\.5"):
        read_manifest(write("v;label\n1,5;a\n2,25;b\n"))


def test_what_the_user_names_as_categories_is_no_number_with_a_comma(write):
    path = write("v;label\n1,2;a\n2,3;b\n 1,2;c\n")
    with pytest.raises(DataError, match=r"data\.categories=\['v'\] \(in Python categories=\) if it is a name"):
        read_manifest(path)
    samples = read_manifest(path, categories=["v"])
    assert samples.inputs.names == ("v=1,2", "v=2,3")
    assert samples.read(np.arange(3)).tolist() == [[1, 0], [0, 1], [1, 0]]
    assert read_manifest(path, categories=["v"], text="code").read(np.arange(3)).tolist() == [[0], [1], [0]]
    again = read_manifest(write("v;label\n2,3;b\n", "later.csv"), like=samples.inputs.features)
    assert again.read(np.arange(1)).tolist() == [[0, 1]]
    with pytest.raises(DataError, match="'9,9' is a category that the model was not trained on"):
        read_manifest(write("v;label\n9,9;b\n", "strange.csv"), like=samples.inputs.features)


def test_a_label_that_is_not_there_is_asked_about(write):
    with pytest.raises(DataError, match=r"no column label in .*data\.label.*--label.*label=.*did you mean 'labell'\?"):
        read_manifest(write("path,labell\na.png,x\n"))


def test_columns_that_are_left_out_are_said(write):
    path = write("path,label,age,place\na.png,x,30,lab\nb.png,y,40,van\n")
    samples = read_manifest(path)
    assert list(samples.groups) == ["place"]
    (note,) = samples.notes
    assert "'age' (numbers)" in note and "data.groups" in note and "place" not in note
    assert read_manifest(path, groups=["age", "place"]).notes == ()
    assert samples.part("train").notes == samples.notes


def test_a_group_called_g_is_said(write):
    (note,) = read_manifest(write(TABLE)).notes
    assert "'g' is taken as a group" in note
    assert read_manifest(write(TABLE), groups=[]).inputs.names == ("age", "job=cook", "job=nurse", "g")
    assert read_manifest(write(TABLE), features=["age", "g"]).groups == {}


def test_advice_names_what_can_be_done(write):
    with pytest.raises(DataError, match=r"data.missing='mean'"):
        read_manifest(write("v,label\n1,a\n,b\n"))
    with pytest.raises(DataError, match=r"data.categories=\['v'\]"):
        read_manifest(write("v,label\n" + "1,a\n" * 30 + "x,b\n"))


def test_rows_without_labels(write):
    samples = read_manifest(write("path\na.png\nb.png\n"), labeled=False)
    assert samples.label.values().tolist() == ["", ""]
    samples = read_manifest(write("path,label\na.png,ann\nb.png,\n"), labeled=False)
    assert samples.label.values().tolist() == ["ann", ""]
    assert len(read_manifest(write("path\na.png\n"), labeled=False, label="identity")) == 1
    with pytest.raises(DataError, match="column 'label': empty"):
        read_manifest(write("path,label\na.png,ann\nb.png,\n"))


@pytest.mark.parametrize(("word", "code"), [("training", 0), ("dev", 1), ("testing", 2), ("Validation", 1)])
def test_other_words_for_splits(word, code, write):
    assert read_manifest(write(f"path,label,split\na.png,x,{word}\n")).split.tolist() == [code]


def test_a_missing_column_of_a_wide_table_is_still_one_short_line(write):
    head = ",".join(f"value of sensor {i}" for i in range(400))
    with pytest.raises(DataError, match="no column label in .*it has 400 columns") as caught:
        read_manifest(write(f"{head}\n{','.join('1' * 400)}\n"))
    assert len(str(caught.value)) < 500


# Columns that are not what they seem: text like numbers, NaN as a name, ids beyond int64, numbers that are text.


NAN = float("nan")


def random_rows(n, width=2):
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
        Samples.of(random_rows(2), ["a", "b"], groups={"session": values})
    with pytest.raises(DataError, match="label holds NaN"):
        Samples.of(random_rows(2), values)


def test_many_rows_with_nan_are_counted_and_some_named():
    with pytest.raises(DataError, match=r"NaN in 30 of 30 rows: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(from 0\)"):
        Column.of(np.full(30, NAN))


def test_text_that_says_nan_is_text():
    assert Column.of(["nan", "a"]).names == ("a", "nan")


def test_rows_with_nan_may_be_left_out_by_another_column(tmp_path):
    from mettle.data.embeddings import read_embeddings

    path = tmp_path / "e.npz"
    np.savez(path, embeddings=np.eye(4), label=[0, 0, 1, 1], score=np.array([0.5, NAN, 0.5, 0.5]))
    assert len(read_embeddings(path, where=["score=0.5"])) == 3


# Ids.


@pytest.mark.parametrize("ids", [np.array([2**63 + 5, 7], np.uint64), [2**63 + 5, 2**63 + 4]])
def test_ids_beyond_int64_are_refused(ids):
    with pytest.raises(DataError, match=f"fit in int64.*{2**63 + 5}"):
        Samples.of(random_rows(2), ["a", "b"], ids=ids)


def test_ids_of_uint64_that_fit_are_kept(tmp_path):
    assert Samples.of(random_rows(2), ["a", "b"], ids=np.array([2**63 - 1, 7], np.uint64)).ids.tolist() == [
        2**63 - 1,
        7,
    ]
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
    samples = Samples.of(random_rows(8), list("aabbccdd"))
    with pytest.raises(InputError, match=f"{name} must be a whole number"):
        data.Loader(samples, data.ShuffledBatchSampler(8, 4), data.Augment(), **{name: value})


@pytest.mark.parametrize("near", ["eror", "", None, "Error"])
def test_a_severity_that_is_none(near):
    with pytest.raises(InputError, match="near must be error or warning, got"):
        data.check(Samples.of(random_rows(4), list("aabb")), near=near)


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
    samples = Samples.of(random_rows(150_000, 1), np.arange(150_000))
    found = []
    assert seconds(lambda: found.extend(class_size_problems(samples))) < 10
    assert [p.id for p in found] == list(range(150_000))


def test_which_sample_is_the_only_one():
    samples = Samples.of(random_rows(5), list("bacab"), ids=[10, 11, 12, 13, 14])
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
