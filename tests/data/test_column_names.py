"""One table of column names: what a column is called means the same to every reader."""

import csv
from pathlib import Path

import numpy as np
import pytest

from mettle.data.column_names import DOMAINS, IDS, LABELS, PICTURES, SPLIT, find_column, find_columns
from mettle.data.sources.manifest import read_manifest
from mettle.data.sources.npz import read_npz
from mettle.evaluate import read_embeddings

ROWS = 12
WHO = [f"p{k % 4}" for k in range(ROWS)]
WHERE = ["left", "right"] * 6
PART = ["train"] * 6 + ["test"] * 6
FILES = [f"{k}.png" for k in range(ROWS)]
VECTORS = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


def written(folder, columns):
    """The same rows as a table of features and as an NPZ file."""
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "e0", "e1", "e2"])
        writer.writerows([*row, *v] for *row, v in zip(*columns.values(), VECTORS.tolist(), strict=True))
    np.savez(folder / "t.npz", embeddings=VECTORS, **{name: np.asarray(values) for name, values in columns.items()})
    return folder / "t.csv", folder / "t.npz"


@pytest.mark.parametrize("label", [*LABELS, "Label", "IDENTITY"])
def test_labels_are_found_by_every_reader(tmp_path, label):
    table, arrays = written(tmp_path, {label: WHO})
    wanted = np.asarray(WHO)
    for samples in (read_manifest(table), read_npz(arrays)):
        assert (samples.label.values() == wanted).all()
    for path in (table, arrays):
        assert (read_embeddings(path).label.values() == wanted).all()


@pytest.mark.parametrize("domain", [*DOMAINS, "Camera"])
def test_domains_are_found_by_every_reader(tmp_path, domain):
    table, arrays = written(tmp_path, {"label": WHO, domain: WHERE})
    for found in (read_manifest(table), read_npz(arrays), read_embeddings(table), read_embeddings(arrays)):
        assert found.domain.values().tolist() == WHERE
    assert read_manifest(table, domain="").domain is None


@pytest.mark.parametrize("split", SPLIT)
def test_splits_and_numbers_are_found_by_every_reader(tmp_path, split):
    table, arrays = written(tmp_path, {"label": WHO, split: PART, "ids": list(range(100, 112))})
    for samples in (read_manifest(table), read_npz(arrays)):
        assert samples.split.tolist() == [0] * 6 + [2] * 6
        assert samples.ids.tolist() == list(range(100, 112))
        assert samples.inputs.read(np.arange(1)).shape[1] == 3  # neither is a feature
    for path in (table, arrays):
        found = read_embeddings(path)
        assert found.split.tolist() == [0] * 6 + [2] * 6 and found.names[0] == "100"


@pytest.mark.parametrize("image", [*(name for name in PICTURES if name != "file"), "Photo"])  # savez has a file=
def test_pictures_are_found_by_every_reader(tmp_path, image):
    table, arrays = written(tmp_path, {"label": WHO, image: FILES})
    assert [Path(path).name for path in read_manifest(table, policy="trust").inputs.paths] == FILES
    assert read_npz(arrays).files.tolist() == FILES
    for path in (table, arrays):
        assert read_embeddings(path).images.tolist() == FILES


def test_what_is_taken_by_an_unusual_name_is_said(tmp_path):
    table, _ = written(tmp_path, {"label": WHO, "camera": WHERE})
    assert any("column 'camera' is taken as the domain" in note for note in read_manifest(table).notes)
    assert not read_manifest(table, domain="camera").notes


def test_a_feature_that_is_named_is_a_feature(tmp_path):
    table, _ = written(tmp_path, {"label": WHO, "session": list(range(ROWS))})
    assert read_manifest(table).domain is not None
    chosen = read_manifest(table, features=["session", "e0"])
    assert chosen.domain is None and chosen.inputs.names == ("session", "e0")
    assert read_manifest(table, like=chosen.inputs.features, features=["session", "e0"]).domain is None


def test_a_subset_that_is_no_split_is_a_group(tmp_path):
    columns = {"label": WHO, "subset": ["easy", "hard"] * 6, "path": FILES}
    samples = read_manifest(written(tmp_path, columns)[0], policy="trust")
    assert "subset" in samples.groups and (samples.split == -1).all()


def test_names_as_written_come_first():
    assert find_column(["Label", "y"], LABELS) == "y"
    assert find_columns(["Y", "labels", "LABEL"], LABELS) == ["labels", "LABEL", "Y"]
    assert find_column(["other"], IDS) is None
