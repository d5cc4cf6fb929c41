"""The positive pairs as a list: they are few, and a sweep that looks at nothing else need not touch any tile."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.pairs.contract import Tile
from mettle.pairs.job import Job

MOST = 1 << 16  # pairs handled at once
FEW = 64  # positives per anchor, on average, up to which a list is shorter work than tiles


@dataclass(frozen=True)
class Pairs:
    """Positions of anchors and references, in the order of the job."""

    i: Tensor
    j: Tensor


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
        found.append(Pairs(i[keep], j[keep]) if keep is not None else Pairs(i, j))
        row, passed = last, int(ends[last - 1])
    return found


def _other_ids(job: Job, i: Tensor, j: Tensor) -> Tensor | None:
    if job.left.ids is None or job.right.ids is None:
        return None
    return job.left.ids[i] != job.right.ids[j]


def listed(job: Job, pairs: Pairs) -> Tile:
    """A list of pairs as a tile of one column."""
    ref = job.z if job.ref is None else job.ref
    s = _similarity(job.z[pairs.i], ref[pairs.j], job.measure)
    biased = None
    if job.biased is not None:
        biased = _similarity(job.biased[0][pairs.i], job.biased[1][pairs.j], job.measure)
    pos = torch.ones_like(s, dtype=torch.bool)
    a, b = job.left.at[pairs.i, None], job.right.at[pairs.j, None]
    return Tile(s, pos, False, a, b, job.loss.temperature, biased)


def _similarity(a: Tensor, b: Tensor, measure: str) -> Tensor:
    if measure == "squared":
        return -(a - b).square().sum(1, keepdim=True)
    return (a * b).sum(1, keepdim=True)
