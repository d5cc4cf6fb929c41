"""Whoever can read a template can be somebody else: no file with one is open to others, however the umask is set."""

import os
import stat
from pathlib import Path

import pytest
from storage_fixtures import units

from mettle import atomic_files
from mettle.gallery import Gallery, IndexSpec

DIM = 16


@pytest.fixture(params=[0o022, 0o077, 0o000], ids=oct)
def umask(request):
    former = os.umask(request.param)
    yield request.param
    os.umask(former)


@pytest.fixture
def lax():
    former = os.umask(0o022)
    yield
    os.umask(former)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def holding(folder: Path, rows) -> list[Path]:
    """Files in which the numbers of any template stand, in single or half precision."""
    marks = [row.astype(kind).tobytes() for row in rows for kind in ("<f4", "<f2")]
    return [f for f in folder.rglob("*") if f.is_file() and any(mark in f.read_bytes() for mark in marks)]


@pytest.mark.parametrize("kind", ["exact", "scan", "compressed"])
def test_every_file_with_a_template_is_its_owners_alone(folder, umask, kind):
    rows = units(1, 300, DIM)
    with Gallery.open(folder / "g", dim=DIM) as gallery:
        gallery.enrol_many((f"p{i}", row) for i, row in enumerate(rows))
        gallery.reindex(IndexSpec(kind=kind))
        gallery.snapshot(folder / "copy")
        in_use = holding(folder, rows)
        assert all(mode(file) == 0o600 for file in in_use), [(f.name, oct(mode(f))) for f in in_use]
    found = holding(folder, rows)
    assert {file.name.split("-")[0] for file in found} == {"record.sqlite", "vectors"}, "the oracle sees them"
    index = list((folder / "g" / "index").iterdir())
    assert len(index) == (3 if kind == "exact" else 4)
    assert {mode(file) for file in [*found, *index, folder / "g" / "lock"]} == {0o600}


def test_a_record_is_private_from_its_first_byte_on(folder, umask):
    """A copy of a large gallery takes seconds, and a killed one stays: neither may be read by others."""
    seen = []

    def fill(temporary: Path) -> None:
        seen.append(mode(temporary))
        temporary.write_bytes(b"x")

    atomic_files.write_file(folder / "record.sqlite", fill, 0o600)
    assert seen == [0o600] and mode(folder / "record.sqlite") == 0o600


def opened_up(folder: Path) -> list[Path]:
    """A gallery whose index everybody may read, as older versions left it; returns the files of the index."""
    with Gallery.open(folder / "g", dim=DIM) as gallery:
        gallery.enrol("anna", units(1, 2, DIM))
    files = list((folder / "g" / "index").iterdir())
    leftover = folder / "g" / "index" / f"vectors-{'0' * 64}.bin.mettle-tmp-7"
    leftover.write_bytes(b"half of them")
    for file in [*files, leftover]:
        file.chmod(0o644)
    return [*files, leftover]


def test_an_index_that_an_older_version_left_open_is_tightened_by_a_writer(folder, lax):
    files = opened_up(folder)
    stranger = folder / "g" / "index" / "notes.txt"
    stranger.write_text("mine")
    stranger.chmod(0o644)
    before = {file: file.read_bytes() for file in files}
    with Gallery.open(folder / "g", read_only=True) as gallery:
        assert gallery.notes == []
    assert {mode(file) for file in files} == {0o644}, "a reader changes nothing"
    with Gallery.open(folder / "g") as gallery:
        assert {mode(file) for file in files} == {0o600}, "at once, not when it is closed"
        assert gallery.notes == [] and {file: file.read_bytes() for file in files} == before
    assert mode(stranger) == 0o644


def test_an_owner_who_lets_others_read_the_record_lets_them_read_the_index(folder, lax):
    files = opened_up(folder)[:-1]
    (folder / "g" / "record.sqlite").chmod(0o640)
    with Gallery.open(folder / "g") as gallery:
        assert {mode(file) for file in files} == {0o640}
        gallery.enrol("ben", units(2, 1, DIM))
    index = folder / "g" / "index"
    assert {mode(file) for file in index.iterdir()} == {0o640} and set(index.iterdir()) != set(files)


def test_what_cannot_be_tightened_is_said(folder, lax, monkeypatch):
    opened_up(folder)
    with monkeypatch.context() as patched:  # as for somebody who may write there, but whose files they are not
        patched.setattr(Path, "chmod", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
        with Gallery.open(folder / "g") as gallery:
            (note,) = gallery.notes
            assert "others may read" in note and "not permitted" in note and "\n" not in note
            assert gallery.identify(units(1, 1, DIM)[0], threshold=0.5).match == "anna"
