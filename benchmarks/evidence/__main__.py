"""``python -m benchmarks.evidence NAME --data FOLDER --out FILE``, and ``write FILE ...``; see the package."""

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.evidence.worker_pool import Limits, run, say


def main() -> None:
    """One study into a JSON file, or pages from such files."""
    began = time.perf_counter()
    if sys.argv[1:2] == ["write"]:
        from benchmarks.evidence.report import write_pages

        return write_pages([Path(name) for name in sys.argv[2:]])
    from benchmarks.evidence.studies import STUDIES, study_of

    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("name", choices=[*STUDIES])
    parser.add_argument("--data", type=Path, required=True, help="folder with the sets, one folder each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, default=240, help="of training, all runs together")
    parser.add_argument("--deadline", type=float, default=420, help="seconds from the start, after which nothing runs")
    parser.add_argument("--workers", type=int, help="processes that share the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, help="where decoded pictures lie for the workers")
    parser.add_argument("--quick", action="store_true", help="a small part, a few steps: does it run?")
    options = parser.parse_args()
    study = study_of(options.name, options.quick)
    if options.workers:
        object.__setattr__(study, "workers", options.workers)
    limits = Limits(began, options.seconds, options.deadline)
    limits.record["command"] = f"python -m benchmarks.evidence {shlex.join(sys.argv[1:])}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        study.prepare(options.data, Path(folder), options.quick)
        say(f"{study.name}: data ready after {time.perf_counter() - began:.0f} s")
        seeds = options.seeds or list(range(study.seeds))
        run(study, seeds, Path(folder), options.device, options.quick, limits, options.out)
    failed, left = len(limits.record["errors"]), len(limits.record["not_run"])
    say(f"{study.name}: {len(limits.record['jobs'])} runs in {limits.record['seconds']:.0f} s, {failed} errors, "
        f"{left} not run")  # fmt: skip


if __name__ == "__main__":
    main()
