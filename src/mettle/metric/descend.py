"""Finding the factor: L-BFGS where the whole objective can be seen at once, Adam over batches where it cannot."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.errors import NumericError

RATE = 0.02  # of Adam; the factor's entries are about 1 where it starts
COLLAPSED = 1e-3  # entries all below this; they start at 1, where a class is about 1 wide
PATIENCE = 5  # epochs without progress before Adam stops


@dataclass(frozen=True)
class Found:
    """Where the search ended."""

    factor: Tensor
    value: float
    iterations: int
    converged: bool


def whole(objective: Callable[[Tensor], Tensor], start: Tensor, *, max_iter: int, tol: float, seed: int) -> Found:
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
        value = finite(objective(factor))
        value.backward()
        return value

    search.step(closure)
    iterations = search.state[factor]["n_iter"]
    value = float(finite(objective(factor.detach())))
    return Found(checked(factor.detach()), value, max(iterations, 1), iterations < max_iter)


def batched(
    objective: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    epochs: Callable[[int], Iterable[Tensor]],
    *,
    max_iter: int,
    tol: float,
    seed: int,
) -> Found:
    """Adam; of every epoch the mean of its factors, and in the end those of the best epoch."""
    torch.manual_seed(seed)
    factor = start.clone().requires_grad_()
    adam = torch.optim.Adam([factor], lr=RATE)
    best, best_value, since, epoch = start, float("inf"), 0, 0
    while epoch < max_iter and since < PATIENCE:
        mean, total, steps = torch.zeros_like(start), 0.0, 0
        for batch in epochs(epoch):
            adam.zero_grad()
            value = finite(objective(factor, batch))
            value.backward()
            adam.step()
            mean, total, steps = mean + factor.detach(), total + float(value.detach()), steps + 1
        epoch, since = epoch + 1, since + 1
        if total / steps < best_value - tol:
            since = 0
        if total / steps < best_value:
            best, best_value = mean / steps, total / steps
    return Found(checked(best), best_value, epoch, since >= PATIENCE)


def finite(value: Tensor) -> Tensor:
    """Refuse to go on from a loss that is no number."""
    if not bool(torch.isfinite(value.detach()).all()):
        raise NumericError(
            "the loss became NaN or infinite while learning the metric: scale the features, or lower its margin"
        )
    return value


def checked(factor: Tensor) -> Tensor:
    """Refuse a factor that holds no metric."""
    if not bool(torch.isfinite(factor).all()) or float(factor.abs().max()) < COLLAPSED:
        raise NumericError(
            "learning collapsed all points onto one: nothing in the loss pushes points apart, or not far. Give it "
            "negatives, a larger margin, or a larger penalty"
        )
    return factor
