"""Candidates for the table of tile sizes of the fused engine, compiled in parallel, then timed one by one.

python benchmarks/tiles.py OUT           the best of every precision and width: OUT/tiles.txt
"""

import multiprocessing
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from gpu import SUPCON, batch, lower, spans
from mettle.pairs.kernels.config import KernelConfig, TileConfig, select_config
from mettle.pairs.kernels.function import PairLossCall


def candidates(precision, d):
    """Ways of cutting worth a try: (pass, config)."""
    given = select_config(precision, d)
    ways = ((False, False), (True, False), (True, True))  # by descriptors, rows in registers
    deep = 64 if d > 256 or (precision == "bf16x3" and d > 128) else d
    sizes = ((128, 128, 4), (128, 128, 8), (128, 64, 4), (64, 128, 4), (128, 256, 8)) if precision == "fp16" else (
        (128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 64, 4), (64, 32, 4))  # fmt: skip
    forward = [
        TileConfig(m, n, deep, w, s, use_tma=t, symmetric=given.forward.symmetric, rows_in_registers=f)
        for (m, n, w), s, (t, f) in product(sizes, (2, 3) if deep == d else (3, 4), ways if deep == d else ways[:2])
    ]
    forward += [replace(given.forward, symmetric=not given.forward.symmetric)]
    found = [("forward", replace(given, forward=shape)) for shape in forward]
    if d <= 256:
        sizes = ((64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8))
        found += [
            (
                "backward",
                KernelConfig(
                    given.forward, TileConfig(m, n, d, w, s, use_tma=t, rows_in_registers=f), scores_in_memory=False
                ),
            )
            for (m, n, w), s, (t, f) in product(sizes, (1, 2) if d > 128 else (2, 3), ways)
        ]
    if d >= 256:
        found += [
            ("backward", KernelConfig(given.forward, TileConfig(128, n, k, w, s, use_tma=t), scores_in_memory=True))
            for n, w, k, s, t in product(
                (128, 256) if precision == "fp16" else (128,), (4, 8), (64,), (3, 4), (False, True)
            )
        ]
    return found


def tried(job):
    """One candidate: milliseconds, or why not. With few rows it only compiles, in a process of its own."""
    precision, d, which, config, n = job
    try:
        z, y = batch(n, d)
        call = PairLossCall(lower(SUPCON, z), y, None, None, precision, config)
        call.forward(z.detach(), None)
        one = torch.ones((), device="cuda")

        def step():
            if which == "forward":
                return call.sum_negatives()
            return call.backward(None, one, z, None, (True, False, False))

        step()
        torch.cuda.synchronize()
        return None if n <= 2048 else spans(step, 0.1, 5, wait=False)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def tune(out, workers=14, n=32768):
    """Compile all candidates in parallel, then time them one by one."""
    cases = list(product(("fp16", "bf16x3"), (128, 256, 512)))
    jobs = [(precision, d, *found) for precision, d in cases for found in candidates(precision, d)]
    print(len(jobs), "candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        refused = pool.map(tried, [(*job, 1024) for job in jobs], chunksize=1)
    found, lines = [], []
    for job, why in zip(jobs, refused, strict=True):
        ms = why or tried((*job, n))
        if isinstance(ms, float):
            found.append((*job, ms))
        else:
            lines.append(f"refused {job}: {ms}")
    for (precision, d), which in product(cases, ("forward", "backward")):
        mine = sorted((f for f in found if f[:3] == (precision, d, which)), key=lambda f: f[4])
        for f in mine[:5]:
            shape = f[3].forward if which == "forward" else f[3].backward
            rate = n * n * d * (2 if which == "forward" else 4) / f[4] / 1e9
            memory = " scores in memory" if which == "backward" and f[3].scores_in_memory else ""
            lines.append(f"{precision} d={d} {which}: {f[4]:.3f} ms {rate:.0f} TF {shape}{memory}")
            print(lines[-1], flush=True)
    (out / "tiles.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tune(out)
