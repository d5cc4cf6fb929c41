"""One call of a pairwise loss, laid out for an engine: what to compare, in which order, in how many passes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.contract import Acc, Difficulty, Measure, PairLoss, Rows, Tile
from mettle.pairs.relation import Side, Span, masks
from mettle.pairs.similarity import similarity


@dataclass(frozen=True)
class Step:
    """One pass over the tiles: how to weigh them and what to accumulate."""

    terms: Callable[[Tile, Rows], dict[str, Acc]]
    weigh: Callable[[Tile, Rows], Tensor | None]
    reads: Literal["nothing", "rows", "both"]  # what terms or weights use of earlier steps
    positives_only: bool = False
    as_list: bool = False  # positive pairs may be taken one by one instead of tile by tile
    constant: bool = False  # no gradient flows through what this step accumulates


@dataclass(frozen=True)
class Job:
    """Prepared embeddings of both sides, their relation, and the loss that compares them."""

    loss: PairLoss
    difficulty: Difficulty | None
    left: Side
    right: Side
    z: Tensor
    ref: Tensor | None  # None: the batch is compared with itself
    biased: tuple[Tensor, Tensor] | None  # a second encoder's view of both sides

    @property
    def measure(self) -> Measure:
        """The similarity in use."""
        return self.loss.measure

    def steps(self) -> list[Step]:
        """The difficulty's row facts first, if it needs any, then the sweeps of the loss."""
        found: list[Step] = []
        difficulty = self.difficulty
        weigh = self._weigh
        if difficulty is not None and difficulty.stats(self.blank()):
            found.append(
                Step(
                    lambda tile, _: {f"difficulty.{k}": acc for k, acc in difficulty.stats(tile).items()},
                    lambda tile, known: None,
                    reads="nothing",
                    constant=difficulty.detach,
                )
            )
        stats = bool(found)
        # Weights that differ between the two ends of a pair must be asked for at each end.
        apart = stats or not (difficulty is None or getattr(difficulty, "symmetric", False))
        for sweep in self.loss.sweeps():
            reads = "rows" if apart and sweep.reads == "nothing" else sweep.reads
            only = sweep.over == "positives"
            # A row fact such as the hardest positive must meet exactly the similarity it was taken from, so a
            # difficulty that has any sees tiles throughout: a product of two rows rounds differently elsewhere.
            exact = stats and not getattr(difficulty, "continuous", False)
            found.append(Step(sweep.terms, weigh, reads, positives_only=only, as_list=only and not exact))
        return found

    def _weigh(self, tile: Tile, known: Rows) -> Tensor | None:
        if self.difficulty is None:
            return None
        return weights(self.difficulty, tile, stats_of(known))

    def tile(self, i: Span, j: Span, s: Tensor | None = None) -> Tile:
        """The anchors of ``i`` against the references of ``j``."""
        ref = self.z if self.ref is None else self.ref
        biased = None
        if self.biased is not None:
            biased = similarity(self.biased[0][i.rows], self.biased[1][j.rows], self.measure)
        if s is None:
            s = similarity(self.z[i.rows], ref[j.rows], self.measure)
        pos, neg = masks(self.left, self.right, i, j, same_set=self.ref is None)
        a, b = self.left.at[i.rows, None], self.right.at[None, j.rows]
        return Tile(s, pos, neg, a, b, self.loss.temperature, biased)

    def whole(self) -> tuple[Span, Span]:
        """Both sides as one block each; the label range is left open so that masks are real tensors."""
        lowest, highest = -(2**63), 2**63 - 1
        return Span(0, len(self.left), lowest, highest), Span(0, len(self.right), lowest, highest)

    def blank(self) -> Tile:
        """A tile of one pair, to learn which terms there are before any work is done."""
        s, at = self.z.new_zeros(1, 1), self.left.at[:1, None]
        pos, neg = (torch.zeros(1, 1, dtype=torch.bool, device=s.device) for _ in range(2))
        return Tile(s, pos, neg, at, at, self.loss.temperature, None if self.biased is None else s)

    def most_positives(self) -> int:
        """The most positives that any anchor has."""
        labels, counts = self.right.labels.unique(return_counts=True)
        at = torch.searchsorted(labels, self.left.labels).clamp(max=len(labels) - 1)
        found = torch.where(labels[at] == self.left.labels, counts[at], 0)
        return max(int(found.max()) - (self.ref is None), 1)


def weights(difficulty: Difficulty, tile: Tile, stats: Rows) -> Tensor:
    """The weights of a tile, without gradient unless the difficulty wants one; a stranger's are looked at."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not difficulty.detach):
        w = difficulty.weigh(tile, stats)
    if not type(difficulty).__module__.startswith("mettle.") and not bool((w >= 0).all()):
        raise InputError(f"{type(difficulty).__name__} gave a negative or NaN weight: weights must be at least 0")
    return w


def stats_of(known: Rows) -> dict[str, Tensor]:
    """The row facts that belong to the difficulty, under the names it gave them."""
    mark = "difficulty."
    return {name[len(mark) :]: row for name, row in known.items() if name.startswith(mark)}
