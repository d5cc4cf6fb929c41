"""The thin shell that every pairwise loss shares: a call, one value per anchor, and the facts."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import Acc, Difficulty, Measure, PairFacts, PairOutput, Rows, Sweep, Tile, pair_facts, pair_loss
from mettle.pairs.engine import Engine, Reference


class Pairwise:
    """A loss over the pairs of a batch, or of a batch against a reference set.

    A member says what its rows accumulate (``terms``) and how a row ends (``finish``); `mettle.pairs` does the rest.
    """

    if TYPE_CHECKING:
        temperature: float
        difficulty: Difficulty | None

    measure: Measure = "cosine"

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """What each row accumulates over one tile."""
        raise NotImplementedError

    def finish(self, rows: Rows) -> Tensor:
        """One value per row."""
        raise NotImplementedError

    def defined(self, rows: Rows) -> Tensor:
        """Anchors with at least one positive that is present."""
        return rows["positives"] > 0

    def sweeps(self) -> tuple[Sweep, ...]:
        """One pass over all tiles, unless a member needs more."""
        return (Sweep(self.terms),)

    def __call__(self, embeddings: Tensor, labels: Tensor, **options) -> Tensor:
        """The mean over anchors, a scalar with gradient. Options: see :meth:`output`."""
        output = self.output(embeddings, labels, **options)
        if _readable(output.defined) and not bool(output.defined.any()):
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
        engine: Engine = "auto",
        tile: int = 512,
    ) -> PairOutput:
        """Values, where they are defined, and the engine that computed them.

        Args:
            embeddings: (n, d), any floating type; normalised inside where the loss lives on the sphere.
            labels: (n,) whole numbers. For two views of unlabelled samples pass the sample ids.
            ref: (embeddings, labels) or (embeddings, labels, ids) to compare with instead of the batch itself.
            ids: (n,) sample ids, to leave out pairs of equal id against a ``ref`` with ids.
            biased: a second encoder's embeddings, for difficulties that compare two encoders.
            engine: ``auto``, ``dense`` or ``tiled``.
            tile: rows of a tile of the tiled engine.
        """
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

    def facts(self, embeddings: Tensor, labels: Tensor, *, biased: Tensor | None = None) -> PairFacts:
        """What the difficulty did to this batch."""
        return pair_facts(self, embeddings, labels, difficulty=self.difficulty, biased=biased)


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Log(eᵃ + eᵇ); -inf, with zero gradient, where both are."""
    empty = (a == -torch.inf) & (b == -torch.inf)
    return torch.where(empty, -torch.inf, torch.logaddexp(a.masked_fill(empty, 0), b.masked_fill(empty, 0)))


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
