"""`mettle check-ranks`, with the processes it starts."""

import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import save_file

from mettle.cli import ranks
from tests.command_line import mettle
from tests.processes import run_mettle, start_mettle


def test_ranks_agree_with_one_process():
    done = run_mettle("check-ranks", "--ranks", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 processes with 5 + 9 rows against one") and done.stdout.endswith("parity holds\n")
    found = [line for line in done.stdout.splitlines() if re.search(r"\d\.\de[+-]\d\d", line)]
    assert [line.split("  ")[1].split(" anchors")[0].strip() for line in found] == list(ranks.build_trials())
    differences = [float(x) for line in found for x in re.findall(r"\d\.\de[+-]\d\d", line)]
    assert len(differences) == 2 * 7 + 3 and max(differences) < 1e-12


@contextmanager
def no_processes(count: int, folder: Path, given=None, alone=ranks.compute_alone):
    """In place of the processes: each has found what one alone finds."""
    for rank in range(count):
        save_file(alone(count, given), folder / f"{rank}.safetensors")
    yield []


def test_a_difference_is_told_and_is_status_1(monkeypatch):
    """What the processes are compared with is off in the last thing that is looked at."""
    right = ranks.compute_alone
    monkeypatch.setattr(ranks, "start_children", no_processes)
    assert mettle("check-ranks").endswith("parity holds\n")

    def off(count: int, given=None):
        found = right(count, given)
        found["ArcFace parameters"][3] += 1e-6
        found["SupCon value"] += float("nan")
        return found

    monkeypatch.setattr(ranks, "compute_alone", off)
    said = mettle("check-ranks", status=1)
    assert said.endswith("parity fails: SupCon, ArcFace\n")
    assert [line.split()[0] for line in said.splitlines() if line.endswith("differs")] == ["SupCon", "ArcFace"]


@pytest.mark.parametrize("count", [1, 17])
def test_a_number_that_makes_no_sense_is_refused(count):
    assert f"--ranks must be between 2 and 16, got {count}" in mettle("check-ranks", "--ranks", count, status=2)


def test_processes_that_cannot_be_started_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "compute_alone", lambda count, given=None: {})
    for path, words in (
        (tmp_path / "none", "cannot start 2 local processes of .*none: No such file"),
        (Path("/bin/false"), "process [01] of 2 ended with status 1: it did not say why"),
        (script(tmp_path, "echo early >&2\necho too little memory >&2\nexit 3"), "status 3: too little memory$"),
    ):
        monkeypatch.setattr(sys, "executable", str(path))
        assert re.search(words, mettle("check-ranks", status=2))


LOSSES = """
import torch
from mettle.losses import SupCon

def make(num_classes):
    return lambda z, y: (z - z.mean(0)).square().sum() / num_classes + y.double().mean() * z.norm()

class OfOneRank(SupCon):
    def row_loss(self, row_values):
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return super().row_loss(row_values) * ranks
"""


def test_a_loss_of_the_user_is_checked_with_leave_to_import_it(monkeypatch, tmp_path):
    (tmp_path / "own_ranks.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    refused = mettle("check-ranks", "--loss", "own_ranks:make", status=2)
    assert "would run code of 'own_ranks': allow it with --allow-import own_ranks" in refused
    words = ("check-ranks", "--allow-import", "own_ranks", "--loss")
    assert "has no 'mak'" in mettle(*words, "own_ranks:mak", status=2)
    assert "takes an import path such as shop.losses:make, got 'SupCon'" in mettle(*words, "SupCon", status=2)
    done = run_mettle(*words, "own_ranks:make")
    assert done.returncode == 0 and "own_ranks:make" in done.stdout and done.stdout.endswith("parity holds\n"), done
    done = run_mettle(*words, "own_ranks:OfOneRank")
    assert done.returncode == 1 and done.stdout.endswith("parity fails: own_ranks:OfOneRank\n"), done


def script(folder: Path, lines: str) -> Path:
    made = folder / "python"
    made.write_text(f"#!/bin/sh\n{lines}\n")
    made.chmod(0o755)
    return made


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it has ended since
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return b"mettle.cli.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def rests(pid: int) -> bool:
    """Whether a process has loaded torch and now uses no processor: it waits for its children."""
    if "libtorch" not in Path(f"/proc/{pid}/maps").read_text():
        return False
    looks = []
    for _ in range(2):
        looks.append(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])
        time.sleep(0.3)
    return looks[0] == looks[1]


def until(condition, seconds: float = 200):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def hear_interrupts() -> None:
    """What runs behind a shell inherits that it does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_it_is_interrupted(how):
    """The signal goes to the command alone, not to its children, as from another program."""
    started = start_mettle("check-ranks", "--ranks", 2, before=hear_interrupts, session=True)
    try:
        children = until(lambda: len(found := children_of(started.pid)) == 2 and found)
        assert all(until(lambda child=child: alive(child)) for child in children)
        for child in children:  # they are not to end before the signal comes
            os.kill(child, signal.SIGSTOP)
        until(lambda: rests(started.pid))  # while a process loads modules, Python may lose an interrupt
        os.kill(started.pid, how)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)
        said = started.communicate(timeout=200)[1]
        assert started.returncode == (130 if how != signal.SIGKILL else -9), said
        assert "Traceback" not in said
        until(lambda: not any(alive(child) for child in children))
    finally:
        started.kill()
