"""The embedded storage on bad disks, in bad files and after bad luck."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from storage_fixtures import FileShelf, units
from test_storage import held

from mettle.atomic_files import TEMPORARY
from mettle.errors import GalleryError, GalleryUnavailable
from mettle.gallery.binding import Binding
from mettle.gallery.storage import sqlite as sqlite_module
from mettle.gallery.storage.sqlite import SqliteStorage


@pytest.fixture
def shelf(folder):
    return FileShelf(folder / "people.mettle")


def copied(shelf: FileShelf, to: Path) -> FileShelf:
    """The files as they are now, as a crash would leave them; shared memory does not survive one."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(shelf.path.parent, to, ignore=shutil.ignore_patterns("*-shm"))
    return FileShelf(to)


def state(shelf: FileShelf):
    storage = shelf.open()
    try:
        assert storage.check() == []
        return storage.sequence(), held(storage)
    finally:
        storage.close()


def test_g2_power_loss_keeps_what_was_synced_and_drops_the_torn_rest(shelf, folder):
    """Every length the log can have, and torn last writes: always a state that was acknowledged, never an older one
    than the log holds whole."""
    storage = shelf.create(Binding(64))
    log = shelf.path.with_name("record.sqlite-wal")
    acknowledged = []  # (length of the log at the acknowledgement, sequence, content)
    for turn in range(4):
        if turn == 2:
            storage.delete("p0")
        else:
            storage.enrol(f"p{turn}", units(turn, 2, 64))
        acknowledged.append((log.stat().st_size, storage.sequence(), held(storage)))
    whole = copied(shelf, folder / "whole")
    storage.close()
    content, ends = log_bytes(whole), [entry[0] for entry in acknowledged]
    before, after = acknowledged[-2], acknowledged[-1]
    rng = random.Random(2)
    cuts = {ends[-2], ends[-2] + 1, ends[-1] - 1, ends[-1], *range(ends[-2], ends[-1], 997)}
    cuts |= {rng.randrange(0, ends[-1]) for _ in range(40)} | {0, 1, 31, 32, 33}
    for cut in sorted(cuts):
        crashed = copied(whole, folder / "crashed")
        log_path(crashed).write_bytes(content[:cut])
        kept = [entry for entry in acknowledged if entry[0] <= cut]
        assert state(crashed) == (kept[-1][1:] if kept else (0, {})), f"log cut at byte {cut} of {len(content)}"
    for _ in range(60):  # the last change's bytes reached the disk in part: zeros or old rubbish in between
        crashed = copied(whole, folder / "crashed")
        torn = bytearray(content)
        start = rng.randrange(ends[-2], ends[-1] - 1)
        stop = min(ends[-1], start + rng.choice([1, 8, 512, 4096]))
        torn[start:stop] = bytes(stop - start) if rng.random() < 0.5 else rng.randbytes(stop - start)
        log_path(crashed).write_bytes(torn)
        assert state(crashed) in (before[1:], after[1:])
        if bytes(torn) != content and any(torn[start:stop]):
            assert state(crashed) == before[1:], "a torn change was taken for whole"


def log_path(shelf: FileShelf) -> Path:
    return shelf.path.with_name("record.sqlite-wal")


def log_bytes(shelf: FileShelf) -> bytes:
    return log_path(shelf).read_bytes()


def test_g2_power_loss_during_a_snapshot_leaves_the_old_one(shelf, folder):
    storage = shelf.create()
    storage.enrol("anna", units(1, 2))
    target = folder / "kept" / "snapshot.sqlite"
    storage.snapshot(target)
    old = target.read_bytes()
    storage.enrol("bert", units(2, 2))
    storage.snapshot(folder / "new.sqlite")
    new = (folder / "new.sqlite").read_bytes()
    temporary = target.with_name(f"snapshot.sqlite{TEMPORARY}77")
    for length in [None, 0, 1, 4096, len(new) // 2, len(new)]:  # not begun, torn, complete but not renamed
        target.write_bytes(old)
        if length is not None:
            temporary.write_bytes(new[:length])
        copy = SqliteStorage.open(target, write=False)
        assert list(copy.ids()) == ["anna"] and copy.check() == []
        copy.close()
        storage.snapshot(target)
        assert sorted(p.name for p in target.parent.iterdir()) == ["snapshot.sqlite"], "leftovers are swept"
        copy = SqliteStorage.open(target, write=False)
        assert list(copy.ids()) == ["anna", "bert"] and copy.digest() == storage.digest()
        copy.close()
    storage.close()


def test_g3_a_full_disk_acknowledges_nothing_and_is_survived(shelf):
    storage = shelf.create(Binding(64))
    storage.enrol("anna", units(1, 2, 64))
    pages = storage._writer.execute("PRAGMA page_count").fetchone()[0]
    storage._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    before, names = held(storage), []

    def fill() -> None:
        for turn in range(1000):
            storage.enrol(f"p{turn}", units(turn, 30, 64), request=f"r{turn}")
            names.append(f"p{turn}")

    with pytest.raises(GalleryUnavailable, match="disk is full"):
        fill()
    assert list(storage.ids()) == sorted(["anna", *names]) and storage.check() == []
    assert held(storage)["anna"] == before["anna"] and storage.sequence() == 1 + len(names)
    storage._writer.execute("PRAGMA max_page_count = 1000000")
    done = storage.enrol(f"p{len(names)}", units(3, 30, 64), request=f"r{len(names)}")
    assert not done.repeated and done.sequence == 2 + len(names)
    storage.close()


BAD_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from storage_fixtures import units
from mettle.errors import GalleryUnavailable, OutcomeUnknown
from mettle.gallery.storage.sqlite import SqliteStorage

storage = SqliteStorage.open(Path(sys.argv[1]))
done = 0
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # from here on the disk takes no more
failed = 0
while failed < 3:
    try:
        storage.enrol(f"p{done}", units(done, 8), request=f"r{done}")
        done += 1
    except GalleryUnavailable as error:
        unsure = isinstance(error, OutcomeUnknown)  # the write of the change, and the one to settle it, failed
        assert ("settles it" if unsure else "nothing was changed") in str(error) and "\\n" not in str(error), error
        failed += 1
        assert storage.size().identities == done and storage.sequence() == done, "reads go on"
        for verb in (storage.compact, lambda: storage.snapshot(Path(sys.argv[1]).with_name("copy.sqlite"))):
            try:
                verb()
            except GalleryUnavailable:
                pass
assert done > 5 and storage.check() == []
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert not storage.enrol(f"p{done}", units(done, 8), request=f"r{done}").repeated
assert storage.check() == []
print(done + 1, flush=True)
storage.close()
"""


def test_g3_a_failing_disk_acknowledges_nothing_and_is_survived(shelf):
    """Writes that the kernel refuses (a limit on file size: real errors from real system calls)."""
    shelf.create().close()
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", BAD_DISK, str(shelf.path), here], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    sequence, people = state(shelf)
    assert sequence == len(people) == int(done.stdout)
    for turn in range(sequence):
        assert sorted(people[f"p{turn}"].values()) == sorted(row.tobytes() for row in units(turn, 8))


READ_ONLY = """
import os, sys
from pathlib import Path
import sqlite3, fcntl
from mettle.errors import GalleryError, GalleryUnavailable
from mettle.gallery.binding import Binding
from mettle.gallery.storage.sqlite import SqliteStorage

if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
path = Path(sys.argv[1])
try:
    SqliteStorage.open(path)
    raise SystemExit("opened for writing")
except GalleryUnavailable as error:
    assert "read-only" in str(error), error
try:
    SqliteStorage.create(path.with_name("other") / "record.sqlite", Binding(8))
    raise SystemExit("created")
except GalleryUnavailable as error:
    pass
reader = SqliteStorage.open(path, write=False)
print(" ".join(reader.ids()), reader.check(), flush=True)
sys.stdin.readline()
print(" ".join(reader.ids()), flush=True)
reader.close()
"""


@pytest.mark.parametrize("writing", [False, True], ids=["left", "in use"])
def test_g3_a_read_only_folder_is_read(writing):
    place = Path(tempfile.mkdtemp())  # one that everybody can look into
    shelf = FileShelf(place / "people.mettle")
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    if not writing:
        storage.close()
    place.chmod(0o755)
    for path in shelf.path.parent.iterdir():
        assert path.stat().st_mode & 0o077 == 0, "templates are private"
        path.chmod(0o444)
    shelf.path.parent.chmod(0o555)
    child = subprocess.Popen(
        [sys.executable, "-c", READ_ONLY, str(shelf.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = child.stdout.readline()
        shelf.path.parent.chmod(0o755)
        for path in shelf.path.parent.iterdir():
            path.chmod(0o644)
        if not writing:
            storage = shelf.open()
        storage.enrol("bert", units(2, 1))
        rest, errors = child.communicate("\n", timeout=200)
        assert child.returncode == 0, errors
        assert first == "anna []\n" and rest == "anna bert\n", "a reader sees the newest, log or no log"
    finally:
        child.kill()
        child.communicate()
        storage.close()
        shutil.rmtree(place)


def test_g5_leftovers_are_swept_or_ignored(shelf):
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    storage.close()
    here = shelf.path.parent
    (here / f"record.sqlite{TEMPORARY}123").write_bytes(b"half a file")
    (here / f"record.sqlite{TEMPORARY}124").mkdir()
    (here / "unknown").write_text("?")
    (here / "lock").write_text("4194304000 no process")
    (here / "record.sqlite-wal").write_bytes(random.Random(1).randbytes(5000))
    (here / "record.sqlite-shm").write_bytes(b"\1" * 32768)
    assert state(shelf)[0] == 1
    assert not list(here.glob(f"*{TEMPORARY}*")) and (here / "unknown").exists()


def test_g5_the_log_of_a_removed_record_is_not_played_into_a_new_one(shelf, folder):
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    crashed = copied(shelf, folder / "crashed")
    storage.close()
    crashed.path.unlink()
    assert log_path(crashed).stat().st_size
    crashed.create().close()
    assert state(crashed) == (0, {})


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\0" + bytes(200), bytes(8192)], ids=len)
def test_a_foreign_file_is_refused_and_left_alone(shelf, content):
    shelf.path.parent.mkdir()
    shelf.path.write_bytes(content)
    for write in (True, False):
        with pytest.raises(GalleryError, match="not a storage"):
            shelf.open(write)
    with pytest.raises(GalleryError, match="already"):
        shelf.create()
    assert shelf.path.read_bytes() == content


def test_another_database_is_refused(shelf, folder):
    shelf.path.parent.mkdir()
    connection = sqlite3.connect(shelf.path)
    connection.execute("CREATE TABLE accounts (id)")
    connection.commit()
    connection.close()
    with pytest.raises(GalleryError, match="not a storage"):
        shelf.open()
    with pytest.raises(GalleryError, match="no gallery"):
        SqliteStorage.open(folder / "nothing" / "record.sqlite")
    with pytest.raises(GalleryError, match="no gallery"):
        SqliteStorage.open(folder)


def test_newer_and_armed_files_are_refused(shelf):
    shelf.create().close()
    original = shelf.path.read_bytes()
    shelf.sql("PRAGMA user_version = 3")
    with pytest.raises(GalleryError, match="upgrade mettle"):
        shelf.open()
    shelf.path.write_bytes(original)
    shelf.sql("CREATE TRIGGER t AFTER INSERT ON templates BEGIN DELETE FROM identities; END")
    with pytest.raises(GalleryError, match="triggers"):
        shelf.open()


def test_g4_flipped_bits_never_give_a_wrong_template(shelf, folder):
    """200 flips anywhere in the file: refused, found by `check`, or without any effect; never another content."""
    storage = shelf.create(Binding(64))
    for turn in range(60):
        storage.enrol(f"p{turn}", units(turn, 4, 64))
    expected = held(storage)
    storage.close()
    original, rng = shelf.path.read_bytes(), random.Random(4)
    seen = {"refused": 0, "same": 0}
    for _ in range(200):
        damaged = bytearray(original)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        broken = FileShelf(folder / "broken")
        broken.path.parent.mkdir(exist_ok=True)
        broken.path.write_bytes(damaged)
        try:
            reader = broken.open(write=False)
        except GalleryError:
            seen["refused"] += 1
            continue
        try:
            got = held(reader)
            names = [reader.templates_of(name).numbers.tolist() for name in expected]
            assert got == expected or reader.check(), "wrong content, and nothing says so"
            assert all(numbers in ([], list(rows)) for numbers, rows in zip(names, expected.values(), strict=True))
            seen["same"] += 1
        except GalleryError:
            seen["refused"] += 1
        finally:
            reader.close()
        shutil.rmtree(broken.path.parent)
    assert seen["refused"] > 20 and seen["same"] > 20


def test_g9_compact_erases_deleted_templates_from_every_file(shelf, folder):
    storage = shelf.create(Binding(128))
    order = random.Random(9).sample(range(1000, 1400), 400)  # so that pages of names are split, and leave copies behind
    people = {f"person number {turn} of this gallery": units(turn, 1, 128) for turn in order}
    for turn, (name, vectors) in enumerate(people.items()):
        storage.enrol(name, vectors, request=f"r {turn}")
    gone = [name for turn, name in enumerate(people) if turn % 3]
    for name in gone:
        storage.delete(name)
    storage.enrol(next(iter(people)), units(99, 1, 128), replace=True)
    old = next(iter(people))

    def found(folder: Path) -> list[str]:
        content = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
        names = [name for name in gone if name.encode() in content]
        return names + [n for n in [*gone, old] if any(row.tobytes()[8:40] in content for row in people[n])]

    assert found(shelf.path.parent), "before, the log at least holds them: otherwise this test sees nothing"
    storage.snapshot(folder / "kept" / "snapshot.sqlite")
    assert found(folder / "kept") == [], "a snapshot made after a deletion holds nothing of it"
    before = shelf.path.stat().st_size
    storage.compact()
    assert found(shelf.path.parent) == [] and shelf.path.stat().st_size < 0.7 * before
    assert storage.check() == [] and storage.size().identities == len(people) - len(gone)
    storage.close()
    assert found(shelf.path.parent) == []


def test_a_snapshot_is_not_written_over_a_gallery(shelf, folder):
    storage = shelf.create()
    for target in (shelf.path, shelf.path.parent, shelf.path.parent / "." / "record.sqlite"):
        with pytest.raises(GalleryError, match="another place"):
            storage.snapshot(target)
    other = FileShelf(folder / "other")
    busy = other.create()
    with pytest.raises(GalleryError, match="another place"):
        storage.snapshot(other.path)
    busy.close()
    (folder / "file").write_text("")
    with pytest.raises(GalleryUnavailable):
        storage.snapshot(folder / "file" / "snapshot.sqlite")
    storage.close()


def test_compact_says_when_a_reader_keeps_it_from_erasing(shelf, monkeypatch):
    monkeypatch.setattr(sqlite_module, "WAIT", 0.2)
    storage = shelf.create()
    for turn in range(9):
        storage.enrol(f"p{turn}", units(turn, 1))
    reader = shelf.open(write=False)
    scan = reader.scan(batch=2)
    next(scan)
    storage.delete("p0")
    with pytest.raises(GalleryUnavailable, match="compact again"):
        storage.compact()
    scan.close()
    storage.compact()
    reader.close()
    storage.close()


def test_g7_readers_read_while_the_writer_compacts_and_snapshots(shelf, folder):
    storage = shelf.create()
    for turn in range(50):
        storage.enrol(f"p{turn}", units(turn, 1))
    digest, troubles, stop = storage.digest(), [], threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                assert storage.digest() == digest and storage.size().templates == 50
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(5):
        storage.snapshot(folder / f"{turn}.sqlite")
        storage.compact()
    stop.set()
    for thread in threads:
        thread.join()
    assert troubles == []
    storage.close()


def test_the_commit_is_synchronous(shelf):
    storage = shelf.create()
    ask = storage._writer.execute
    assert ask("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert ask("PRAGMA synchronous").fetchone()[0] == 2
    assert ask("PRAGMA secure_delete").fetchone()[0] == 1
    assert ask("PRAGMA foreign_keys").fetchone()[0] == 1
    storage.close()
    reopened = shelf.open()
    assert reopened._writer.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert reopened._writer.execute("PRAGMA secure_delete").fetchone()[0] == 1
    reopened.close()


def test_odd_paths_are_only_paths(folder):
    for name in ("a b", "q?mode=memory", "h#x", "p%20", "[x]*", "über"):
        shelf = FileShelf(folder / name)
        storage = shelf.create()
        storage.enrol("anna", units(1, 1))
        storage.snapshot(folder / "copies" / f"{name}.sqlite")
        storage.close()
        assert shelf.path.is_file() and state(shelf)[0] == 1
    assert len(os.listdir(folder)) == 7
