"""What is said of a change is true: disks and servers that fail while a change is committed."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from storage_fixtures import FileShelf, units

from mettle.errors import GalleryUnavailable, OutcomeUnknown
from mettle.gallery.binding import Binding

TESTS = str(Path(__file__).parents[1])
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters system calls")

# Enrols anna, then asks for a change on a disk whose synchronization fails, says what it was told, and dies: what the
# files hold then is what a restart finds. "dead": the disk takes nothing at all after the failure.
FAILING_SYNC = """
import os, sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/gallery"]
import json
from pathlib import Path
from storage_fixtures import units
from system_faults import fail_system_calls
from mettle.errors import GalleryUnavailable, OutcomeUnknown
from mettle.gallery.storage import sqlite

storage = sqlite.SqliteStorage.open(Path(sys.argv[1]))
storage.enrol("zoe", units(3, 1))  # the log is begun: its own synchronization is not what fails
verb, dead = sys.argv[3], sys.argv[4] == "dead"
change = (lambda: storage.enrol("bert", units(2, 1), request="r")) if verb == "enrol" else (
    lambda: storage.delete("anna", request="r"))
settle = sqlite.SqliteStorage._settle
def on_a_dead_disk(self, connection, before, error):
    fail_system_calls("pwrite64", "write")
    settle(self, connection, before, error)
if dead:
    sqlite.SqliteStorage._settle = on_a_dead_disk
fail_system_calls("fsync", "fdatasync")
told = []
for _ in range(2):  # asked again at once, on the same disk
    try:
        change()
        told.append("done")
    except Exception as error:
        told.append(type(error).__name__)
os.writev(1, [json.dumps([told, list(storage.ids())]).encode()])  # a call that was not taken away
os._exit(0)
"""


@linux
@pytest.mark.parametrize("verb", ["enrol", "delete"])
@pytest.mark.parametrize("disk", ["passing", "dead"])
def test_a_change_whose_synchronization_failed_is_called_unsure_and_is_settled_by_asking_again(tmp_path, verb, disk):
    shelf = FileShelf(tmp_path)
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    storage.close()
    done = subprocess.run(
        [sys.executable, "-c", FAILING_SYNC, str(shelf.path), TESTS, verb, disk], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told, ids = json.loads(done.stdout)
    assert set(told) == {"OutcomeUnknown"}, "neither 'nothing was changed' nor an acknowledgement"
    assert ids == ["anna", "zoe"], "until it is known to be made, nobody sees it"
    storage = shelf.open()  # after the restart
    made = storage.sequence() == 3
    assert made == (disk == "dead"), "on a dead disk the change is in the log, or this test saw nothing"
    again = storage.enrol("bert", units(2, 1), request="r") if verb == "enrol" else storage.delete("anna", request="r")
    assert again.repeated == made and again.sequence == storage.sequence() == 3
    assert list(storage.ids()) == (["anna", "bert", "zoe"] if verb == "enrol" else ["zoe"]) and storage.check() == []
    storage.close()


def test_a_failed_commit_that_could_be_settled_changed_nothing(folder, monkeypatch):
    """The disk fails once: the next commit is written over the change, so that no restart plays it back."""
    shelf = FileShelf(folder / "g")
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    shutil.copytree(shelf.path.parent, folder / "before", ignore=shutil.ignore_patterns("*-shm"))
    kept = (folder / "before" / "record.sqlite-wal").read_bytes()

    class FailingOnce:
        """A connection whose next COMMIT writes all of the change, and then fails as a synchronization does."""

        def __init__(self, connection):
            self._connection, self.failed = connection, False

        def __getattr__(self, name):
            return getattr(self._connection, name)

        def execute(self, sql, *values):
            if sql == "COMMIT" and not self.failed:
                self.failed = True
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
            return self._connection.execute(sql, *values)

    storage._writer = FailingOnce(storage._writer)
    with pytest.raises(GalleryUnavailable, match="nothing was changed") as told:
        storage.enrol("bert", units(2, 1), request="r")
    assert not isinstance(told.value, OutcomeUnknown)
    shutil.copytree(shelf.path.parent, folder / "after", ignore=shutil.ignore_patterns("*-shm"))
    assert (folder / "after" / "record.sqlite-wal").read_bytes() != kept, "something was written over it"
    restarted = FileShelf(folder / "after").open()
    assert list(restarted.ids()) == ["anna"] and restarted.check() == []
    restarted.close()
    assert not storage.enrol("bert", units(2, 1), request="r").repeated
    storage.close()


HOLDER = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/gallery"]
from pathlib import Path
from storage_fixtures import units
from mettle.gallery.storage.sqlite import SqliteStorage
storage = SqliteStorage.open(Path(sys.argv[1]))
storage.enrol("anna", units(1, 1))
SqliteStorage.open(Path(sys.argv[1]), write=False).close()
print("looked", flush=True)
sys.stdin.readline()
storage.enrol("bert", units(2, 1))
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_second_opening_in_the_writers_process_does_not_let_others_remove_its_log(tmp_path):
    """Closing any handle of a file takes back all locks that the process has on it: others would take it for closed."""
    shelf = FileShelf(tmp_path)
    shelf.create(Binding(8)).close()
    writer = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(shelf.path), TESTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "looked\n"
        shelf.open(write=False).close()
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "done\n"
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    storage = shelf.open()
    assert list(storage.ids()) == ["anna", "bert"], "an acknowledged change is lost"
    storage.close()
