"""Learning the factor from examples with any pairwise loss.

The search runs in coordinates u = W(x − o) in which the spread inside a class is round, over A with L = A W: steps of
one length suit every direction there, whatever the units of the features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mettle.data import PKBatchSampler
from mettle.errors import InputError
from mettle.metric.descend import Found, batched, whole
from mettle.pairs import as_pair_list_loss

AT_ONCE = 1024  # points up to which every step sees all pairs
BATCH = 256  # points of a batch beyond that


@dataclass(frozen=True)
class Examples:
    """Points with labels, or pairs of points with 1 where they are alike and 0 where not."""

    first: np.ndarray  # (n, d)
    target: np.ndarray  # (n,) int64
    second: np.ndarray | None = None  # (n, d)


def learn(
    loss: Any,
    examples: Examples,
    prior: np.ndarray,
    r: int,
    *,
    penalty: float,
    batch: tuple[int, int] | str | None,
    max_iter: int,
    tol: float,
    seed: int,
) -> Found:
    """L (r, d) that minimises loss + penalty · ‖A − A₀‖²; ``prior`` is W (k, d), A₀ its first r rows."""
    w = torch.from_numpy(prior)
    start = torch.eye(r, len(w), dtype=w.dtype)
    value = (
        _as_pair_list_loss(loss, examples, w, batch) if examples.second is not None else _on_labels(loss, examples, w)
    )
    order = None if examples.second is not None else _batches(loss, examples.target, batch, seed)

    def objective(a: Tensor, rows: Tensor | None = None) -> Tensor:
        return value(a, rows) + penalty * (a - start).square().sum()

    with torch.random.fork_rng(devices=[]):  # a caller's stream of random numbers is not ours to move
        if order is None:
            found = whole(objective, start, max_iter=max_iter, tol=tol, seed=seed)
        else:
            found = batched(
                objective,
                start,
                lambda epoch: map(torch.from_numpy, order.epoch_batches(epoch)),
                max_iter=max_iter,
                tol=tol,
                seed=seed,
            )
    return replace(found, factor=found.factor @ w)


def _on_labels(loss: Any, examples: Examples, w: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    u = _seen(loss, examples.first, w)
    y = torch.from_numpy(examples.target)

    def value(a: Tensor, rows: Tensor | None) -> Tensor:
        return loss(u @ a.T, y) if rows is None else loss(u[rows] @ a.T, y[rows])

    return value


def _as_pair_list_loss(
    loss: Any, examples: Examples, w: Tensor, batch: Any
) -> Callable[[Tensor, Tensor | None], Tensor]:
    if isinstance(batch, (tuple, list)):
        raise InputError("batch=(classes, samples) draws from labels, and pairs have none: leave batch at 'auto'")
    assert examples.second is not None
    n = len(examples.first)
    u = _seen(loss, np.concatenate([examples.first, examples.second]), w)
    alike = torch.from_numpy(examples.target)
    form = as_pair_list_loss(loss)
    return lambda a, rows: form(u[:n] @ a.T, u[n:] @ a.T, alike)


def _seen(loss: Any, x: np.ndarray, w: Tensor) -> Tensor:
    """Wx; about the mean for losses on differences, whose value is the same there with more digits to spare."""
    centred = getattr(loss, "measure", None) in ("squared", "euclidean", "l1")
    return torch.from_numpy(x - x.mean(0) if centred else x) @ w.T


def _batches(loss: Any, labels: np.ndarray, batch: Any, seed: int) -> PKBatchSampler | None:
    """The order of batches, or None for everything at once."""
    counts = np.bincount(labels)
    counts = counts[counts >= 2]
    usable = len(counts)
    # A difficulty that follows the data is another function at every step, and L-BFGS needs one that stays.
    moving = hasattr(getattr(loss, "difficulty", None), "observe")
    if batch is None or (batch == "auto" and (usable < 2 or (len(labels) <= AT_ONCE and not moving))):
        return None
    if batch == "auto":
        classes = min(usable, BATCH // 8)
        batch = classes, max(2, min(BATCH // classes, int(np.median(counts))))
    if usable < batch[0]:
        raise InputError(
            f"batch={tuple(batch)} needs {batch[0]} classes with two or more samples, y has {usable}: "
            "lower the first number"
        )
    return PKBatchSampler(labels, int(batch[0]), int(batch[1]), seed)
