"""Durable writes beside other writers, live and dead: real processes, killed in the middle."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mettle import atomic_files

# Writes file or folder, says when it is in the middle of it, and goes on when told.
WRITER = """
import os, sys
from pathlib import Path
from mettle import atomic_files
what, path = sys.argv[1], Path(sys.argv[2])
def pause():
    print("in the middle", flush=True)
    sys.stdin.readline()
if what == "file":
    sync = os.fsync
    os.fsync = lambda handle: (pause(), setattr(os, "fsync", sync), sync(handle))
    atomic_files.write_text(path, "theirs")
else:
    atomic_files.write_folder(path, lambda place: ((place / "inside").write_text("theirs"), pause()))
print("done", flush=True)
"""


@pytest.fixture(params=["file", "folder"])
def what(request):
    return request.param


def begun(what: str, path: Path) -> subprocess.Popen:
    """A process that is in the middle of writing."""
    command = [sys.executable, "-c", WRITER, what, str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "in the middle\n"
    return child


def killed(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def write(what: str, path: Path) -> None:
    if what == "file":
        atomic_files.write_text(path, "ours")
    else:
        atomic_files.write_folder(path, lambda place: (place / "inside").write_text("ours"))


def content(what: str, path: Path) -> str:
    return (path if what == "file" else path / "inside").read_text()


def test_the_next_write_removes_what_killed_writers_left(folder, what):
    path = folder / "a [*] name"
    children = [begun(what, path) for _ in range(3)]  # at the same time, so each has a name of its own
    other = folder / "another.mettle-tmp-0"
    other.write_text("of something else")
    for child in children:
        killed(child)
    assert len(list(folder.iterdir())) == 4 and not path.exists()
    for _ in range(3):
        killed(begun(what, path))
        assert len(list(folder.iterdir())) == 2, "killed again and again: they do not pile up"
    write(what, path)
    assert content(what, path) == "ours" and sorted(folder.iterdir()) == sorted([path, other])


def test_a_single_leftover_is_gone_after_the_next_write(folder, what):
    path = folder / "target"
    killed(begun(what, path))
    assert [file.name for file in folder.iterdir()] == ["target.mettle-tmp-0"]
    write(what, path)
    assert list(folder.iterdir()) == [path] and content(what, path) == "ours"


def test_what_a_live_writer_holds_is_left_alone(folder, what):
    path = folder / "target"
    child = begun(what, path)
    try:
        (theirs,) = folder.iterdir()
        atomic_files.remove_leftovers(folder)
        assert theirs.exists(), "not even a sweep takes it"
        write(what, folder / "elsewhere")
        if what == "file":  # a folder is never made over another
            write(what, path)
            assert content(what, path) == "ours" and theirs.exists()
        assert child.communicate("go on\n", timeout=60)[0] == "done\n" and child.returncode == 0
    finally:
        child.kill()
        child.communicate()
    assert content(what, path) == "theirs", "the last one wins"
    assert not list(folder.glob("*.mettle-tmp-*"))


def test_sweep_takes_what_the_dead_left_whoever_named_it(folder, what):
    killed(begun(what, folder / "target"))
    (folder / "b.mettle-tmp-12").write_text("of an older version")
    (folder / "c.mettle-tmp-0").symlink_to(folder / "nowhere")
    atomic_files.remove_leftovers(folder)
    assert list(folder.iterdir()) == []


HAMMER = """
import sys
from pathlib import Path
from mettle import atomic_files
path = Path(sys.argv[1])
print("ready", flush=True)
for turn in range(10**9 if sys.argv[3] == "forever" else int(sys.argv[3])):
    atomic_files.write_text(path, sys.argv[2] * 5000)
"""


def test_many_writers_of_one_file_some_of_them_killed(folder):
    """Whoever looks sees the whole content of one of them; nobody who lives fails; nothing is left."""
    path = folder / "target"

    def start(letter: str, turns: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HAMMER, str(path), letter, turns]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        return child

    steady = [start(letter, "300") for letter in "ab"]
    for _ in range(4):
        victim = start("c", "forever")
        for _ in range(20):
            if path.exists():
                seen = path.read_text()
                assert len(seen) == 5000 and len(set(seen)) == 1
        killed(victim)
    for child in steady:
        errors = child.communicate(timeout=250)[1]
        assert child.returncode == 0, errors
    atomic_files.write_text(path, "end")
    assert list(folder.iterdir()) == [path] and path.read_text() == "end"


def test_where_there_are_no_locks_writes_work_and_only_a_sweep_removes(folder, what, monkeypatch):
    killed(begun(what, folder / "target"))
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on a system without it
    write(what, folder / "target")
    assert content(what, folder / "target") == "ours"
    assert sorted(file.name for file in folder.iterdir()) == ["target", "target.mettle-tmp-0"]
    atomic_files.remove_leftovers(folder)
    assert [file.name for file in folder.iterdir()] == ["target"]


MODES = """
import json, os, stat, sys
from pathlib import Path
from mettle import atomic_files
here, umask = Path(sys.argv[1]), int(sys.argv[2], 8)
os.umask(umask)
sync, during = os.fsync, []
def look(handle):
    during.append(stat.S_IMODE(os.fstat(handle).st_mode))
    sync(handle)
atomic_files.write_text(here / "plain", "x")
atomic_files.write_folder(here / "box", lambda place: (place / "inside").write_text("x"))
os.fsync = look
atomic_files.write_bytes(here / "secret", b"x", mode=0o600)
atomic_files.write_bytes(here / "shown", b"x", mode=0o644)
os.fsync = sync
names = ("plain", "box", "box/inside", "secret", "shown")
print(json.dumps([[stat.S_IMODE((here / name).stat().st_mode) for name in names], during[0], during[2]]))
"""


@pytest.mark.parametrize(
    ("umask", "plain", "box"),
    [("022", 0o644, 0o755), ("077", 0o600, 0o700), ("027", 0o640, 0o750), ("002", 0o664, 0o775)],
)
def test_the_umask_says_who_may_read_unless_the_caller_does(folder, umask, plain, box):
    said = subprocess.run([sys.executable, "-c", MODES, str(folder), umask], capture_output=True, text=True, check=True)
    found, *during = json.loads(said.stdout)
    assert found == [plain, box, plain, 0o600, 0o644]
    assert during == [0o600, 0o600], "until it is complete its owner alone may read it"


def test_a_leftover_that_is_no_file_of_ours_does_not_stop_a_write(folder):
    """A pipe would block whoever opens it, a link would lead elsewhere, a folder is not a file."""
    os.mkfifo(folder / "target.mettle-tmp-0")
    outside = folder / "outside"
    outside.write_text("mine")
    (folder / "target.mettle-tmp-1").symlink_to(outside)
    (folder / "target.mettle-tmp-2").mkdir()
    atomic_files.write_text(folder / "target", "ours")
    assert (folder / "target").read_text() == "ours" and outside.read_text() == "mine"
    assert stat.S_ISREG((folder / "target").lstat().st_mode)
