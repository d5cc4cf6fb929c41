"""The positive pairs as a list: they are few, and a sweep that looks at nothing else need not touch any tile."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.pairs.interface import Tile
from mettle.pairs.problem import Job
from mettle.pairs.similarity import Sides

MOST = 1 << 16  # pairs handled at once
BLOCK = 128  # rows whose positives are compared by one matrix product
FEW = 64  # positives per anchor, on average, up to which a list is shorter work than tiles


@dataclass(frozen=True)
class Block:
    """Pairs ``pairs`` of a list lie in the block ``rows`` x ``columns`` of the matrix, at (``i``, ``j``) of it."""

    pairs: slice
    rows: slice
    columns: slice
    i: Tensor
    j: Tensor


@dataclass(frozen=True)
class Pairs:
    """Positions of anchors and references, in the order of the job, and the blocks of the matrix they lie in.

    Rows are sorted by label, so the positives of neighbouring rows are neighbouring columns: their products come from
    small blocks near the diagonal, which is several times faster than gathering two rows for every pair.
    """

    i: Tensor
    j: Tensor
    blocks: tuple[Block, ...]

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """(p, 1) dot products of row i of ``a`` with row j of ``b``."""
        parts = [(a[block.rows] @ b[block.columns].T)[block.i, block.j] for block in self.blocks]
        return torch.cat(parts).unsqueeze(1)

    def pull(self, g: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        """Add the gradient of `products`, given that of its values, (p, 1)."""
        for block in self.blocks:
            rows, columns = a[block.rows], b[block.columns]
            spread = g.new_zeros(len(rows), len(columns))
            spread[block.i, block.j] = g[block.pairs, 0]
            da[block.rows] += spread @ columns
            db[block.columns] += spread.T @ rows


def positive_pairs(job: Job) -> list[Pairs] | None:
    """Every positive pair of a job whose rows are sorted by label, in lists of bounded length.

    None where classes are so large that a list would be longer work than the tiles, and take more memory.
    """
    start = torch.searchsorted(job.right.labels, job.left.labels)
    stop = torch.searchsorted(job.right.labels, job.left.labels, right=True)
    counts = stop - start
    ends = counts.cumsum(0)
    found: list[Pairs] = []
    row, n, total, passed = 0, len(counts), int(ends[-1]), 0
    if total > FEW * n:
        return None
    while passed < total:
        last = int(torch.searchsorted(ends, min(passed + MOST, total)))
        last = max(last + (int(ends[min(last, n - 1)]) <= passed + MOST), row + 1)
        i = torch.repeat_interleave(torch.arange(row, last, device=ends.device), counts[row:last])
        first = torch.cat([ends.new_zeros(1), counts[row:last].cumsum(0)[:-1]])
        j = start[i] + torch.arange(len(i), device=i.device) - first[i - row]
        keep = i != j if job.ref is None else _other_ids(job, i, j)
        i, j = (i, j) if keep is None else (i[keep], j[keep])
        if len(i):
            found.append(Pairs(i, j, _blocks(i, j, start, stop, row, last)))
        row, passed = last, int(ends[last - 1])
    return found


def _blocks(i: Tensor, j: Tensor, start: Tensor, stop: Tensor, row: int, last: int) -> tuple[Block, ...]:
    """Cut the list where its anchors ``row`` to ``last`` - 1 cross a multiple of `BLOCK`."""
    firsts = list(range(row, last, BLOCK))
    lasts = [*firsts[1:], last]
    marks = torch.tensor([*firsts, last], device=i.device)
    cuts = torch.searchsorted(i, marks).tolist()
    low = start[marks[:-1]].tolist()
    high = stop[marks[1:] - 1].tolist()
    return tuple(
        Block(slice(p, q), slice(a, b), slice(c, d), i[p:q] - a, j[p:q] - c)
        for p, q, a, b, c, d in zip(cuts[:-1], cuts[1:], firsts, lasts, low, high, strict=True)
        if p < q
    )


def _other_ids(job: Job, i: Tensor, j: Tensor) -> Tensor | None:
    if job.left.ids is None or job.right.ids is None:
        return None
    return job.left.ids[i] != job.right.ids[j]


def listed(job: Job, pairs: Pairs) -> Tile:
    """A list of pairs as a tile of one column."""
    ref = job.z if job.ref is None else job.ref
    s = _similarity(pairs, job.z, ref, job.measure)
    biased = None if job.biased is None else _similarity(pairs, *job.biased, job.measure)
    pos = torch.ones_like(s, dtype=torch.bool)
    a, b = job.left.at[pairs.i, None], job.right.at[pairs.j, None]
    sides = Sides(job.z, ref, pairs.i, pairs.j, job.measure)
    return Tile(s, pos, False, a, b, job.loss.temperature, biased, sides)


def _similarity(pairs: Pairs, a: Tensor, b: Tensor, measure: str) -> Tensor:
    if measure == "squared":  # by differences: a small distance is not the difference of two large numbers
        return -(a[pairs.i] - b[pairs.j]).square().sum(1, keepdim=True)
    return pairs.products(a, b)
