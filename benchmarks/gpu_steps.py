"""Times of training steps of a loss on one GPU: a quick look, for comparing two checkouts on one machine.

python benchmarks/gpu_steps.py after.json
PYTHONPATH=OTHER_CHECKOUT/src python benchmarks/gpu_steps.py before.json

Forward and backward from raw embeddings, the best of three rounds of steps that follow each other without waiting.
Small batches are bound by the host, so their times wander from machine to machine and from minute to minute.
`benchmarks/gpu.py` is the complete table, with rivals and accuracy.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mettle.difficulty import AdaptiveThreshold, Importance, Relative
from mettle.losses import ArcFace, DASupCon, InfoNCE, SupCon, Triplet

PRECISIONS = {"half": torch.float16, "float32": torch.float32}


def best_time(step: Callable[[], None], steps: int, rounds: int = 3) -> float:
    """Milliseconds of one step."""
    for _ in range(5):
        step()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start) / steps)
    return min(times)


def time_loss(loss: Callable, n: int, d: int, dtype: torch.dtype, labels: Tensor | None = None, biased: bool = False):
    """One row of the table."""
    z = torch.randn(n, d, device="cuda", dtype=dtype, requires_grad=True)
    y = torch.arange(n // 4, device="cuda").repeat(4) if labels is None else labels
    parameters = list(loss.parameters()) if isinstance(loss, torch.nn.Module) else []
    options = {"biased": torch.randn(n, d, device="cuda", dtype=dtype)} if biased else {}

    def step() -> None:
        z.grad = None
        for parameter in parameters:
            parameter.grad = None
        loss(z, y, **options).backward()

    return round(best_time(step, 200 if n <= 4096 and labels is None else 20), 4)


def main() -> None:
    torch.manual_seed(0)
    rows: dict[str, float] = {}

    def add(name: str, *arguments, **options) -> None:
        rows[name] = time_loss(*arguments, **options)
        print(f"{name:40} {rows[name]:9.4f} ms", flush=True)

    for precision, dtype in PRECISIONS.items():
        for n in (256, 1024, 4096):
            add(f"SupCon, n = {n}, {precision}", SupCon(), n, 128, dtype)
        add(
            f"SupCon, adaptive thresholds, n = 4096, {precision}",
            SupCon(difficulty=AdaptiveThreshold()),
            4096,
            128,
            dtype,
        )
        add(f"SupCon, n = 32k, {precision}", SupCon(), 32768, 128, dtype)
        add(f"DA-SupCon, n = 32k, {precision}", DASupCon(), 32768, 128, dtype)
        add(f"debiased, n = 32k, {precision}", InfoNCE(0.5, 0.1), 32768, 128, dtype)
        add(f"hard negatives, n = 32k, {precision}", InfoNCE(0.5, 0.1, Importance(1.0)), 32768, 128, dtype)
        add(f"relative, n = 32k, {precision}", InfoNCE(0.5, 0.1, Relative()), 32768, 128, dtype, biased=True)
        add(f"batch-hard, n = 32k, {precision}", Triplet(mining="hardest"), 32768, 128, dtype)
    for classes, d in ((100_000, 512), (1_000_000, 128)):
        labels = torch.randint(classes, (1024,), device="cuda")
        add(f"ArcFace, {classes:,} classes, half", ArcFace(classes, d).cuda(), 1024, d, torch.float16, labels)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
