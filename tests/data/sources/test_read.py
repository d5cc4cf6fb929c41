import numpy as np
import pytest
from PIL import Image

from mettle.data import read
from mettle.errors import DataError, InputError


def test_one_door_for_every_kind(tmp_path, cache):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), np.float32), label=[0, 0, 1, 1])
    (tmp_path / "b.csv").write_text("label,u,v\na,1,2\nb,3,4\n")
    assert len(read(tmp_path / "a.npz")) == 4
    assert len(read(tmp_path / "b.csv")) == 2
    assert read("glyphs", cache=cache).source_name == "glyphs"
    assert read("glyphs:closed", cache=cache).source_name == "glyphs:closed"


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="no data at 'nowhere'"):
        read("nowhere")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match="wanted a folder"):
        read(tmp_path / "x.txt")
    (tmp_path / "d" / "a").mkdir(parents=True)
    where = "a folder of pictures, where the names of folders are the labels: leave it out"
    with pytest.raises(DataError, match=rf"^label does not apply to '.*/d', {where} \(data\.label in a recipe"):
        read(tmp_path / "d", label="identity")
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), np.float32), label=[0, 0, 1, 1])
    with pytest.raises(DataError, match=r"^image does not apply to '.*', an \.npz file: leave it out") as caught:
        read(tmp_path / "a.npz", image="scan")
    assert "read_npz" not in str(caught.value)  # what to write, not what was called
    with pytest.raises(DataError, match=r"^no option 'lable' of an \.npz file; did you mean 'label'\?"):
        read(tmp_path / "a.npz", lable="who")


def test_a_picture_that_is_not_there_is_said_with_the_folder_it_was_looked_for_in(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    picture(tmp_path / "pictures/1.png")
    (tmp_path / "sub/m.csv").write_text("path,label\npictures/1.png,a\n/nowhere/2.png,b\n")
    monkeypatch.chdir(tmp_path)  # from where the path would be right
    found = read("sub/m.csv", policy="trust", size=4)
    looked = f"in {str(tmp_path / 'sub')!r} (relative paths of a table start from its folder)"
    for work in (lambda: read("sub/m.csv"), lambda: found.read(np.arange(1)), found.fingerprint):
        with pytest.raises(DataError) as caught:
            work()
        assert looked in str(caught.value)
    with pytest.raises(DataError, match=r"'/nowhere/2\.png': No such file or directory$"):
        found.read(np.arange(1, 2))
    (tmp_path / "sub/pictures").mkdir()
    (tmp_path / "sub/pictures/1.png").symlink_to(tmp_path / "gone")  # it is there, and leads nowhere
    with pytest.raises(DataError, match=r"'pictures/1\.png': No such file or directory$"):
        found.read(np.arange(1))


def picture(path, shape=(6, 4, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, 90, np.uint8)).save(path)


@pytest.mark.parametrize(("size", "shape"), [(8, (8, 8, 3)), ((8, 5), (8, 5, 3)), ([8, 5], (8, 5, 3))])
def test_a_size_is_a_side_or_a_pair(size, shape, tmp_path):
    picture(tmp_path / "d/a/1.png")
    picture(tmp_path / "d/b/2.png", (9, 9, 3))
    (tmp_path / "d/m.csv").write_text("path,label\na/1.png,a\nb/2.png,b\n")
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 6, 4, 3), np.uint8), label=[0, 1])
    for source in ("d", "d/m.csv", "a.npz"):
        samples = read(tmp_path / source, size=size)
        assert samples.inputs.shape == shape
        assert samples.read(np.arange(2)).shape == (2, *shape)


@pytest.mark.parametrize("size", [0, -3, (8,), (8, 8, 8), (8, 0), 8.5, "8", (2.5, 3), True])
def test_any_other_size_is_refused_in_one_line(size, tmp_path):
    picture(tmp_path / "a/1.png")
    with pytest.raises(InputError, match="size must be one side in pixels or"):
        read(tmp_path, size=size)


def test_one_picture_without_a_label(tmp_path):
    picture(tmp_path / "one.jpg")
    with pytest.raises(DataError, match="one picture without a label"):
        read(tmp_path / "one.jpg")
    samples = read(tmp_path / "one.jpg", labeled=False, size=8)
    assert samples.read(np.arange(1)).shape == (1, 8, 8, 3)
    assert samples.paths().tolist() == [str(tmp_path / "one.jpg")]


def test_arrays_without_labels(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), np.float32))
    with pytest.raises(DataError, match=r"no labels in .*data\.label.*--label.*label="):
        read(tmp_path / "a.npz")
    assert read(tmp_path / "a.npz", labeled=False).label.values().tolist() == [""] * 4


def test_the_files_that_an_npz_names(tmp_path):
    paths = np.array(["a/1.png", "/b/2.png", ""])
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2), np.float32), label=[0, 1, 2], path=paths, model=np.array("abc"))
    samples = read(tmp_path / "a.npz")
    assert samples.groups == {}
    assert samples.paths().tolist() == [str(tmp_path / "a/1.png"), "/b/2.png", ""]
    assert [samples.name(i) for i in range(3)] == ["a/1.png", "/b/2.png", "sample 2"]
