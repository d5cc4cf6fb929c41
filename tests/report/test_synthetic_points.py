"""Synthetic negatives on the map of a hardness-aware run: those of its last checkpoint, or the reason for none."""

import shutil
from dataclasses import replace

import numpy as np

from conftest import make, pictures
from mettle.evaluate.run.synthetic_points import synthesize_test_negatives
from mettle.report.run_page import write_report


def test_the_map_shows_what_the_generator_makes(tmp_path):
    pictures(tmp_path / "pictures.npz")
    hard = make(tmp_path, tmp_path / "pictures.npz", "hard", method="hardness-aware", kind="Triplet", difficulty=None)
    rows = np.arange(len(hard.samples.part("test")))
    made, why_not = synthesize_test_negatives(hard.run, hard.samples, rows)
    assert why_not == "" and made.shape == (5, 8) and np.isfinite(made).all()  # a triple for each of five classes
    real = hard.evaluation.results.embeddings
    assert np.abs(made[:, None] - real).sum(2).min() > 0, "none is a sample"
    assert hard.evaluation.metrics["question"]["name"] == "retrieval"
    page = write_report(hard.run, hard.evaluation).read_text(encoding="utf-8")
    assert "synthetic negatives (5)" in page and "Crosses: negatives" in page
    elsewhere = replace(hard.run, folder=shutil.copytree(hard.run.folder, tmp_path / "copy"))
    shutil.rmtree(elsewhere.folder / "checkpoints")
    made, why_not = synthesize_test_negatives(elsewhere, hard.samples, rows)
    assert made is None and "no checkpoint is left" in why_not
    text = write_report(elsewhere, hard.evaluation).read_text(encoding="utf-8")
    assert "No synthetic negatives are drawn: no checkpoint is left" in text


def test_other_methods_have_none(made):
    assert synthesize_test_negatives(made.run, made.samples, np.arange(4)) == (None, "")
