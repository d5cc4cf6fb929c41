import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mettle.data.image_decoding import decode_image
from mettle.data.inputs import FeatureArray, ImageArray, ImageFiles, PackedImages, load_into_memory
from mettle.errors import DataError
from tests.data import corpus

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, (7, 6, 5, 3)).astype(np.uint8)


def files(folder, pictures=PICTURES, **options):
    names = [f"{i}.png" for i in range(len(pictures))]
    for name, picture in zip(names, pictures, strict=True):
        (folder / name).write_bytes(corpus.encoded(picture, "PNG"))
    return ImageFiles(names, root=folder, **options)


def packed(pictures=PICTURES, **options):
    parts = [np.frombuffer(corpus.encoded(picture, "PNG"), np.uint8) for picture in pictures]
    offsets = np.cumsum([0, *map(len, parts)])
    return PackedImages(np.concatenate([np.empty(0, np.uint8), *parts]), offsets, **options)


def every(folder):
    return {
        "array": ImageArray(PICTURES),
        "files": files(folder),
        "packed": packed(),
        "rows": FeatureArray(PICTURES.reshape(7, -1)),
    }


@pytest.mark.parametrize("name", ["array", "files", "packed", "rows"])
def test_every_kind_reads_by_position_and_keeps_order(name, tmp_path):
    inputs = every(tmp_path)[name]
    want = PICTURES if name != "rows" else PICTURES.reshape(7, -1).astype(np.float32)
    assert (len(inputs), inputs.shape, inputs.kind) == (
        7,
        want.shape[1:],
        "row" if name == "rows" else "image",
    )
    at = np.array([3, 0, 3, 6])
    assert np.array_equal(inputs.read(at), want[at])
    assert inputs.read(at).dtype == want.dtype
    assert inputs.read(np.array([], np.int64)).shape == (0, *want.shape[1:])
    assert np.array_equal(inputs.take(np.array([5, 1])).read(np.array([0, 1])), want[[5, 1]])


@pytest.mark.parametrize("name", ["array", "files", "packed", "rows"])
def test_every_kind_survives_pickling(name, tmp_path):
    inputs = every(tmp_path)[name]
    copy = pickle.loads(pickle.dumps(inputs))
    assert np.array_equal(copy.read(np.arange(7)), inputs.read(np.arange(7)))
    assert copy.fingerprint() == inputs.fingerprint()


@pytest.mark.parametrize("name", ["array", "packed", "rows"])
def test_d7_fingerprint_follows_content_and_order(name, tmp_path):
    inputs = every(tmp_path)[name]
    same, other = inputs.take(np.arange(7)), inputs.take(np.array([1, 0, 2, 3, 4, 5, 6]))
    assert same.fingerprint() == inputs.fingerprint() != other.fingerprint()


def test_d7_fingerprint_of_files_sees_names_sizes_and_content(tmp_path):
    inputs = files(tmp_path)
    first = inputs.fingerprint()
    assert files(tmp_path).fingerprint() == first
    assert files(tmp_path, channels=1).fingerprint() != first
    content = bytearray((tmp_path / "3.png").read_bytes())
    content[-1] ^= 1  # as many bytes as before
    (tmp_path / "3.png").write_bytes(content)
    changed = inputs.fingerprint()
    assert changed != first
    (tmp_path / "3.png").rename(tmp_path / "3b.png")
    with pytest.raises(DataError, match=r"cannot find '3\.png'"):
        inputs.fingerprint()


def test_a_copy_is_returned_not_a_view():
    inputs = ImageArray(PICTURES.copy())
    inputs.read(np.array([0]))[:] = 0
    assert np.array_equal(inputs.array[0], PICTURES[0])


def test_grey_arrays_get_a_channel_and_sizes_change():
    grey = ImageArray(PICTURES[..., 0])
    assert grey.shape == (6, 5, 1)
    assert ImageArray(PICTURES, (12, 3)).shape == (12, 3, 3)
    assert np.array_equal(grey.with_size(channels=3).array, np.repeat(grey.array, 3, 3))
    flat = np.full((1, 8, 8, 3), 77, np.uint8)
    assert np.array_equal(ImageArray(flat).with_size((5, 3)).array, flat[:, :5, :3])


@given(hnp.arrays(np.uint8, (2, 4, 3, 3)))
def test_grey_is_the_same_by_either_road(pictures):
    by_array = ImageArray(pictures).with_size(channels=1).array
    by_decoder = [decode_image(corpus.encoded(picture, "PNG"), channels=1) for picture in pictures]
    assert np.array_equal(by_array, by_decoder)


@pytest.mark.parametrize("inputs", [files, lambda _: packed()])
def test_resized_files_decode_to_the_new_size(inputs, tmp_path):
    resized = inputs(tmp_path).with_size((4, 9), 1)
    assert resized.shape == (4, 9, 1)
    want = decode_image(corpus.encoded(PICTURES[2], "PNG"), size=(4, 9), channels=1)
    assert np.array_equal(resized.read(np.array([2]))[0], want)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((2, 4, 4), np.float32), "uint8"),
        (np.zeros((2, 3, 4, 4), np.uint8), "channels last"),
        (np.zeros((2, 4), np.uint8), "pictures must be"),
        (np.zeros((2, 0, 4), np.uint8), "pictures must be"),
    ],
)
def test_arrays_that_are_no_pictures_are_refused(array, problem):
    with pytest.raises(DataError, match=problem):
        ImageArray(array)


@pytest.mark.parametrize("offsets", [[0, 5, 3], [-1, 4], [0, 1000], [], [0.5, 2.0]])
def test_packed_pictures_with_wrong_offsets_are_refused(offsets):
    with pytest.raises(DataError, match="offsets"):
        PackedImages(np.zeros(10, np.uint8), np.array(offsets))


def test_rows_are_numbers_with_one_name_a_column():
    with pytest.raises(DataError, match="numbers"):
        FeatureArray(np.array([["a"]]))
    with pytest.raises(DataError, match="2 names for 3 columns"):
        FeatureArray(np.ones((1, 3)), ["a", "b"])
    assert np.isinf(FeatureArray(np.array([[1e300]])).array).all()


def test_pictures_of_several_sizes_ask_for_a_size(tmp_path):
    (tmp_path / "other.png").write_bytes(corpus.encoded(corpus.BASE, "PNG"))
    inputs = ImageFiles([*files(tmp_path).paths, "other.png"], root=tmp_path)
    with pytest.raises(DataError, match=r"'other\.png' is 24 x 16, the first is 6 x 5: give one size"):
        inputs.read(np.array([0, 7]))
    assert inputs.with_size((6, 5)).read(np.array([0, 7])).shape == (2, 6, 5, 3)


def test_the_shape_is_that_of_the_first_readable_picture(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"")
    inputs = ImageFiles(["bad.png", *files(tmp_path).paths], root=tmp_path)
    assert inputs.shape == (6, 5, 3)
    with pytest.raises(DataError, match="no picture can be read"):
        _ = ImageFiles(["bad.png"], root=tmp_path).shape
    with pytest.raises(DataError, match=r"'bad\.png'"):
        inputs.read(np.array([0]))


def test_hold_decodes_everything_and_keeps_the_fingerprint(tmp_path):
    many = np.concatenate([PICTURES] * 30)
    for inputs in (files(tmp_path, many), packed(many)):
        held = load_into_memory(inputs)
        assert held.is_in_memory
        assert np.array_equal(held.read(np.arange(210)), many)
        assert held.fingerprint() == inputs.fingerprint()


def test_hold_respects_the_budget_to_the_byte(tmp_path):
    inputs = files(tmp_path)
    assert load_into_memory(inputs, PICTURES.nbytes - 1) is inputs
    assert load_into_memory(inputs, PICTURES.nbytes).is_in_memory
    rows = FeatureArray(np.ones((2, 2)))
    assert load_into_memory(rows) is rows


def test_d1_hold_names_the_bad_file(tmp_path):
    inputs = files(tmp_path)
    os.truncate(tmp_path / "4.png", 60)
    with pytest.raises(DataError, match=r"'4\.png': damaged or truncated PNG"):
        load_into_memory(inputs)


@given(st.lists(hnp.arrays(np.uint8, (3, 4, 3)), min_size=1, max_size=5), st.data())
def test_packing_with_a_common_start_and_end_loses_nothing(pictures, data):
    files = [corpus.encoded(picture, "PNG") for picture in pictures]
    head = files[0][: data.draw(st.integers(0, 33))]  # signature and first chunk: alike, as the sizes are
    tail = files[0][-12:]  # the last chunk of every PNG
    bodies = [file[len(head) : -12] for file in files]
    buffer = np.frombuffer(b"".join(bodies), np.uint8)
    inputs = PackedImages(buffer, np.cumsum([0, *map(len, bodies)]), head, tail)
    assert np.array_equal(inputs.read(np.arange(len(files))), np.stack(pictures))
