import io
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from mettle.data.dataset import Samples
from mettle.data.image_decoding import ImageTarget, decode_image, decode_to_sizes, read_image_header, resize_to_array
from mettle.data.inputs import FeatureArray, ImageArray, ImageFiles, PackedImages, load_into_memory
from mettle.data.loader import Loader
from mettle.data.sampler import ShuffledBatchSampler
from mettle.data.sources.image_folder import read_image_folder
from mettle.data.transforms import Augment
from mettle.errors import DataError, InputError
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


# Pictures of other shapes: cropped, padded or stretched to one size; whole ones for random crops.


def encode(array: np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def disc(height: int, width: int, radius: int = 20) -> np.ndarray:
    """A white disc in the middle of a black picture: its outline tells whether proportions were kept."""
    y, x = np.mgrid[:height, :width]
    inside = (y - (height - 1) / 2) ** 2 + (x - (width - 1) / 2) ** 2 <= radius**2
    return np.repeat((255 * inside).astype(np.uint8)[..., None], 3, axis=2)


def extent(array: np.ndarray, dark: int = 200) -> tuple[int, int]:
    """Height and width of what is bright."""
    bright = array[..., 0] > dark
    return int(bright.any(1).sum()), int(bright.any(0).sum())


@pytest.mark.parametrize("shape", [(60, 120), (120, 60), (90, 61)])
@pytest.mark.parametrize("resize", ["crop", "pad"])
def test_proportions_are_kept(shape, resize):
    found = decode_image(encode(disc(*shape)), size=32, resize=resize)
    high, wide = extent(found)
    assert found.shape == (32, 32, 3)
    assert abs(high - wide) <= 1
    scale = (min if resize == "crop" else max)(side / 32 for side in shape)
    assert high == pytest.approx(41 / scale, abs=2)


def test_stretching_does_not_keep_them():
    high, wide = extent(decode_image(encode(disc(60, 120)), size=32, resize="stretch"))
    assert high == pytest.approx(2 * wide, abs=2)


def test_the_crop_is_the_centre_and_the_padding_is_grey():
    ramp = np.repeat(np.arange(0, 240, 2, dtype=np.uint8)[None, :, None], 60, axis=0).repeat(3, axis=2)  # 60 x 120
    cropped = decode_image(encode(ramp), size=60)
    assert np.array_equal(cropped, ramp[:, 30:90])
    padded = decode_image(encode(ramp), size=60, resize="pad")
    assert (padded[:15] == 128).all() and (padded[45:] == 128).all() and (padded[16:44] != 128).mean() > 0.9


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_a_turned_photograph_is_cropped_as_it_is_looked_at(turn):
    rng = np.random.default_rng(0)
    upright = np.kron(rng.integers(0, 256, (6, 12, 3)), np.ones((20, 20, 1))).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = turn
    back = {1: 0, 3: 2, 6: 1, 8: 3}[turn]  # quarter turns that put the camera's picture upright
    stored = np.ascontiguousarray(np.rot90(upright, back))
    for resize in ("crop", "pad", "stretch"):
        found = decode_image(encode(stored, "JPEG", quality=98, exif=exif), size=(24, 30), resize=resize)
        wanted = decode_image(encode(upright, "JPEG", quality=98), size=(24, 30), resize=resize)
        assert np.abs(found.astype(int) - wanted).mean() < 3
    assert read_image_header(encode(stored, "JPEG", exif=exif)).size == (120, 240)


def test_several_sizes_come_from_one_decoding():
    content = encode(disc(60, 120))
    (small, canvas), aspect = decode_to_sizes(
        content, [ImageTarget((32, 32), "crop"), ImageTarget((48, 48), "stretch")]
    )
    assert aspect == 2.0
    assert np.array_equal(small, decode_image(content, size=32, resize="crop"))
    assert np.array_equal(canvas, decode_image(content, size=48, resize="stretch"))


def test_an_unknown_way_is_an_error():
    with pytest.raises(InputError, match="resize must be crop, pad or stretch, got 'squash'"):
        decode_image(encode(disc(9, 9)), size=4, resize="squash")  # type: ignore[arg-type]


def test_arrays_and_files_are_resized_alike(tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (3, 50, 90, 3), dtype=np.uint8)
    for i, one in enumerate(array):
        (tmp_path / f"{i}.png").write_bytes(encode(one))
    for resize in ("crop", "pad", "stretch"):
        files = ImageFiles(["0.png", "1.png", "2.png"], 24, 3, tmp_path, resize)
        assert np.array_equal(files.read(np.arange(3)), ImageArray(array, 24, resize=resize).array)


@pytest.fixture
def photographs(tmp_path):
    """Discs in files of many shapes."""
    rng = np.random.default_rng(2)
    for i in range(12):
        folder = tmp_path / f"class{i % 3}"
        folder.mkdir(exist_ok=True)
        shape = (80, int(rng.integers(80, 161))) if i % 2 else (int(rng.integers(80, 161)), 80)
        (folder / f"{i}.png").write_bytes(encode(disc(*shape)))
    return read_image_folder(tmp_path, size=32)


def crops_of(samples: Samples, augment: Augment, workers: int = 0) -> torch.Tensor:
    loader = Loader(samples, ShuffledBatchSampler(len(samples), len(samples), 0), augment, workers=workers)
    return next(loader.batches(0, 1)).inputs


def test_random_crops_are_of_the_whole_picture_and_keep_its_proportions(photographs):
    held = Samples.of(load_into_memory(photographs.inputs), photographs.label)
    found = crops_of(held, Augment(crop=(1.0, 1.0 - 1e-9)))
    for one in found.permute(0, 2, 3, 1).numpy():
        high, wide = extent((255 * one).astype(np.uint8), 128)
        assert abs(high - wide) <= 1  # round, wherever the window lies
        assert high in (15, 16, 17)


def test_crops_reach_what_the_centre_crop_cuts_off(tmp_path):
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, :20, 0] = wide[:, -20:, 0] = 255  # only the sides are red
    (tmp_path / "a").mkdir()
    for i in range(32):
        (tmp_path / "a" / f"{i}.png").write_bytes(encode(wide))
    samples = read_image_folder(tmp_path, size=20)
    assert samples.read(np.arange(32)).max() == 0
    held = Samples.of(load_into_memory(samples.inputs), samples.label)
    seen = crops_of(held, Augment(crop=(0.2, 0.3))).amax((1, 2, 3))
    assert (seen > 0.9).float().mean() > 0.15


def test_crops_are_the_same_from_memory_from_files_and_from_workers(photographs):
    held = Samples.of(load_into_memory(photographs.inputs), photographs.label)
    augment = Augment(crop=(0.3, 1.0), aspect=4 / 3, flip=0.5)
    wanted = crops_of(held, augment)
    assert wanted.shape == (12, 3, 32, 32)
    assert torch.equal(crops_of(photographs, augment), wanted)
    assert torch.equal(crops_of(photographs, augment, workers=1), wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(48, 40), (25, 90), (200, 300)])
def test_stretched_pictures_are_those_of_pillow_but_for_rounding(size, interpolation, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (96, 130, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels).convert("L" if channels == 1 else "RGB")
    found = np.asarray(resize_to_array(picture, size, ImageTarget(size, "stretch", None, interpolation)), int)
    wanted = picture.resize((size[1], size[0]), Image.Resampling[interpolation.upper()])
    assert found.shape[:2] == size
    difference = np.abs(found - np.asarray(wanted, int))
    assert difference.max() <= (1 if interpolation == "bilinear" else 2) and difference.mean() < 0.05


@pytest.mark.parametrize("crop", [None, 0.875])
def test_whole_pictures_of_large_files_are_the_same_from_memory(tmp_path, crop):
    pixels = np.random.default_rng(0).integers(0, 256, (400, 600, 3)).astype(np.uint8)
    (tmp_path / "large.jpg").write_bytes(encode(pixels, "JPEG"))
    files = ImageFiles(["large.jpg"], 32, root=tmp_path, crop=crop)
    first = np.array([0])
    for found, wanted in zip(files.uncropped.read(first), load_into_memory(files).uncropped.read(first), strict=True):
        assert np.array_equal(found, wanted)


def test_without_random_crops_training_sees_what_evaluation_sees(photographs):
    wanted = photographs.read(np.arange(12)).transpose(0, 3, 1, 2) / np.float32(255)
    order = np.concatenate([np.asarray(b) for b in ShuffledBatchSampler(12, 12, 0).epoch_batches(0)])
    assert np.array_equal(crops_of(photographs, Augment()).numpy(), wanted[order])


def test_holding_does_not_look_like_other_data_but_another_way_does(photographs):
    assert load_into_memory(photographs.inputs).fingerprint() == photographs.inputs.fingerprint()
    assert photographs.inputs.with_size(resize="pad").fingerprint() != photographs.inputs.fingerprint()
    assert load_into_memory(photographs.inputs, 100) is photographs.inputs
    part = load_into_memory(photographs.inputs).take(np.array([3, 5]))
    assert np.array_equal(
        part.uncropped.read(np.array([1]))[0], load_into_memory(photographs.inputs).uncropped.read(np.array([5]))[0]
    )


def test_files_that_are_not_read_are_counted_and_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(encode(disc(20, 20, 5)))
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "a" / "b.txt").write_text("x")
    (tmp_path / "Thumbs.db").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (note,) = read_image_folder(tmp_path).notes
    assert note == "3 files that are no pictures were passed over (2 .txt, 1 .db), first: 'a/b.txt'"


def test_heic_is_read_where_pillow_heif_is_installed(tmp_path, monkeypatch):
    import pillow_heif

    picture = pillow_heif.from_pillow(Image.fromarray(disc(64, 96)))
    (tmp_path / "a").mkdir()
    picture.save(tmp_path / "a" / "1.heic", quality=90)
    samples = read_image_folder(tmp_path, size=32)
    assert len(samples) == 1
    high, wide = extent(samples.read(np.array([0]))[0])
    assert abs(high - wide) <= 1 and high > 15
    assert read_image_header(tmp_path / "a" / "1.heic") == ((64, 96), False)

    (tmp_path / "a" / "2.png").write_bytes(encode(disc(20, 20, 5)))
    monkeypatch.setattr("mettle.data.image_decoding.can_read_heic", lambda: False)
    found = read_image_folder(tmp_path)
    assert len(found) == 1
    assert found.notes == (
        "1 HEIC picture was passed over, first: 'a/1.heic'; install pillow-heif to read it (pip install pillow-heif)",
    )
