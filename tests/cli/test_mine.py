"""`mettle mine`: tables that training takes as they are, what is said of them, and what is refused."""

import csv
import html
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mettle.data import Pairs, Samples, Triplets, read
from mettle.mining import mine
from mettle.train import load, train
from tests.command_line import mettle, refused
from tests.small_runs import small_run


def vectors(seed=0):
    """Ten labels of six rows."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(10), 6)
    return (rng.normal(size=(10, 12))[y] + 0.6 * rng.normal(size=(60, 12))).astype(np.float32), y


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file of vectors, those of a second model, and pictures of the same samples."""
    place = tmp_path_factory.mktemp("mined")
    x, y = vectors()
    x[7] = x[50]
    camera = np.tile(["front", "back"], 30)
    split = np.where(y < 8, "train", "test")
    np.savez(place / "vectors.npz", embeddings=x, label=y, camera=camera)
    np.savez(place / "second.npz", embeddings=vectors(1)[0], label=y, camera=camera)
    np.savez(place / "parted.npz", x=x, label=y, split=split)
    np.savez(place / "short.npz", embeddings=x[:-1], label=y[:-1], camera=camera[:-1])
    files = []
    for k, label in enumerate(y):
        file = place / "pictures" / f"who{label}" / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 4 * k, np.uint8)).save(file)
        files.append(str(file))
    np.savez(place / "pictured.npz", embeddings=x, label=[f"who{k}" for k in y], path=files)
    return place


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_holds_the_mined_triplets_and_the_page_their_account(folder, tmp_path):
    table = tmp_path / "triplets.csv"
    said = mettle("mine", folder / "vectors.npz", "-o", table, "--negatives", "2", "--margin", "0.05")
    x, y = vectors()
    x[7] = x[50]
    found = mine(x, y, negatives=2, guards=mettle_guards(margin=0.05))
    rows = rows_of(table)
    for role in ("anchor", "positive", "negative"):
        assert [int(row[role]) for row in rows] == getattr(found, f"{role}s").tolist()
    assert [float(r["negative_score"]) for r in rows] == pytest.approx(found.negative_scores, abs=1e-6)
    assert all(row["anchor_label"] != row["negative_label"] for row in rows)
    for line in found.account.lines():
        assert line in said
    assert "every row was compared with every other" in said
    assert "2 samples equal one of another label number for number, the first are 7 and 50" in said
    text = html.unescape((tmp_path / "triplets.html").read_text())
    assert "Copies under two labels" in text and f"{found.account.candidates:,} candidates" in text
    shown = re.findall(r"cosine <b>([\d.-]+)</b>", text)
    assert f"{found.negative_scores.max():.3f}" in shown and f"{found.positive_pairs.scores.min():.3f}" in shown


def mettle_guards(**options):
    from mettle.mining import Guards

    return Guards(**options)


def test_the_options_of_the_command_are_those_of_the_library(folder, tmp_path):
    table = tmp_path / "t.csv"
    words = ["--positives", "all", "--skip", "1", "--depth", "30", "--relative-margin", "0.1", "--max-score", "0.8"]
    words += ["--min-score", "-0.5", "--second-margin", "0.02", "--across", "camera", "--sampling", "random"]
    words += ["--seed", "3", "--search", "exact", "--no-page", "--negatives", "2"]
    mettle("mine", folder / "vectors.npz", "-o", table, "--second", folder / "second.npz", *words)
    x, y = vectors()
    x[7] = x[50]
    guards = mettle_guards(relative_margin=0.1, max_score=0.8, min_score=-0.5, second_margin=0.02)
    options = {"positives": "all", "skip": 1, "depth": 30, "sampling": "random", "seed": 3, "negatives": 2}
    camera = np.tile([1, 0], 30)
    found = mine(x, y, second=vectors(1)[0], across=camera, guards=guards, **options)
    assert [int(row["negative"]) for row in rows_of(table)] == found.negatives.tolist()
    assert not table.with_suffix(".html").exists()


@pytest.mark.parametrize(("kind", "loss"), [("triplets", "similarity-ranking"), ("pairs", "similarity-classification")])
def test_training_takes_the_table_as_it_is(kind, loss, folder, tmp_path):
    table = tmp_path / f"{kind}.csv"
    mettle("mine", folder / "parted.npz", "-o", table, *(["--pairs"] if kind == "pairs" else []), "--no-page")
    settings = [f"data.source={folder / 'parted.npz'}", f"data.{kind}={table}", "batch.size=8", "batch.augment=none"]
    settings += ["model.backbone=mlp", "model.width=4", "model.depth=2", "model.dim=8", "train.steps=5"]
    outcome = train(load(loss, settings), tmp_path / "run", tensorboard=False)
    assert outcome.finished and not any("left out" in note or "across splits" in note for note in outcome.notes)
    samples = outcome.samples
    rows = (Triplets if kind == "triplets" else Pairs).read(table, samples)
    assert rows.target is None or set(rows.target.tolist()) == {0.0, 1.0}
    assert set(samples.split[rows.positions(samples)].ravel().tolist()) == {0}, "training rows only"


def test_pictures_are_named_by_their_files_and_shown(folder, tmp_path):
    table = tmp_path / "t.csv"
    mettle("mine", folder / "pictured.npz", "-o", table)
    samples = read(folder / "pictures", size=8, channels=1)
    triplets = Triplets.read(table, samples)
    labels = samples.labels[triplets.positions(samples)]
    assert (labels[:, 0] == labels[:, 1]).all() and (labels[:, 0] != labels[:, 2]).all()
    assert table.with_suffix(".html").read_text().count("data:image/png") > 20


def test_parquet_is_written_too(folder, tmp_path):
    pytest.importorskip("pyarrow")
    mettle("mine", folder / "vectors.npz", "-o", tmp_path / "t.parquet", "--no-page")
    x, y = vectors()
    from mettle.data.inputs import FeatureArray

    assert len(Triplets.read(tmp_path / "t.parquet", Samples.of(FeatureArray(x), y))) == 60


def test_a_run_embeds_its_own_training_rows_and_shows_them(tmp_path):
    small = small_run(tmp_path, steps=5)
    again = small_run(tmp_path, "again", seed=1, steps=5)
    table = tmp_path / "t.csv"
    said = mettle("mine", small.run.folder, "-o", table, "--second", again.run.folder, "--negatives", "2")
    assert "96 train embeddings of dimension 8" in said and "second model dropped" in said
    triplets, _ = Triplets.read(table, small.samples).assign_splits(small.samples)
    assert set(triplets.split.tolist()) == {0}
    assert table.with_suffix(".html").read_text().count("data:image/png") > 20


REFUSED = {
    "missing": (["nothing.npz"], "no file 'nothing.npz'"),
    "ending": (["vectors.npz", "-o", "t.txt"], "tables are written as .csv or .parquet"),
    "no folder": (["vectors.npz", "-o", "no/t.csv"], "there is no folder no"),
    "column": (["vectors.npz", "--across", "camrea"], "--across: no column 'camrea' in"),
    "labels": (["vectors.npz", "--across", "label"], "choose another --across"),
    "label": (["vectors.npz", "--label", "who"], "no column 'who' in"),
    "deep": (["vectors.npz", "--depth", "100"], "to the 54 rows of other labels: got 100"),
    "second": (["vectors.npz", "--second", "short.npz"], "must hold the same rows: it has 59, and"),
    "split": (["parted.npz", "--split", "val"], "--split val: no row is marked as val"),
    "word": (["vectors.npz", "--split", "dev"], "--split takes train, val, test or all, got 'dev'"),
    "one label": (["vectors.npz", "--where", "label=3"], "has no column of ids"),
    "names": (["vectors.npz", "--names", "path"], "has no column of picture paths"),
    "range": (["vectors.npz", "--max-score", "3"], "max_score must be a number between -2 and 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mined_is_refused_in_one_line(case, folder, monkeypatch):
    monkeypatch.chdir(folder)
    words, said = REFUSED[case]
    assert said in refused("mine", *words)
    assert not (folder / "triplets.csv").exists()


def test_vectors_that_cannot_be_judged_are_refused(tmp_path):
    x, y = vectors()
    x[4, 0] = np.nan
    np.savez(tmp_path / "hole.npz", embeddings=x, label=y)
    np.savez(tmp_path / "alike.npz", embeddings=vectors()[0], label=0 * y)
    np.savez(tmp_path / "unnamed.npz", embeddings=vectors()[0])
    table = tmp_path / "t.csv"
    assert "1 of 60 rows hold NaN or infinity, the first is row 4" in refused(
        "mine", tmp_path / "hole.npz", "-o", table
    )
    assert "all 60 rows have one label" in refused("mine", tmp_path / "alike.npz", "-o", table)
    assert "no labels in" in refused("mine", tmp_path / "unnamed.npz", "-o", table)
    np.save(tmp_path / "alone.npy", vectors()[0])
    assert "name the .npy file that holds them after it" in refused("mine", tmp_path / "alone.npy", "-o", table)
    assert not table.exists()


@pytest.mark.parametrize("option", ["positives", "sampling", "search", "split", "negatives", "skip", "seed"])
def test_options_are_checked_before_a_run_is_opened(option, tmp_path):
    said = refused("mine", tmp_path, f"--{option}", "-1" if option in ("negatives", "skip", "seed") else "nothing")
    assert option in said and "run" not in said


def test_codes_of_few_bits_are_called_coarse(tmp_path):
    x, y = vectors()
    np.savez(tmp_path / "signs.npz", embeddings=np.sign(x[:, :2]) + 0.5, label=y)
    mettle("mine", tmp_path / "signs.npz", "-o", tmp_path / "t.csv", "--margin", "2")
    text = (tmp_path / "t.html").read_text()
    assert "too coarse to tell labels apart" in text and "<li>None.</li>" in text
