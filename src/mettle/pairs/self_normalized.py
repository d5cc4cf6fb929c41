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

from mettle.pairs.declarations import log_weight_of
from mettle.pairs.interface import Acc, Difficulty, Measure, PairLoss, Rows, Sweep, Tile, lse, total

ROOM = 80.0  # twice the largest exponent that float32 sums without a running maximum


class CannotFold(Exception):
    """A loss weighs pairs other than all negatives or all positives together: weights must be computed pair by pair."""


class Tilt(Protocol):
    """A difficulty whose negative weights have this form; positives weigh 1."""

    @property
    def detach(self) -> bool:
        """Whether weights are constants for the gradient."""
        ...

    def log_weight(self, tile: Tile) -> Tensor:
        """Log u, a function of the pair alone."""
        ...

    def ceiling(self, temperature: float) -> float:
        """A bound of |log u|."""
        ...


def tilted(loss: PairLoss, difficulty: Difficulty | None) -> tuple[PairLoss, Difficulty | None]:
    """The loss with its difficulty folded in, where that is possible; else both as they came."""
    if log_weight_of(difficulty) is None or 2 * difficulty.ceiling(loss.temperature) > ROOM:  # type: ignore[union-attr]
        return loss, difficulty
    return Tilted(loss, difficulty), None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tilted:
    """A loss whose negatives are weighed by a `Tilt`."""

    loss: PairLoss
    tilt: Tilt

    @property
    def measure(self) -> Measure:
        """As inside."""
        return self.loss.measure

    @property
    def temperature(self) -> float:
        """As inside."""
        return self.loss.temperature

    def sweeps(self) -> tuple[Sweep, ...]:
        """Those of the loss, the first of which also sums u."""
        first, *rest = self.loss.sweeps()
        return (
            replace(first, terms=self._terms(first.terms, opening=True)),
            *(replace(sweep, terms=self._terms(sweep.terms, opening=False)) for sweep in rest),
        )

    def _terms(self, terms: Callable[[Tile, Rows], dict[str, Acc]], opening: bool):
        def wrapped(tile: Tile, rows: Rows) -> dict[str, Acc]:
            log_u, top = self.tilt.log_weight(tile), self.tilt.ceiling(tile.temperature)
            log_u = log_u.detach() if self.tilt.detach else log_u
            found = {}
            for name, acc in terms(tile, self._seen(rows)).items():
                found |= self._acc(name, acc, tile, log_u, top)
            if opening:
                found["tilt.sum"] = lse(log_u, tile.neg, ceiling=top)
                found["tilt.count"] = total(1.0, tile.neg)
            return found

        return wrapped

    @staticmethod
    def _acc(name: str, acc: Acc, tile: Tile, log_u: Tensor, top: float) -> dict[str, Acc]:
        """A term with u inside; its name tells `_seen` how to divide by the mean."""
        plain = replace(acc, weigh="none")
        moved = acc.weigh == "full" and acc.mask is tile.neg
        if acc.weigh == "full" and acc.kind != "peak" and not (moved or acc.mask is tile.pos):
            raise CannotFold
        if not moved or acc.kind == "peak" or not isinstance(acc.x, Tensor):
            return {name: plain}  # weights of mean 1 leave counts alone, and maxima see presence only
        if acc.kind == "lse":
            ceiling = None if acc.ceiling is None else acc.ceiling + top
            return {f"lse|{name}": replace(plain, x=acc.x + log_u, ceiling=ceiling)}
        u = (log_u - top).exp()
        return {f"total|{name}": replace(plain, x=acc.x * (u if acc.x.ndim == 2 else u[..., None]))}

    def _seen(self, rows: Rows) -> dict[str, Tensor]:
        """What the loss expects to see: names and values after division by the mean of u, each end by its own."""
        if "tilt.sum" not in rows:
            return dict(rows)
        means = {end: self._mean(rows, end) for end in ("", "ᵀ") if f"tilt.sum{end}" in rows}
        found = {}
        for name, row in rows.items():
            kind, mark, own = name.partition("|")
            if not mark:
                found[name] = row
                continue
            mean = means["ᵀ" if own.endswith("ᵀ") else ""]
            mean = mean if row.ndim == mean.ndim else mean[..., None]
            found[own] = row - mean if kind == "lse" else row * (self.tilt.ceiling(self.temperature) - mean).exp()
        return found

    def _mean(self, rows: Rows, end: str) -> Tensor:
        """Log ū; 0 where there are no negatives."""
        some = rows[f"tilt.count{end}"] > 0
        mean = torch.where(some, rows[f"tilt.sum{end}"], 0) - torch.where(some, rows[f"tilt.count{end}"], 1).log()
        return mean.detach() if self.tilt.detach else mean

    def finish(self, rows: Rows) -> Tensor:
        """As inside."""
        return self.loss.finish(self._seen(rows))

    def defined(self, rows: Rows) -> Tensor:
        """As inside."""
        return self.loss.defined(self._seen(rows))

    def share(self, rows: Rows) -> Tensor:
        """As inside."""
        return self.loss.share(self._seen(rows))
