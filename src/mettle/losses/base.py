"""The thin shell that every pairwise loss shares: a call, one value per anchor, and the facts."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from mettle.difficulty.validation import settings
from mettle.errors import InputError
from mettle.pairs import (
    Acc,
    Difficulty,
    Mask,
    Measure,
    PairFacts,
    PairOutput,
    Rows,
    Sweep,
    Tile,
    pair_facts,
    pair_loss,
)
from mettle.pairs.diagnostics import pair_rows
from mettle.pairs.dispatch import Engine, Reference, check
from mettle.pairs.validation import stacked


class Pairwise:
    """A loss over the pairs of a batch, or of a batch against a reference set.

    A member says what its rows accumulate (``terms``) and how a row ends (``finish``); `mettle.pairs` does the rest.
    """

    if TYPE_CHECKING:  # a member's own fields, or these
        temperature: float
        difficulty: Difficulty | None
    else:
        temperature = 1.0
        difficulty = None

    measure: Measure = "cosine"

    def __post_init__(self) -> None:
        """A member that is a dataclass: numbers must be numbers, and its difficulty one."""
        settings(self)

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """What each row accumulates over one tile."""
        raise NotImplementedError

    def finish(self, rows: Rows) -> Tensor:
        """One value per row."""
        raise NotImplementedError

    def defined(self, rows: Rows) -> Tensor:
        """Anchors with at least one positive that is present."""
        return rows["positives"] > 0

    def share(self, rows: Rows) -> Tensor:
        """Every anchor counts alike in the mean."""
        return torch.ones_like(self._any(rows))

    @staticmethod
    def _any(rows: Rows) -> Tensor:
        return next(row for row in rows.values() if row.ndim == 1)

    def sweeps(self) -> tuple[Sweep, ...]:
        """One pass over all tiles, unless a member needs more."""
        return (Sweep(self.terms),)

    def __call__(self, embeddings: Tensor, labels: Tensor, **options) -> Tensor:
        """The mean over anchors, a scalar with gradient. Options: see :meth:`output`."""
        output = self.output(embeddings, labels, **options)
        # Looking at a GPU's result would stall it: there, the mean of nothing is NaN.
        if output.engine != "triton" and _readable(output.defined) and not bool(output.defined.any()):
            raise InputError(
                f"no anchor has a positive among {len(labels)} samples: each class needs at least two samples in a "
                "batch. The usual cause is a sampler that draws samples one by one; draw P classes x K samples"
            )
        return output.mean()

    def per_anchor(self, embeddings: Tensor, labels: Tensor, **options) -> Tensor:
        """(n,) one value per anchor, NaN for anchors without positives. Options: see :meth:`output`."""
        return self.output(embeddings, labels, **options).per_anchor()

    def output(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ref: Reference | None = None,
        ids: Tensor | None = None,
        biased: Tensor | tuple[Tensor, Tensor] | None = None,
        views: bool = False,
        engine: Engine = "auto",
        tile: int | None = None,
    ) -> PairOutput:
        """Values, where they are defined, and the engine that computed them.

        Args:
            embeddings: (n, d), any floating type; normalised inside where the loss lives on the sphere.
            labels: (n,) whole numbers. For two views of unlabelled samples pass the sample ids.
            ref: (embeddings, labels) or (embeddings, labels, ids) to compare with instead of the batch itself.
            ids: (n,) sample ids, to leave out pairs of equal id against a ``ref`` with ids.
            biased: a second encoder's embeddings, for difficulties that compare two encoders.
            views: embeddings are (n, v, d): v views of each sample; values come view by view, (v * n,).
            engine: ``auto``, ``dense``, ``tiled`` or, on a GPU, ``triton``.
            tile: rows of a tile of the tiled engine; chosen by size when left out.
        """
        if views:
            embeddings, labels, biased = stacked(embeddings, labels, biased)
        self._observe(embeddings, labels)
        return pair_loss(
            self,
            embeddings,
            labels,
            ref=ref,
            ids=ids,
            biased=biased,
            difficulty=self.difficulty,
            engine=engine,
            tile=tile,
        )

    def _observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Let a difficulty that follows the data see a training batch."""
        observe = getattr(self.difficulty, "observe", None)
        if observe is not None and torch.is_grad_enabled():
            check(embeddings, labels, "embeddings", "labels")
            observe(embeddings, labels)

    def facts(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ref: Reference | None = None,
        ids: Tensor | None = None,
        biased: Tensor | tuple[Tensor, Tensor] | None = None,
        views: bool = False,
    ) -> PairFacts:
        """What the difficulty did to this batch. Options as in a call."""
        if views:
            embeddings, labels, biased = stacked(embeddings, labels, biased)
        return pair_facts(self, embeddings, labels, difficulty=self.difficulty, ref=ref, ids=ids, biased=biased)

    def rows(self, embeddings: Tensor, labels: Tensor, **options: Any) -> Rows:
        """Everything that the rows of this batch accumulate, in no particular order."""
        return pair_rows(self, embeddings, labels, difficulty=self.difficulty, **options)

    def at(self, progress: float) -> Self:
        """The loss at a point of training between 0 and 1, for difficulties that follow a curriculum."""
        later = getattr(self.difficulty, "at", None)
        return self if later is None else replace(self, difficulty=later(progress))  # type: ignore[type-var]


def either(tile: Tile) -> Mask:
    """Every pair of a tile, positive or negative: all but a row with itself."""
    if tile.pos is False or tile.neg is False:
        return tile.neg if tile.pos is False else tile.pos
    return tile.pos | tile.neg


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Log(eᵃ + eᵇ); -inf, with zero gradient, where both are."""
    empty = (a == -torch.inf) & (b == -torch.inf)
    return torch.where(empty, -torch.inf, torch.logaddexp(a.masked_fill(empty, 0), b.masked_fill(empty, 0)))


def softplus(x: Tensor) -> Tensor:
    """Log(1 + eˣ), exact in float64 too: torch's own stops counting the 1 at x = 20."""
    return torch.nn.functional.softplus(x, threshold=40)


def filled(x: Tensor) -> Tensor:
    """Zero, with zero gradient, where a row had nothing to accumulate (-inf)."""
    return x.masked_fill(x == -torch.inf, 0)


def need(condition: bool, message: str) -> None:
    """Refuse a constructor argument."""
    if not condition:
        raise InputError(message)


def _readable(x: Tensor) -> bool:
    """Whether looking at a value now is allowed: not while a CUDA graph is being captured."""
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
