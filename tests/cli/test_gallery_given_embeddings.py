"""Embeddings of one person from a file: an array by itself, or what `mettle embed` writes."""

import numpy as np

from tests.command_line import mettle, refused


def test_both_kinds_of_file_say_the_same(tmp_path):
    rows = np.eye(4, dtype=np.float32)[:2]
    np.save(tmp_path / "v.npy", rows)
    np.savez(tmp_path / "v.npz", embeddings=rows, ids=np.arange(2))
    for kind in ("npy", "npz"):
        said = mettle("gallery", "enrol", tmp_path / kind, "anna", "--embeddings", tmp_path / f"v.{kind}", "--dim", "4")
        assert "2 templates" in said
    found = [
        mettle("gallery", "identify", tmp_path / "npy", "--embeddings", tmp_path / f"v.{kind}", "--threshold", "0.5")
        for kind in ("npy", "npz")
    ]
    assert found[0] == found[1] and "anna" in found[0]


def test_other_files_of_arrays_are_told(tmp_path):
    np.savez(tmp_path / "v.npz", vectors=np.eye(4))
    said = refused("gallery", "enrol", tmp_path / "g", "anna", "--embeddings", tmp_path / "v.npz", "--dim", "4")
    assert "no array called embeddings" in said
