"""What a file of embeddings holds, and what it must not make up."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mettle.data import identity_disjoint_split, read
from mettle.data.dataset import Samples
from mettle.data.embeddings import read_embeddings
from mettle.data.inputs import ImageArray
from mettle.errors import InputError, MissingExtra
from mettle.model import Embedder, EmbedderSpec
from mettle.model.inference import write_embeddings
from mettle.model.onnx import export_onnx
from small_runs import small_run


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Embedder(EmbedderSpec(width=4, depth=2, dim=6), (3, 8, 8))


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for label in "abcdef":
        for i in range(3):
            place = tmp_path / "pictures" / label / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(place)
    return tmp_path / "pictures"


def arrays(path):
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_files_are_named_so_that_they_can_be_opened(model, folder, tmp_path):
    write_embeddings(model, read(folder), tmp_path / "z.npz")
    found = arrays(tmp_path / "z.npz")
    names = found["label_names"][found["label"]]
    assert found["path"].tolist() == [str(folder / name / f"{i}.png") for name in "abcdef" for i in range(3)]
    assert [Path(path).parent.name for path in found["path"]] == names.tolist()
    table = read_embeddings(tmp_path / "z.npz")
    assert table.images is not None and table.images.tolist() == found["path"].tolist()
    assert read(tmp_path / "z.npz").groups == {}


def test_no_split_is_made_up_and_a_real_one_is_kept(model, folder, tmp_path):
    samples = read(folder)
    write_embeddings(model, samples, tmp_path / "z.npz")
    assert "split" not in arrays(tmp_path / "z.npz")
    assert read_embeddings(tmp_path / "z.npz").split is None
    write_embeddings(model, identity_disjoint_split(samples), tmp_path / "z.npz")
    assert set(arrays(tmp_path / "z.npz")["split"]) == {"train", "val", "test"}


def test_samples_without_labels_get_none(model, folder, tmp_path):
    samples = read(folder / "a", labeled=False)
    said = write_embeddings(model, samples, tmp_path / "z.npz")
    assert "3 embeddings of dimension 6" in said
    assert not {"label", "label_names"} & set(arrays(tmp_path / "z.npz"))


def test_the_file_says_which_model_it_is_of(tmp_path):
    run = small_run(tmp_path).run
    samples = read(tmp_path / "pictures.npz")
    write_embeddings(run.model(), samples, tmp_path / "z.npz")
    found = arrays(tmp_path / "z.npz")["model"]
    assert found.shape == () and str(found) == json.loads((run.folder / "contract.json").read_text())["weights"]
    write_embeddings(run.model(), samples, tmp_path / "z.npz", weights="given")
    assert str(arrays(tmp_path / "z.npz")["model"]) == "given"
    assert len(read(tmp_path / "z.npz")) == len(read_embeddings(tmp_path / "z.npz")) == len(samples)


def test_columns_never_take_the_place_of_what_the_file_needs(model, tmp_path):
    pictures = ImageArray(np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), np.uint8))
    groups = {"model": ["phone"] * 4, "embeddings": list("abcd"), "age": [1, 2, 3, 4]}
    write_embeddings(model, Samples.of(pictures, [0, 0, 1, 1], groups=groups), tmp_path / "z.npz")
    found = arrays(tmp_path / "z.npz")
    assert found["embeddings"].shape == (4, 6) and found["model"].shape == ()
    assert found["model_"].tolist() == ["phone"] * 4 and found["embeddings_"].tolist() == list("abcd")
    assert found["age"].tolist() == list("1234")


class Unread:
    """Inputs that must not be read: the file is refused before the work."""

    kind = "image"
    is_in_memory = True
    shape = (8, 8, 3)

    def __len__(self):
        return 2

    def read(self, at):
        raise AssertionError("read although the file cannot be written")

    def fingerprint(self):
        return ""


def test_no_folder_for_the_file_is_told_before_the_work(model, tmp_path):
    samples = Samples.of(Unread(), [0, 1])
    for write in (lambda path: write_embeddings(model, samples, path), lambda path: export_onnx(model, path)):
        with pytest.raises(InputError, match=r"there is no folder .*gone; make it") as caught:
            write(tmp_path / "gone" / "z.npz")
        assert ".mettle-tmp-" not in str(caught.value)
        with pytest.raises(InputError, match="it is a folder; name a file in it"):
            write(tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "PQ", "csv"])
def test_the_ending_says_what_is_written_and_all_kinds_read_alike(model, tmp_path, ending):
    pictures = ImageArray(np.random.default_rng(0).integers(0, 255, (12, 8, 8, 3), np.uint8))
    names = np.asarray(["Ann, the first", "Bób", "007", 'the "4th"', "e", "f"])[np.arange(12) // 2]
    columns = {"domain": ["in", "out"] * 6, "groups": {"hand": list("lrlrlrlrlrlr"), "model": ["x", "y"] * 6}}
    samples = identity_disjoint_split(Samples.of(pictures, names.tolist(), **columns))
    for file in ("z.npz", f"z.{ending}"):
        write_embeddings(model, samples, tmp_path / file, weights="abc")
    content = (tmp_path / f"z.{ending}").read_bytes()
    assert content[:4] == b"PAR1" if ending != "csv" else content.startswith(b"ids,role,model,label,split")
    wanted, found = read_embeddings(tmp_path / "z.npz"), read_embeddings(tmp_path / f"z.{ending}")
    np.testing.assert_array_equal(found.values.astype(np.float32), wanted.values)
    assert (found.label.values() == wanted.label.values()).all() and set(found.label.names) == set(names)
    assert found.ids.tolist() == wanted.ids.tolist() and found.names.tolist() == wanted.names.tolist()
    assert found.split is not None and wanted.split is not None and found.split.tolist() == wanted.split.tolist()
    assert found.domain is not None and (found.domain.values() == wanted.domain.values()).all()
    assert set(found.groups) == set(wanted.groups) >= {"hand", "model_"}
    for name, column in wanted.groups.items():
        assert (found.groups[name].values() == column.values()).all()


@pytest.mark.parametrize("name", ["z", "z.json", "z.npy", "z.csv.gz"])
def test_another_ending_is_refused_before_the_work(model, tmp_path, name):
    with pytest.raises(InputError, match=r"embeddings are written as \.npz, \.parquet or \.csv"):
        write_embeddings(model, Samples.of(Unread(), [0, 1]), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_pyarrow_is_one_line(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install pyarrow"):
        write_embeddings(model, Samples.of(Unread(), [0, 1]), tmp_path / "z.parquet")
