"""One call of a pairwise loss, laid out for an engine: both sides, their blocks and masks, and the passes over them.

Positive: same label. Negative: another label. A row is never paired with itself; against a reference set, pairs of
equal id are left out when ids are known. Rows are sorted by label first, so that nearly every tile is purely
negative and needs no mask at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.declarations import traits_of
from mettle.pairs.interface import Acc, Difficulty, Mask, Measure, PairLoss, Rows, Tile
from mettle.pairs.similarity import Sides, similarity


@dataclass(frozen=True)
class Side:
    """The labels (and ids, where known) of one side of the comparison, in the order in which tiles are cut."""

    labels: Tensor
    at: Tensor  # where each row came from
    ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def spans(self, size: int) -> "list[Span]":
        """Cut into blocks of ``size`` rows, each with its smallest and largest label (one transfer for all)."""
        n = len(self)
        starts = range(0, n, size)
        low = torch.stack([self.labels[i : i + size].amin() for i in starts]).tolist()
        high = torch.stack([self.labels[i : i + size].amax() for i in starts]).tolist()
        return [Span(i, min(i + size, n), a, b) for i, a, b in zip(starts, low, high, strict=True)]


@dataclass(frozen=True)
class Span:
    """Rows ``start:stop`` and the range of their labels."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        """The rows as a slice."""
        return slice(self.start, self.stop)


def masks(a: Side, b: Side, i: Span, j: Span, *, same_set: bool) -> tuple[Mask, Mask]:
    """``(pos, neg)`` of one tile; plain booleans where the label ranges already decide.

    ``same_set``: both sides are the same rows in the same order, so the diagonal pairs a row with itself.
    """
    if (i.high < j.low or j.high < i.low) and (a.ids is None or b.ids is None):
        return False, True
    same = a.labels[i.rows, None] == b.labels[None, j.rows]
    pos, neg = same, ~same
    if same_set:
        if i.start == j.start:
            pos = pos & ~torch.eye(i.stop - i.start, dtype=torch.bool, device=same.device)
    elif a.ids is not None and b.ids is not None:
        other = a.ids[i.rows, None] != b.ids[None, j.rows]
        pos, neg = pos & other, neg & other
    return pos, neg


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
                    self._asked(lambda tile, _: {f"difficulty.{k}": x for k, x in difficulty.stats(tile).items()}),
                    lambda tile, known: None,
                    reads="nothing",
                    constant=difficulty.detach,
                )
            )
        stats, traits = bool(found), traits_of(difficulty)
        # Weights that differ between the two ends of a pair must be asked for at each end.
        apart = stats or not (difficulty is None or traits.symmetric)
        for sweep in self.loss.sweeps():
            reads = "rows" if apart and sweep.reads == "nothing" else sweep.reads
            only = sweep.over == "positives"
            # A row fact such as the hardest positive must meet exactly the similarity it was taken from, so a
            # difficulty that has any sees tiles throughout: a product of two rows rounds differently elsewhere.
            exact = stats and not traits.continuous
            terms = self._asked(sweep.terms)
            found.append(Step(terms, weigh, reads, positives_only=only, as_list=only and not exact))
        return found

    def _asked(self, terms: Callable[[Tile, Rows], dict[str, Acc]]) -> Callable[[Tile, Rows], dict[str, Acc]]:
        """What each row accumulates, every term laid over the whole tile."""

        def asked(tile: Tile, rows: Rows) -> dict[str, Acc]:
            try:
                found = terms(tile, rows)
            except KeyError as error:
                refuse_missing(self.loss, error, rows, "give its Sweep reads='rows' (or 'both')")
                raise
            return {name: _laid_out(name, acc, tile.s) for name, acc in found.items()}

        return asked

    def _weigh(self, tile: Tile, known: Rows) -> Tensor | None:
        if self.difficulty is None:
            return None
        return weights(self.difficulty, tile, stats_of(known))

    def tile(self, i: Span, j: Span, s: Tensor | None = None) -> Tile:
        """The anchors of ``i`` against the references of ``j``."""
        ref = self.z if self.ref is None else self.ref
        pos, neg = masks(self.left, self.right, i, j, same_set=self.ref is None)
        biased = sides = None
        if self.biased is not None:
            biased = similarity(self.biased[0][i.rows], self.biased[1][j.rows], self.measure)
        if s is None:
            sides = Sides(self.z, ref, i.rows, j.rows, self.measure)
            s = similarity(self.z[i.rows], ref[j.rows], self.measure)
            s = -sides.sharpened(-s, pos, neg).clamp(min=0) if self.measure == "squared" else s
        a, b = self.left.at[i.rows, None], self.right.at[None, j.rows]
        return Tile(s, pos, neg, a, b, self.loss.temperature, biased, sides)

    def whole(self) -> tuple[Span, Span]:
        """Both sides as one block each; the label range is left open so that masks are real tensors."""
        lowest, highest = -(2**63), 2**63 - 1
        return Span(0, len(self.left), lowest, highest), Span(0, len(self.right), lowest, highest)

    def blank(self) -> Tile:
        """A tile of one pair, to learn which terms there are before any work is done."""
        s, i, j = self.z.new_zeros(1, 1), self.left.at[:1, None], self.right.at[None, :1]
        pos, neg = (torch.zeros(1, 1, dtype=torch.bool, device=s.device) for _ in range(2))
        return Tile(s, pos, neg, i, j, self.loss.temperature, None if self.biased is None else s)

    def most_positives(self) -> int:
        """The most positives that any anchor has."""
        labels, counts = self.right.labels.unique(return_counts=True)
        at = torch.searchsorted(labels, self.left.labels).clamp(max=len(labels) - 1)
        found = torch.where(labels[at] == self.left.labels, counts[at], 0)
        return max(int(found.max()) - (self.ref is None), 1)


def weights(difficulty: Difficulty, tile: Tile, stats: Rows) -> Tensor:
    """The weights of a tile, without gradient unless the difficulty wants one; looked at unless it is trusted."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not difficulty.detach):
        w = difficulty.weigh(tile, stats)
    return w if traits_of(difficulty).trusted else _accepted(w, tile.s, type(difficulty).__name__)


def _accepted(w: Any, s: Tensor, whose: str) -> Tensor:
    """Weights that nobody vouches for, one per pair of the tile."""
    if isinstance(w, (int, float)):
        w = torch.as_tensor(float(w), device=s.device)
    if not isinstance(w, Tensor):
        raise InputError(f"{whose}.weigh must give a tensor or a number, got {type(w).__name__}")
    if w.device != s.device:
        raise InputError(f"{whose}.weigh gave weights on {w.device} for embeddings on {s.device}: use one device")
    if not bool((w >= 0).all()):
        raise InputError(f"{whose} gave a negative or NaN weight: weights must be at least 0")
    try:
        return w.to(s.dtype).expand_as(s)
    except RuntimeError as error:
        raise InputError(
            f"{whose}.weigh gave weights of shape {tuple(w.shape)} for a tile of {tuple(s.shape)}: "
            "give one per pair, or a shape that broadcasts to that"
        ) from error


def _laid_out(name: str, acc: Acc, s: Tensor) -> Acc:
    """A term with one x, and one entry of the mask, for every pair of the tile.

    One that takes no weights may stand on columns of its own, if its mask does too.
    """
    x, mask = acc.x, acc.mask
    if acc.weigh == "none" and isinstance(x, Tensor) and isinstance(mask, Tensor) and x.shape[:2] == mask.shape:
        return acc
    try:
        if isinstance(x, Tensor) and x.shape[:2] != s.shape:
            acc = replace(acc, x=x.expand(*s.shape, *x.shape[2:]))
        if isinstance(mask, Tensor) and mask.shape != s.shape:
            acc = replace(acc, mask=mask.expand_as(s))
    except RuntimeError as error:
        shapes = " and a mask of ".join(str(tuple(v.shape)) for v in (x, mask) if isinstance(v, Tensor))
        raise InputError(
            f"term {name!r} has a shape of {shapes} on a tile of {tuple(s.shape)}: give one value per pair"
        ) from error
    return acc


def refuse_missing(loss: PairLoss, error: KeyError, rows: Rows, remedy: str) -> None:
    """Say what to do where a loss asks for a row that is not there; say nothing of other errors."""
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in rows:
        return
    whose = type(getattr(loss, "loss", loss)).__name__
    there = ", ".join(repr(key) for key in rows) or "none"
    raise InputError(
        f"{whose} asks for a row {name!r}, but the rows are {there}: accumulate it in terms, or {remedy}"
    ) from error


def stats_of(known: Rows) -> dict[str, Tensor]:
    """The row facts that belong to the difficulty, under the names it gave them."""
    mark = "difficulty."
    return {name[len(mark) :]: row for name, row in known.items() if name.startswith(mark)}
