"""CPU time of a gallery's questions to its storage, of this tree and of another one in turns.

    python benchmarks/gallery_storage.py                                   this tree
    git worktree add --detach /tmp/before COMMIT
    python benchmarks/gallery_storage.py --against /tmp/before/src         both, in turns

Each round is a fresh process with one thread for each tree; which is first changes from round to round. A time is the
CPU time of the process, the least of five tries in a round, and what is printed is the median over the rounds. Names
that were checked are kept in memory until the storage changes, so the first try of a question takes longer than the
others: "names not kept" are tries that all are the first.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import numpy as np

PEOPLE, EACH, DIM, TRIES = 2000, 2, 128, 5
OWN = Path(__file__).parents[1] / "src"


def cpu_ms(work):
    """CPU milliseconds of this process, all threads."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def measure_here():
    """The least CPU time of every question, in ms, of the mettle that is imported."""
    from mettle import Gallery

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((PEOPLE, EACH, DIM)).astype(np.float32)
    probes = rows[:200, 0] + 0.3 * rng.standard_normal((200, DIM)).astype(np.float32)
    people = [(f"person {i:05}", templates) for i, templates in enumerate(rows)]
    folder = Path(tempfile.mkdtemp(prefix="gallery-storage-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    numbered = count()
    try:
        with Gallery.open(folder / "g", dim=DIM, thresholds={0.01: 0.3}) as gallery:
            gallery.enrol_many(people)
            gallery.reindex()

        def enrol_all():
            with Gallery.open(folder / f"new {next(numbered)}", dim=DIM) as new:
                new.enrol_many(people)

        def enrol_singly():
            with Gallery.open(folder / f"new {next(numbered)}", dim=DIM) as new:
                for name, templates in people[:100]:
                    new.enrol(name, templates)

        def open_and_check():
            with Gallery.open(folder / "g") as again:
                assert again.check() == []

        with Gallery.open(folder / "g") as gallery:
            storage = vars(gallery).get("_storage") or vars(gallery)["_record"]

            def anew(question):
                """The same where nothing is kept in memory of what was read before."""
                storage._checked = None  # names, where this mettle keeps any
                return question()

            work = {
                "identify, 200 times": lambda: [gallery.identify(probe) for probe in probes],
                "identify_many, 200 probes": lambda: gallery.identify_many(probes),
                "verify, 200 times": lambda: [gallery.verify(people[i][0], probes[i]) for i in range(200)],
                "scan": lambda: list(storage.scan()),
                "ids": lambda: list(gallery.ids()),
                "identify_many, names not kept": lambda: anew(lambda: gallery.identify_many(probes)),
                "scan, names not kept": lambda: anew(lambda: list(storage.scan())),
                "ids, names not kept": lambda: anew(lambda: list(gallery.ids())),
            }
            found = {name: min(cpu_ms(asked) for _ in range(TRIES)) for name, asked in work.items()}
        later = {"enrol_many": enrol_all, "enrol, 100 times": enrol_singly, "open and check": open_and_check}
        return found | {name: min(cpu_ms(asked) for _ in range(3)) for name, asked in later.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_tree(source):
    """The same by a fresh process that imports mettle from a folder."""
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    called = [sys.executable, __file__, "--here"]
    run = subprocess.run(
        called, env=os.environ | alone | {"PYTHONPATH": str(source)}, check=True, capture_output=True, text=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="src folder of another tree")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measure_here()))
        return
    trees = [OWN] if asked.against is None else [asked.against.resolve(), OWN]
    times = {tree: [] for tree in trees}
    for turn in range(asked.rounds):
        for tree in trees if turn % 2 else reversed(trees):
            times[tree].append(measure_tree(tree))
    titles = ["this tree"] if asked.against is None else ["before", "this tree", "ratio"]
    print(f"| CPU ms, {PEOPLE:,} people x {EACH} x {DIM} | " + " | ".join(titles) + " |")
    print("|---" * (1 + len(titles)) + "|")
    for name in times[OWN][0]:
        medians = [statistics.median(row[name] for row in times[tree]) for tree in trees]
        last = [] if asked.against is None else [f"{medians[1] / medians[0]:.2f}"]
        print(f"| {name} | " + " | ".join([*(f"{value:.1f}" for value in medians), *last]) + " |")


if __name__ == "__main__":
    main()
