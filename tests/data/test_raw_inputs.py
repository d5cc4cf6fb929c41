"""Batches that stay bytes: their rows are those of the batch as it is made at once, whichever are asked for."""

from typing import Any

import numpy as np
import pytest
import torch

from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.data.loader import Loader
from mettle.data.rank_share import RankShare
from mettle.data.raw_inputs import RawInputs
from mettle.data.sampler import ShuffledBatchSampler
from mettle.data.sources import read_image_folder
from mettle.data.transforms import Augment, BatchTransform, find_preset
from mettle.data.tuples import Pairs

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 20, 18, 3), np.uint8)
SAMPLES = Samples.of(ImageArray(PIXELS), np.arange(40) // 4)
LARGE = Samples.of(ImageArray(np.repeat(np.repeat(PIXELS, 4, 1), 4, 2)), np.arange(40) // 4)
ROWS = Samples.of(FeatureArray(np.ones((40, 3), np.float32)), np.arange(40) // 4)
PAIRS = Pairs.of(np.arange(39), np.arange(1, 40), np.ones(39))
SPANS = (slice(0, 5), slice(3, 13), slice(7, 8), slice(0, None))


def mirror(image):
    return image.flip(-1) if torch.rand(()) < 0.5 else image


CASES: dict[str, tuple[Samples, Augment, dict[str, Any]]] = {
    "unchanged": (SAMPLES, Augment(), {}),
    "floats": (SAMPLES, find_preset("mild+erase"), {}),
    "bytes": (LARGE, find_preset("reid"), {}),
    "colours and noise": (SAMPLES, find_preset("small"), {"seed": 3}),
    "noise": (SAMPLES, Augment(noise=0.3), {}),
    "views": (SAMPLES, find_preset("small"), {"views": 2}),
    "pairs": (SAMPLES, find_preset("mild"), {"tuples": PAIRS}),
    "a transform": (SAMPLES, Augment(noise=0.1), {"transform": mirror, "views": 2}),
    "workers": (SAMPLES, find_preset("mild"), {"workers": 1}),
    "a rank": (SAMPLES, find_preset("small"), {"views": 2, "share": RankShare(1, 3)}),
}


def batches(samples: Samples, augment: Augment, options: dict[str, Any], **more: Any) -> list:
    return list(Loader(samples, ShuffledBatchSampler(39, 13), augment, **options, **more).batches(1, 4))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_batch_made_at_once(case):
    found = batches(*CASES[case], keep_raw=True)
    for raw, whole in zip(found, batches(*CASES[case]), strict=True):
        assert isinstance(raw.inputs, RawInputs) and len(raw.inputs) == len(whole.inputs)
        assert raw.inputs.raw.dtype == torch.uint8
        assert torch.equal(raw.labels, whole.labels) and torch.equal(raw.ids, whole.ids)
        for span in SPANS:
            for _ in range(2):  # again, and the same
                torch.testing.assert_close(raw.inputs.prepare_rows(span), whole.inputs[span], rtol=0, atol=0)


def test_crops_of_whole_photographs_are_the_same(tmp_path):
    for i, pixels in enumerate(PIXELS):
        (tmp_path / str(i // 4)).mkdir(exist_ok=True)
        write_picture(tmp_path / str(i // 4) / f"{i}.png", pixels[:, : 8 + i % 10])
    samples = read_image_folder(tmp_path, size=12)
    for raw, whole in zip(
        batches(samples, find_preset("photo"), {}, keep_raw=True),
        batches(samples, find_preset("photo"), {}),
        strict=True,
    ):
        assert isinstance(raw.inputs, RawInputs)
        for span in SPANS:
            torch.testing.assert_close(raw.inputs.prepare_rows(span), whole.inputs[span], rtol=0, atol=1e-6)


def write_picture(path, pixels):
    from PIL import Image

    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ("samples", "options"), [(ROWS, {}), (SAMPLES, {"transform": BatchTransform(lambda x: x - x.mean())})]
)
def test_what_is_no_image_or_is_changed_as_a_whole_is_made_at_once(samples, options):
    for raw, whole in zip(
        batches(samples, Augment(), options, keep_raw=True), batches(samples, Augment(), options), strict=True
    ):
        torch.testing.assert_close(raw.inputs, whole.inputs, rtol=0, atol=0)


@pytest.mark.parametrize("preset", ["mild", "small"])
def test_images_are_the_same_under_autocast_and_outside_it(preset):
    [first, *_] = batches(LARGE, find_preset(preset), {}, keep_raw=True)
    wanted = first.inputs.prepare_rows(slice(0, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(first.inputs.prepare_rows(slice(0, 8)), wanted)
        assert torch.equal(first.inputs.prepare_all()[:8], wanted)
