"""Networks, the loop over batches on the device, and what frozen networks say of a set."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.data import Set
from torch import Tensor, nn

from mettle.data.sampler import EpochBatchSampler
from mettle.data.transforms import Augment
from mettle.model import Embedder, EmbedderSpec
from mettle.train.optim import Schedule, WarmupCosine

PATIENCE = 50  # refused steps in a row before a run is given up


def precision(device: str) -> str:
    """Half precision for the encoder where there are tensor cores; losses stay in float32."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def resnet18(shape: tuple[int, ...], *, stem: str, dim: int, head: str = "linear", unit: bool = True) -> Embedder:
    """The package's ResNet-18 with another first layer.

    ``half``: 3x3 at stride 2 without pooling, for 32 pixels a quarter of the work of the usual small stem;
    ``large``: 7x7 at stride 2 and pooling, whatever the size of the picture.
    """
    model = Embedder(EmbedderSpec("resnet18", head=head, dim=dim, unit=unit), shape)  # type: ignore[arg-type]
    assert isinstance(model.backbone, nn.Sequential)
    if stem == "half":
        model.backbone[0] = nn.Conv2d(shape[0], 64, 3, stride=2, padding=1, bias=False)
    elif stem == "large":
        model.backbone[0] = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        model.backbone[3] = nn.MaxPool2d(3, 2, 1)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def ready(network: Callable[[], Embedder], data: Set, train: np.ndarray, seed: int) -> Embedder:
    """An untrained network on the device, centred on training inputs; a pure function of the seed."""
    torch.manual_seed(seed)
    model = network()
    some = train[np.unique(np.linspace(0, len(train) - 1, min(len(train), 2048)).astype(np.int64))]
    model.fit_normalization(data.take(some).cpu())
    return model.to(data.device)


def order_of(order: EpochBatchSampler) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, positions) without end."""
    epoch = 0
    while True:
        for positions in order.epoch_batches(epoch):
            yield epoch, positions
        epoch += 1


def fit(
    method: Any,
    data: Set,
    train: np.ndarray,
    labels: np.ndarray,
    order: EpochBatchSampler,
    augment: Augment,
    *,
    steps: int,
    rate: float,
    seed: int,
    views: int = 1,
    warmup: float = 0.1,
    visit: Callable[[int], None] | None = None,
    visits: int = 4,
) -> dict[str, Any]:
    """Train, and tell what the method told at a few points on the way; ``order`` counts within ``train``."""
    schedule, refused, told = Schedule(steps, rate, WarmupCosine(warmup)), 0, []
    marks = {max(1, round(steps * k / visits)) for k in range(1, visits + 1)}
    for step, (epoch, positions) in enumerate(order_of(order)):
        at = train[positions]
        batch = data.batch(at, labels, augment, seed=seed, step=step, epoch=epoch, views=views, draw=positions)
        result = method.step(batch, schedule.lr_at(step), step / steps)
        refused = 0 if result.applied else refused + 1
        if refused > PATIENCE:
            raise RuntimeError(f"{refused} steps in a row were refused: the loss or its gradient is not finite")
        done = step + 1
        if done in marks:
            told.append({"step": done, "loss": result.loss} | _plain(result.lazy_stats()))
            if visit is not None:
                visit(done)
        if done >= steps:
            break
    return {"epochs": epoch + 1, "trace": told}


def cost(step: Callable[[int], None], device: str, meet: Callable[[], None], warm: int, seconds: float) -> float:
    """Seconds a step, warmed up, while all workers do the same."""
    for k in range(warm):
        step(k)
    meet()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step(warm + count)
        count += 1
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _plain(facts: Any) -> dict[str, Any]:
    return {name: v for name, v in dict(facts).items() if isinstance(v, int | float | dict)}


@torch.inference_mode()
def outputs(model: Embedder, data: Set, at: np.ndarray, *, features: bool = False, size: int = 2048) -> Tensor:
    """(n, d) float32 embeddings, or what the head sees, in eval mode, left on the device."""
    training = model.training
    model.eval()
    try:
        parts = []
        for start in range(0, len(at), size):
            x = data.take(at[start : start + size])
            parts.append((model.features(x) if features else model(x)).float())
        return torch.cat(parts)
    finally:
        model.train(training)
