"""What hardness-aware training costs a step, with a ResNet-18.

    python benchmarks/hdml.py            triplet and N-pair, against the same loss without synthesis
    python benchmarks/hdml.py --quick    fewer rounds, smaller pictures

Times are medians over rounds in which all take turns, of whole optimisation steps (forward, backward, optimisers), on
CUDA where there is one. The goal is at most 25 % over the plain triplet loss; N-pair synthesises (B/2)² features and is
only reported. Memory (CUDA) is the peak of a step.
"""

import sys
import time
from statistics import median

import torch

from mettle.data.loader import Batch
from mettle.losses import NPair, Triplet
from mettle.model import Embedder, EmbedderSpec
from mettle.train import HardnessAware, Supervised
from mettle.train.methods.synthesis import Synthesis

GOAL = 0.25
CLASSES, DIM = 100, 128


def made(kind: str, aware: bool, side: int, device: str):
    """A method over the same network and loss, with or without synthesis."""
    torch.manual_seed(0)
    unit = kind == "triplet"
    model = Embedder(EmbedderSpec("resnet18", dim=DIM, unit=unit), (3, side, side)).to(device)
    loss = Triplet(margin=0.2, squared=True) if kind == "triplet" else NPair()
    precision = "bfloat16" if device == "cuda" else "float32"
    if not aware:
        return Supervised(model, loss, precision=precision)
    classes = torch.arange(CLASSES, device=device)
    return HardnessAware(loss, model, classes=classes, synthesis=Synthesis(), precision=precision)


def seconds(method, batch: Batch, device: str) -> float:
    """One step."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    method.step(batch, 1e-4, 0.5)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(quick: bool) -> None:
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side, rounds, warm = (96, 5, 1) if quick else (96, 15, 3) if device == "cpu" else (224, 40, 10)
    print(f"ResNet-18, {side} x {side} pictures, {DIM} dimensions, {CLASSES} classes, {device}")
    for kind, size in (("triplet", 120), ("N-pair", 128)):
        labels = (torch.arange(size) // 2).to(device)
        batch = Batch(
            torch.rand(size, 3, side, side, device=device), labels, torch.arange(size, device=device), 0, 0, 0.0
        )
        methods = {aware: made(kind, aware, side, device) for aware in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds + warm):
            for aware, method in methods.items():
                spent = seconds(method, batch, device)
                if turn >= warm:
                    times[aware].append(spent)
        plain, aware = (median(times[key]) for key in (False, True))
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if device == "cuda" else ""
        goal = f" (goal: at most {GOAL:.0%})" if kind == "triplet" else ""
        print(f"{kind:8} batch {size}: {1e3 * plain:8.1f} ms plain, {1e3 * aware:8.1f} ms HDML, "
              f"{aware / plain - 1:+.1%}{goal}{peak}")  # fmt: skip


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
