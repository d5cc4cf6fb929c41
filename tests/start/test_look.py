"""The account of a folder of photographs: sizes, labels, copies, files that cannot be read."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mettle.errors import DataError
from mettle.start import look_at_data


@pytest.fixture
def folder(tmp_path) -> Path:
    """Six labels of two to seven images, twice as wide as high."""
    for label in range(6):
        (tmp_path / f"label-{label}").mkdir()
        for k in range(2 + label):
            pixels = np.random.default_rng([label, k]).integers(0, 256, (40, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"label-{label}" / f"{k}.png")
    return tmp_path


def test_it_counts_images_labels_and_sizes(folder):
    found = look_at_data(str(folder))
    assert (found.samples, found.per_label, found.has_split) == (27, (2, 3, 4, 5, 6, 7), False)
    assert found.kept_by_crop == 0.5 and found.images.median_short_side == 40
    lines = found.lines()
    assert lines[0].startswith("27 images of 6 labels, 2 to 7 of each (median 4.5); no split")
    assert lines[1] == (
        "1 size, short sides 40 to 40 pixels (median 40); a square from the center keeps 50% of an image"
    )
    assert lines[2] == "no copies, near-copies or other problems"


def test_an_image_under_two_labels_and_a_broken_file_are_named(folder):
    shutil.copy(folder / "label-0" / "0.png", folder / "label-5" / "copy.png")
    (folder / "label-4" / "0.png").write_bytes(b"broken")
    text = "\n".join(look_at_data(str(folder)).lines())
    assert f"`mettle data check {folder}` lists all" in text
    assert "under the labels" in text and "label-4/0.png" in text


def test_mostly_broken_files_are_refused(folder):
    for path in (folder / "label-5").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"7 of 27 pictures cannot be used.*`mettle data check .*` says more"):
        look_at_data(str(folder))
