"""A new user's first command: a folder of photographs of mixed sizes, and no other option than fewer steps."""

import sys
from pathlib import Path

import pytest

from mettle.train import open_run_folder
from tests.command_line import mettle

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from photo_folder import write_folder


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """What the command prints, and the folder that it was called in."""
    place = tmp_path_factory.mktemp("first")
    write_folder(place / "photos", classes=12, each=6)
    (place / "photos" / "notes.txt").write_text("not a picture")
    where = ("--data", place / "photos", "--runs", place / "runs")
    printed = mettle("train", "supcon", *where, "--set", "train.steps=12")
    return printed, place


def test_it_says_what_it_chose_and_which_key_changes_it(first):
    printed, _ = first
    chosen = [line for line in printed.splitlines() if line.startswith("note: chose ")]
    keys = [line.split()[2] for line in chosen]
    assert keys == ["data.size", "data.resize", "batch.classes", "batch.augment", "model.backbone", "model.pool"]
    assert all(f"(--set {key}=... changes it)" in line for key, line in zip(keys, chosen, strict=True))
    assert "note: 1 file that is no picture was passed over (1 .txt), first: 'notes.txt'" in printed


def test_it_ends_with_a_report_that_says_what_the_network_sees(first):
    printed, place = first
    assert "EER" in printed and "with untrained network" in printed
    page = (place / "runs" / "supcon" / "report.html").read_text(encoding="utf-8")
    assert "scaled with their proportions kept and cropped from the centre to 64 x 64 pixels" in page


def test_a_gallery_of_the_run_sees_photographs_as_evaluation_did(first):
    import numpy as np

    from mettle import Gallery
    from mettle.model import embed
    from mettle.train import prepare_samples

    _, place = first
    run = open_run_folder(place / "runs" / "supcon")
    samples = prepare_samples(run.recipe_with_data_paths())
    wanted = embed(run.model(), samples.take(np.arange(4)))
    with Gallery.open(place / "shop.mettle", model=run) as gallery:
        gallery.enrol("a", [place / "photos" / samples.files[i] for i in range(4)])
        scores = [gallery.verify("a", vector, threshold=0.5).score for vector in wanted]
    assert np.allclose(scores, 1, atol=1e-5)
