"""Gradient caching: time per sample and memory of a large batch, beside plain steps and sentence-transformers.

    python benchmarks/gradient_caching.py out.json           ResNet-50 at 128 px, batches of 65,536, on one GPU
    python benchmarks/gradient_caching.py --device cpu       a small network at 32 px, batches of 1,024: a try

All steps train the same network from the same state with AdamW, on a GPU in bfloat16, on uint8 images in (pinned)
memory of the host, which a step moves to the device and scales.

    plain, n                  a step on n images with SupCon: what the memory of a card has room for
    cached, N by n            `GradientCaching(network, rows=n)` around it: SupCon of all N embeddings
    sentence-transformers     `CachedMultipleNegativesRankingLoss` with micro-batches of n: N / 2 images against N / 2

Of each the best of some rounds, rounds in turns; peak memory is that of torch's allocator, network and optimizer
included. ``of plain`` is the time per sample over that of the plain step with as many images as a micro-batch has.
Beside torch, torchvision and NumPy nothing is needed (`stand_ins`); the last row is left out where that package is not
installed. After ``--seconds`` no round begins.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stand_ins import MISSING, is_installed
from torch import Tensor, nn

from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train.gradient_caching import GradientCaching

DIM, EACH = 128, 4  # width of an embedding, images of a class


@dataclass(frozen=True)
class Setting:
    """What is trained on one kind of device."""

    backbone: str
    side: int
    batch: int
    rows: tuple[int, ...]  # of micro-batches, and of plain steps


SETTINGS = {"cuda": Setting("resnet50", 128, 65536, (64, 256, 512)), "cpu": Setting("convnet", 32, 1024, (64, 128))}


class Pictures(nn.Module):
    """A network on uint8 images, in half precision on a GPU."""

    def __init__(self, network: nn.Module, device: str):
        super().__init__()
        self.network, self.device = network, device

    def forward(self, images: Tensor) -> Tensor:
        """(n, c, h, w) to (n, d)."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return self.network(images.float().div_(255))


class Sentences(nn.Module):
    """The same network as the module of a `SentenceTransformer`."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the embeddings."""
        return {**features, "sentence_embedding": self.network(features["images"])}


class Steps:
    """Steps of one kind, one after the other."""

    def __init__(self, setting: Setting, device: str, images: Tensor):
        torch.manual_seed(0)
        shape = (3, setting.side, setting.side)
        self.network = Pictures(Embedder(EmbedderSpec(setting.backbone, dim=DIM), shape).to(device), device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, fused=device == "cuda")
        self.images, self.device = images, device
        self.loss = SupCon()

    def labels(self, count: int) -> Tensor:
        """Of the first images."""
        return torch.arange(count, device=self.device) // EACH

    def plain(self, rows: int) -> Tensor:
        """The loss of so many images."""
        return self.loss(self.network(self.images[:rows].to(self.device, non_blocking=True)), self.labels(rows))

    def cached(self, rows: int) -> Tensor:
        """The loss of all images."""
        return self.loss(GradientCaching(self.network, rows)(self.images), self.labels(len(self.images)))

    def sentence_transformers(self, rows: int) -> Tensor:
        """The cached loss of that package: each image of the first half against all of the second one."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

        model = SentenceTransformer(modules=[Sentences(self.network)], device=self.device)
        images = self.images.to(self.device)  # it moves nothing by itself
        halves: list[dict[str, Any]] = [
            {"input_ids": torch.zeros(len(part), 1, device=self.device), "images": part} for part in images.chunk(2)
        ]
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=rows)(halves, None)

    def run(self, loss: Callable[[], Tensor]) -> float:
        """One step; seconds."""
        synchronize(self.device)
        began = time.perf_counter()
        loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(setting: Setting, device: str, rounds: int, deadline: float) -> list[dict[str, Any]]:
    """A row for every kind of step."""
    images = torch.randint(0, 256, (setting.batch, 3, setting.side, setting.side), dtype=torch.uint8)
    images = images.pin_memory() if device == "cuda" else images
    steps = Steps(setting, device, images)
    kinds: dict[tuple[str, int], tuple[Callable[[], Tensor], int, int]] = {}  # the loss, its images, steps of a round
    for rows in setting.rows:
        kinds["plain", rows] = (lambda rows=rows: steps.plain(rows), rows, max(2, min(setting.batch, 4096) // rows))
        kinds["cached", rows] = (lambda rows=rows: steps.cached(rows), setting.batch, 1)
        if is_installed("sentence_transformers"):
            kinds["sentence-transformers", rows] = (
                lambda rows=rows: steps.sentence_transformers(rows),
                setting.batch,
                1,
            )
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for turn in range(rounds):
        for (kind, rows), (loss, count, repeats) in kinds.items():
            if turn and time.perf_counter() > deadline:
                break
            if kind == "plain" and not turn:
                steps.run(loss)  # kernels are chosen
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            milliseconds = 1000 * sum(steps.run(loss) for _ in range(repeats)) / repeats / count
            row = found.setdefault((kind, rows), {"kind": kind, "batch": count, "rows": rows, "ms_per_sample": []})
            row["ms_per_sample"].append(round(milliseconds, 5))
            row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None
            print(f"  {kind}, {rows} rows: {milliseconds:.4f} ms a sample", flush=True)
    for (_, rows), row in found.items():
        plain = min(found["plain", rows]["ms_per_sample"])
        row["of_plain"] = round(min(row["ms_per_sample"]) / plain, 3)
    return list(found.values())


def as_table(rows: list[dict[str, Any]]) -> str:
    """One line a kind."""
    lines = [
        "| step | batch | micro-batch | ms a sample, best | of plain | peak, GB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        best = min(row["ms_per_sample"])
        peak = "" if row["peak_gb"] is None else row["peak_gb"]
        lines.append(f"| {row['kind']} | {row['batch']:,} | {row['rows']} | {best:.4f} | {row['of_plain']} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description="Gradient caching against plain steps.")
    parser.add_argument("out", nargs="?", help="where the numbers go, as JSON")
    parser.add_argument("--device", default="cuda", choices=list(SETTINGS))
    parser.add_argument("--batch", type=int, help="images of the effective batch")
    parser.add_argument("--rows", type=int, nargs="+", help="sizes of micro-batches")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=400.0, help="after which no round begins")
    asked = parser.parse_args()
    usual = SETTINGS[asked.device]
    rows = tuple(asked.rows or usual.rows)
    setting = Setting(usual.backbone, usual.side, asked.batch or usual.batch, rows)
    place = torch.cuda.get_device_name() if asked.device == "cuda" else f"{torch.get_num_threads()} threads"
    missing = f", without {', '.join(sorted(MISSING.missing))}" if MISSING.missing else ""
    print(f"torch {torch.__version__}, {place}{missing}, {setting}", flush=True)
    found = measure(setting, asked.device, asked.rounds, time.perf_counter() + asked.seconds)
    print(as_table(found))
    if asked.out:
        record = {"torch": torch.__version__, "device": place, "rows": found}
        Path(asked.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
