"""What training costs beside the model: the loader, and hardness-aware steps.

    python benchmarks/training.py loader           batches a second beside a bare DataLoader of torch, by workers
    python benchmarks/training.py loader --keep    the same, kept in RESULTS.md
    python benchmarks/training.py hdml             hardness-aware steps against the same loss without synthesis
    python benchmarks/training.py hdml --quick     fewer rounds, smaller images

loader: every item is slept for, 0.25 s a batch in all, as if it came over a slow disk. Both read the same samples in
the same order with the same number of worker processes; ours also converts to float and augments. What
is timed starts after one batch of every worker, so that the start of the processes is left out of both, and rounds
alternate. The goal is 0.95 of torch's own rate.

hdml: times are medians over rounds in which all take turns, of whole optimization steps (forward, backward, optimizers)
of a ResNet-18, on CUDA where there is one. The goal is at most 25 % over the plain triplet loss; N-pair synthesizes
(B/2)² features and is only reported. Memory (CUDA) is the peak of a step.

Whole training steps on a GPU, beside loops of somebody careful, are timed by `training_steps.py`.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch
from record import keep
from torch.utils.data import DataLoader, Dataset

from mettle.data import Augment, Loader, Samples, ShuffledBatchSampler
from mettle.data.inputs import ImageArray
from mettle.data.loader import Batch
from mettle.losses import NPair, Triplet
from mettle.model import Embedder, EmbedderSpec
from mettle.train import HardnessAware, Supervised
from mettle.train.methods.hardness_aware import Synthesis

WORKERS = (2, 4, 8)
SECONDS = 0.25  # that reading a batch sleeps
SIZE, SIDE, COUNT = 32, 32, 4096
LEAST = 0.95


class SlowImages(ImageArray):
    """Images that take their time to read, as from a slow disk."""

    is_in_memory = False

    def read(self, at: np.ndarray) -> np.ndarray:
        """Copies, after a nap for every one of them."""
        for _ in at:
            time.sleep(SECONDS / SIZE)
        return super().read(at)


class SlowDataset(Dataset):
    """The same images as anybody would write it."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.samples.read(np.array([i]))[0]), int(self.samples.labels[i])


def iterate_torch(samples: Samples, workers: int, batches: int) -> Iterator:
    """A bare DataLoader."""
    sampler = ShuffledBatchSampler(len(samples), SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than processors are what is measured
        loader = DataLoader(SlowDataset(samples), batch_sampler=sampler, num_workers=workers)
        found = iter(loader)
    return (batch for batch, _ in zip(found, range(batches), strict=False))


def iterate_mettle(samples: Samples, workers: int, batches: int) -> Iterator:
    """Ours."""
    return Loader(samples, ShuffledBatchSampler(len(samples), SIZE), Augment(flip=0.5), workers=workers).batches(
        0, batches
    )


def batches_per_second(found: Iterator, workers: int) -> float:
    """The rate from the end of the first wave of batches on, one of each worker."""
    for _ in range(workers):
        next(found)
    began, count = time.perf_counter(), 0
    for _ in found:
        count += 1
    return count / (time.perf_counter() - began)


def measure_loader(rounds: int, is_kept: bool) -> None:
    """Print, and keep, the table of both loaders."""
    images = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), np.uint8)
    samples = Samples.of(SlowImages(images), np.arange(COUNT) // 4)
    lines = ["| workers | torch DataLoader, batches/s | mettle Loader, batches/s | ratio |", "|---|---|---|---|"]
    lowest = float("inf")
    for workers in WORKERS:
        rates: dict[str, list[float]] = {"torch": [], "mettle": []}
        for _ in range(rounds):
            for name, iterate in (("torch", iterate_torch), ("mettle", iterate_mettle)):
                rates[name].append(batches_per_second(iterate(samples, workers, 13 * workers), workers))
        torch_rate, our_rate = (median(rates[name]) for name in ("torch", "mettle"))
        lowest = min(lowest, our_rate / torch_rate)
        lines.append(f"| {workers} | {torch_rate:.2f} | {our_rate:.2f} | {our_rate / torch_rate:.3f} |")
        print(lines[-1], flush=True)
    verdict = "met" if lowest >= LEAST else "missed"
    sleep = f"A reader that sleeps {SECONDS} s a batch of {SIZE} images, {SIDE} x {SIDE}"
    text = (
        "\n".join(lines)
        + f"\n\n{sleep}; medians of {rounds} rounds in turns. The goal of {LEAST} of a bare DataLoader is "
    )
    text += (
        f"{verdict}: the lowest ratio is {lowest:.3f} (a worker of ours reads a batch in one call, one of torch's item "
    )
    text += "by item)."
    print(text)
    if is_kept:
        keep("Loading batches", f"training.py loader --rounds {rounds} --keep", text, threads="one thread a process")


GOAL = 0.25
CLASSES, DIM = 100, 128


def build_method(kind: str, aware: bool, side: int, device: str):
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


def time_step(method, batch: Batch, device: str) -> float:
    """One step."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    method.step(batch, 1e-4, 0.5)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure_synthesis(quick: bool) -> None:
    """Print what hardness-aware steps take beside plain ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side, rounds, warm = (96, 5, 1) if quick else (96, 15, 3) if device == "cpu" else (224, 40, 10)
    print(f"ResNet-18, {side} x {side} images, {DIM} dimensions, {CLASSES} classes, {device}")
    for kind, size in (("triplet", 120), ("N-pair", 128)):
        labels = (torch.arange(size) // 2).to(device)
        batch = Batch(
            torch.rand(size, 3, side, side, device=device), labels, torch.arange(size, device=device), 0, 0, 0.0
        )
        methods = {aware: build_method(kind, aware, side, device) for aware in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds + warm):
            for aware, method in methods.items():
                spent = time_step(method, batch, device)
                if turn >= warm:
                    times[aware].append(spent)
        plain, aware = (median(times[key]) for key in (False, True))
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if device == "cuda" else ""
        goal = f" (goal: at most {GOAL:.0%})" if kind == "triplet" else ""
        print(f"{kind:8} batch {size}: {1e3 * plain:8.1f} ms plain, {1e3 * aware:8.1f} ms HDML, "
              f"{aware / plain - 1:+.1%}{goal}{peak}")  # fmt: skip


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="What training costs beside the model.")
    parts = parser.add_subparsers(dest="part", required=True)
    loader = parts.add_parser("loader", help="batches a second beside a bare DataLoader")
    loader.add_argument("--rounds", type=int, default=5)
    loader.add_argument("--keep", action="store_true", help="keep the table in RESULTS.md")
    hdml = parts.add_parser("hdml", help="hardness-aware steps against plain ones")
    hdml.add_argument("--quick", action="store_true", help="fewer rounds, smaller images")
    asked = parser.parse_args()
    if asked.part == "loader":
        measure_loader(asked.rounds, asked.keep)
    else:
        measure_synthesis(asked.quick)


if __name__ == "__main__":
    main()
