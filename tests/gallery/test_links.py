"""A gallery's folder may come from elsewhere: no link in it is followed, and nothing of others is removed."""

import os
import shutil
from pathlib import Path

import pytest
from storage_fixtures import units

from mettle import Gallery
from mettle.atomic_files import TEMPORARY, open_unlinked, remove_leftovers
from mettle.errors import GalleryError
from mettle.gallery.binding import Binding
from mettle.gallery.storage.sqlite import SqliteStorage


@pytest.fixture
def place(folder) -> Path:
    with Gallery.open(folder / "g", dim=8) as gallery:
        gallery.enrol_many((f"p{i}", units(i, 1)) for i in range(12))
        gallery.reindex()
    return folder / "g"


@pytest.fixture
def outside(folder) -> Path:
    """A file and a folder of somebody else."""
    (folder / "theirs").mkdir()
    (folder / "theirs" / "file").write_text("mine")
    return folder / "theirs"


def kept(outside: Path) -> bool:
    return os.listdir(outside) == ["file"] and (outside / "file").read_text() == "mine"


ENTRIES = [
    "lock",
    "record.sqlite-wal",
    "record.sqlite-shm",
    "record.sqlite-journal",
    "index/manifest.json",
    "model/run.json",
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_link_in_the_place_of_a_file_is_refused(place, outside, entry, read_only):
    link = place / entry
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outside / "file")
    with pytest.raises(GalleryError, match="is a link"):
        Gallery.open(place, read_only=read_only)
    assert kept(outside) and link.is_symlink()


@pytest.mark.parametrize("entry", ["index", "model", "lock"])
def test_a_link_in_the_place_of_a_folder_is_refused_and_not_written_through(place, outside, entry):
    shutil.rmtree(place / entry) if (place / entry).is_dir() else (place / entry).unlink(missing_ok=True)
    (place / entry).symlink_to(outside, target_is_directory=True)
    with pytest.raises(GalleryError, match="is a link"):
        Gallery.open(place)
    assert kept(outside)


def test_a_link_to_a_record_elsewhere_is_refused(place, folder):
    (folder / "h").mkdir()
    (folder / "h" / "record.sqlite").symlink_to(place / "record.sqlite")
    before = (place / "record.sqlite").read_bytes()
    with pytest.raises(GalleryError, match="is a link"):
        Gallery.open(folder / "h")
    with pytest.raises(GalleryError, match="is a link"):
        SqliteStorage.open(folder / "h" / "record.sqlite")
    assert (place / "record.sqlite").read_bytes() == before


@pytest.mark.parametrize("entry", ["lock", "record.sqlite-wal", "record.sqlite-journal"])
def test_a_new_gallery_is_not_made_among_links(folder, outside, entry):
    (folder / "new").mkdir()
    (folder / "new" / entry).symlink_to(outside / "file")
    for make in (
        lambda: Gallery.open(folder / "new", dim=8),
        lambda: SqliteStorage.create(folder / "new" / "record.sqlite", Binding(8)),
    ):
        with pytest.raises(GalleryError, match="is a link"):
            make()
    assert kept(outside)


def test_a_pipe_in_the_place_of_the_lock_does_not_hang(place):
    (place / "lock").unlink()
    os.mkfifo(place / "lock")
    with pytest.raises(GalleryError, match="no regular file"):
        Gallery.open(place)


def test_an_index_that_becomes_a_link_while_the_gallery_is_open_is_not_written_through(place, outside):
    with Gallery.open(place) as gallery:
        shutil.rmtree(place / "index")
        (place / "index").symlink_to(outside, target_is_directory=True)
        gallery.enrol("late", units(50, 1))
        with pytest.raises(GalleryError, match="is a link"):
            gallery.reindex()
        (place / "index").unlink()
    assert kept(outside)


def test_files_of_others_are_not_taken_for_leftovers(place):
    theirs = ["notes.tmp-1", "x.tmp-abc", f"report{TEMPORARY}final", f"{TEMPORARY}1", "tmp-3"]
    for name in theirs:
        (place / name).write_text("mine")
        (place / "index" / name).write_text("mine")
    (place / f"record.sqlite{TEMPORARY}4").write_text("of a killed writer")
    with Gallery.open(place) as gallery:
        gallery.enrol("late", units(50, 1))
        gallery.reindex()
    remove_leftovers(place)
    for name in theirs:
        assert (place / name).read_text() == (place / "index" / name).read_text() == "mine"
    assert not (place / f"record.sqlite{TEMPORARY}4").exists()


def test_only_regular_files_are_opened_without_links(folder):
    (folder / "file").write_bytes(b"x")
    (folder / "link").symlink_to(folder / "file")
    os.mkfifo(folder / "pipe")
    with open_unlinked(folder / "file") as file:
        assert file.read() == b"x"
    for name in ("link", "pipe", "."):
        with pytest.raises(OSError, match=name if name != "." else "folder"):
            open_unlinked(folder / name)
