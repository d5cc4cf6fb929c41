import os

import pytest

from mettle import atomic_files


def test_a_failed_write_leaves_the_old_content_and_no_leftovers(tmp_path, monkeypatch):
    file = tmp_path / "x.txt"
    atomic_files.write_text(file, "old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        atomic_files.write_text(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_what_killed_writers_left_is_removed_leftovers_and_nothing_else(tmp_path):
    (tmp_path / "keep.txt").write_text("x")
    (tmp_path / "a.mettle-tmp-1").write_text("x")
    (tmp_path / "b.mettle-tmp-2").mkdir()
    (tmp_path / "b.mettle-tmp-2" / "inside").write_text("x")
    atomic_files.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["keep.txt"]


def test_write_folder_is_all_or_nothing(tmp_path):
    def fill(place):
        (place / "one").write_text("1")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        atomic_files.write_folder(tmp_path / "f", fill)
    assert not list(tmp_path.iterdir())
