"""Processes that die: killed in the middle of every verb, killed while they hold the lock, forked and left behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import killed
import pytest
from storage_fixtures import FileShelf, memory, units

from mettle.errors import GalleryError, GalleryLocked
from mettle.gallery.binding import Binding
from mettle.gallery.storage.sqlite import SqliteStorage

SCRIPT = str(Path(killed.__file__))


def run(*arguments: str, timeout: float = 400) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.timeout(900)  # a busy machine takes a minute, and more kills
def test_g1_kill_loses_nothing_acknowledged(tmp_path):
    """A hundred: on a disk, where there is time to be killed while it syncs, and in memory, where more is under way."""
    seed, quick = str(int(time.time()) % 100_000), memory()
    runs = [run("--kills", "40", "--each", "2", "--seed", seed, "--folder", str(tmp_path))]
    fast = ["--folder", quick, "--delay", "0.003"] if quick else []
    runs += [run("--kills", "60", "--each", "2", "--seed", seed, *fast)]
    for done, kills in zip(runs, (40, 60), strict=True):
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        print(facts)
        assert facts["kills"] >= kills and facts["acknowledged"] > kills
        verbs = ("enrol", "replace", "delete", "calibrate", "compact", "snapshot")
        assert all(facts["killed during"].get(verb, 0) >= 2 for verb in verbs)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_g1_a_thousand_kills_lose_nothing_acknowledged():
    done = run("--kills", "1000", "--seconds", "1200", "--seed", str(int(time.time()) % 100_000), timeout=1500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= 300


@pytest.mark.parametrize("damage", ["lost", "back again", "half", "not asked for", "calibration lost", "or torn"])
def test_g1_the_harness_would_see_a_loss(tmp_path, damage):
    storage = SqliteStorage.create(tmp_path / "record.sqlite", Binding(killed.DIM))
    expected = killed.Expected()
    verbs = [("enrol", "a"), ("enrol", "b"), ("delete", "a"), ("calibrate", ""), ("snapshot", "")]
    for turn, (verb, name) in enumerate(verbs):
        task = {"verb": verb, "name": name, "seed": turn, "n": 3, "request": f"r{turn}"}
        receipt = killed.act(storage, tmp_path, task)
        expected.apply(task, *((receipt.sequence, list(receipt.numbers)) if receipt else (0, [])))
    storage.close()
    assert killed.look(tmp_path, expected, None, random.Random(1)) is False
    shelf = FileShelf(tmp_path)
    if damage == "lost":
        shelf.sql("DELETE FROM templates")
        shelf.sql("DELETE FROM identities")
    elif damage == "calibration lost":
        shelf.sql("DELETE FROM metadata WHERE key = 'calibration'")
    elif damage == "or torn":
        shelf.sql("UPDATE metadata SET value = replace(value, '0.7', '0.6') WHERE key = 'calibration'")
    elif damage == "half":
        shelf.sql("DELETE FROM templates WHERE number = 5")
    else:
        storage = shelf.open()
        storage.enrol("a", killed.vectors(0, 3))
        storage.close()
        if damage == "back again":
            shelf.sql("UPDATE revision_state SET sequence = 4")
    with pytest.raises((AssertionError, GalleryError)):
        killed.look(tmp_path, expected, None, random.Random(1))


def test_g6_a_second_writer_is_refused_and_a_dead_one_is_no_obstacle(tmp_path):
    shelf = FileShelf(tmp_path)
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    with pytest.raises(GalleryLocked, match=f"this process .{os.getpid()}."):
        shelf.open()
    storage.close()
    holder = subprocess.Popen(
        [sys.executable, SCRIPT, "--hold", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert holder.stdout.readline().strip() == str(holder.pid)
        with pytest.raises(GalleryLocked, match=f"process {holder.pid} is writing"):
            shelf.open()
        reader = shelf.open(write=False)
        assert list(reader.ids()) == ["anna"], "readers need no lock"
        reader.close()
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    again = shelf.open()
    assert list(again.ids()) == ["anna"]
    again.close()


def test_g6_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A process that forked (a loader of images, say) and died leaves no lock behind in its children."""
    FileShelf(tmp_path).create().close()
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom mettle.gallery.storage.sqlite import SqliteStorage\n"
        "storage = SqliteStorage.open(Path(sys.argv[1]))\npid = os.fork()\n"
        "if pid == 0:\n    os.close(1)\n    time.sleep(600)\n    os._exit(0)\n"
        "print(pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "record.sqlite")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=200,
    )
    left = int(done.stdout)
    try:
        os.kill(left, 0)  # it is alive
        FileShelf(tmp_path).open().close()
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_record_opens_without_torch(tmp_path):
    code = (
        "import sys, mettle.gallery.storage.sqlite, mettle.gallery.storage.postgres\n"
        "import mettle.gallery.storage.transfer\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=200)
