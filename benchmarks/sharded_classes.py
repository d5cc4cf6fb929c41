"""Class vectors over ranks: memory and time of a training step on CPU ranks, beside what is expected on paper.

    python benchmarks/sharded_classes.py out.json                         4 ranks, up to 1,000,000 classes x 128
    python benchmarks/sharded_classes.py --classes 20000 --steps 1        a try in seconds

Each rank trains `shard_classes(ArcFace, C, d)` on its part of a batch of B embeddings with AdamW, with all classes and
with a tenth of them (``sample = 0.1``). Memory of a rank is what its process holds more than before the loss was built
(``VmRSS`` after the steps, ``VmHWM`` at most). On paper, with n = C / R:

    vectors                n · d · 4 bytes
    gradient               n · d · 4
    AdamW                  n · d · 8                   and as much again while it steps, unless it is ``fused``
    sampled copies         2 · sample · n · d · 4      the vectors of a step and their gradient
    embeddings             3 · B · d · 4               of all ranks, their gradient, and a copy
    chunk                  2 · 2²¹                     similarities held at once, and their exponentials
    sent by a rank         2 · B · d · 4 + 2 · B · 4   embeddings and gradient back; row sums

Compute of a rank: 8 · B · n · d floating point operations a step, of which the sampled step has its share.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import status
from torch import distributed as dist
from torch import multiprocessing

from mettle.losses import ArcFace, shard_classes


def work(rank: int, asked: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=asked.ranks)
    measure(rank, 4096, 1.0, asked)  # what a first step loads is not counted
    found = [measure(rank, classes, sample, asked) for classes in asked.classes for sample in (1.0, 0.1)]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(rank: int, classes: int, sample: float, asked: argparse.Namespace) -> dict[str, Any]:
    """Steps of one size: seconds a step of the slowest rank, and megabytes of the largest one.

    Beside them the processor time of a step, which says more than the clock where ranks share cores.
    """
    own = asked.batch // asked.ranks
    before = status("VmRSS")
    torch.manual_seed(0)
    loss = shard_classes(ArcFace, classes, asked.dim, sample=sample)
    vectors = status("VmRSS")
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    times, worked = [], []
    for _ in range(asked.steps):
        z = torch.randn(own, asked.dim, generator=generator, requires_grad=True)
        y = torch.randint(classes, (own,), generator=generator)
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        loss(z, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - began)
        worked.append(time.process_time() - busy)
    numbers = [min(times), min(worked), vectors - before, status("VmRSS") - before, status("VmHWM") - before]
    most = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    seconds, processor, *kilobytes = most.tolist()
    rows = ("vectors_mb", "after_mb", "peak_mb")
    return {
        "classes": classes,
        "sample": sample,
        "seconds": round(seconds, 3),
        "processor_seconds": round(processor, 3),
        **{name: round(kb / 1024, 1) for name, kb in zip(rows, kilobytes, strict=True)},
        **on_paper(classes, asked.ranks, asked.dim, asked.batch, sample),
    }


def on_paper(classes: int, ranks: int, dim: int, batch: int, sample: float = 1.0) -> dict[str, float]:
    """Megabytes of a rank, and operations, as the terms above say."""
    vectors = classes / ranks * dim * 4
    copies = 2 * sample * vectors if sample < 1 else 0
    kept = 4 * vectors
    peak = kept + 2 * vectors + copies + 3 * batch * dim * 4 + 2 * 2**21
    sent = 2 * batch * dim * 4 + 2 * batch * 4
    mega = {"paper_vectors_mb": vectors, "paper_after_mb": kept, "paper_peak_mb": peak, "paper_sent_mb": sent}
    return {name: round(x / 2**20, 1) for name, x in mega.items()} | {
        "gflop": round(8 * batch * classes / ranks * dim * sample / 1e9, 1)
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    """Measured, and in brackets as expected."""
    head = ("classes", "sample", "s a step", "of a processor", "vectors, MB", "after a step, MB", "at most, MB")
    head += ("GFLOP a rank", "sent, MB")
    lines = [f"| {' | '.join(head)} |", "|---:" * len(head) + "|"]
    for row in rows:
        measured = (f"{row[f'{name}_mb']:.0f} ({row[f'paper_{name}_mb']:.0f})" for name in ("vectors", "after", "peak"))
        times = (f"{row[name]:.2f}" for name in ("seconds", "processor_seconds"))
        cells = (f"{row['classes']:,}", row["sample"], *times, *measured, row["gflop"], row["paper_sent_mb"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description="Class vectors over ranks.")
    parser.add_argument("out", nargs="?", help="where the numbers go, as JSON")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--classes", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256, help="embeddings of all ranks together")
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {asked.ranks} ranks of one thread on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (asked, folder), asked.ranks)  # type: ignore[attr-defined]
        found = json.loads(Path(folder, "found.json").read_text())
    print(as_table(found))
    if asked.out:
        record = {"torch": torch.__version__, "ranks": asked.ranks, "batch": asked.batch, "dim": asked.dim}
        Path(asked.out).write_text(json.dumps(record | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
