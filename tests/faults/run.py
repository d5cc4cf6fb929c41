"""Every file call of a gallery fails once, is the last one before a kill, or is lost when the power fails.

    make test-faults                                       all of it, and its counts as JSON; exit status 1 on a loss
    python tests/faults/run.py --every 9                   every ninth call, as the quick tests do

A process makes a gallery, enrols, deletes, calibrates, erases, indexes, closes, and writes an audit log; the preloaded
library `shim.c` stands between it and the system. Each run is one of these:

    kill     the process is killed before its n-th call that changes a file
    error    the n-th such call fails with EIO or ENOSPC, or that one and all that follow
    replay   of one run that is written down: the files after each call, as a crash leaves them (all that was written,
             only what was synchronized, that with the names that were synchronized too, the last write torn in half)

Afterwards the gallery is opened, and what is in it is compared with what the process was told: what was acknowledged
must be there, what was refused must not, and what was called unsure may be either and is settled by asking again.
"""

import argparse
import ctypes
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable, MettleError, OutcomeUnknown, UnknownIdentity
from mettle.gallery import Gallery
from mettle.service.audit_log import AuditLog, verify_audit_log

HERE = Path(__file__).parent
DIM = 8
COUNT, KILL, FAIL, STICK = range(4)


def units(seed, n):
    rows = np.random.default_rng(seed).normal(size=(n, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def build_shim(folder):
    """Compile the library; where there is no compiler that is an error that says so."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("the fault shim is C: install a compiler that is called cc (apt-get install gcc libc6-dev)")
    library = Path(folder) / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


STEPS = ["enrol a", "enrol b", "enrol many", "delete a", "replace b", "calibrate", "compact", "enrol c", "delete c"]


def do_step(gallery, step):
    """One change under a name of its own, so that it may be asked for again."""
    verb, whom = (*step.split(), "")[:2]
    if step == "enrol many":
        return gallery.enrol_many((f"m{i}", units(100 + i, 1)) for i in range(9))
    if verb == "enrol":
        return gallery.enrol(whom, units(ord(whom), 2), request=step)
    if verb == "replace":
        return gallery.enrol(whom, units(50, 3), request=step, replace=True)
    if verb == "delete":
        return gallery.delete(whom, request=step)
    if step == "compact":
        return gallery.compact()
    if all(entry["threshold"] is None for entry in gallery.calibrate(0.1).values()):
        raise GalleryError("too few are enrolled, so nothing was kept")
    return None


def expect(done):
    """Who is enrolled with how many templates, and whether a calibration is kept, once these steps were made."""
    people, calibrated = {}, False
    for step in done:
        verb, whom = (*step.split(), "")[:2]
        if step == "enrol many":
            people |= {f"m{i}": 1 for i in range(9)}
        elif verb in ("enrol", "replace"):
            people[whom] = 2 if verb == "enrol" else 3
        elif verb == "delete":
            people.pop(whom, None)
        calibrated = calibrated or step == "calibrate"
    return people, calibrated


def work(root, say):
    """All steps, each asked for again where it failed; ``say`` is told how each ended."""
    gallery = log = None
    try:
        say("begin", "make")
        gallery = Gallery.open(root / "g", dim=DIM)
        say("done", "make")
        log = AuditLog(root / "audit.jsonl")
        for step in STEPS:
            for _ in range(3):
                try:
                    say("begin", "line")
                    log.append("tests", step, "begun")
                    say("done", "line")
                except MettleError:
                    say("failed", "line")
                try:
                    say("begin", step)
                    do_step(gallery, step)
                    say("done", step)
                    break
                except OutcomeUnknown:
                    say("unsure", step)
                except UnknownIdentity:
                    break  # whoever was to be deleted was never enrolled
                except MettleError:
                    say("failed", step)
    except MettleError:
        pass
    finally:
        for opened in (gallery, log):
            try:
                if opened is not None:
                    opened.close()
            except (MettleError, OSError):
                pass


@dataclass
class Told:
    """What the process was told of its steps."""

    made: bool = False
    lines: int = 0
    pending_line: bool = False
    done: list = field(default_factory=list)
    unsure: list = field(default_factory=list)

    def hear(self, how, step):
        """Take in one thing that was said."""
        if step == "make":
            self.made = self.made or how == "done"
        elif step == "line":
            self.lines += how == "done"
            self.pending_line = how != "done"
        elif how in ("begin", "unsure"):
            if step not in self.unsure:
                self.unsure.append(step)
        else:
            self.unsure = [other for other in self.unsure if other != step]
            if how == "done":
                self.done.append(step)


def look(root, told):
    """Compare what is there with what was told; returns what is wrong, in words, or None."""
    if not (root / "g" / "record.sqlite").exists():
        return "an acknowledged gallery is gone" if told.made else None
    with Gallery.open(root / "g") as gallery:
        if problems := gallery.check():
            return f"damaged: {problems[:2]}"
        for case in _cases(told.done, told.unsure):
            if _holds(gallery, *expect(case)):
                break
        else:
            return f"done {told.done}, unsure {told.unsure}, but there are {sorted(gallery.ids())}"
        for step in told.unsure:
            with suppress(UnknownIdentity):
                do_step(gallery, step)  # settles it
        if told.unsure and not _holds(gallery, *expect(sorted({*told.done, *told.unsure}, key=STEPS.index))):
            return f"asked again for {told.unsure}, but there are {sorted(gallery.ids())}"
    if told.lines:
        AuditLog(root / "audit.jsonl").close()
        found = verify_audit_log(root / "audit.jsonl")
        if found.problems or found.lines < told.lines:
            return f"audit log: {found.problems}, {found.lines} lines of {told.lines}"
    return None


def _cases(done, unsure):
    if not unsure:
        return [done]
    rest = _cases(done, unsure[1:])
    return rest + [sorted({*case, unsure[0]}, key=STEPS.index) for case in rest]


def _holds(gallery, people, calibrated):
    found = {name: len(gallery._storage.templates_of(name).numbers) for name in gallery.ids()}
    return found == people and (gallery._storage.calibration_status() is not None) == calibrated


def run_armed(place, mode, n, error, trace=-1):
    """One run in a forked process under the shim; returns the folder, what was told, and how many calls it made."""
    root = Path(tempfile.mkdtemp(dir=place))
    inward, outward = os.pipe()
    pid = os.fork()
    if pid == 0:
        shim = ctypes.CDLL(None)

        def say(how, step):
            os.write(outward, f"{how}|{step}\n".encode())
            if trace >= 0:
                shim.note(f"{how}|{step}".encode())

        status = 9
        try:
            shim.arm(str(root).encode(), mode, ctypes.c_long(n), error, trace)
            work(root, say)
            os.write(outward, f"calls|{shim.disarm()}\n".encode())
            status = 0
        except BaseException as problem:
            os.write(outward, f"crash|{problem!r}\n".encode())
        finally:
            os._exit(status)
    os.close(outward)
    with os.fdopen(inward, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    status, told, calls = os.waitpid(pid, 0)[1], Told(), 0
    for line in lines:
        how, step = line.split("|", 1)
        if how == "calls":
            calls = int(step)
        elif how == "crash":
            return root, told, step
        else:
            told.hear(how, step)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return root, told, f"signal {os.WTERMSIG(status)}"
    return root, told, calls


def judge(root, told, calls):
    """What is wrong after a run, None if nothing is; the folder is removed."""
    try:
        return calls if isinstance(calls, str) else look(root, told)
    except GalleryUnavailable:
        raise
    except (GalleryError, MettleError) as problem:
        return f"cannot be opened: {problem}"
    finally:
        shutil.rmtree(root, ignore_errors=True)


def try_faults(place, every, counts, troubles):
    """Kills and errors at every so-many-th call."""
    root, told, total = run_armed(place, COUNT, 0, 0)
    if problem := judge(root, told, total):
        raise SystemExit(f"without a fault: {problem}")
    counts["calls of one run"] = total
    kinds = [("kill", KILL, 0), ("EIO", FAIL, errno.EIO), ("ENOSPC", FAIL, errno.ENOSPC)]
    kinds += [("EIO from then on", STICK, errno.EIO), ("ENOSPC from then on", STICK, errno.ENOSPC)]
    for offset, (name, mode, error) in enumerate(kinds):
        for n in range(1 + offset % every, total + 1, every):
            root, told, calls = run_armed(place, mode, n, error)
            problem = judge(root, told, calls)
            counts[name] += 1
            if problem:
                troubles.append(f"{name} at call {n}: {problem}")


def read_trace(path):
    """The calls that were written down: (kind, name, other name, offset, data)."""
    content, at, found = Path(path).read_bytes(), 0, []
    while at < len(content):
        kind, first, second, offset, length = struct.unpack_from("<ciiqq", content, at)
        at += 25
        names = content[at : at + first].decode(), content[at + first : at + first + second].decode()
        at += first + second
        length = length if kind == b"W" else 0
        found.append((kind.decode(), *names, offset, content[at : at + length]))
        at += length
    return found


class Disk:
    """Files as calls leave them: what was written, what of it was synchronized, and under which names."""

    def __init__(self):
        self.names, self.durable_names = {}, {}  # path to number of a file, None for a folder
        self.content, self.synced = {}, {}

    def apply(self, kind, name, other, offset, data):
        """One call."""
        if kind == "C":
            number = len(self.content)
            self.names[name], self.content[number], self.synced[number] = number, b"", b""
        elif kind == "M":
            self.names[name] = None
        elif kind == "W":
            self.content[self.names[name]] = self.written(name, offset, data)
        elif kind == "T":
            number = self.names[name]
            self.content[number] = self.content[number][:offset].ljust(offset, b"\0")
        elif kind == "S" and self.names.get(name) is not None:
            self.synced[self.names[name]] = self.content[self.names[name]]
        elif kind == "S":  # a folder: the names in it
            for path in [*self.durable_names, *self.names]:
                if os.path.dirname(path) == name:
                    self.durable_names.pop(path, None)
                    if path in self.names:
                        self.durable_names[path] = self.names[path]
        elif kind == "R":
            moved = {
                path: self.names.pop(path) for path in list(self.names) if path == name or path.startswith(name + "/")
            }
            self.names |= {other + path[len(name) :]: number for path, number in moved.items()}
        elif kind == "U":
            self.names.pop(name, None)

    def written(self, name, offset, data):
        """The content of a file after a write."""
        old = self.content[self.names[name]].ljust(offset, b"\0")
        return old[:offset] + data + old[offset + len(data) :]

    def states(self, torn=None):
        """(name, files) of each way in which a crash may leave it."""
        yield "as written", {path: self._of(self.content, n) for path, n in self.names.items()}
        yield "as synchronized", {path: self._of(self.synced, n) for path, n in self.names.items()}
        yield "with synchronized names", {path: self._of(self.synced, n) for path, n in self.durable_names.items()}
        if torn is not None:
            name, content = torn
            yield "torn", {path: self._of(self.content, n) for path, n in self.names.items()} | {name: content}

    @staticmethod
    def _of(table, number):
        return None if number is None else table[number]


def replay_crashes(place, every, counts, troubles):
    """The files after each call of one run, as crashes leave them."""
    trace = Path(place) / "trace"
    handle = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    root, told, calls = run_armed(place, COUNT, 0, 0, handle)
    os.close(handle)
    if problem := judge(root, told, calls):
        raise SystemExit(f"without a fault: {problem}")
    disk, told, seen = Disk(), Told(), set()
    for at, (kind, name, other, offset, data) in enumerate(read_trace(trace)):
        if kind == "N":
            told.hear(*name.split("|", 1))
            continue
        torn = None
        if kind == "W" and len(data) > 1:
            torn = (name, disk.written(name, offset, data[: len(data) // 2]))
        before = list(disk.states(torn))[-1:] if torn is not None else []
        disk.apply(kind, name, other, offset, data)
        for what, files in [*disk.states(), *before]:
            state = hash((frozenset(files.items()), tuple(told.done), tuple(told.unsure), told.lines))
            if state in seen or (len(seen) + at) % every:
                seen.add(state)
                continue
            seen.add(state)
            copy = Path(tempfile.mkdtemp(dir=place))
            for path, content in sorted(files.items()):
                target = copy / os.path.relpath(path, root)
                if content is None:
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                    target.chmod(0o600)
            problem = judge(copy, told, 0)
            counts[f"crash states {what}"] += 1
            if problem:
                troubles.append(f"crash after call {at} ({kind} {os.path.relpath(name, root)}), {what}: {problem}")


def run(every):
    """Everything, or every so-many-th of it; in a process that has the shim preloaded. Returns counts and troubles."""
    counts, troubles = Counter(), []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mettle-faults-", dir=memory) as place:
        try_faults(place, every, counts, troubles)
        replay_crashes(place, every, counts, troubles)
    return counts, troubles


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="only every so-many-th call")
    given = parser.parse_args()
    if "shim.so" not in os.environ.get("LD_PRELOAD", ""):
        with tempfile.TemporaryDirectory(prefix="mettle-shim-") as folder:
            preloaded = os.environ | {"LD_PRELOAD": str(build_shim(folder)), "OMP_NUM_THREADS": "1"}
            return subprocess.run([sys.executable, *sys.argv], env=preloaded, check=False).returncode
    counts, troubles = run(given.every)
    for line in troubles:
        print(line)
    print(json.dumps(dict(counts) | {"losses": len(troubles)}))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
