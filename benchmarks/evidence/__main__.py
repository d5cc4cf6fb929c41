"""``python -m benchmarks.evidence NAME --data FOLDER --out FILE``, and ``write FILE ...``; see the package."""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.evidence import cifar, cub200, market, spurious, tabular
from benchmarks.evidence.worker_pool import Limits, Study, print_now, run_study

STUDIES: dict[str, Callable[[bool], Study]] = {  # all of it, or (quick) a minute on a CPU that shows that it runs
    "market": market.market_study,
    "birds": cub200.cub200_study,
    "cifar": cifar.cifar_study,
    "tiny": cifar.tiny_study,
    "coloured": spurious.colored_digits_study,
    "waterbirds": spurious.waterbirds_study,
    "tables": tabular.tabular_study,
}


def main() -> None:
    """One study into a JSON file, or pages from such files."""
    began = time.perf_counter()
    if sys.argv[1:2] == ["write"]:
        from benchmarks.evidence.report import write_pages

        return write_pages([Path(name) for name in sys.argv[2:]])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("name", choices=[*STUDIES])
    parser.add_argument("--data", type=Path, required=True, help="folder with the sets, one folder each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, default=240, help="of training, all runs together")
    parser.add_argument("--deadline", type=float, default=420, help="seconds from the start, after which nothing runs")
    parser.add_argument("--workers", type=int, help="processes that share the device; 0 for none but this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, help="where decoded pictures lie for the workers")
    parser.add_argument("--quick", action="store_true", help="a small part, a few steps: does it run?")
    options = parser.parse_args()
    study = STUDIES[options.name](options.quick)
    if options.workers is not None:
        study = replace(study, workers=options.workers)  # type: ignore[type-var]
    limits = Limits(began, options.seconds, options.deadline)
    limits.record["command"] = f"python -m benchmarks.evidence {shlex.join(sys.argv[1:])}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        study.prepare(options.data, Path(folder), options.quick)
        print_now(f"{study.name}: data ready after {time.perf_counter() - began:.0f} s")
        seeds = options.seeds or list(range(study.seeds))
        run_study(study, seeds, Path(folder), options.device, options.quick, limits, options.out)
    failed, left = len(limits.record["errors"]), len(limits.record["not_run"])
    print_now(f"{study.name}: {len(limits.record['jobs'])} runs in {limits.record['seconds']:.0f} s, {failed} errors, "
        f"{left} not run")  # fmt: skip


if __name__ == "__main__":
    main()
