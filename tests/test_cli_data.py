"""Data on the command line: other tables and pictures for a trained model, and what `data check` says."""

import contextlib
import csv
import io
import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from mettle.cli import main
from mettle.train.recipe import parse

COLOURS = ("blue", "green", "red")


def mettle(*arguments: object, code: int = 0) -> str:
    """What a command prints, in this process: starting one takes longer than most of these commands."""
    out, err = io.StringIO(), io.StringIO()
    found = 0
    argv = patch.object(sys, "argv", ["mettle", *map(str, arguments)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            found = leaving.code or 0
    assert found == code, out.getvalue() + err.getvalue()
    return out.getvalue() if code < 2 else err.getvalue()


def one_line(*arguments: object) -> str:
    """The one line of a refused command."""
    text = mettle(*arguments, code=2)
    assert text.startswith("mettle: ") and text.count("\n") == 1, text
    return text


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
    recipe = parse(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 3, "augment": "none"},
            "model": {"backbone": "mlp", "width": 4, "depth": 2, "dim": 4},
            "train": {"steps": 5, "device": "cpu"},
        }
    )
    (folder / "small.toml").write_text(recipe.toml())
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
    recipe = parse(
        {
            "data": {"source": str(folder / "set")},
            "batch": {"classes": 4, "samples": 3, "augment": "none"},
            "model": {"width": 4, "depth": 2, "dim": 4},
            "train": {"steps": 3, "device": "cpu"},
        }
    )
    (folder / "small.toml").write_text(recipe.toml())
    mettle("train", folder / "small.toml", "--runs", folder / "runs", "--no-report")
    return folder / "runs" / "small"


def embedded(run: Path, data: Path, output: Path) -> dict[str, np.ndarray]:
    mettle("embed", run, data, "-o", output)
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
        assert "'amber' is a category" in one_line("embed", of_rows, path, "-o", tmp_path / "z.npz")
        renamed = [{"years" if key == "age" else key: value for key, value in row.items()} for row in rows]
        path = table(tmp_path / "renamed.csv", ["years", "colour", "height", "label"], renamed)
        for command in (["embed", of_rows, path, "-o", tmp_path / "z.npz"], ["evaluate", of_rows, "--data", path]):
            assert "no column 'age'" in one_line(*command)
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
        assert "has no label" in one_line("train", "supcon", "--data", flat, "--runs", tmp_path / "runs")
        assert "has no label" in one_line("data", "check", flat)

    def test_a_folder_that_is_not_there_is_named(self, of_pictures, tmp_path):
        output = tmp_path / "gone" / "z.npz"
        for command in (
            ["embed", of_pictures, of_pictures.parents[1] / "set", "-o"],
            ["export", of_pictures, "--onnx"],
        ):
            text = one_line(*command, output)
            assert str(output.parent) in text and ".tmp-" not in text


class TestCheck:
    def test_all_errors_are_counted(self, tmp_path):
        for i in range(50):
            place = tmp_path / "d" / f"p{i % 5}" / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"")
        assert "50 errors, 0 warnings" in mettle("data", "check", tmp_path / "d", code=1)

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
        assert "rename it to path" in one_line("data", "check", tmp_path / "m.csv")
        text = mettle("data", "check", tmp_path / "m.csv", "--image", "scan")
        assert "note: columns left out: 'age' (numbers)" in text
