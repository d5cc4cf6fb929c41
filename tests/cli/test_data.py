"""Data on the command line: other tables and pictures for a trained model, and what `data check` says."""

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mettle.train.recipe import parse_recipe
from tests.command_line import mettle, refused

COLOURS = ("blue", "green", "red")


def table(path: Path, columns: list[str], rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(10, 2))
    found = []
    for who in range(10):
        for _ in range(6):
            u, v = centre[who] + rng.normal(0, 0.2, 2)
            found.append({"age": f"{u:.4f}", "height": f"{v:.4f}", "colour": COLOURS[who % 3], "label": f"p{who}"})
    return found


@pytest.fixture(scope="module")
def of_rows(rows, tmp_path_factory) -> Path:
    """A run on a table with numbers and text."""
    folder = tmp_path_factory.mktemp("table")
    source = table(folder / "t.csv", ["age", "colour", "height", "label"], rows)
    recipe = parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 3, "augment": "none"},
            "model": {"backbone": "mlp", "width": 4, "depth": 2, "dim": 4},
            "train": {"steps": 5, "device": "cpu"},
        }
    )
    (folder / "small.toml").write_text(recipe.to_toml())
    mettle("train", folder / "small.toml", "--runs", folder / "runs", "--no-report")
    return folder / "runs" / "small"


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory) -> Path:
    """A run on pictures that are higher than wide, in a folder without splits."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for who in range(8):
        pattern = rng.integers(0, 255, (8, 4, 3))
        for i in range(4):
            place = folder / "set" / f"p{who}" / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            one = np.kron(pattern, np.ones((2, 2, 1))) + rng.normal(0, 9, (16, 8, 3))
            Image.fromarray(one.clip(0, 255).astype(np.uint8)).save(place)
    recipe = parse_recipe(
        {
            "data": {"source": str(folder / "set")},
            "batch": {"classes": 4, "samples": 3, "augment": "none"},
            "model": {"width": 4, "depth": 2, "dim": 4},
            "train": {"steps": 3, "device": "cpu"},
        }
    )
    (folder / "small.toml").write_text(recipe.to_toml())
    mettle("train", folder / "small.toml", "--runs", folder / "runs", "--no-report")
    return folder / "runs" / "small"


def embedded(run: Path, data: Path, output: Path, *options: object) -> dict[str, np.ndarray]:
    mettle("embed", run, data, "-o", output, *options)
    with np.load(output, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


class TestTables:
    def test_the_contract_names_the_columns(self, of_rows):
        contract = json.loads((of_rows / "contract.json").read_text())
        assert contract["input"]["columns"] == [
            {"name": "age"},
            {"name": "colour", "categories": list(COLOURS)},
            {"name": "height"},
        ]

    def test_columns_in_another_order_give_the_same_vectors(self, of_rows, rows, tmp_path):
        same = table(tmp_path / "same.csv", ["age", "colour", "height", "label"], rows)
        turned = table(tmp_path / "turned.csv", ["label", "height", "colour", "age"], rows)
        some = table(tmp_path / "some.csv", ["height", "age", "colour", "label"], rows[:6])  # one colour only
        first = embedded(of_rows, same, tmp_path / "same.npz")["embeddings"]
        np.testing.assert_array_equal(embedded(of_rows, turned, tmp_path / "turned.npz")["embeddings"], first)
        np.testing.assert_allclose(embedded(of_rows, some, tmp_path / "some.npz")["embeddings"], first[:6], atol=1e-6)

    def test_what_was_never_trained_on_is_refused(self, of_rows, rows, tmp_path):
        amber = [row | {"colour": "amber"} for row in rows]
        path = table(tmp_path / "amber.csv", ["age", "colour", "height", "label"], amber)
        assert "'amber' is a category" in refused("embed", of_rows, path, "-o", tmp_path / "z.npz")
        renamed = [{"years" if key == "age" else key: value for key, value in row.items()} for row in rows]
        path = table(tmp_path / "renamed.csv", ["years", "colour", "height", "label"], renamed)
        for command in (["embed", of_rows, path, "-o", tmp_path / "z.npz"], ["evaluate", of_rows, "--data", path]):
            assert "no column 'age'" in refused(*command)
        assert not (tmp_path / "z.npz").exists()


class TestPictures:
    def test_other_pictures_have_no_split_and_are_named(self, of_pictures, tmp_path):
        place = tmp_path / "other" / "q" / "x.png"
        place.parent.mkdir(parents=True)
        Image.fromarray(np.full((30, 20, 3), 80, np.uint8)).save(place)
        found = embedded(of_pictures, tmp_path / "other", tmp_path / "z.npz")
        assert "split" not in found and found["path"].tolist() == [str(place)]
        weights = json.loads((of_pictures / "contract.json").read_text())["weights"]
        assert str(found["model"]) == weights and found["label_names"].tolist() == ["q"]

    def test_its_own_pictures_keep_their_split(self, of_pictures, tmp_path):
        found = embedded(of_pictures, of_pictures.parents[1] / "set", tmp_path / "z.npz")
        assert set(found["split"]) == {"train", "val", "test"}
        assert found["path"][0].endswith("set/p0/0.png")

    def test_pictures_without_labels_can_be_embedded(self, of_pictures, tmp_path):
        flat = tmp_path / "flat"
        flat.mkdir()
        for i in range(3):
            Image.fromarray(np.full((16, 8, 3), 40 * i, np.uint8)).save(flat / f"{i}.png")
        found = embedded(of_pictures, flat, tmp_path / "z.npz")
        assert found["embeddings"].shape == (3, 4) and "label" not in found
        one = embedded(of_pictures, flat / "1.png", tmp_path / "one.npz")
        np.testing.assert_allclose(one["embeddings"][0], found["embeddings"][1], atol=1e-6)
        (tmp_path / "list.csv").write_text("file\nflat/2.png\n")
        listed = embedded(of_pictures, tmp_path / "list.csv", tmp_path / "listed.npz")
        np.testing.assert_allclose(listed["embeddings"][0], found["embeddings"][2], atol=1e-6)
        assert "has no label" in refused("train", "supcon", "--data", flat, "--runs", tmp_path / "runs")
        assert "has no label" in refused("data", "check", flat)

    def test_a_folder_that_is_not_there_is_named(self, of_pictures, tmp_path):
        output = tmp_path / "gone" / "z.npz"
        for command in (
            ["embed", of_pictures, of_pictures.parents[1] / "set", "-o"],
            ["export", of_pictures, "--onnx"],
        ):
            text = refused(*command, output)
            assert str(output.parent) in text and ".mettle-tmp-" not in text


def named(found: dict[str, np.ndarray], column: str) -> list[str]:
    """A column of an NPZ file in words."""
    names = found.get(f"{column}_names")
    return [str(value if names is None else names[value]) for value in found[column]]


@pytest.fixture(scope="module")
def places(rows, tmp_path_factory) -> dict[str, Path]:
    """The same new rows twice: under the usual names and under others."""
    folder = tmp_path_factory.mktemp("columns")
    rng = np.random.default_rng(1)
    new = []
    for i, row in enumerate(rows):
        there = {"age": f"{float(row['age']) + rng.normal():.4f}", "label": f"q{row['label']}"}
        new.append(row | there | {"domain": "lab" if i % 2 else "field"})
    odd = [{"who": row["label"], "where": row["domain"], **row} for row in new]
    return {
        "usual": table(folder / "usual.csv", ["age", "colour", "height", "label", "domain"], new),
        "odd": table(folder / "odd.csv", ["where", "age", "colour", "who", "height"], odd),
        "twice": table(folder / "twice.csv", ["age", "colour", "height", "who", "domain"], odd),
    }


class TestColumns:
    """Other data call their columns as they like, and say so."""

    ODD = ("--label", "who", "--domain", "where")

    def test_evaluate_and_report_measure_the_same_under_any_names(self, of_rows, places, tmp_path):
        said = mettle("evaluate", of_rows, "--data", places["usual"], "-o", tmp_path / "usual.json")
        mettle("evaluate", of_rows, "--data", places["odd"], *self.ODD, "-o", tmp_path / "odd.json")
        usual, odd = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("usual", "odd"))
        assert set(odd["scenarios"]) == {"in-domain", "cross-domain"} and odd["scenarios"] == usual["scenarios"]
        assert odd["data"]["test_identities"] == 10 and odd["data"]["shared_identities"] == 0
        again = mettle("report", of_rows, "--data", places["odd"], *self.ODD, "-o", tmp_path / "page.html")
        lines = [line for line in said.splitlines() if " EER " in line]
        assert lines and set(lines) <= set(again.splitlines())
        assert "cross-domain" in (tmp_path / "page.html").read_text()
        assert not (of_rows / "metrics.json").exists() and not (of_rows / "report.html").exists()

    def test_one_name_leaves_the_other_to_the_usual_ones(self, of_rows, places, tmp_path):
        found = embedded(of_rows, places["twice"], tmp_path / "z.npz", "--label", "who")
        assert set(named(found, "domain")) == {"lab", "field"}

    def test_embed_keeps_what_was_named(self, of_rows, places, tmp_path):
        usual = embedded(of_rows, places["usual"], tmp_path / "usual.npz")
        odd = embedded(of_rows, places["odd"], tmp_path / "odd.npz", *self.ODD)
        np.testing.assert_array_equal(odd["embeddings"], usual["embeddings"])
        with places["odd"].open() as file:
            wanted = list(csv.DictReader(file))
        assert named(odd, "label") == [row["who"] for row in wanted]
        assert named(odd, "domain") == [row["where"] for row in wanted]

    def test_rows_to_embed_need_no_label_but_the_column_that_was_named(self, of_rows, rows, tmp_path):
        some = [row | {"who": row["label"] if i % 2 else ""} for i, row in enumerate(rows)]
        path = table(tmp_path / "some.csv", ["age", "colour", "height", "who"], some)
        assert set(named(embedded(of_rows, path, tmp_path / "z.npz", "--label", "who"), "label")) >= {"", "p1"}
        assert "no column 'whom'" in refused("embed", of_rows, path, "-o", tmp_path / "no.npz", "--label", "whom")
        assert not (tmp_path / "no.npz").exists()

    def test_a_gallery_of_everybody(self, of_rows, places, tmp_path):
        enrol = ("gallery", "enrol", tmp_path / "g", "--model", of_rows, "--data", places["odd"])
        assert "no column label" in refused(*enrol)
        assert not (tmp_path / "g").exists()
        assert "10 people enrolled, 60 templates" in mettle(*enrol, *self.ODD)
        assert mettle("gallery", "ids", tmp_path / "g").split() == [f"qp{k}" for k in range(10)]
        assert "did you mean 'where'" in refused(*enrol, "--label", "who", "--domain", "wehre")
        for words in (["anna", "--embeddings", tmp_path / "z.npy"], ["--table", tmp_path / "z.npz"]):
            assert "columns of --data" in refused("gallery", "enrol", tmp_path / "g", *words, "--label", "who")

    def test_pictures_of_a_table(self, of_pictures, tmp_path):
        source = of_pictures.parents[1] / "set"
        files = sorted(source.rglob("*.png"))
        lines = [f"{file};{file.parent.name}x;{'ab'[i % 2]}\n" for i, file in enumerate(files)]
        (tmp_path / "m.csv").write_text("scan;person;lens\n" + "".join(lines))
        names = ("--image", "scan", "--label", "person", "--domain", "lens")
        wanted = embedded(of_pictures, source, tmp_path / "wanted.npz")
        found = embedded(of_pictures, tmp_path / "m.csv", tmp_path / "z.npz", *names)
        np.testing.assert_allclose(found["embeddings"], wanted["embeddings"], atol=1e-6)
        assert named(found, "label") == [f"{file.parent.name}x" for file in files]
        assert named(found, "domain") == ["ab"[i % 2] for i in range(len(files))]
        said = mettle("evaluate", of_pictures, "--data", tmp_path / "m.csv", *names)
        assert "32 test samples of 8 identities" in said and "cross-domain" in said
        enrol = ("gallery", "enrol", tmp_path / "g", "--model", of_pictures, "--data", tmp_path / "m.csv")
        assert "8 people enrolled, 32 templates" in mettle(*enrol, *names)
        misnamed = ("--image", "scn", "--label", "person")
        assert "did you mean 'scan'" in refused("evaluate", of_pictures, "--data", tmp_path / "m.csv", *misnamed)

    def test_arrays_of_an_npz_file(self, of_pictures, tmp_path):
        rng = np.random.default_rng(0)
        person = np.repeat([f"r{k}" for k in range(6)], 4)
        lens, path = np.tile(["a", "b"], 12), tmp_path / "odd.npz"
        np.savez(path, images=rng.integers(0, 255, (24, 16, 8, 3), np.uint8), person=person, lens=lens, camera=lens)
        assert "no labels in" in refused("evaluate", of_pictures, "--data", path)
        said = mettle("evaluate", of_pictures, "--data", path, "--label", "person", "--domain", "lens")
        assert "24 test samples of 6 identities" in said and "cross-domain" in said
        said = mettle("evaluate", of_pictures, "--data", path, "--label", "person", "--domain", "")
        assert "cross-domain" not in said
        found = embedded(of_pictures, path, tmp_path / "z.npz", "--label", "person", "--domain", "lens")
        assert named(found, "label") == person.tolist() and named(found, "domain") == lens.tolist()
        assert "did you mean 'person'" in refused("evaluate", of_pictures, "--data", path, "--label", "persn")
        wrong = ("--label", "person", "--image", "images")
        assert "image does not apply" in refused("evaluate", of_pictures, "--data", path, *wrong)

    def test_names_of_the_recipe_give_way(self, of_pictures, tmp_path):
        """A run on a table with names of its own, and other data of another kind that have others."""
        files = sorted((of_pictures.parents[1] / "set").rglob("*.png"))
        lines = [f"{file};{file.parent.name};{'ab'[i % 2]}\n" for i, file in enumerate(files)]
        (tmp_path / "m.csv").write_text("scan;person;lens\n" + "".join(lines))
        plain = tomllib.loads((of_pictures / "recipe.toml").read_text())
        names = {"image": "scan", "label": "person", "domain": "lens"}
        plain |= {"data": {"source": str(tmp_path / "m.csv"), **names}}
        (tmp_path / "small.toml").write_text(parse_recipe(plain).to_toml())
        mettle("train", tmp_path / "small.toml", "--runs", tmp_path, "--no-report", "--set", "train.steps=1")
        images = np.random.default_rng(0).integers(0, 255, (24, 16, 8, 3), np.uint8)
        np.savez(tmp_path / "n.npz", images=images, who=np.repeat(np.arange(6), 4), place=np.tile([0, 1], 12))
        evaluate = ("evaluate", tmp_path / "small", "--data", tmp_path / "n.npz")
        assert "no array 'person'" in refused(*evaluate)
        assert "no array 'lens'" in refused(*evaluate, "--label", "who")
        assert "cross-domain" in mettle(*evaluate, "--label", "who", "--domain", "place")
        assert "24 test samples of 6 identities" in mettle(*evaluate, "--label", "who", "--domain", "")

    @pytest.mark.parametrize("option", ["--label", "--domain", "--image"])
    def test_own_data_are_read_as_the_recipe_says(self, of_rows, option, tmp_path):
        own, output = of_rows.parents[1] / "t.csv", tmp_path / "out"
        assert f"{option} only with --data" in refused("evaluate", of_rows, option, "colour")
        assert f"{option} only with --data" in refused("report", of_rows, option, "colour")
        assert "report of one run" in refused("report", of_rows, of_rows, option, "colour", "-o", output)
        for command in (
            ["evaluate", of_rows, "--data", own, "-o", output],
            ["report", of_rows, "--data", own, "-o", output],
            ["embed", of_rows, own, "-o", f"{output}.npz"],
            ["gallery", "enrol", output, "--model", of_rows, "--data", own],
        ):
            said = refused(*command, option, "colour")
            assert said.startswith(f"{option} only with other data: {own} are those that {of_rows} was trained on")
        assert list(tmp_path.iterdir()) == []

    def test_what_has_no_such_columns(self, of_rows, of_pictures, places, tmp_path):
        (tmp_path / "other").mkdir()
        for data in (tmp_path / "other", tmp_path / "one.png", "glyphs"):
            said = refused("evaluate", of_pictures, "--data", data, "--label", "who", "--image", "scan")
            assert said.startswith(f"--label and --image only with a table or an .npz file: {data} has no columns")
        said = refused("evaluate", of_rows, "--data", places["odd"], "--label", "who", "--image", "age")
        assert said.startswith("--image only with a model of pictures")


class TestCheck:
    def test_all_errors_are_counted(self, tmp_path):
        for i in range(50):
            place = tmp_path / "d" / f"p{i % 5}" / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"")
        assert "50 errors, 0 warnings" in mettle("data", "check", tmp_path / "d", status=1)

    def test_identities_in_train_and_test_are_told(self, tmp_path):
        people = {"train": "abcd", "test": "cdef"}
        lines = [f"{i},{7 * i % 5},{who},{part}\n" for part in people for who in people[part] for i in range(3)]
        (tmp_path / "m.csv").write_text("u,v,label,split\n" + "".join(lines))
        text = mettle("data", "check", tmp_path / "m.csv")
        (said,) = (line for line in text.splitlines() if "share" in line)
        assert said.startswith("  warning: train and test share 2 identities of 4 in test ('c' and 'd'): ")
        assert "not open-set" in said and "leave the split out" in said
        (tmp_path / "m.csv").write_text("u,v,label\n" + "".join(line.rpartition(",")[0] + "\n" for line in lines))
        assert "share" not in mettle("data", "check", tmp_path / "m.csv")  # what the line says to do ends it

    def test_gaps_are_told_with_what_can_be_set_there(self, tmp_path, of_rows, rows):
        rows = [row | {"age": ""} if i == 3 else row for i, row in enumerate(rows)]
        path = table(tmp_path / "gaps.csv", ["age", "colour", "height", "label"], rows)
        assert "--missing mean of data check" in refused("data", "check", path)
        assert "60 samples" in mettle("data", "check", path, "--missing", "mean")
        for words in (["evaluate", of_rows, "--data", path], ["embed", of_rows, path, "-o", tmp_path / "z.npz"]):
            said = refused(*words)  # a trained model has nothing to fill a gap with, and no option changes that
            assert "line 5, column 'age': no number; fill it in" in said and "missing" not in said

    def test_columns_and_layouts_are_remarked_on(self, tmp_path):
        rng = np.random.default_rng(0)
        for i in range(4):
            place = tmp_path / "all" / f"p{i // 2}" / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).save(place)
        text = mettle("data", "check", tmp_path)
        assert "each of the 2 domains occurs under one label" in text and "only 1 label" in text
        names = [f"all/p{i // 2}/{i}.png" for i in range(4)]
        lines = [f"{name};who {i};{20 + i}\n" for i, name in enumerate(names)]
        (tmp_path / "m.csv").write_text("scan;label;age\n" + "".join(lines))
        assert "rename it to path" in refused("data", "check", tmp_path / "m.csv")
        text = mettle("data", "check", tmp_path / "m.csv", "--image", "scan")
        assert "note: columns left out: 'age' (numbers)" in text


def test_a_check_says_in_words_what_the_splits_share(tmp_path):
    rows = [f"{k % 6},{k},{k * k % 7}" for k in range(30)]
    path = tmp_path / "t.csv"
    path.write_text("label,a,b\n" + "\n".join(rows) + "\n")
    assert "30 samples, 6 labels; no split into train and test, so training holds out whole labels" in mettle(
        "data", "check", path
    )
    halves = [f"{row},{'train' if k % 6 < 3 else 'test'}" for k, row in enumerate(rows)]
    path.write_text("label,a,b,split\n" + "\n".join(halves) + "\n")
    assert "6 labels; train and test share none of them (open-set)" in mettle("data", "check", path)


def test_files_that_cost_too_much_are_lines_of_the_check(tmp_path):
    """The limits of the service hold here too, and can be set."""
    from tests.data import corpus
    from tests.service.hostile_uploads import large_png, slow_jpeg

    for label in "ab":
        for i in range(2):
            file = tmp_path / label / f"{i}.png"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(corpus.encoded(np.roll(corpus.BASE, i + 3 * (label == "b"), 0), "PNG"))
    (tmp_path / "a" / "slow.jpg").write_bytes(slow_jpeg())
    (tmp_path / "b" / "large.png").write_bytes(large_png())
    said = mettle("data", "check", tmp_path, "--read-seconds", "0.5", "--read-megabytes", "64", status=1)
    assert "slow.jpg': reading it takes more than 0.5 s" in said
    assert re.search(r"large\.png': reading it takes more than (\d+ MB of memory|0\.5 s)", said)
    assert "2 errors" in said
