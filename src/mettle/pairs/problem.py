"""One call of a pairwise loss, laid out for an engine: both sides, their blocks and masks, and the passes over them.

Positive: same label. Negative: another label. A row is never paired with itself; against a reference set, pairs of
equal id are left out when ids are known. Rows are sorted by label first, so that nearly every tile is purely
negative and needs no mask at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mettle.errors import InputError
from mettle.pairs.declarations import declared_traits
from mettle.pairs.interface import (
    Difficulty,
    Mask,
    Measure,
    PairLoss,
    Pass,
    Reduction,
    RowValues,
    Tile,
    temperature_of,
)
from mettle.pairs.selection import PairSelection, TileRelation, count_repeats
from mettle.pairs.similarity import (
    TileOperands,
    can_read,
    may_read,
    prepare_embeddings,
    prepare_sides,
    safe_sqrt,
    similarity,
    transforms_active,
)
from mettle.pairs.validation import Reference

ReductionsOfTile = Callable[[Tile, RowValues], dict[str, Reduction]]
STATISTIC = "difficulty."  # before the names of row statistics that a difficulty asked for


@dataclass(frozen=True)
class Side:
    """The labels (and ids, where known) of one side of the comparison, in the order in which tiles are cut."""

    labels: Tensor
    original_index: Tensor  # where each row came from
    ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def split_blocks(self, size: int) -> "list[RowBlock]":
        """Cut into blocks of ``size`` rows, each with its smallest and largest label (one transfer for all)."""
        n = len(self)
        starts = range(0, n, size)
        low = torch.stack([self.labels[i : i + size].amin() for i in starts]).tolist()
        high = torch.stack([self.labels[i : i + size].amax() for i in starts]).tolist()
        return [RowBlock(i, min(i + size, n), a, b) for i, a, b in zip(starts, low, high, strict=True)]


@dataclass(frozen=True)
class RowBlock:
    """Rows ``start:stop`` and the range of their labels."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        """The rows as a slice."""
        return slice(self.start, self.stop)


def relation_masks(a: Side, b: Side, i: RowBlock, j: RowBlock, *, same_set: bool) -> tuple[Mask, Mask]:
    """The positive and the negative pairs of one tile; plain booleans where the label ranges already decide.

    ``same_set``: both sides are the same rows in the same order, so the diagonal pairs a row with itself.
    """
    if (i.high < j.low or j.high < i.low) and (a.ids is None or b.ids is None):
        return False, True
    same = a.labels[i.rows, None] == b.labels[None, j.rows]
    pos, neg = same, ~same
    if same_set:
        if i.start == j.start:
            if can_read(same):  # in place, where no transform has to see it
                pos = same.fill_diagonal_(False)
            else:
                pos = pos & ~torch.eye(i.stop - i.start, dtype=torch.bool, device=same.device)
    elif a.ids is not None and b.ids is not None:
        other = a.ids[i.rows, None] != b.ids[None, j.rows]
        pos, neg = pos & other, neg & other
    return pos, neg


@dataclass(frozen=True)
class ResolvedPass:
    """One pass over the tiles: how to weigh them and what to accumulate."""

    reductions: ReductionsOfTile
    weights: Callable[[Tile, RowValues], Tensor | None]
    reads: Literal["none", "anchor", "both"]  # what reductions or weights use of earlier passes
    positives_only: bool = False
    as_pair_list: bool = False  # positive pairs may be taken one by one instead of tile by tile
    constant: bool = False  # no gradient flows through what this pass accumulates


@dataclass(frozen=True)
class PairProblem:
    """Prepared embeddings of both sides, their relation, and the loss that compares them."""

    loss: PairLoss
    difficulty: Difficulty | None
    left: Side
    right: Side
    z: Tensor
    ref: Tensor | None  # None: the batch is compared with itself
    second: tuple[Tensor, Tensor] | None  # a second encoder's embeddings of both sides
    selection: PairSelection | None = None  # which pairs there are, where labels do not say it

    @property
    def measure(self) -> Measure:
        """The similarity in use."""
        return self.loss.measure

    def parameters(self) -> list[Tensor]:
        """What loss and difficulty learn, other than embeddings: a temperature, say."""
        parts = (getattr(self.loss, "loss", self.loss), getattr(self.loss, "difficulty", None), self.difficulty)
        found = (p for part in parts if isinstance(part, nn.Module) for p in part.parameters() if p.requires_grad)
        return list({id(p): p for p in found}.values())

    def has_differentiable_weights(self) -> bool:
        """Whether gradient flows through the weights of pairs."""
        return self.difficulty is not None and not self.difficulty.detach

    def resolve_passes(self) -> list[ResolvedPass]:
        """The difficulty's row statistics first, if it needs any, then the passes of the loss."""
        resolved = self.resolve_statistics()
        difficulty = self.difficulty
        weights = self._weights
        statistics, traits = bool(resolved), declared_traits(difficulty)
        # Weights that differ between the two ends of a pair must be asked for at each end.
        apart = statistics or not (difficulty is None or traits.symmetric)
        for loss_pass in self.loss.passes():
            reads = "anchor" if apart and loss_pass.reads == "none" else loss_pass.reads
            positives_only = loss_pass.over == "positives"
            # A row statistic such as the hardest positive must meet exactly the similarity it was taken from, so a
            # difficulty that has any sees tiles throughout: a product of two rows rounds differently elsewhere.
            exact = statistics and not traits.continuous
            reductions = self._broadcast_reductions(loss_pass.reductions)
            resolved.append(
                ResolvedPass(
                    reductions, weights, reads, positives_only=positives_only, as_pair_list=positives_only and not exact
                )
            )
        return resolved

    def resolve_statistics(self) -> list[ResolvedPass]:
        """The passes for the row statistics of the difficulty, if it needs any."""
        difficulty = self.difficulty
        if difficulty is None or not difficulty.row_statistics(self.probe_tile()):
            return []

        def prefix_names(reductions: ReductionsOfTile) -> ReductionsOfTile:
            return self._broadcast_reductions(
                lambda tile, rows: {
                    f"{STATISTIC}{name}": acc for name, acc in reductions(tile, difficulty_statistics(rows)).items()
                }
            )

        return [
            ResolvedPass(
                prefix_names(one.reductions), lambda tile, row_values: None, reads=one.reads, constant=difficulty.detach
            )
            for one in statistic_passes(difficulty)
        ]

    def _broadcast_reductions(self, reductions: ReductionsOfTile) -> ReductionsOfTile:
        """The reductions of a tile, each broadcast to the whole tile."""

        def reduce_tile(tile: Tile, rows: RowValues) -> dict[str, Reduction]:
            try:
                found = reductions(tile, rows)
            except KeyError as error:
                raise_missing_row(self.loss, error, rows, "give its Pass reads='anchor' (or 'both')")
                raise
            found = {name: _broadcast_to_tile(name, acc, tile.similarity) for name, acc in found.items()}
            return {name: count_repeats(acc, tile.repeats) for name, acc in found.items()}

        return reduce_tile

    def _weights(self, tile: Tile, row_values: RowValues) -> Tensor | None:
        if self.difficulty is None:
            return None
        return evaluate_weights(self.difficulty, tile, difficulty_statistics(row_values))

    def tile(self, i: RowBlock, j: RowBlock, s: Tensor | None = None) -> Tile:
        """The anchors of ``i`` against the references of ``j``."""
        ref = self.z if self.ref is None else self.ref
        pos, neg, repeats, target = self._relate(i, j)
        second = operands = None
        if self.second is not None:
            second = similarity(self.second[0][i.rows], self.second[1][j.rows], self.measure)
        if s is None:
            operands = TileOperands(self.z, ref, i.rows, j.rows, self.measure)
            a, b = take_block(self.z, i), take_block(ref, j)
            if self.measure in ("squared", "euclidean"):
                d = operands.refine_small_distances(-similarity(a, b, "squared"), pos, neg).clamp(min=0)
                s = -d if self.measure == "squared" else -safe_sqrt(d)
            else:
                s = similarity(a, b, self.measure)
        at = self.left.original_index[i.rows, None], self.right.original_index[None, j.rows]
        labels = self.tile_labels((i.rows, None), (None, j.rows))
        made = Tile(s, pos, neg, *at, temperature_of(self.loss), second, operands, *labels)
        if self.selection is None:
            return made
        cast = {"repeats": repeats, "target": target}
        return replace(made, **{name: None if x is None else x.to(s.dtype) for name, x in cast.items()})

    def _relate(self, i: RowBlock, j: RowBlock) -> tuple[Mask, Mask, Tensor | None, Tensor | None]:
        """Positives, negatives, repeats and soft targets of a tile: by its labels, or as the call selects them."""
        if self.selection is None:
            return *relation_masks(self.left, self.right, i, j, same_set=self.ref is None), None, None
        found: TileRelation = self.selection.relation(i.rows, j.rows)
        pos, neg = found.positive, found.negative
        if self.left.ids is not None and self.right.ids is not None:
            other = self.left.ids[i.rows, None] != self.right.ids[None, j.rows]
            pos, neg = pos & other, neg & other
        return pos, neg, found.repeats, found.target

    def is_irrelevant(self, i: RowBlock, j: RowBlock, *, positives_only: bool) -> bool:
        """Whether a tile is known to hold no pair, or no positive pair, that a pass looks at."""
        if self.selection is not None:
            return self.selection.is_empty(i.rows, j.rows)
        return positives_only and (i.high < j.low or j.high < i.low)

    def tile_labels(self, i: tuple, j: tuple) -> tuple[Tensor, Tensor] | tuple[()]:
        """Labels of both ends of a tile, for a loss that has a number for each class."""
        reads = getattr(getattr(self.loss, "loss", self.loss), "reads_labels", False)
        return (self.left.labels[i], self.right.labels[j]) if reads else ()

    def whole_blocks(self) -> tuple[RowBlock, RowBlock]:
        """Both sides as one block each; the label range is left open so that masks are real tensors."""
        lowest, highest = -(2**63), 2**63 - 1
        return RowBlock(0, len(self.left), lowest, highest), RowBlock(0, len(self.right), lowest, highest)

    def probe_tile(self) -> Tile:
        """A tile of one pair, to learn which reductions there are before any work is done."""
        s, i, j = self.z.new_zeros(1, 1), self.left.original_index[:1, None], self.right.original_index[None, :1]
        pos, neg = (torch.zeros(1, 1, dtype=torch.bool, device=s.device) for _ in range(2))
        second, labels = None if self.second is None else s, self.tile_labels((slice(1), None), (None, slice(1)))
        made = Tile(s, pos, neg, i, j, temperature_of(self.loss), second, None, *labels)
        return replace(made, target=s) if self.selection is not None and self.selection.soft else made

    def max_positives(self) -> int:
        """The most positives that any anchor has; where nobody may look, the most that it could have."""
        if self.selection is not None:
            return max(self.selection.max_positives(), 1)
        if not may_read(self.right.labels):
            return len(self.right)
        labels, counts = self.right.labels.unique(return_counts=True)
        found = torch.searchsorted(labels, self.left.labels).clamp(max=len(labels) - 1)
        positives = torch.where(labels[found] == self.left.labels, counts[found], 0)
        return max(int(positives.max()) - (self.ref is None), 1)


def take_block(z: Tensor, block: RowBlock) -> Tensor:
    """The rows of a block; all of them without a view, which autograd would have to go back through."""
    return z if block.start == 0 and block.stop == len(z) else z[block.rows]


def statistic_passes(difficulty: Difficulty) -> tuple[Pass, ...]:
    """How the row statistics of a difficulty are accumulated: in one pass, unless it says otherwise."""
    several = getattr(difficulty, "statistic_passes", None)
    return (Pass(lambda tile, _: difficulty.row_statistics(tile)),) if several is None else several()


def evaluate_weights(difficulty: Difficulty, tile: Tile, statistics: RowValues) -> Tensor:
    """The weights of a tile, without gradient unless the difficulty wants one; checked unless it is trusted."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not difficulty.detach):
        w = difficulty.weights(tile, statistics)
    if difficulty.detach and isinstance(w, Tensor) and transforms_active():
        w = w.detach()  # forward-mode derivatives go through no_grad
    return (
        w if declared_traits(difficulty).trusted else _validate_weights(w, tile.similarity, type(difficulty).__name__)
    )


def _validate_weights(w: Any, s: Tensor, whose: str) -> Tensor:
    """Weights that nobody vouches for, one per pair of the tile."""
    if isinstance(w, (int, float)):
        w = torch.as_tensor(float(w), device=s.device)
    if not isinstance(w, Tensor):
        raise InputError(f"{whose}.weights must give a tensor or a number, got {type(w).__name__}")
    if w.device != s.device:
        raise InputError(f"{whose}.weights gave weights on {w.device} for embeddings on {s.device}: use one device")
    if may_read(w) and not bool((w >= 0).all()):
        raise InputError(f"{whose} gave a negative or NaN weight: weights must be at least 0")
    try:
        return w.to(s.dtype).expand_as(s)
    except RuntimeError as error:
        raise InputError(
            f"{whose}.weights gave weights of shape {tuple(w.shape)} for a tile of {tuple(s.shape)}: "
            "give one per pair, or a shape that broadcasts to that"
        ) from error


def _broadcast_to_tile(name: str, acc: Reduction, s: Tensor) -> Reduction:
    """A reduction with one value, and one entry of the mask, for every pair of the tile.

    One that takes no weights may stand on columns of its own, if its mask does too.
    """
    x, mask = acc.values, acc.mask
    if acc.weighting == "none" and isinstance(x, Tensor) and isinstance(mask, Tensor) and x.shape[:2] == mask.shape:
        return acc
    try:
        if isinstance(x, Tensor) and x.shape[:2] != s.shape:
            acc = replace(acc, values=x.expand(*s.shape, *x.shape[2:]))
        if isinstance(mask, Tensor) and mask.shape != s.shape:
            acc = replace(acc, mask=mask.expand_as(s))
    except RuntimeError as error:
        shapes = " and a mask of ".join(str(tuple(v.shape)) for v in (x, mask) if isinstance(v, Tensor))
        raise InputError(
            f"the reduction {name!r} has a shape of {shapes} on a tile of {tuple(s.shape)}: give one value per pair"
        ) from error
    return acc


def raise_missing_row(loss: PairLoss, error: KeyError, rows: RowValues, remedy: str) -> None:
    """Say what to do where a loss asks for a row that is not there; say nothing of other errors."""
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in rows:
        return
    whose = type(getattr(loss, "loss", loss)).__name__
    there = ", ".join(repr(key) for key in rows) or "none"
    raise InputError(
        f"{whose} asks for a row {name!r}, but the rows are {there}: accumulate it in reductions, or {remedy}"
    ) from error


def difficulty_statistics(row_values: RowValues) -> dict[str, Tensor]:
    """The row statistics that belong to the difficulty, under the names it gave them."""
    return {n.removeprefix(STATISTIC): row for n, row in row_values.items() if n.startswith(STATISTIC)}


def build_problem(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    ref: Reference | None,
    ids: Tensor | None,
    difficulty: Difficulty | None,
    biased: Tensor | tuple[Tensor, Tensor] | None,
    *,
    sort: bool,
    selection: PairSelection | None = None,
) -> tuple[PairProblem, Tensor | None]:
    """One call as a problem for an engine, and the order of its rows where these are sorted by label.

    Arguments as in `mettle.pairs.dispatch.pair_loss`, validated.
    """
    sort = sort and selection is None  # a selection is in the order of the batch
    order = torch.argsort(labels, stable=True) if sort else None

    if ref is None and loss.measure == "snr":
        # A pair looks different from its two ends, so the batch is a reference set of its own. A row meets itself by
        # its number and is left out, by a selection anyway.
        own = torch.arange(len(z), device=z.device)
        ref, ids = ((z, labels, own), own) if selection is None else ((z, labels), None)
        biased = (biased, biased) if isinstance(biased, Tensor) else biased
    left = make_side(labels, ids, order)
    if ref is None:
        anchors, second = prepare_embeddings(z, loss.measure), None
        if isinstance(biased, Tensor):
            rows = reorder(prepare_embeddings(biased, loss.measure).detach().to(anchors.dtype), order)
            second = rows, rows
        anchors, references = reorder(anchors, order), None
        if selection is not None and not selection.symmetric:
            # A pair and its mirror image may differ, so the batch is a reference set of its own. Two views of the rows:
            # neither may be part of the other's graph, or second derivatives would be counted twice.
            anchors, references = anchors.view_as(anchors), anchors.view_as(anchors)
        return PairProblem(loss, difficulty, left, left, anchors, references, second, selection), order
    ref_order = torch.argsort(ref[1], stable=True) if sort else None
    right = make_side(ref[1], ref[2] if len(ref) == 3 else None, ref_order)
    anchors, references = prepare_sides(z, ref[0], loss.measure)
    dtype = torch.promote_types(anchors.dtype, references.dtype)  # of two precisions the better one
    anchors, references = reorder(anchors.to(dtype), order), reorder(references.to(dtype), ref_order)
    second = None
    if isinstance(biased, tuple):
        first, other = (b.detach().to(dtype) for b in prepare_sides(*biased, loss.measure))
        second = reorder(first, order), reorder(other, ref_order)
    return PairProblem(loss, difficulty, left, right, anchors, references, second, selection), order


def reorder(x: Tensor, order: Tensor | None) -> Tensor:
    """The rows in this order, or as they are."""
    return x if order is None else x[order]


def make_side(labels: Tensor, ids: Tensor | None, order: Tensor | None) -> Side:
    """One side of the comparison, in this order."""
    if order is None:
        return Side(labels, torch.arange(len(labels), device=labels.device), ids)
    return Side(labels[order], order, None if ids is None else ids[order])
