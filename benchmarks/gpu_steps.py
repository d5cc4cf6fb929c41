"""Times of training steps of a loss on one GPU: a quick look, for comparing two checkouts on one machine.

python benchmarks/gpu_steps.py after.json
PYTHONPATH=OTHER_CHECKOUT/src python benchmarks/gpu_steps.py before.json

Forward and backward from raw embeddings, steps that follow each other without waiting: the best round and the median
of 25 rounds of 40 steps (large batches: three rounds of 20). Small batches are bound by the host, so their times wander
from machine to machine and from minute to minute: beside them stands an autograd function that does nothing, and the
same step with its launches one by one instead of replayed, in interleaved rounds, after a check that both are equal.
`benchmarks/gpu.py` is the complete table, with rivals and accuracy.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mettle.difficulty import AdaptiveThreshold, Importance, MultiSimilarityMining, Relative
from mettle.losses import (
    AdaFace,
    ArcFace,
    Circle,
    CurricularFace,
    DASupCon,
    InfoNCE,
    MagFace,
    MultiSimilarity,
    ProxyAnchor,
    ProxyNCA,
    SubCenterArcFace,
    SupCon,
    Triplet,
)
from mettle.pairs.kernels import launch

PRECISIONS = {"half": torch.float16, "float32": torch.float32}


class EmptyFunction(torch.autograd.Function):
    """What autograd costs alone."""

    @staticmethod
    def forward(ctx, z: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        ctx.save_for_backward(z)
        return torch.empty((), device=z.device)

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        return torch.empty_like(ctx.saved_tensors[0])


def time_steps(*steps: Callable[[], object], count: int, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of one of each kind of step, best round and median, in rounds that take turns."""
    for step in steps:
        for _ in range(5):
            step()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, found in zip(steps, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                step()
            torch.cuda.synchronize()
            found.append(1000 * (time.perf_counter() - start) / count)
    return [(round(min(found), 4), round(statistics.median(found), 4)) for found in times]


def time_small_batch(n: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """SupCon on a batch that the host is the limit of: replayed, launch by launch, compiled, and autograd alone."""
    z = torch.randn(n, 128, device="cuda", dtype=dtype, requires_grad=True)
    y = torch.arange(n // 4, device="cuda").repeat(4)
    loss = SupCon()
    launch._caches.clear()
    compiled = torch.compile(loss, fullgraph=True)

    def step_with(function: Callable, may_replay: bool = True) -> Callable[[], Tensor]:
        def step() -> Tensor:
            for cache in launch._caches.values():
                cache.may_replay = may_replay
            z.grad = None
            value = function(z, y)
            value.backward()
            return value

        return step

    kinds = {
        "replayed": step_with(loss),
        "launched": step_with(loss, may_replay=False),
        "compiled": step_with(compiled),
        "autograd alone": step_with(lambda z, y: EmptyFunction.apply(z)),
    }
    values, gradients = [], []
    for kind in ("launched", "replayed", "replayed", "replayed"):
        values.append(kinds[kind]().detach())
        gradients.append(z.grad)
    assert all(cache.recorded_step is not None for cache in launch._caches.values()), "the step was not recorded"
    assert all(torch.equal(values[0], x) for x in values), "a replayed loss differs"
    assert all(torch.equal(gradients[0], x) for x in gradients), "a replayed gradient differs"
    return dict(zip(kinds, time_steps(*kinds.values(), count=40, rounds=25), strict=True))


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

    small = n <= 4096 and labels is None
    return time_steps(step, count=40 if small else 20, rounds=25 if small or labels is not None else 3)[0]


def time_class_losses(precision: str, dtype: torch.dtype, show: Callable) -> None:
    """Losses with class vectors, 1,024 samples x 512: the named ones beside ArcFace, in rounds that take turns."""

    def make_step(loss: torch.nn.Module, classes: int) -> Callable[[], None]:
        loss.cuda()
        z = torch.randn(1024, 512, device="cuda", dtype=dtype, requires_grad=True)
        labels = torch.randint(classes, (1024,), device="cuda")

        def step() -> None:
            z.grad = None
            for parameter in loss.parameters():
                parameter.grad = None
            loss(z, labels).backward()

        return step

    classes = 100_000
    kinds = (ArcFace, ProxyAnchor, ProxyNCA, AdaFace, MagFace)
    steps = {f"{kind.__name__}, {classes:,} classes": make_step(kind(classes, 512), classes) for kind in kinds}
    for name, times in zip(steps, time_steps(*steps.values(), count=10, rounds=15), strict=True):
        show(f"{name}, {precision}", times)
    del steps
    several = {
        "ArcFace, 300,000 classes": make_step(ArcFace(3 * classes, 512), 3 * classes),
        "SubCenterArcFace, 3 x 100,000": make_step(SubCenterArcFace(classes, 512, vectors_per_class=3), classes),
    }
    for name, times in zip(several, time_steps(*several.values(), count=10, rounds=15), strict=True):
        show(f"{name}, {precision}", times)
    step = make_step(CurricularFace(classes, 512), classes)
    show(f"CurricularFace, {classes:,} classes, {precision}", time_steps(step, count=1, rounds=3)[0])


def main() -> None:
    torch.manual_seed(0)
    rows: dict[str, tuple[float, float]] = {}

    def show(name: str, times: tuple[float, float]) -> None:
        rows[name] = times
        print(f"{name:50} best {times[0]:9.4f} ms, median {times[1]:9.4f} ms", flush=True)

    def add(name: str, *arguments, **options) -> None:
        show(name, time_loss(*arguments, **options))

    for precision, dtype in PRECISIONS.items():
        for n in (256, 1024, 4096):
            for kind, times in time_small_batch(n, dtype).items():
                show(f"SupCon, n = {n}, {precision}, {kind}", times)
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
        mining = MultiSimilarityMining()
        add(f"MultiSimilarity, n = 32k, {precision}", MultiSimilarity(), 32768, 128, dtype)
        add(f"Circle, n = 32k, {precision}", Circle(), 32768, 128, dtype)
        add(f"SupCon with mining, n = 32k, {precision}", SupCon(difficulty=mining), 32768, 128, dtype)
        add(f"MultiSimilarity with mining, n = 32k, {precision}", MultiSimilarity(difficulty=mining), 32768, 128, dtype)
        time_class_losses(precision, dtype, show)
    for classes, d in ((100_000, 512), (1_000_000, 128)):
        labels = torch.randint(classes, (1024,), device="cuda")
        add(f"ArcFace, {classes:,} classes, half", ArcFace(classes, d).cuda(), 1024, d, torch.float16, labels)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
