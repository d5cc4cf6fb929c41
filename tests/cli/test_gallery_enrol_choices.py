"""What chooses people for a gallery is heard or refused, never passed over."""

import numpy as np
import pytest

from tests.command_line import refused


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--table", "e.npz", "--split", "test"], "--where split=test"),
        (["--data", "glyphs", "--where", "split=test"], "chosen by --split"),
        (["anna", "x.jpg", "--split", "test"], "--split chooses from --data"),
        (["anna", "x.jpg", "--where", "split=test"], "--where chooses rows of --table"),
        (["--table", "e.npz", "--embeddings", "v.npy"], "of one IDENTITY"),
    ],
)
def test_a_choice_that_does_not_apply_is_refused(tmp_path, monkeypatch, given, told):
    monkeypatch.chdir(tmp_path)
    np.savez(
        tmp_path / "e.npz", embeddings=np.eye(4, dtype=np.float32), label=np.arange(4), split=["train", "test"] * 2
    )
    np.save(tmp_path / "v.npy", np.eye(4, dtype=np.float32))
    said = refused("gallery", "enrol", str(tmp_path / "g"), "--dim", "4", *given)
    assert told in said and not (tmp_path / "g").exists()
