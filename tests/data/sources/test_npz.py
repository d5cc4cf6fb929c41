import io
import pickle
import zipfile

import numpy as np
import pytest

from mettle.data.inputs import FeatureArray, ImageArray, PackedImages
from mettle.data.sources.npz import column_with_names, read_npz
from mettle.errors import DataError
from tests.data import corpus

IMAGES = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
LABEL = np.array([0, 1, 2, 0, 1, 2], np.int8)


@pytest.fixture
def save(tmp_path):
    def write(**arrays):
        np.savez_compressed(tmp_path / "set.npz", **arrays)
        return tmp_path / "set.npz"

    return write


def test_plain_pictures_with_everything(save):
    path = save(
        images=IMAGES,
        label=LABEL,
        split=np.array([0, 0, 1, 1, 2, -1], np.int8),
        role=np.array([0, 0, 0, 1, 2, 2], np.int8),
        id=np.array([10, 11, 12, 13, 14, 15]),
        camera=np.array([1, 2, 1, 2, 1, 2]),
        session=np.array(["am", "pm", "am", "am", "pm", "pm"]),
        quality=np.linspace(0, 1, 6),
        flag=np.array([True, False] * 3),
        class_names=np.array(["ant", "bee", "cat"]),
        palette=np.zeros((6, 3), np.uint8),
    )
    samples = read_npz(path)
    assert isinstance(samples.inputs, ImageArray)
    assert samples.inputs.shape == (4, 4, 1)
    assert samples.label.values().tolist() == ["ant", "bee", "cat"] * 2
    assert samples.ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert samples.split.tolist() == [0, 0, 1, 1, 2, -1]
    assert samples.role.tolist() == [0, 0, 0, 1, 2, 2]
    assert samples.domain.values().tolist() == ["1", "2"] * 3
    assert set(samples.groups) == {"session", "flag"}  # not the float column, not the table
    assert samples.source_name == str(path)


@pytest.mark.parametrize("name", ["x", "rows", "embeddings", "features"])
@pytest.mark.parametrize("label", ["label", "labels", "y", "identity"])
def test_rows_under_their_usual_names(name, label, save):
    rows = np.random.default_rng(0).normal(size=(6, 3))
    samples = read_npz(save(**{name: rows, label: LABEL}))
    assert isinstance(samples.inputs, FeatureArray)
    assert np.array_equal(samples.read(np.arange(6)), rows.astype(np.float32))
    assert samples.labels.tolist() == LABEL.tolist()


def test_columns_can_be_chosen(save):
    path = save(images=IMAGES, label=LABEL, who=LABEL[::-1].copy(), where=np.arange(6) % 2, camera=np.arange(6) % 3)
    samples = read_npz(path, label="who", domain="where", groups=["label"])
    assert samples.labels.tolist() == LABEL[::-1].tolist()
    assert samples.domain.values().tolist() == ["0", "1"] * 3
    assert list(samples.groups) == ["label"]
    assert read_npz(path, domain="").domain is None
    assert set(read_npz(path).groups) == {"who", "where"}
    with pytest.raises(DataError, match=r"no array 'wo'.*did you mean 'who'"):
        read_npz(path, label="wo")
    with pytest.raises(DataError, match=r"groups: no array 'camra'.*did you mean 'camera'"):
        read_npz(path, groups=["camra"])


def test_pictures_can_be_resized_and_coloured(save):
    samples = read_npz(save(images=IMAGES, y=LABEL), size=(8, 2), channels=3)
    assert samples.inputs.shape == (8, 2, 3)


def test_a_column_with_too_many_values_is_no_group(save):
    rows = np.zeros((1002, 2), np.float32)
    path = save(x=rows, y=np.zeros(1002, int), few=np.minimum(np.arange(1002), 999), many=np.arange(1002))
    samples = read_npz(path)
    assert list(samples.groups) == ["few"]
    assert list(read_npz(path, groups=["many"]).groups) == ["many"]


def test_distractors_are_gallery_and_nobody_in_particular(save):
    path = save(
        images=IMAGES,
        identity=np.array([7, -1, 7, 9, -1, 9]),
        role=np.array([0, 3, 1, 2, 3, 2]),
        split=np.array([0, 2, 2, 2, 2, 2]),
    )
    samples = read_npz(path)
    assert samples.role.tolist() == [0, 2, 1, 2, 2, 2]
    assert samples.label.values().tolist() == ["7", "distractor 1", "7", "9", "distractor 4", "9"]
    assert len(samples.label.names) == 4
    assert samples.groups["distractor"].values().tolist() == ["no", "yes", "no", "no", "yes", "no"]


def test_negative_labels_without_distractors_are_labels(save):
    samples = read_npz(save(x=np.ones((4, 2)), y=np.array([-1, 1, 1, -1])))
    assert samples.label.values().tolist() == ["-1", "1", "1", "-1"]
    assert "distractor" not in samples.groups


def test_words_for_splits_and_roles(save):
    words = np.array(["train", "val", "test", "TEST", "", "validation"])
    roles = np.array(["", "query", "gallery", "distractor", "either", "train"])
    samples = read_npz(save(images=IMAGES, y=LABEL, split=words, role=roles))
    assert samples.split.tolist() == [0, 1, 2, 2, -1, 1]
    assert samples.role.tolist() == [0, 1, 2, 2, 0, 0]
    with pytest.raises(DataError, match=r"role must be .*'probe'"):
        read_npz(save(images=IMAGES, y=LABEL, role=np.array(["probe"] * 6)))
    with pytest.raises(DataError, match="role codes are 0 to 3"):
        read_npz(save(images=IMAGES, y=LABEL, role=np.full(6, 4)))


def test_names_are_used_only_where_they_fit():
    names = np.array(["ant", "bee"])
    assert column_with_names(np.array([1, 0]), names).values().tolist() == ["bee", "ant"]
    assert column_with_names(np.array([1, 2]), names).values().tolist() == ["1", "2"]
    assert column_with_names(np.array([-1, 0]), names).values().tolist() == ["-1", "0"]
    assert column_with_names(np.array(["x", "y"]), names).values().tolist() == ["x", "y"]
    twins = column_with_names(np.array([0, 1, 2]), np.array(["crane", "crane", "cat"]))
    assert twins.names == ("crane (0)", "crane (1)", "cat")


def test_group_columns_take_their_own_names(save):
    path = save(images=IMAGES, y=LABEL, room=LABEL, room_names=np.array(["hall", "lab", "van"]))
    assert read_npz(path).groups["room"].names == ("hall", "lab", "van")


def test_packed_pictures(save):
    files = [corpus.encoded(np.full((5, 4, 3), 40 * i, np.uint8), "PNG") for i in range(6)]
    data = np.frombuffer(b"".join(file[8:-12] for file in files), np.uint8)
    offsets = np.cumsum([0, *(len(file) - 20 for file in files)])
    ends = {
        "header": np.frombuffer(files[0][:8], np.uint8),
        "trailer": np.frombuffer(files[0][-12:], np.uint8),
    }
    samples = read_npz(save(data=data, offsets=offsets, label=LABEL, **ends))
    assert isinstance(samples.inputs, PackedImages)
    assert set(samples.groups) == set()
    assert samples.read(np.arange(6))[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160, 200]
    assert read_npz(save(data=data, offsets=offsets, label=LABEL, **ends), size=(2, 2), channels=1).inputs.shape == (
        2,
        2,
        1,
    )


def test_d1_packed_pictures_are_looked_at_on_request(save):
    path = save(data=np.zeros(6, np.uint8), offsets=np.arange(7), label=LABEL)
    assert len(read_npz(path)) == 6
    with pytest.raises(DataError, match="6 of 6 pictures cannot be used, first: cannot decode 'picture 0'"):
        read_npz(path, policy="fail")


def test_rows_must_be_finite(save):
    rows = np.ones((200, 3))
    rows[41, 2] = np.nan
    path = save(x=rows, y=np.arange(200) % 2)
    with pytest.raises(DataError, match=r"1 of 200 rows .*row 42, column 2: nan is not finite"):
        read_npz(path)
    samples = read_npz(path, policy="skip")
    assert len(samples) == 199
    assert 41 not in samples.ids
    assert np.isfinite(samples.read(np.arange(199))).all()


class Trap:
    """What a pickle would run."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_s1_objects_are_refused_and_never_unpickled(save, tmp_path):
    objects = np.array([Trap()] * 6, dtype=object)
    with pytest.raises(DataError, match=r"'label' .*Python objects"):
        read_npz(save(images=IMAGES, label=objects))
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="not a readable NPZ"):
        read_npz(tmp_path / "plain.npz")
    assert not Trap.sprung


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"images": IMAGES}, "no labels"),
        ({"label": LABEL}, "no samples"),
        ({"images": IMAGES, "label": LABEL[:5]}, r"'label' .*shape \(5,\)"),
        ({"images": IMAGES.astype(np.float32), "label": LABEL}, "uint8"),
        ({"images": IMAGES, "label": LABEL, "split": np.full(6, 7)}, "split codes"),
        ({"images": IMAGES, "label": LABEL, "id": np.zeros(6, int)}, "occurs more than once"),
        ({"images": IMAGES, "label": LABEL, "id": np.linspace(0, 1, 6)}, "whole numbers"),
        ({"images": IMAGES, "label": np.array([b"\xff"] * 6)}, "not UTF-8"),
        ({"data": np.zeros(3, np.uint8), "offsets": np.array([0, 9]), "label": LABEL[:1]}, "offsets"),
    ],
)
def test_files_that_do_not_fit_are_refused(arrays, problem, save):
    with pytest.raises(DataError, match=problem):
        read_npz(save(**arrays))


def test_damaged_files_are_refused(save, tmp_path):
    path = save(images=IMAGES, label=LABEL)
    data = path.read_bytes()
    for cut in (0, 10, len(data) // 2):
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match="not a readable NPZ"):
            read_npz(path)
    flipped = bytearray(data)
    flipped[60:70] = b"\xff" * 10
    path.write_bytes(flipped)
    with pytest.raises(DataError, match="cannot read the array 'images'"):
        read_npz(path)
    with pytest.raises(DataError, match="no file"):
        read_npz(tmp_path / "absent.npz")


def test_s3_files_that_unpack_to_too_much_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "set.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(2_000_000, np.uint8))
        archive.writestr("images.npy", buffer.getvalue())
    with pytest.raises(DataError, match="over the limit"):
        read_npz(tmp_path / "set.npz", largest=1_000_000)


def test_s3_an_array_that_promises_more_than_it_has_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(16, np.uint8))
    lie = buffer.getvalue().replace(b"(16,), }      ", b"(9999999999,)}")
    assert lie != buffer.getvalue()
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        archive.writestr("images.npy", lie)
    with pytest.raises(DataError, match="cannot read the array 'images'"):
        read_npz(tmp_path / "set.npz")
