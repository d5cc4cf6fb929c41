import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from mettle.data.dataset import SPLITS
from mettle.data.inputs import load_into_memory
from mettle.data.sources.image_folder import read_image_folder
from mettle.errors import DataError
from tests.data import corpus

PNG = corpus.encoded(corpus.BASE, "PNG")


def tree(root, *paths, data=PNG):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def test_labels_come_from_folders_and_ids_from_the_order_of_paths(tmp_path):
    tree(tmp_path, "b/2.png", "b/10.png", "a/z.png", "B/1.JPG")
    samples = read_image_folder(tmp_path)
    assert list(samples.inputs.paths) == ["B/1.JPG", "a/z.png", "b/10.png", "b/2.png"]
    assert samples.label.values().tolist() == ["B", "a", "b", "b"]
    assert samples.ids.tolist() == [0, 1, 2, 3]
    assert samples.domain is None
    tree(tmp_path, "a-b/1.png")  # a folder that sorts after a, with paths that sort before
    assert read_image_folder(tmp_path).inputs.paths[1] == "a-b/1.png"
    assert samples.split.tolist() == [-1] * 4
    assert np.array_equal(samples.read(np.array([1]))[0], corpus.BASE)


def test_splits_and_domains_come_from_folders_too(tmp_path):
    tree(
        tmp_path,
        "train/cat/phone/1.png",
        "train/cat/2.png",
        "Validation/cat/a.png",
        "test/dog/camera/deep/1.png",
    )
    samples = read_image_folder(tmp_path, size=(8, 8), channels=1)
    assert samples.inputs.shape == (8, 8, 1)
    rows = zip(samples.inputs.paths, samples.label.values(), samples.domain.values(), samples.split, strict=True)
    assert {path: (label, domain, SPLITS[split]) for path, label, domain, split in rows} == {
        "train/cat/phone/1.png": ("cat", "phone", "train"),
        "train/cat/2.png": ("cat", "", "train"),
        "Validation/cat/a.png": ("cat", "", "val"),
        "test/dog/camera/deep/1.png": ("dog", "camera", "test"),
    }


def test_a_label_may_be_called_train(tmp_path):
    tree(tmp_path, "train/1.png", "plane/1.png")
    assert read_image_folder(tmp_path).label.names == ("plane", "train")
    tree(tmp_path, "test/1.png")
    with pytest.raises(DataError, match=r"holds splits and 'plane'.*splits=False"):
        read_image_folder(tmp_path)
    assert read_image_folder(tmp_path, splits=False).label.names == ("plane", "test", "train")
    with pytest.raises(DataError, match="'plane' is not a split"):
        read_image_folder(tmp_path, splits=True)


def test_hidden_and_other_files_are_passed_over(tmp_path):
    tree(tmp_path, "a/1.png", "a/.hidden.png", ".git/x.png", "a/.thumbs/2.png", "a/notes.txt", "readme.md")
    assert list(read_image_folder(tmp_path).inputs.paths) == ["a/1.png"]


def test_a_label_folder_without_pictures_stays_a_name(tmp_path):
    tree(tmp_path, "a/1.png", "empty/readme.txt")
    samples = read_image_folder(tmp_path)
    assert samples.label.names == ("a", "empty")
    assert samples.labels.tolist() == [0]


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["a/notes.txt"], "no pictures"),
        (["a/1.png", "stray.png"], r"'stray\.png' has no label"),
        (["train/a/1.png", "train/stray.png"], r"'train/stray\.png' has no label"),
    ],
)
def test_folders_without_labels_are_refused(paths, problem, tmp_path):
    tree(tmp_path, *paths)
    with pytest.raises(DataError, match=problem):
        read_image_folder(tmp_path)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        read_image_folder(tmp_path / "absent")


def test_d6_unusual_names_are_names(tmp_path):
    names = ["spaced name", "new\nline", "Ж漢字", "\u202ertl", "%2e%2e", "..dots", "x" * 200]
    tree(tmp_path, *(f"{name}/{name[:100]}.png" for name in names))
    samples = read_image_folder(tmp_path)
    found = set(samples.label.values().tolist())
    assert found == {name for name in names if not name.startswith(".")}
    assert samples.read(np.arange(len(samples))).shape[0] == len(found)
    samples.fingerprint()


def test_d6_an_error_about_an_unusual_name_is_one_line(tmp_path):
    tree(tmp_path, "new\nline/\u202egpj.png", data=b"")
    with pytest.raises(DataError) as caught:
        read_image_folder(tmp_path)
    assert str(caught.value).isprintable()
    assert r"new\nline/\u202egpj.png" in str(caught.value)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file system refuses such names itself")
def test_d6_names_that_are_not_utf8(tmp_path):
    tree(tmp_path, "a/1.png")
    with open(os.fsencode(tmp_path / "a") + b"/\xff.png", "wb") as file:
        file.write(PNG)
    samples = read_image_folder(tmp_path)
    assert len(samples) == 2
    samples.fingerprint()
    os.mkdir(os.fsencode(tmp_path) + b"/\xfe")
    with pytest.raises(DataError, match=r"not valid UTF-8"):
        read_image_folder(tmp_path)


def test_d6_link_loops_are_cut(tmp_path):
    tree(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "other").symlink_to(tmp_path / "a")
    found = list(read_image_folder(tmp_path).inputs.paths)
    assert len(found) == len(set(found)) < 10
    assert {"a/1.png", "b/2.png", "b/other/1.png"} <= set(found)


def test_d1_a_dangling_link_is_a_bad_picture(tmp_path):
    tree(tmp_path, "a/1.png")
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match=r"1 of 2 pictures .*'a/gone\.png': No such file"):
        read_image_folder(tmp_path)


def test_d1_skip_leaves_bad_files_out_and_says_so(tmp_path):
    tree(tmp_path, *(f"a/{i:03}.png" for i in range(150)))
    tree(tmp_path, "a/077.png", data=b"<html>")
    samples = read_image_folder(tmp_path, policy="skip")
    assert len(samples) == 149
    assert 77 not in samples.ids
    assert samples.ids[-1] == 149
    assert len(samples.skipped) == 1
    assert "a/077.png" in samples.skipped[0]
    assert "web page" in samples.skipped[0]


def test_d2_too_many_bad_files_stop_even_skip(tmp_path):
    tree(tmp_path, *(f"a/{i:03}.png" for i in range(100)))
    tree(tmp_path, *(f"a/0{i}.png" for i in range(20, 31)), data=b"")
    with pytest.raises(DataError, match=r"11 of 100 .*over the 10% limit.*a/020\.png.*a/030\.png"):
        read_image_folder(tmp_path, policy="skip")


def test_trust_does_not_look(tmp_path):
    tree(tmp_path, "a/1.png", data=b"")
    samples = read_image_folder(tmp_path, policy="trust", size=(4, 4))
    with pytest.raises(DataError, match="empty"):
        samples.read(np.array([0]))


def test_other_names_of_splits(tmp_path):
    tree(tmp_path, "training/cat/1.png", "testing/dog/1.png", "Dev/cow/1.png")
    samples = read_image_folder(tmp_path)
    assert samples.label.names == ("cat", "cow", "dog")
    assert samples.domain is None
    assert {name: len(samples.part(name)) for name in ("train", "val", "test")} == {"train": 1, "val": 1, "test": 1}


def test_pictures_without_labels(tmp_path):
    tree(tmp_path, "0.png", "1.jpg", "notes.txt")
    with pytest.raises(DataError, match=r"'0\.png' has no label.*embedded"):
        read_image_folder(tmp_path)
    samples = read_image_folder(tmp_path, labeled=False)
    assert samples.label.values().tolist() == ["", ""]
    assert [samples.name(i) for i in range(2)] == ["0.png", "1.jpg"]


def test_some_pictures_without_labels(tmp_path):
    tree(tmp_path, "train/a/1.png", "train/0.png", "test/b/x/1.png")
    samples = read_image_folder(tmp_path, labeled=False)
    found = {samples.name(i): (samples.label.values()[i], samples.split[i]) for i in range(len(samples))}
    assert found == {"test/b/x/1.png": ("b", 2), "train/0.png": ("", 0), "train/a/1.png": ("a", 0)}


def test_files_are_remembered_by_parts_and_in_memory(tmp_path):
    tree(tmp_path, "a/1.png", "b/2.png", "c/3.png")
    samples = read_image_folder(tmp_path)
    held = replace(samples, inputs=load_into_memory(samples.inputs)).take(np.array([2, 0]))
    assert [held.name(i) for i in range(2)] == ["c/3.png", "a/1.png"]
    assert held.paths().tolist() == [str(tmp_path / "c/3.png"), str(tmp_path / "a/1.png")]
