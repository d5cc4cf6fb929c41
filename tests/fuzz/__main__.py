"""`make fuzz`: change files of every kind and read them, and print what came of it.

python -m tests.fuzz --runs 20000 --seed 1 [--only NPZ] [--keep FOLDER]
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.fuzz.engine import fuzz, summarize
from tests.fuzz.readers import build_targets
from tests.small_runs import small_run


def main() -> int:
    """Fuzz all readers; exit status 1 where there is a finding."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--runs", type=int, default=2000, help="files for each reader")
    words.add_argument("--seed", type=int, default=int(time.time()))
    words.add_argument("--only", default="", help="readers whose name holds this")
    words.add_argument("--keep", type=Path, help="folder for the files that were findings")
    given = words.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "runs").mkdir()
        targets = build_targets(folder, small_run(folder / "runs", steps=3).run.folder)
        counts = {}
        for name, target in targets.items():
            if given.only in name:
                counts[name] = fuzz(name, target, folder, given.runs, given.seed)
                for k, found in enumerate(counts[name].findings.values()):
                    print(found, flush=True)
                    if given.keep:
                        given.keep.mkdir(parents=True, exist_ok=True)
                        (given.keep / f"{name.replace(' ', '-').replace(':', '')}-{k}{target.suffix}").write_bytes(
                            found.content
                        )
    print(summarize(counts))
    print(f"seed {given.seed}")
    return any(one.findings for one in counts.values())


if __name__ == "__main__":
    sys.exit(main())
