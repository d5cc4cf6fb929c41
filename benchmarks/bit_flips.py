"""What a flipped bit does to a closed gallery: nothing, a refusal, or a wrong answer, of which there must be none.

    python benchmarks/bit_flips.py --flips 20000 --seed 1       some minutes on two cores
    python benchmarks/bit_flips.py --flips 20000 --model RUN    with the copy of a run's model beside the templates

A gallery is made with people, deletions, named requests, thresholds, a calibration and an index on disk, and closed.
Then, again and again, one bit of one of its files is flipped, half of the time in a file chosen by its size and half in
one chosen evenly; the gallery is opened, everything is asked that can be asked, and the answers are compared with those
before. Each flip counts as one of:

    same     every answer is what it was (the bit means nothing, or what it damaged was built again)
    refused  the gallery, or a question, was refused by an error of mettle's
    crash    any other exception
    wrong    an answer differs, and nothing says so

The last line is the counts as JSON; exit status 1 if anything was wrong or crashed.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mettle.errors import GalleryError, MettleError
from mettle.gallery import Gallery

DIM, PEOPLE = 16, 40


def units(seed, n, dim):
    rows = np.random.default_rng(seed).normal(size=(n, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make_gallery(folder, model=None):
    """A gallery with something in every table, closed; returns the length of its embeddings."""
    owner = {"dim": DIM} if model is None else {"model": model}
    with Gallery.open(folder, thresholds={0.01: 0.9, 0.2: 0.42}, **owner) as gallery:
        dim = gallery.binding.dim
        for i in range(PEOPLE):
            gallery.enrol(f"person-{i:02}", units(i, 2, dim), request=f"request {i}")
        for i in range(0, PEOPLE, 10):
            gallery.delete(f"person-{i:02}", request=f"delete {i}")
        gallery.calibrate(0.1)
        gallery.enrol("person-late", units(999, 1, dim), request="late")
        gallery.enrol("person-07", units(998, 1, dim), replace=True)
        gallery.identify(units(0, 1, dim)[0])
    return dim


def ask_everything(folder, dim):
    """What a gallery says: every person verified, known and unknown probes identified, thresholds, lists, receipts."""
    names = [f"person-{i:02}" for i in range(PEOPLE)] + ["person-late", "nobody"]
    answers = {}

    def ask(what, question):
        try:
            answers[what] = repr(question())
        except MettleError as error:
            answers[what] = error.with_traceback(None)

    probes = np.concatenate([units(i, 1, dim) for i in range(PEOPLE)] + [units(10_000, 40, dim)])
    with Gallery.open(folder, read_only=True, create=False) as gallery:
        ask("ids", lambda: list(gallery.ids()))
        ask("identify", lambda: [asdict(found) for found in gallery.identify_many(probes, k=3)])
        ask("at a rate", lambda: [asdict(found) for found in gallery.identify_many(probes[:5], k=1, far=0.2)])
        for i, name in enumerate(names):
            ask(f"verify {name}", lambda name=name, i=i: asdict(gallery.verify(name, probes[i % len(probes)])))
        ask("info", lambda: describe(gallery))
        ask("digest", lambda: gallery._storage.digest())
    with Gallery.open(folder) as gallery:
        ask("repeated", lambda: gallery.enrol("person-03", units(3, 2, dim), request="request 3"))
        ask("deleted", lambda: gallery.delete("person-10", request="delete 10"))
        ask("unknown", lambda: gallery.delete("nobody"))
    return answers


def describe(gallery):
    """What a gallery says of itself, but for its index, which may have been built again."""
    for note in gallery.notes:
        if "calibration" in note and "damaged" in note:
            raise GalleryError(note)
    return asdict(gallery.info()) | {"where": "", "bytes": 0, "index": {}}


def compare(wanted, got):
    """How the answers of a damaged gallery stand to those of the sound one."""
    refused = False
    for what, before in wanted.items():
        now = got.get(what)
        if repr(now) == repr(before) or (isinstance(now, LookupError) and isinstance(before, LookupError)):
            continue
        if isinstance(now, MettleError) and not isinstance(now, LookupError | ValueError):
            refused = True  # an error that speaks of the gallery, not of the question
            continue
        return "wrong", what
    return ("refused", "") if refused else ("same", "")


def flip_bits(job):
    """Flip bits one by one; returns counts, and where anything was wrong."""
    source, seed, flips, dim = job
    rng, counts, troubles = random.Random(seed), Counter(), []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mettle-flips-", dir=memory) as place:
        wanted = ask_everything(copied(source, Path(place) / "sound"), dim)
        files = sorted(path.relative_to(source) for path in Path(source).rglob("*") if path.is_file())
        files = [name for name in files if (source / name).stat().st_size]
        sizes = [(source / name).stat().st_size for name in files]
        for _ in range(flips):
            name = rng.choices(files, sizes if rng.random() < 0.5 else None)[0]
            folder = copied(source, Path(place) / "damaged")
            content = bytearray((folder / name).read_bytes())
            at = rng.randrange(8 * len(content))
            content[at // 8] ^= 1 << at % 8
            (folder / name).write_bytes(content)
            try:
                kind, what = compare(wanted, ask_everything(folder, dim))
            except MettleError:
                kind, what = "refused", ""
            except Exception as error:
                kind, what = "crash", repr(error)
            counts[kind] += 1
            counts[f"{name.parts[0]}: {kind}"] += 1
            if kind in ("wrong", "crash"):
                troubles.append(f"{kind}: bit {at} of {name}: {what}")
    return counts, troubles


def copied(source, to):
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(source, to))


def run(flips, seed, processes, model=None):
    """Flip so many bits in so many processes; returns counts and troubles."""
    counts, troubles = Counter(), []
    with tempfile.TemporaryDirectory(prefix="mettle-flips-") as place:
        source = Path(place) / "gallery"
        dim = make_gallery(source, model)
        parts = 8 * processes
        jobs = [(source, seed * 1000 + i, flips // parts + (i < flips % parts), dim) for i in range(parts)]
        if processes == 1:
            results = map(flip_bits, jobs)
        else:
            pool = ProcessPoolExecutor(processes)
            results = pool.map(flip_bits, jobs)
        for some, wrong in results:
            counts += some
            troubles += wrong
    return counts, troubles


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a run, so that the copy of its model is flipped too")
    given = parser.parse_args()
    counts, troubles = run(given.flips, given.seed, given.processes, given.model)
    for line in troubles:
        print(line)
    kinds = ("same", "refused", "crash", "wrong")
    by_file = {name: count for name, count in sorted(counts.items()) if name not in kinds}
    print(json.dumps({"flips": given.flips, "seed": given.seed} | {kind: counts[kind] for kind in kinds} | by_file))
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
