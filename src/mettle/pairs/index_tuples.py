"""Pairs that a difficulty leaves in, and triplets, as lists of positions: what a miner hands to a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.dispatch import autocast_disabled
from mettle.pairs.interface import Difficulty, Mask, Measure, Pass, Tile
from mettle.pairs.problem import ResolvedPass, build_problem, difficulty_statistics, evaluate_weights
from mettle.pairs.selection import resolve_labels
from mettle.pairs.similarity import may_read
from mettle.pairs.tiled import TILE_ROWS, TileLoop
from mettle.pairs.validation import Reference, validate_inputs

IndexPairs = tuple[Tensor, Tensor, Tensor, Tensor]
"""(anchors, positives, anchors, negatives), int64 positions."""

IndexTriplets = tuple[Tensor, Tensor, Tensor]
"""(anchors, positives, negatives), int64 positions."""

TRIPLETS_AT_ONCE = 1 << 22  # looked at together while triplets are listed

EVERY_TILE = ResolvedPass(lambda tile, rows: {}, lambda tile, rows: None, reads="anchor")


@dataclass(frozen=True)
class _Comparison:
    """A "loss" without passes: only the row statistics of the difficulty are accumulated."""

    measure: Measure
    temperature: float

    def passes(self) -> tuple[Pass, ...]:
        return ()


@torch.no_grad()
def list_pairs(
    difficulty: Difficulty,
    z: Tensor,
    labels: Tensor,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    measure: Measure = "cosine",
    temperature: float = 1.0,
    tile: int | None = None,
) -> IndexPairs:
    """The pairs whose weight is not 0, in the order of anchors and references; one of weight k is listed k times.

    Tile by tile: memory is that of the list. ``measure`` and ``temperature`` are those of a loss; the other arguments
    are those of `mettle.pairs.dispatch.pair_loss`.
    """
    labels, ref, selection = resolve_labels(z, labels, ref, None)
    validate_inputs(z, labels, ref, ids, biased, tile)
    _validate_listing(measure, z, *(ref or ())[:1])
    positives: list[Tensor] = []
    negatives: list[Tensor] = []
    with autocast_disabled(z.device.type):
        loss: Any = _Comparison(measure, temperature)
        problem, _ = build_problem(loss, z, labels, ref, ids, difficulty, biased, sort=True, selection=selection)
        loop = TileLoop(problem, tile or TILE_ROWS)
        for current in loop.passes:
            loop.accumulate(current)
        for block in loop.blocks(EVERY_TILE):
            for visit in block.visits:
                rows = loop.earlier_values(EVERY_TILE, len(loop.values), visit)
                w = evaluate_weights(difficulty, visit.tile, difficulty_statistics(rows))
                for pairs, mask in ((positives, visit.tile.positive), (negatives, visit.tile.negative)):
                    if mask is not False:
                        pairs.append(_list_tile(w, mask, visit.tile, type(difficulty).__name__))
    anchors, references = _sort_pairs(positives, z)
    return anchors, references, *_sort_pairs(negatives, z)


@torch.no_grad()
def list_triplets(
    selects: Callable[[Tensor, Tensor, Tensor], Tensor],
    z: Tensor,
    labels: Tensor,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    measure: Measure = "cosine",
) -> IndexTriplets:
    """The triplets that a condition selects, by anchor, positive and negative; memory is that of the list.

    ``selects(anchors, positives, negatives)`` gives (c, b): of row i of the first two, (c, d), with row j of the third,
    (b, d). Rows are as ``measure`` compares them. The other arguments are those of `list_pairs`.
    """
    labels, ref, selection = resolve_labels(z, labels, ref, None)
    validate_inputs(z, labels, ref, ids, None)
    _validate_listing(measure, z, *(ref or ())[:1])
    found: list[Tensor] = [torch.empty(0, 3, dtype=torch.int64, device=z.device)]
    with autocast_disabled(z.device.type):
        loss: Any = _Comparison(measure, 1.0)
        problem, _ = build_problem(loss, z, labels, ref, ids, None, None, sort=False, selection=selection)
        references = problem.z if problem.ref is None else problem.ref
        _, everything = problem.whole_blocks()
        at_once = max(1, TRIPLETS_AT_ONCE // len(references))
        for block in problem.left.split_blocks(at_once):
            tile = problem.tile(block, everything)
            positive, negative = (torch.as_tensor(mask, device=z.device) for mask in (tile.positive, tile.negative))
            i, p = positive.expand(tile.similarity.shape).nonzero(as_tuple=True)
            negative = negative.expand(tile.similarity.shape)
            for start in range(0, len(i), at_once):
                rows, columns = i[start : start + at_once], p[start : start + at_once]
                chosen = selects(problem.z[rows + block.start], references[columns], references) & negative[rows]
                pair, n = chosen.nonzero(as_tuple=True)
                found.append(torch.stack([rows[pair] + block.start, columns[pair], n], 1))
    anchors, positives, negatives = torch.cat(found).unbind(1)
    return anchors.contiguous(), positives.contiguous(), negatives.contiguous()


def _validate_listing(measure: str, *embeddings: Tensor) -> None:
    """Refuse an unknown measure, and embeddings that cannot be looked at now or of which nothing can be said."""
    if measure not in get_args(Measure):
        raise InputError(f"measure must be one of {', '.join(get_args(Measure))}, got {measure!r}")
    for z in embeddings:
        if not may_read(z):
            raise InputError("while torch compiles or transforms, pairs cannot be listed: call the miner outside of it")
        if not bool(torch.isfinite(z).all()):
            raise InputError("embeddings hold NaN or infinity: nothing can be said about the difficulty of their pairs")


def _list_tile(w: Tensor, mask: Mask, tile: Tile, whose: str) -> Tensor:
    """(p, 2) anchors and references of the pairs of a tile, each as often as it weighs."""
    times = w.long()
    listed = (w != 0) if mask is True else (w != 0) & mask
    broken = listed & (times != w)
    if bool(broken.any()):
        raise InputError(
            f"{whose} gives weights such as {float(w[broken][0]):.4g}, and a list repeats a pair a whole number of "
            f"times: give the difficulty to the loss, difficulty={whose}(...)"
        )
    i, j = listed.nonzero(as_tuple=True)
    anchors, references = (x.expand(w.shape)[i, j] for x in (tile.anchor_index, tile.reference_index))
    return torch.stack([anchors, references], 1).repeat_interleave(times[i, j], 0)


def _sort_pairs(tiles: list[Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Anchors and references of all tiles, by anchor, then reference."""
    found = torch.cat(tiles) if tiles else torch.empty(0, 2, dtype=torch.int64, device=z.device)
    for column in (1, 0):
        found = found[found[:, column].argsort(stable=True)]
    return found[:, 0].contiguous(), found[:, 1].contiguous()
