"""Weights that are exponential up to a constant of the row, folded into the loss instead of computed pair by pair.

With w_ij = u_ij / (mean of u over the anchor's negatives) and log u a function of the tile alone,

    log Σ w·eˣ = log Σ e^{x + log u} − log ū,     Σ w·x = (Σ u·x) / ū,     log ū = log Σ u − log N

so one pass over the tiles serves both the row's mean and its sums, and both ends of a pair share the work. The plain
way, a first pass for the mean and a second one for the weights, gives the same and remains the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mettle.pairs.declarations import declared_log_weight
from mettle.pairs.interface import (
    Difficulty,
    Measure,
    PairLoss,
    Pass,
    Reduction,
    RowValues,
    Tile,
    logsumexp_over,
    sum_over,
    temperature_of,
)

MAX_EXPONENT_RANGE = 80.0  # twice the largest exponent that float32 sums without a running maximum


class CannotFold(Exception):
    """A loss weighs pairs other than all negatives or all positives together: weights must be computed pair by pair."""


class SelfNormalizedDifficulty(Protocol):
    """A difficulty whose negative weights have this form; positives weigh 1."""

    @property
    def detach(self) -> bool:
        """Whether weights are constants for the gradient."""
        ...

    def log_weight(self, tile: Tile) -> Tensor:
        """Log u, a function of the pair alone."""
        ...

    def log_weight_bound(self, temperature: float) -> float:
        """A bound of |log u|."""
        ...


def may_fold() -> bool:
    """Not under ``torch.compile``, which makes one pass of two by itself and cannot trace the wrapper."""
    return not torch.compiler.is_compiling()


def fold_weights(loss: PairLoss, difficulty: Difficulty | None) -> tuple[PairLoss, Difficulty | None]:
    """The loss with its difficulty folded in, where that is possible; else both as they came."""
    if declared_log_weight(difficulty) is None or isinstance(temperature_of(loss), Tensor) or not may_fold():
        return loss, difficulty
    if loss.measure != "cosine":  # the bound of the weights is that of cosines
        return loss, difficulty
    if 2 * difficulty.log_weight_bound(loss.temperature) > MAX_EXPONENT_RANGE:  # type: ignore[union-attr]
        return loss, difficulty
    return SelfNormalizedLoss(loss, difficulty), None  # type: ignore[arg-type]


@dataclass(frozen=True)
class SelfNormalizedLoss:
    """A loss whose negatives are weighed by a self-normalized difficulty."""

    loss: PairLoss
    difficulty: SelfNormalizedDifficulty

    @property
    def measure(self) -> Measure:
        """As inside."""
        return self.loss.measure

    @property
    def temperature(self) -> float:
        """As inside."""
        return self.loss.temperature

    def passes(self) -> tuple[Pass, ...]:
        """Those of the loss, the first of which also sums u."""
        first, *rest = self.loss.passes()
        return (
            replace(first, reductions=self._with_weights(first.reductions, opening=True)),
            *(replace(later, reductions=self._with_weights(later.reductions, opening=False)) for later in rest),
        )

    def _with_weights(self, reductions: Callable[[Tile, RowValues], dict[str, Reduction]], opening: bool):
        def wrapped(tile: Tile, rows: RowValues) -> dict[str, Reduction]:
            log_u, bound = self.difficulty.log_weight(tile), self.difficulty.log_weight_bound(self.temperature)
            log_u = log_u.detach() if self.difficulty.detach else log_u
            found = {}
            for name, acc in reductions(tile, self._divide_by_mean(rows)).items():
                found |= self._fold_reduction(name, acc, tile, log_u, bound)
            if opening:
                found["weight.sum"] = logsumexp_over(log_u, tile.negative, bound=bound)
                found["weight.count"] = sum_over(1.0, tile.negative)
            return found

        return wrapped

    @staticmethod
    def _fold_reduction(name: str, acc: Reduction, tile: Tile, log_u: Tensor, bound: float) -> dict[str, Reduction]:
        """A reduction with u inside; its name tells `_divide_by_mean` what to do with it."""
        if acc.weighting == "square":
            raise CannotFold
        plain = replace(acc, weighting="none")
        weighted = acc.weighting == "weight" and acc.mask is tile.negative
        if acc.weighting == "weight" and acc.kind != "max" and not (weighted or acc.mask is tile.positive):
            raise CannotFold
        if not weighted or acc.kind == "max" or not isinstance(acc.values, Tensor):
            return {name: plain}  # weights of mean 1 leave counts alone, and maxima see presence only
        if acc.kind == "logsumexp":
            total_bound = None if acc.bound is None else acc.bound + bound
            return {f"logsumexp|{name}": replace(plain, values=acc.values + log_u, bound=total_bound)}
        u = (log_u - bound).exp()
        return {f"sum|{name}": replace(plain, values=acc.values * (u if acc.values.ndim == 2 else u[..., None]))}

    def _divide_by_mean(self, rows: RowValues) -> dict[str, Tensor]:
        """What the loss expects to see: names and values after division by the mean of u, each end by its own."""
        if "weight.sum" not in rows:
            return dict(rows)
        means = {end: self._mean(rows, end) for end in ("", "ᵀ") if f"weight.sum{end}" in rows}
        found = {}
        for name, row in rows.items():
            kind, mark, loss_name = name.partition("|")
            if not mark:
                found[name] = row
                continue
            mean = means["ᵀ" if loss_name.endswith("ᵀ") else ""]
            mean = mean if row.ndim == mean.ndim else mean[..., None]
            if kind == "logsumexp":
                found[loss_name] = row - mean
            else:
                found[loss_name] = row * (self.difficulty.log_weight_bound(self.temperature) - mean).exp()
        return found

    def _mean(self, rows: RowValues, end: str) -> Tensor:
        """Log ū; 0 where there are no negatives."""
        some = rows[f"weight.count{end}"] > 0
        mean = torch.where(some, rows[f"weight.sum{end}"], 0) - torch.where(some, rows[f"weight.count{end}"], 1).log()
        return mean.detach() if self.difficulty.detach else mean

    def row_loss(self, rows: RowValues) -> Tensor:
        """As inside."""
        return self.loss.row_loss(self._divide_by_mean(rows))

    def is_defined(self, rows: RowValues) -> Tensor:
        """As inside."""
        return self.loss.is_defined(self._divide_by_mean(rows))

    def anchor_weight(self, rows: RowValues) -> Tensor | None:
        """As inside."""
        return self.loss.anchor_weight(self._divide_by_mean(rows))
