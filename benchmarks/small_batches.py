"""Small batches: forward and backward beside ten lines of plain torch of the same formula, on one CPU thread.

python benchmarks/small_batches.py [--rounds 200] [--json OUT]

Every row is the median of interleaved pairs of calls (ours, plain), so that a busy machine slows down both. ATen calls
are counted at n = 128, forward and backward together; `tests/pairs/test_small_batches.py` keeps them below 1.2 times
those of plain torch.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mettle.losses import ArcFace, DASupCon, InfoNCE, SupCon, Triplet

SIZES = (64, 128, 256, 512)
DIM = 128
CLASSES = 1000


class CallCounter(TorchDispatchMode):
    """Counts the ATen operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def masks(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positive pairs, negative pairs and the diagonal."""
    same, diagonal = y[:, None] == y[None, :], torch.eye(len(y), dtype=torch.bool)
    return same & ~diagonal, ~same, diagonal


def plain_supcon(z: Tensor, y: Tensor, t: float = 0.1) -> Tensor:
    z = F.normalize(z, dim=1)
    x = z @ z.T / t
    positive, _, diagonal = masks(y)
    log_p = x - torch.logsumexp(x.masked_fill(diagonal, -torch.inf), 1, keepdim=True)
    count = positive.sum(1)
    values = -log_p.masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
    return values[count > 0].mean()


def plain_da_supcon(z: Tensor, y: Tensor, t: float = 0.1, alpha=1.0, beta=2.0, high=0.7, low=0.3) -> Tensor:
    z = F.normalize(z, dim=1)
    s = z @ z.T
    x = s / t
    positive, negative, _ = masks(y)
    with torch.no_grad():
        w_positive = 1 + alpha * ((high - s) / high).clamp(min=0)
        w_negative = 1 + beta * ((s - low) / (1 - low)).clamp(min=0)
        inside = torch.where(positive, 0, w_negative.log()).masked_fill(~(positive | negative), -torch.inf)
    log_p = x - torch.logsumexp(x + inside, 1, keepdim=True)
    count = positive.sum(1)
    values = -(w_positive * log_p).masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
    return values[count > 0].mean()


def plain_infonce_labels(z: Tensor, y: Tensor, t: float = 0.5) -> Tensor:
    z = F.normalize(z, dim=1)
    x = z @ z.T / t
    positive, negative, _ = masks(y)
    others = torch.logsumexp(x.masked_fill(~negative, -torch.inf), 1, keepdim=True)
    value = F.softplus(others - x)
    count = positive.sum(1)
    values = value.masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
    return values[count > 0].mean()


def plain_infonce_views(z: Tensor, y: Tensor, t: float = 0.5) -> Tensor:
    """NT-Xent of two views as a cross-entropy; row i and row i + n/2 are views of one sample."""
    n = len(z) // 2
    z = F.normalize(z, dim=1)
    x = (z @ z.T / t).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(x, torch.arange(2 * n).roll(n))


def plain_batch_hard(z: Tensor, y: Tensor, margin: float = 0.2) -> Tensor:
    z = F.normalize(z, dim=1)
    d = (2 - 2 * z @ z.T).clamp(min=1e-12).sqrt()
    positive, negative, _ = masks(y)
    farthest = d.masked_fill(~positive, -torch.inf).amax(1)
    closest = d.masked_fill(~negative, torch.inf).amin(1)
    values = (farthest - closest + margin).clamp(min=0)
    return values[positive.any(1)].mean()


class PlainArcFace(torch.nn.Module):
    """ArcFace as a cross-entropy over all classes."""

    def __init__(self, weight: Tensor, scale: float = 64.0, margin: float = 0.5):
        super().__init__()
        self.weight, self.scale, self.margin = torch.nn.Parameter(weight.clone()), scale, margin

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """The mean over samples."""
        cosine = F.normalize(z, dim=1) @ F.normalize(self.weight, dim=1).T
        own = cosine.gather(1, y[:, None]).clamp(-1 + 1e-7, 1 - 1e-7)
        cos_m, sin_m = torch.cos(torch.tensor(self.margin)), torch.sin(torch.tensor(self.margin))
        moved = own * cos_m - (1 - own * own).sqrt() * sin_m
        logits = self.scale * cosine.scatter(1, y[:, None], moved)
        return F.cross_entropy(logits, y)


def cases(n: int) -> dict[str, tuple[Callable, Callable, Tensor, Tensor]]:
    """Name -> ours, plain, embeddings, labels."""
    generator = torch.Generator().manual_seed(n)
    z = torch.randn(n, DIM, generator=generator, requires_grad=True)
    four, two = torch.arange(n // 4).repeat(4), torch.arange(n // 2).repeat(2)
    arcface = ArcFace(CLASSES, DIM)
    samples = torch.randint(CLASSES, (n,), generator=generator)
    return {
        "SupCon": (SupCon(), plain_supcon, z, four),
        "DA-SupCon": (DASupCon(), plain_da_supcon, z, four),
        "InfoNCE, labels": (InfoNCE(), plain_infonce_labels, z, four),
        "InfoNCE, two views": (InfoNCE(), plain_infonce_views, z, two),
        "batch-hard triplet": (Triplet(mining="hardest"), plain_batch_hard, z, four),
        f"ArcFace, {CLASSES} classes": (arcface, PlainArcFace(arcface.weight.detach()), z, samples),
    }


def step(loss: Callable, z: Tensor, y: Tensor) -> None:
    """Forward and backward."""
    z.grad = None
    loss(z, y).backward()


def count_calls(loss: Callable, z: Tensor, y: Tensor) -> int:
    """ATen operators of one step."""
    with CallCounter() as counter:
        step(loss, z, y)
    return counter.count


def time_ratio(ours: Callable, plain: Callable, z: Tensor, y: Tensor, rounds: int) -> tuple[float, float, float]:
    """Median times in milliseconds of both, and the median of the ratios of neighbouring calls."""
    for loss in (ours, plain) * 5:
        step(loss, z, y)
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for loss in (ours, plain):
            start = time.perf_counter()
            step(loss, z, y)
            pair.append(1000 * (time.perf_counter() - start))
        times.append((pair[0], pair[1]))
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return first, second, statistics.median(a / b for a, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'loss':24} {'n':>5} {'ours ms':>9} {'plain ms':>9} {'ratio':>6}  ATen calls")
    for n in SIZES:
        for name, (ours, plain, z, y) in cases(n).items():
            first, second, ratio = time_ratio(ours, plain, z, y, arguments.rounds)
            calls = (count_calls(ours, z, y), count_calls(plain, z, y)) if n == 128 else ("", "")
            rows.append({"loss": name, "n": n, "ours_ms": first, "plain_ms": second, "ratio": ratio, "calls": calls})
            print(f"{name:24} {n:5} {first:9.3f} {second:9.3f} {ratio:6.2f}  {calls[0]} / {calls[1]}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
