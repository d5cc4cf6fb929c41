"""A sample of the faults that `make test-faults` tries in full, and that its harness would see a loss."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run as faults


def test_a_sample_of_faults_loses_nothing():
    script = [sys.executable, str(Path(faults.__file__)), "--every", "97"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    if shutil.which("cc") is None:
        assert done.returncode and "install a compiler" in done.stderr, "without one it says what is missing"
        return
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["losses"] == 0 and counts["calls of one run"] > 150
    assert min(counts[kind] for kind in ("kill", "EIO", "ENOSPC", "EIO from then on")) >= 2
    assert sum(count for kind, count in counts.items() if kind.startswith("crash states")) >= 3


@pytest.fixture
def worked(tmp_path):
    """What the workload leaves, and what it was told."""
    told = faults.Told()
    faults.work(tmp_path, told.hear)
    assert told.done == faults.STEPS and told.unsure == [] and told.lines == len(faults.STEPS)
    assert faults.look(tmp_path, told) is None
    return tmp_path, told


def test_the_harness_would_see_a_loss(worked):
    root, told = worked
    told.done.remove("enrol many")
    assert "but there are" in faults.look(root, told), "what was refused is there"
    told.done.append("enrol many")
    assert faults.look(root, told) is None
    told.done.remove("delete c")
    assert "but there are" in faults.look(root, told), "what was acknowledged is not there"
    told.unsure.append("delete c")
    assert faults.look(root, told) is None, "it may be either"
    told.lines += 1
    assert "audit log" in faults.look(root, told)
    shutil.rmtree(root / "g")
    assert "is gone" in faults.look(root, told)


def test_a_disk_forgets_what_was_not_synchronized():
    disk = faults.Disk()
    for call in [
        ("M", "/g", "", 0, b""),
        ("C", "/g/a", "", 0, b""),
        ("W", "/g/a", "", 0, b"one"),
        ("S", "/g/a", "", 0, b""),
        ("W", "/g/a", "", 3, b"two"),
        ("S", "/g", "", 0, b""),
        ("R", "/g/a", "/g/b", 0, b""),
    ]:
        disk.apply(*call)
    states = dict(disk.states(("/g/b", b"onet")))
    assert states["as written"] == {"/g": None, "/g/b": b"onetwo"}
    assert states["as synchronized"] == {"/g": None, "/g/b": b"one"}
    assert states["with synchronized names"] == {"/g/a": b"one"}
    assert states["torn"]["/g/b"] == b"onet"
