import io
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from mettle.data.image_decoding import decode_image, quote_name
from mettle.errors import DataError, InputError
from tests.data import corpus

GOOD, BAD, BOMBS = corpus.good(), corpus.bad(), corpus.bombs()


@pytest.mark.parametrize("name", GOOD)
def test_d1_good_files_show_the_picture_upright(name):
    case = GOOD[name]
    array = decode_image(case.data)
    assert array.dtype == np.uint8
    assert array.shape == case.shows.shape
    # JPEG blurs the edges between the quarters: compare the middle of each.
    for rows, columns in [
        (slice(3, 8), slice(2, 6)),
        (slice(3, 8), slice(10, 14)),
        (slice(15, 21), slice(2, 6)),
    ]:
        difference = array[rows, columns].astype(int) - case.shows[rows, columns]
        assert np.abs(difference).max() <= case.off


@pytest.mark.parametrize("name", GOOD)
def test_d1_good_files_come_in_any_size_and_in_grey(name):
    assert decode_image(GOOD[name].data, size=(10, 30), channels=1).shape == (10, 30, 1)
    assert decode_image(GOOD[name].data, size=(50, 7)).shape == (50, 7, 3)


@pytest.mark.parametrize("name", ["odd_exif.jpg", "no_frames.png", "odd_tag.tif"])
def test_d1_the_corpus_has_files_that_pillow_warns_about(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Image.open(io.BytesIO(GOOD[name].data)) as image:
            image.getexif()
    assert caught


@pytest.mark.parametrize("name", BAD)
def test_d1_bad_files_are_refused_with_name_and_reason(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(BAD[name].data)
    with pytest.raises(DataError, match=BAD[name].reason) as caught:
        decode_image(path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BOMBS)
def test_d3_bombs_are_refused_by_their_header(name):
    with pytest.raises(DataError, match=BOMBS[name].reason):
        decode_image(BOMBS[name].data)


@pytest.mark.parametrize("side", [9_000, 12_000])
def test_d3_what_pillow_only_warns_about_is_refused_too(side):
    with pytest.raises(DataError, match="more than the limit"):
        decode_image(corpus.bombs(side)["bomb.png"].data)
    with pytest.raises(DataError, match="more than the limit"):
        decode_image(corpus.bombs(side)["bomb.gif"].data)


def test_d3_bombs_take_no_memory(tmp_path):
    for name, case in BOMBS.items():
        (tmp_path / name).write_bytes(case.data)
    program = """
import resource, sys
from pathlib import Path
from mettle.data.image_decoding import decode_image
from mettle.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in Path(sys.argv[1]).iterdir():
    try:
        decode_image(path, size=(32, 32))
    except DataError:
        continue
    raise SystemExit(f"{path} was decoded")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 * 1024  # KiB on Linux


def test_the_pixel_limit_is_exact():
    data = corpus.encoded(corpus.BASE, "PNG")
    assert decode_image(data, pixels=24 * 16).shape == (24, 16, 3)
    with pytest.raises(DataError, match="16 x 24 pixels, more than the limit of 383"):
        decode_image(data, pixels=24 * 16 - 1)


def test_resizing_averages_instead_of_picking():
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    small = decode_image(corpus.encoded(stripes, "PNG"), size=(8, 8), channels=1)
    assert 120 <= small.min() <= small.max() <= 135


def test_large_jpeg_is_reduced_to_the_same_picture_as_at_full_size():
    large = np.kron(corpus.BASE, np.ones((40, 40, 1), np.uint8))
    small = decode_image(corpus.encoded(large, "JPEG", quality=95), size=(24, 16)).astype(int)
    assert np.abs(small[2:10, 2:6] - corpus.BASE[2:10, 2:6]).max() <= 4


def test_a_turned_picture_is_sized_after_turning():
    large = np.kron(corpus.STORED[6], np.ones((20, 20, 1), np.uint8))
    data = corpus.encoded(large, "JPEG", quality=95, exif=corpus.turned(6))
    small = decode_image(data, size=(48, 32)).astype(int)
    assert np.abs(small[4:20, 4:12] - corpus.BASE[2, 2]).max() <= 4
    assert np.abs(small[4:20, 20:28] - corpus.BASE[2, 12]).max() <= 4


def test_16_bit_white_is_white_and_rounding_is_to_nearest():
    deep = np.array([[0, 65535, 257 * 7 + 128, 257 * 7 + 129]], np.uint16)
    assert decode_image(corpus.encoded(deep, "PNG"), channels=1).ravel().tolist() == [0, 255, 7, 8]


def test_d1_files_that_are_no_files(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        decode_image(tmp_path / "absent.jpg")
    with pytest.raises(DataError, match="not a regular file"):
        decode_image(tmp_path)
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    with pytest.raises(DataError, match="loop"):
        decode_image(tmp_path / "loop.jpg")


@pytest.mark.parametrize("options", [{"channels": 2}, {"size": (0, 4)}, {"size": (4,)}])
def test_wrong_arguments_are_input_errors(options):
    with pytest.raises(InputError):
        decode_image(corpus.encoded(corpus.BASE, "PNG"), **options)


def test_d1_filters_for_warnings_survive_many_threads():
    files = [GOOD[name].data for name in ("pages.tif", "animated.gif", "animated.png", "odd_exif.jpg")] * 10
    before = list(warnings.filters)
    threads = [threading.Thread(target=decode_image, args=(data,)) for data in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 20), st.just(3))))
def test_lossless_formats_keep_every_pixel(array):
    for kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(decode_image(corpus.encoded(array, kind)), array)


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_d1_damage_is_a_data_error_or_a_picture(name, data):
    content = bytearray(GOOD[name].data)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        array = decode_image(bytes(content), size=(8, 8))
    except DataError:
        return
    assert array.shape == (8, 8, 3)


@given(st.binary(max_size=200))
def test_d1_random_bytes_are_a_data_error(content):
    with pytest.raises(DataError):
        decode_image(content)


@given(st.text(max_size=300))
def test_s5_shown_names_stay_on_one_line(name):
    text = quote_name(name)
    assert len(text.splitlines()) == 1
    assert text.isprintable()
