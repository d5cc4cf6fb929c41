"""Learning the factor from examples with any pairwise loss.

The search runs in coordinates u = W(x − o) in which the spread inside a class is round, over A with L = A W: steps of
one length suit every direction there, whatever the units of the features.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mettle.data import PKBatchSampler
from mettle.errors import InputError, NumericError
from mettle.pairs import as_pair_list_loss

AT_ONCE = 1024  # points up to which every step sees all pairs
BATCH = 256  # points of a batch beyond that
RATE = 0.02  # of Adam; the factor's entries are about 1 where it starts
COLLAPSED = 1e-3  # entries all below this; they start at 1, where a class is about 1 wide
PATIENCE = 5  # epochs without progress before Adam stops


@dataclass(frozen=True)
class Examples:
    """Points with labels, or pairs of points with 1 where they are alike and 0 where not."""

    first: np.ndarray  # (n, d)
    target: np.ndarray  # (n,) int64
    second: np.ndarray | None = None  # (n, d)


@dataclass(frozen=True)
class FitResult:
    """Where the search ended."""

    factor: Tensor
    value: float
    iterations: int
    converged: bool


def learn_factor(
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
) -> FitResult:
    """L (r, d) that minimises loss + penalty · ‖A − A₀‖²; ``prior`` is W (k, d), A₀ its first r rows."""
    w = torch.from_numpy(prior)
    start = torch.eye(r, len(w), dtype=w.dtype)
    value = (
        _objective_on_pairs(loss, examples, w, batch)
        if examples.second is not None
        else _objective_on_labels(loss, examples, w)
    )
    order = None if examples.second is not None else _batch_sampler(loss, examples.target, batch, seed)

    def objective(a: Tensor, rows: Tensor | None = None) -> Tensor:
        return value(a, rows) + penalty * (a - start).square().sum()

    with torch.random.fork_rng(devices=[]):  # a caller's stream of random numbers is not ours to move
        if order is None:
            found = fit_lbfgs(objective, start, max_iter=max_iter, tol=tol, seed=seed)
        else:
            found = fit_adam(
                objective,
                start,
                lambda epoch: map(torch.from_numpy, order.epoch_batches(epoch)),
                max_iter=max_iter,
                tol=tol,
                seed=seed,
            )
    return replace(found, factor=found.factor @ w)


def _objective_on_labels(loss: Any, examples: Examples, w: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    u = _whiten(loss, examples.first, w)
    y = torch.from_numpy(examples.target)

    def value(a: Tensor, rows: Tensor | None) -> Tensor:
        return loss(u @ a.T, y) if rows is None else loss(u[rows] @ a.T, y[rows])

    return value


def _objective_on_pairs(
    loss: Any, examples: Examples, w: Tensor, batch: Any
) -> Callable[[Tensor, Tensor | None], Tensor]:
    if isinstance(batch, (tuple, list)):
        raise InputError("batch=(classes, samples) draws from labels, and pairs have none: leave batch at 'auto'")
    assert examples.second is not None
    n = len(examples.first)
    u = _whiten(loss, np.concatenate([examples.first, examples.second]), w)
    alike = torch.from_numpy(examples.target)
    form = as_pair_list_loss(loss)
    return lambda a, rows: form(u[:n] @ a.T, u[n:] @ a.T, alike)


def _whiten(loss: Any, x: np.ndarray, w: Tensor) -> Tensor:
    """Wx; about the mean for losses on differences, whose value is the same there with more digits to spare."""
    centred = getattr(loss, "measure", None) in ("squared", "euclidean", "l1")
    return torch.from_numpy(x - x.mean(0) if centred else x) @ w.T


def _batch_sampler(loss: Any, labels: np.ndarray, batch: Any, seed: int) -> PKBatchSampler | None:
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


def fit_lbfgs(
    objective: Callable[[Tensor], Tensor], start: Tensor, *, max_iter: int, tol: float, seed: int
) -> FitResult:
    """L-BFGS with a line search, until no entry of the gradient is above ``tol``, or no step changes that much."""
    factor = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [factor],
        max_iter=max_iter,
        max_eval=max_iter * 5,
        tolerance_grad=tol,
        tolerance_change=tol * 1e-2,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        torch.manual_seed(seed)  # a loss that draws must draw alike, or it is another function at every step
        search.zero_grad()
        value = check_finite(objective(factor))
        value.backward()
        return value

    search.step(closure)
    iterations = search.state[factor]["n_iter"]
    value = float(check_finite(objective(factor.detach())))
    return FitResult(check_factor(factor.detach()), value, max(iterations, 1), iterations < max_iter)


def fit_adam(
    objective: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    epochs: Callable[[int], Iterable[Tensor]],
    *,
    max_iter: int,
    tol: float,
    seed: int,
) -> FitResult:
    """Adam; of every epoch the mean of its factors, and in the end those of the best epoch."""
    torch.manual_seed(seed)
    factor = start.clone().requires_grad_()
    adam = torch.optim.Adam([factor], lr=RATE)
    best, best_value, since, epoch = start, float("inf"), 0, 0
    while epoch < max_iter and since < PATIENCE:
        mean, total, steps = torch.zeros_like(start), 0.0, 0
        for batch in epochs(epoch):
            adam.zero_grad()
            value = check_finite(objective(factor, batch))
            value.backward()
            adam.step()
            mean, total, steps = mean + factor.detach(), total + float(value.detach()), steps + 1
        epoch, since = epoch + 1, since + 1
        if total / steps < best_value - tol:
            since = 0
        if total / steps < best_value:
            best, best_value = mean / steps, total / steps
    return FitResult(check_factor(best), best_value, epoch, since >= PATIENCE)


def check_finite(value: Tensor) -> Tensor:
    """Refuse to go on from a loss that is no number."""
    if not bool(torch.isfinite(value.detach()).all()):
        raise NumericError(
            "the loss became NaN or infinite while learning the metric: scale the features, or lower its margin"
        )
    return value


def check_factor(factor: Tensor) -> Tensor:
    """Refuse a factor that holds no metric."""
    if not bool(torch.isfinite(factor).all()) or float(factor.abs().max()) < COLLAPSED:
        raise NumericError(
            "learning collapsed all points onto one: nothing in the loss pushes points apart, or not far. Give it "
            "negatives, a larger margin, or a larger penalty"
        )
    return factor
