"""kill -9 over and over: a child changes a gallery, the parent kills it in the middle and looks at what is left.

    python tests/gallery/killed.py --kills 2000            # thousands; prints one line of JSON, exit status 1 on a loss
    python tests/gallery/killed.py --hold FOLDER           # take the write lock and wait

The child says on a pipe what it is going to do and, once it is acknowledged, that it was done. The parent keeps what
must be there in ``expected.json``: every acknowledged change, and at most the one change that was under way.
Neither imports torch, so children start in milliseconds.
"""

import argparse
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from mettle.gallery.binding import Binding
from mettle.gallery.calibration import GalleryCalibration
from mettle.gallery.storage.sqlite import SqliteStorage

DIM = 64
VERBS = ("enrol", "replace", "delete", "calibrate", "compact", "snapshot", "anything")


def vectors(seed: int, n: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(n, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def marks(seed: int, n: int) -> list[str]:
    """What stands for the vectors of a seed in the file of what is expected."""
    return [hashlib.sha256(row.tobytes()).hexdigest()[:24] for row in vectors(seed, n)]


def calibration(seed: int) -> GalleryCalibration:
    """The calibration that a seed stands for; long, so that writing it takes several pages."""
    rates = [(i + 1) / 400 for i in range(200)]
    table = {repr(rate): {"threshold": round(0.9 - rate - seed % 97 / 1e4, 6)} for rate in rates}
    return GalleryCalibration(table, people=seed, templates=2 * seed, sequence=0, fusion="best", model=None)


def child(folder: Path, seed: int, names: list[str], pipe: int) -> None:
    """Change the gallery until killed."""
    rng = random.Random(seed)

    def say(**line) -> None:
        os.write(pipe, json.dumps(line).encode() + b"\n")

    storage = SqliteStorage.open(folder / "record.sqlite")
    here = set(names)
    for turn in range(10_000):
        verb = rng.choices(["enrol", "replace", "delete", "calibrate", "compact", "snapshot"], [8, 4, 5, 3, 1, 1])[0]
        name, number = f"person {rng.randrange(40)}", rng.randint(1, 4)
        if verb == "delete" and name not in here:
            verb = "enrol"
        task = {"verb": verb, "name": name, "seed": seed * 10_000 + turn, "n": number, "request": f"{seed}-{turn}"}
        say(intent=task)
        receipt = act(storage, folder, task)
        say(ack=[] if receipt is None else [receipt.sequence, *receipt.numbers])
        here = here - {name} if verb == "delete" else here | {name} if verb in ("enrol", "replace") else here


def act(storage: SqliteStorage, folder: Path, task: dict):
    verb, name = task["verb"], task["name"]
    if verb == "compact":
        return storage.compact()
    if verb == "snapshot":
        return storage.snapshot(folder / "kept" / "snapshot.sqlite")
    if verb == "calibrate":
        return storage.keep_calibration(calibration(task["seed"]))
    if verb == "delete":
        return storage.delete(name, request=task["request"])
    return storage.enrol(name, vectors(task["seed"], task["n"]), request=task["request"], replace=verb == "replace")


class Expected:
    """What must be in the gallery: a plain dict, and a hash of it for every sequence number (for snapshots)."""

    def __init__(self) -> None:
        self.people: dict[str, dict[int, str]] = {}
        self.sequence = 0
        self.last_number = 0
        self.snapshot_at = -1
        self.calibrated: int | None = None  # seed of the one that is kept
        self.history = {0: state_hash({}, None)}

    def apply(self, task: dict, sequence: int, numbers: list[int]) -> None:
        if task["verb"] == "snapshot":
            self.snapshot_at = self.sequence
        if task["verb"] in ("compact", "snapshot"):
            return
        assert sequence == self.sequence + 1, f"sequence went from {self.sequence} to {sequence}"
        name = task["name"]
        if task["verb"] == "calibrate":
            assert not numbers
            self.calibrated = task["seed"]
        elif task["verb"] == "delete":
            assert set(numbers) == set(self.people.pop(name)), "a deletion named other templates"
        else:
            assert len(numbers) == task["n"] and min(numbers) > self.last_number, "a number was used twice"
            if task["verb"] == "replace":
                self.people.pop(name, None)
            self.people.setdefault(name, {}).update(zip(numbers, marks(task["seed"], task["n"]), strict=True))
            self.last_number = max(numbers)
        self.sequence = sequence
        self.history[sequence] = state_hash(self.people, self.calibrated)


def state_hash(people: dict[str, dict[int, str]], calibrated: int | None) -> str:
    lines = sorted(f"{name} {number} {mark}" for name, rows in people.items() for number, mark in rows.items())
    return hashlib.sha256("\n".join([*lines, str(calibrated)]).encode()).hexdigest()


def held(storage: SqliteStorage) -> dict[str, dict[int, str]]:
    people: dict[str, dict[int, str]] = {}
    for part in storage.scan():
        for number, name, row in zip(part.numbers.tolist(), part.identities, part.vectors, strict=True):
            people.setdefault(name, {})[number] = hashlib.sha256(row.tobytes()).hexdigest()[:24]
    return people


def calibrated(storage: SqliteStorage) -> int | None:
    """Seed of the calibration that is kept, whole or not at all."""
    standing = storage.calibration_status()
    if standing is None:
        return None
    found = standing.calibration
    assert found == calibration(found.people), "half a calibration, or of two"
    return found.people


def kill_once(folder: Path, expected: Expected, seed: int, target: str, delay: float) -> tuple[dict | None, int]:
    """Run a child, kill it during ``target``; returns what was under way and how much was acknowledged."""
    rng = random.Random(seed)
    inward, outward = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(inward)
            child(folder, seed, sorted(expected.people), outward)
        except BaseException as error:
            os.write(2, f"child failed: {error!r}\n".encode())
        finally:
            os._exit(3)
    os.close(outward)
    acknowledged, pending, wait, buffer = 0, None, rng.randrange(6), b""
    deadline = time.monotonic() + 20
    alive = True
    while True:
        ready = select.select([inward], [], [], max(0.0, deadline - time.monotonic()))[0] if alive else [inward]
        if not ready:
            os.kill(pid, signal.SIGKILL)
            alive = False
            continue
        piece = os.read(inward, 65536)
        if not piece:
            break
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "intent" in said:
                pending = said["intent"]
                if alive and acknowledged >= wait and target in (pending["verb"], "anything"):
                    deadline = time.monotonic() + rng.random() ** 2 * delay
            else:
                expected.apply(pending, said["ack"][0] if said["ack"] else 0, said["ack"][1:])
                acknowledged, pending = acknowledged + 1, None
    os.close(inward)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "the child ended by itself: see its message above"
    return pending, acknowledged


def look(folder: Path, expected: Expected, pending: dict | None, rng: random.Random) -> bool:
    """Compare what is left with what must be there; returns whether the change under way was made."""
    (folder / "expected.json").write_text(json.dumps({"people": expected.people, "pending": pending}))
    storage = SqliteStorage.open(folder / "record.sqlite")  # the dead child's lock does not stand in the way
    try:
        assert storage.check() == [], storage.check()
        made = storage.sequence() == expected.sequence + 1
        if made:
            assert pending is not None and pending["verb"] not in ("compact", "snapshot"), "a change nobody asked for"
            settle(storage, folder, expected, pending, repeated=True)
        assert storage.sequence() == expected.sequence, f"sequence {storage.sequence()}, expected {expected.sequence}"
        assert held(storage) == expected.people, "acknowledged templates are lost, doubled or back again"
        assert calibrated(storage) == expected.calibrated, "an acknowledged calibration is lost"
        if pending is not None and not made and rng.random() < 0.5:
            settle(storage, folder, expected, pending, repeated=False)  # what a client would do
            assert held(storage) == expected.people
    finally:
        storage.close()
    kept = folder / "kept" / "snapshot.sqlite"
    assert kept.exists() or expected.snapshot_at < 0, "an acknowledged snapshot is gone"
    if kept.exists():
        copy = SqliteStorage.open(kept, write=False)
        at = copy.sequence()
        same = state_hash(held(copy), calibrated(copy)) == expected.history[at]
        assert at >= expected.snapshot_at and same, "a bad snapshot"
        copy.close()
    return made


def settle(storage: SqliteStorage, folder: Path, expected: Expected, pending: dict, *, repeated: bool) -> None:
    """Ask for the pending change again, under its request name."""
    receipt = act(storage, folder, pending)
    if receipt is not None:
        assert receipt.repeated == repeated, "a retried request was served twice, or not at all"
    expected.apply(pending, *((receipt.sequence, list(receipt.numbers)) if receipt else (0, [])))


def run(kills: int, each: int, seed: int, seconds: float, folder: Path, delay: float) -> dict:
    """Kill, look, go on until there were ``kills``, ``each`` of them in the middle of every verb; returns counts.

    How long to wait inside a verb is learned: a kill that came too late halves the wait for its verb, one that hit
    draws it out again. What a machine is busy with besides decides how often a kill misses, not what is covered.
    """
    SqliteStorage.create(folder / "record.sqlite", Binding(DIM)).close()
    expected, rng, started = Expected(), random.Random(seed), time.monotonic()
    facts: dict = {"kills": 0, "seed": seed, "acknowledged": 0, "under way and made": 0, "killed during": {}}
    waits, hits = dict.fromkeys(VERBS, delay), Counter()
    while time.monotonic() - started < seconds:
        missing = [verb for verb in VERBS[:-1] if hits[verb] < each]
        if facts["kills"] >= kills and not missing:
            break
        turns = VERBS if facts["kills"] < kills else missing
        target = turns[facts["kills"] % len(turns)]
        pending, acknowledged = kill_once(folder, expected, seed * 100_003 + facts["kills"], target, waits[target])
        facts["kills"] += 1
        facts["acknowledged"] += acknowledged
        during = pending["verb"] if pending else "between"
        hits[during] += 1
        waits[target] = min(delay, waits[target] * 1.5) if target in (during, "anything") else waits[target] / 2
        facts["killed during"] = dict(hits)
        try:
            facts["under way and made"] += look(folder, expected, pending, rng)
        except BaseException:
            sys.stderr.write(f"after {facts['kills']} kills, seed {seed}; the gallery stays in {folder}\n")
            raise
    facts["seconds"] = round(time.monotonic() - started, 1)
    return facts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=0, help="go on until so many hit every verb in its middle")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--delay", type=float, default=0.03, help="longest time between a verb's begin and the kill")
    parser.add_argument("--hold", type=Path)
    given = parser.parse_args()
    assert "torch" not in sys.modules
    if given.hold:
        storage = SqliteStorage.open(given.hold / "record.sqlite")
        print(os.getpid(), flush=True)
        time.sleep(600)
        storage.close()
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mettle-killed-", dir=given.folder))
    facts = run(given.kills, given.each, given.seed, given.seconds, folder, given.delay)
    shutil.rmtree(folder)
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
