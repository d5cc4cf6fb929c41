"""Candidates for the table of tile sizes of the fused engine, compiled in parallel, then timed one by one.

python benchmarks/tiles.py OUT           the best of every precision and width: OUT/tiles.txt
"""

import multiprocessing
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from gpu import SUPCON, batch, form_of, spans
from mettle.pairs.kernels.config import Choice, Shape, choice
from mettle.pairs.kernels.function import Plan


def candidates(mode, d):
    """Ways of cutting worth a try: (pass, choice)."""
    given, ways = choice(mode, d), ((False, False), (True, False), (True, True))  # by descriptors, rows in registers
    deep = 64 if d > 256 or (mode == "split" and d > 128) else d
    sizes = ((128, 128, 4), (128, 128, 8), (128, 64, 4), (64, 128, 4), (128, 256, 8)) if mode == "half" else (
        (128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 64, 4), (64, 32, 4))  # fmt: skip
    forward = [
        Shape(m, n, deep, w, s, tma=t, half=given.forward.half, firm=f)
        for (m, n, w), s, (t, f) in product(sizes, (2, 3) if deep == d else (3, 4), ways if deep == d else ways[:2])
    ]
    forward += [replace(given.forward, half=not given.forward.half)]
    found = [("forward", replace(given, forward=shape)) for shape in forward]
    if d <= 256:
        sizes = ((64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8))
        found += [
            ("backward", Choice(given.forward, Shape(m, n, d, w, s, tma=t, firm=f), written=False))
            for (m, n, w), s, (t, f) in product(sizes, (1, 2) if d > 128 else (2, 3), ways)
        ]
    if d >= 256:
        found += [
            ("backward", Choice(given.forward, Shape(128, n, k, w, s, tma=t), written=True))
            for n, w, k, s, t in product((128, 256) if mode == "half" else (128,), (4, 8), (64,), (3, 4), (False, True))
        ]
    return found


def tried(job):
    """One candidate: milliseconds, or why not. With few rows it only compiles, in a process of its own."""
    mode, d, which, cut, n = job
    try:
        z, y = batch(n, d)
        plan = Plan(form_of(SUPCON, z), y, None, None, mode, cut)
        plan.forward(z.detach(), None)
        one = torch.ones((), device="cuda")

        def step():
            if which == "forward":
                return plan._sums("far", "plain", False, plan.left, plan.right)
            return plan.backward(None, one, z, None, True, False)

        step()
        torch.cuda.synchronize()
        return None if n <= 2048 else spans(step, 0.1, 5, wait=False)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def tune(out, workers=14, n=32768):
    """Compile all candidates in parallel, then time them one by one."""
    cases = list(product(("half", "split"), (128, 256, 512)))
    jobs = [(mode, d, *found) for mode, d in cases for found in candidates(mode, d)]
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
    for (mode, d), which in product(cases, ("forward", "backward")):
        mine = sorted((f for f in found if f[:3] == (mode, d, which)), key=lambda f: f[4])
        for f in mine[:5]:
            shape = f[3].forward if which == "forward" else f[3].backward
            rate = n * n * d * (2 if which == "forward" else 4) / f[4] / 1e9
            written = " written" if which == "backward" and f[3].written else ""
            lines.append(f"{mode} d={d} {which}: {f[4]:.3f} ms {rate:.0f} TF {shape}{written}")
            print(lines[-1], flush=True)
    (out / "tiles.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tune(out)
