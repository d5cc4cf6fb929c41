"""Near-copies are found however they were made; ordinary pictures, glyphs included, are not taken for copies."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from mettle.data import duplicates
from mettle.data.duplicates import DESCRIPTOR_SIZE, NEAR_DUPLICATE, find_near_duplicates, image_descriptor
from mettle.data.sources.glyphs import glyphs


def scene(seed, side=96):
    """A smooth picture with edges: blurred noise and a few rectangles."""
    rng = np.random.default_rng(seed)
    rough = Image.fromarray(rng.integers(0, 256, (7, 7), dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    pixels = np.asarray(rough).copy()
    for _ in range(4):
        y, x = rng.integers(0, side - 20, 2)
        pixels[y : y + rng.integers(8, 40), x : x + rng.integers(8, 40)] = rng.integers(0, 256)
    return Image.fromarray(pixels)


def jpeg(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("L")


def shrunk(image, by):
    return image.resize((int(image.width * by), int(image.height * by)), Image.Resampling.BILINEAR)


EDITS = {
    "smaller": lambda image: shrunk(image, 0.7),
    "larger": lambda image: shrunk(image, 2),
    "JPEG 60": lambda image: jpeg(image, 60),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "duller": lambda image: ImageEnhance.Contrast(image).enhance(0.8),
    "mirrored": ImageOps.mirror,
    "all at once": lambda image: jpeg(ImageEnhance.Brightness(ImageOps.mirror(shrunk(image, 0.75))).enhance(1.05), 75),
}


def looks(images):
    return np.stack([image_descriptor(np.asarray(image)) for image in images])


@pytest.mark.parametrize("edit", EDITS)
def test_edited_copies_are_found_and_nothing_else(edit):
    originals = [scene(seed) for seed in range(60)]
    strangers = [scene(seed) for seed in range(1000, 1060)]
    copies = [EDITS[edit](originals[k]) for k in range(0, 60, 3)]
    found = find_near_duplicates(looks(originals), looks([*copies, *strangers]))
    assert [(pair.first, pair.second) for pair in found] == [(3 * k, k) for k in range(20)]
    assert {pair.mirrored for pair in found} == {edit in ("mirrored", "all at once")}
    assert all(NEAR_DUPLICATE <= pair.similarity < 1.001 for pair in found)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_colour_and_shape_of_the_array_do_not_matter(mode):
    image = scene(5).convert(mode)
    pixels = np.asarray(image)
    if mode == "L":
        assert np.array_equal(image_descriptor(pixels), image_descriptor(pixels[:, :, None]))
    assert image_descriptor(pixels).shape == (DESCRIPTOR_SIZE,)
    assert image_descriptor(pixels) @ image_descriptor(np.asarray(image.convert("L"))) > 0.9999


@given(st.integers(0, 10**6), st.floats(0.3, 1.0), st.integers(0, 40))
def test_brightness_and_contrast_leave_the_look_alone(seed, gain, offset):
    pixels = np.asarray(scene(seed)).astype(float) * 0.8
    other = np.rint(pixels * gain + offset).astype(np.uint8)
    assert image_descriptor(np.rint(pixels).astype(np.uint8)) @ image_descriptor(other) > 0.999


def test_pictures_of_one_colour_are_like_no_other():
    rng = np.random.default_rng(0)
    plain = [Image.fromarray(np.full((40, 40), level, np.uint8)) for level in (0, 128, 255)]
    noisy = [Image.fromarray(rng.integers(126, 129, (40, 40)).astype(np.uint8)) for _ in range(2)]
    assert find_near_duplicates(looks([*plain, *noisy]), looks([*noisy, *plain])) == []


@pytest.mark.parametrize(("split", "most"), [("open", 0.001), ("closed", 0.004)])
def test_glyphs_raise_few_false_alarms(split, most, cache):
    """Small and much alike, homoglyphs among them; the closed split even has one character in one typeface thrice."""
    samples = glyphs(split, cache=cache)
    rng = np.random.default_rng(0)
    sides = [rng.permutation(np.flatnonzero(samples.split == code))[:3000] for code in (0, 2)]
    first, second = (np.stack([image_descriptor(pixels) for pixels in samples.read(np.sort(side))]) for side in sides)
    found = [pair for pair in find_near_duplicates(first, second)]
    assert len(found) <= most * len(second)
    copies = np.stack(
        [
            image_descriptor(np.asarray(jpeg(shrunk(Image.fromarray(p[:, :, 0]), 0.75), 85)))
            for p in samples.read(np.sort(sides[0])[:200])
        ]
    )
    hits = {pair.second for pair in find_near_duplicates(first, copies) if pair.first == pair.second}
    assert len(hits) >= 190  # copies at three quarters of 32 pixels


def directions(rng, n):
    x = rng.normal(size=(n, DESCRIPTOR_SIZE)) / (1 + np.arange(DESCRIPTOR_SIZE) // 12)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def test_the_lookup_finds_what_comparing_all_finds(monkeypatch):
    rng = np.random.default_rng(1)
    first, second = directions(rng, 4000), directions(rng, 3000)
    at = rng.permutation(3000)[:300]
    second[at] = first[:300] + 0.004 * rng.normal(size=(300, DESCRIPTOR_SIZE)).astype(np.float32)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    second[at[:100]] *= duplicates._MIRROR
    full = find_near_duplicates(first, second)
    monkeypatch.setattr(duplicates, "IN_FULL", 0)
    quick = find_near_duplicates(first, second)
    assert len(full) == 300
    assert {(p.first, p.second, p.mirrored) for p in quick} <= {(p.first, p.second, p.mirrored) for p in full}
    assert len(quick) >= 297


def test_a_crowd_of_copies_is_no_quadratic_list(monkeypatch):
    monkeypatch.setattr(duplicates, "IN_FULL", 0)
    one = directions(np.random.default_rng(2), 1)
    crowd = np.repeat(one, 5000, axis=0)
    found = find_near_duplicates(crowd, crowd)
    assert [pair.second for pair in found] == list(range(5000))


def test_nothing_is_like_nothing():
    empty = np.empty((0, DESCRIPTOR_SIZE), np.float32)
    assert find_near_duplicates(empty, directions(np.random.default_rng(0), 3)) == []
    assert find_near_duplicates(directions(np.random.default_rng(0), 3), empty) == []
