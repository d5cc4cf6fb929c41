"""Learning the factor of a metric with any pairwise loss, from where a closed form left off.

The search runs over A with L = A W, where W makes the spread inside a class round: steps of one length suit every
direction there, whatever the units of the features. It starts at the closed form, is held to it by a penalty, and goes
only as far as held-out classes gain from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from mettle.data import PKBatchSampler
from mettle.errors import InputError, NumericError
from mettle.pairs import as_pair_list_loss

AT_ONCE = 1024  # points up to which every step sees all pairs
BATCH = 256  # points of a batch beyond that
RATE = 0.02  # of Adam; the factor's entries are about 1 where it starts
COLLAPSED = 1e-4  # of where it started: what is left of a factor when all points fall onto one
PATIENCE = 5  # epochs without progress before Adam stops
FLOOR = 1e-3  # of the largest weight, where a search begins
SCALES = tuple(2.0**k for k in (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6))

OnStep = Callable[[np.ndarray], bool]
"""Sees the factor after every step, and says whether to stop."""


@dataclass(frozen=True)
class Examples:
    """Points with labels, or pairs of points with 1 where they are similar and 0 where not."""

    first: np.ndarray  # (n, d)
    target: np.ndarray  # (n,) int64
    second: np.ndarray | None = None  # (n, d)

    @property
    def points(self) -> np.ndarray:
        """All points; of pairs first the one end, then the other."""
        return self.first if self.second is None else np.concatenate([self.first, self.second])

    def take(self, rows: np.ndarray) -> "Examples":
        """Some of them."""
        return Examples(self.first[rows], self.target[rows], None if self.second is None else self.second[rows])


@dataclass(frozen=True)
class FitResult:
    """Where a search ended."""

    factor: np.ndarray
    value: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class Search:
    """How to learn; fields as in `mettle.metric.Mahalanobis`."""

    loss: Any
    penalty: float
    batch: tuple[int, int] | str | None
    max_iter: int
    tol: float
    seed: int


def learn_factor(
    search: Search,
    examples: Examples,
    directions: np.ndarray,
    weights: np.ndarray,
    *,
    on_step: OnStep | None = None,
    max_iter: int | None = None,
) -> FitResult:
    """L (r, d) that minimizes loss + penalty · ‖A − A₀‖² over L = A W.

    Args:
        search: the loss and how to search.
        examples: what to learn from.
        directions: W (k, d).
        weights: (r,) diagonal of A₀, but for a factor: the power of two at which the loss is least.
        on_step: sees L after every step of L-BFGS or epoch of Adam.
        max_iter: in place of the one in ``search``; 0 only finds the loss of the closed form.
    """
    loss, w = search.loss, torch.from_numpy(directions)
    on_pairs = examples.second is not None
    value = (
        _objective_on_pairs(loss, examples, w, search.batch) if on_pairs else _objective_on_labels(loss, examples, w)
    )
    sampler = None if on_pairs else _batch_sampler(loss, examples.target, search.batch, search.seed)
    with torch.random.fork_rng(devices=[]):  # a caller's stream of random numbers is not ours to move
        steps = search.max_iter if max_iter is None else max_iter
        start = torch.zeros(len(weights), len(w), dtype=w.dtype)
        # At a weight of 0 the gradient is 0 too: a direction that the closed form leaves out could never come back.
        start.diagonal().copy_(torch.from_numpy(np.maximum(weights, FLOOR * weights.max()) if steps else weights))
        rows = None if sampler is None else torch.from_numpy(next(iter(sampler.epoch_batches(0))))
        if steps == 0:
            value_at_start = check_finite(value(start, rows))
            return FitResult(start.numpy() @ directions, float(value_at_start), 0, True)
        start = start * _best_scale(lambda a: value(a, rows), start, search.seed)

        def objective(a: Tensor, rows: Tensor | None = None) -> Tensor:
            return value(a, rows) + search.penalty * (a - start).square().sum()

        def see(a: np.ndarray) -> bool:
            return on_step is not None and on_step(a @ directions)

        if sampler is None:
            evaluate = _value_and_gradient(objective, start.shape, search.seed)
            found = fit_lbfgs(evaluate, start.numpy(), max_iter=steps, tol=search.tol, on_step=see)
        else:
            found = fit_adam(objective, start, sampler, max_iter=steps, tol=search.tol, seed=search.seed, on_step=see)
    return FitResult(found.factor @ directions, found.value, found.iterations, found.converged)


def fit_lbfgs(
    evaluate: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    max_iter: int,
    tol: float,
    on_step: OnStep | None = None,
) -> FitResult:
    """L-BFGS, until no entry of the gradient is above ``tol``, the value settles, or ``on_step`` says so.

    Args:
        evaluate: value and gradient at a factor.
        start: the factor to start from.
        max_iter: steps.
        tol: of the gradient.
        on_step: sees the factor after every step.
    """

    def step(x: np.ndarray) -> None:
        if on_step is not None and on_step(x.reshape(start.shape)):
            raise StopIteration

    def flat(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = evaluate(x.reshape(start.shape))
        return value, gradient.ravel()

    options = {"maxiter": max_iter, "gtol": tol, "ftol": tol * 1e-4, "maxfun": 20 * max_iter}
    found = minimize(flat, start.ravel(), jac=True, method="L-BFGS-B", callback=step, options=options)
    return FitResult(found.x.reshape(start.shape), float(found.fun), max(int(found.nit), 1), found.status != 1)


def fit_adam(
    objective: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    sampler: PKBatchSampler,
    *,
    max_iter: int,
    tol: float,
    seed: int,
    on_step: OnStep | None = None,
) -> FitResult:
    """Adam; of every epoch the mean of its factors, and in the end those of the best epoch."""
    torch.manual_seed(seed)
    factor = start.clone().requires_grad_()
    adam = torch.optim.Adam([factor], lr=RATE)
    best, best_value, since, epoch, stopped = start, float("inf"), 0, 0, False
    while epoch < max_iter and since < PATIENCE and not stopped:
        mean, total, steps = torch.zeros_like(start), 0.0, 0
        for batch in sampler.epoch_batches(epoch):
            adam.zero_grad()
            value = check_finite(objective(factor, torch.from_numpy(batch)))
            value.backward()
            adam.step()
            mean, total, steps = mean + factor.detach(), total + float(value.detach()), steps + 1
        epoch, since = epoch + 1, since + 1
        if total / steps < best_value - tol:
            since = 0
        if total / steps < best_value:
            best, best_value = mean / steps, total / steps
        stopped = on_step is not None and on_step(best.numpy())
    return FitResult(best.numpy(), best_value, epoch, since >= PATIENCE or stopped)


def check_batch(search: Search, examples: Examples) -> None:
    """Refuse batches that these examples cannot fill."""
    if examples.second is None:
        _batch_sampler(search.loss, examples.target, search.batch, search.seed)


def check_finite(value: Tensor) -> Tensor:
    """Refuse to go on from a loss that is no number."""
    if not bool(torch.isfinite(value.detach()).all()):
        raise NumericError(
            "the loss became NaN or infinite while learning the metric: scale the features, or lower its margin"
        )
    return value


def check_factor(factor: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Refuse a factor that holds no metric."""
    if not np.isfinite(factor).all() or np.abs(factor).max() < COLLAPSED * np.abs(start).max():
        raise NumericError(
            "learning collapsed all points onto one: nothing in the loss pushes points apart, or not far. Give it "
            "negatives, a larger margin, or a larger penalty"
        )
    return factor


def _best_scale(value: Callable[[Tensor], Tensor], start: Tensor, seed: int) -> float:
    """The size of distances that suits the loss: it would cost the search its first steps, and the penalty."""
    best, least = 1.0, np.inf
    with torch.no_grad():
        for scale in SCALES:
            torch.manual_seed(seed)
            found = float(value(scale * start))
            if found < least - 1e-9 * abs(found):  # a loss of angles has no preference: 1
                best, least = scale, found
    return best


def _value_and_gradient(
    objective: Callable[[Tensor], Tensor], shape: tuple[int, ...], seed: int
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    def evaluate(a: np.ndarray) -> tuple[float, np.ndarray]:
        torch.manual_seed(seed)  # a loss that draws must draw alike, or it is another function at every step
        factor = torch.from_numpy(a.reshape(shape).copy()).requires_grad_()
        value = check_finite(objective(factor))
        (gradient,) = torch.autograd.grad(value, factor)
        return float(value.detach()), gradient.numpy()

    return evaluate


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
    n = len(examples.first)
    u = _whiten(loss, examples.points, w)
    similar = torch.from_numpy(examples.target)
    form = as_pair_list_loss(loss)
    return lambda a, rows: form(u[:n] @ a.T, u[n:] @ a.T, similar)


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
