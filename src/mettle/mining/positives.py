"""The positives of every anchor: other samples of its label, the least similar one, one at random, or all.

Labels of one size are worked on together, so that a million labels of two rows take as few steps as one of a thousand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mettle.errors import InputError
from mettle.mining.neighbors import score_lists, score_pairs
from mettle.rng import uniform_per_id

Positives = Literal["hardest", "random", "all"]

CELLS = 1 << 22  # scores held at a time
ROWS = 1 << 16  # rows that are gathered at a time
FEW = 8  # positives that are ranked in float64: equal ones are taken by their number
MOST = 20_000_000  # pairs of an anchor and a positive that are held
STREAM = 31


@dataclass(frozen=True, eq=False)
class PositivePairs:
    """Pairs of an anchor and a positive, by rising anchor: rows (p,), rows (p,) and their cosines (p,)."""

    anchors: np.ndarray
    positives: np.ndarray
    scores: np.ndarray


def choose_positives(
    unit: np.ndarray, labels: np.ndarray, ids: np.ndarray, across: np.ndarray | None, which: Positives, seed: int
) -> PositivePairs:
    """The positives of every row that has one.

    Args:
        unit: (n, d) float32 rows of unit length.
        labels: (n,) integers.
        ids: (n,) integers: rows of one id are one sample, and no positives of each other.
        across: (n,) integers: a positive differs from its anchor in this; None: it need not.
        which: ``hardest`` for the least similar one, ``random`` for one drawn by the seed, ``all`` for each.
        seed: of the draw.
    """
    anchors, positives = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    held = 0
    for own, members in _blocks(labels):
        usable = ids[own][:, :, None] != ids[members][:, None, :]
        if across is not None:
            usable &= across[own][:, :, None] != across[members][:, None, :]
        if which == "all":
            group, i, j = np.nonzero(usable)
            held += len(i)
            if held > MOST:
                raise InputError(
                    f"positives='all' makes more than {MOST:,} pairs of an anchor and a positive: take 'hardest' or "
                    "'random', one for each anchor"
                )
            anchors.append(own[group, i])
            positives.append(members[group, j])
            continue
        there = usable.any(2)
        pick = _pick_hardest if which == "hardest" else _pick_random
        anchors.append(own[there])
        positives.append(pick(unit, own, members, usable, seed)[there])
    a, p = np.concatenate(anchors), np.concatenate(positives)
    order = np.lexsort((p, a))
    return PositivePairs(a[order], p[order], score_pairs(unit, a[order], p[order]))


def _blocks(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows (g, r) and all rows of the same labels (g, c), both rising, for labels of one size at a time."""
    order = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    for size in np.unique(sizes[sizes > 1]).tolist():
        begins = starts[sizes == size]
        step = max(1, min(CELLS // size**2, ROWS // size))
        rows = max(1, min(size, CELLS // size))
        for k in range(0, len(begins), step):
            members = order[begins[k : k + step, None] + np.arange(size)]
            for start in range(0, size, rows):
                yield members[:, start : start + rows], members


def _pick_hardest(unit: np.ndarray, own: np.ndarray, members: np.ndarray, usable: np.ndarray, seed: int) -> np.ndarray:
    """(g, r) the usable member of the lowest cosine, the first of equal ones; anything where there is none."""
    one, other = torch.from_numpy(unit[own]), torch.from_numpy(unit[members])
    scores = (one @ other.mT).masked_fill_(~torch.from_numpy(usable), torch.inf)
    low = scores.topk(min(FEW, scores.shape[2]), dim=2, largest=False)
    found = np.take_along_axis(members[:, None, :], low.indices.numpy(), 2).reshape(own.size, -1)
    exact = score_lists(unit, own.reshape(-1), found)
    exact[~torch.isfinite(low.values).numpy().reshape(own.size, -1)] = np.inf
    first = np.lexsort((found, exact), axis=-1)[:, :1]
    return np.take_along_axis(found, first, 1).reshape(own.shape)


def _pick_random(unit: np.ndarray, own: np.ndarray, members: np.ndarray, usable: np.ndarray, seed: int) -> np.ndarray:
    """(g, r) a usable member, a pure function of the seed and the anchor; anything where there is none."""
    u = uniform_per_id(seed, 0, own.reshape(-1), 1, stream=STREAM).reshape(own.shape)
    place = (u * usable.sum(2)).astype(np.int64)
    at = (np.cumsum(usable, 2) > place[:, :, None]).argmax(2)
    return np.take_along_axis(members, at, 1)
