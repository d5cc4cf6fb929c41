import numpy as np
import pytest

from mettle.data import read
from mettle.errors import DataError


def test_one_door_for_every_kind(tmp_path, cache):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), np.float32), label=[0, 0, 1, 1])
    (tmp_path / "b.csv").write_text("label,u,v\na,1,2\nb,3,4\n")
    assert len(read(tmp_path / "a.npz")) == 4
    assert len(read(tmp_path / "b.csv")) == 2
    assert read("glyphs", cache=cache).origin == "glyphs"
    assert read("glyphs:closed", cache=cache).origin == "glyphs:closed"


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="no data at 'nowhere'"):
        read("nowhere")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match="wanted a folder"):
        read(tmp_path / "x.txt")
    (tmp_path / "d" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="'label' does not apply"):
        read(tmp_path / "d", label="identity")
