"""A list of the hardest pairs that stays short: however many pairs are equally hard, memory does not grow.

Pairs have one order: harder ones first, equally hard ones by their two positions. The list holds the first of all that
were offered, whatever order they came in.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import check_embeddings, check_int
from mettle.evaluate.scoring.cpu_passes import FastPasses
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.unknown_names import explain_arguments

_OFFERED = 1 << 18  # pairs of a tile that are looked at in one go
_SCORED_AT_ONCE = 1 << 14  # pairs scored at a time
_ROWS = 512  # of a tile
_SORTED_AT_ONCE = 1 << 16  # pairs that are sorted at a time


@dataclass(frozen=True)
class HardPair:
    """Two samples by position, and their cosine."""

    first: int
    second: int
    score: float


@explain_arguments
def hardest_pairs(
    embeddings: Any, labels: Any, kind: Literal["genuine", "impostor"], *, count: int = 20, each: int = 2
) -> list[HardPair]:
    """The hardest pairs, hardest first: genuine ones with the lowest score, impostors with the highest.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        kind: which.
        count: how many.
        each: how many of them may show the same two labels.
    """
    if kind not in ("genuine", "impostor"):
        raise InputError(f"kind must be 'genuine' or 'impostor': got {kind!r}")
    check_int(count, "count", 1)
    check_int(each, "each", 1)
    rows, sign = check_embeddings(embeddings, labels), 1 if kind == "impostor" else -1
    design = PairTiles.from_sets(rows, None, "all", _ROWS)
    room = 64 * count  # enough that a cap of `each` per two labels cannot run dry, unless one class holds all
    best = _hardest_genuine(design, room) if kind == "genuine" else _hardest_impostors(design, room)
    seen: dict[tuple[int, int], int] = {}
    found = []
    for a, b, value in zip(best.first.tolist(), best.second.tolist(), (sign * best.hardness).tolist(), strict=True):
        low, high = sorted((int(rows.labels[a]), int(rows.labels[b])))
        seen[low, high] = seen.get((low, high), 0) + 1
        if seen[low, high] <= each:
            found.append(HardPair(a, b, value))
    return found[:count]


class TopPairs:
    """The first ``room`` pairs in that order.

    Attributes:
        first: the smaller position of each pair.
        second: the larger one.
        hardness: of each pair, falling.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.first, self.second = np.empty((2, 0), np.int64)
        self.hardness = np.empty(0)

    @property
    def min_hardness(self) -> float:
        """How hard a pair must be, at least, to be of interest."""
        return float(self.hardness[-1]) if len(self.hardness) == self.room else -np.inf

    def add(self, one: np.ndarray, two: np.ndarray, hardness: np.ndarray) -> None:
        """Put these pairs where they belong, as far as they do."""
        for start in range(0, len(one), _SORTED_AT_ONCE):
            part = slice(start, start + _SORTED_AT_ONCE)
            self._add_distinct(np.minimum(one[part], two[part]), np.maximum(one[part], two[part]), hardness[part])

    def _add_distinct(self, first: np.ndarray, second: np.ndarray, hardness: np.ndarray) -> None:
        new = hardness >= self.min_hardness
        if len(self.hardness) == self.room:  # among those as hard as the last one only earlier ones
            i, j = self.first[-1], self.second[-1]
            new &= (hardness > self.min_hardness) | (first < i) | ((first == i) & (second < j))
        if not new.any():
            return
        first, second = np.append(self.first, first[new]), np.append(self.second, second[new])
        hardness = np.append(self.hardness, hardness[new].astype(np.float64))
        best = np.lexsort((second, first, -hardness))[: self.room]
        self.first, self.second, self.hardness = first[best], second[best], hardness[best]


def _hardest_genuine(design: PairTiles, room: int) -> TopPairs:
    """The genuine pairs with the lowest scores."""
    best, order = TopPairs(room), design.order[0]
    i, j = design.genuine_pairs()
    for at in range(0, len(i), _SCORED_AT_ONCE):
        one, two = i[at : at + _SCORED_AT_ONCE], j[at : at + _SCORED_AT_ONCE]
        best.add(order[one], order[two], -design.score_pairs(one, two))
    return best


def _hardest_impostors(design: PairTiles, room: int) -> TopPairs:
    """The impostor pairs with the highest scores: fast scores say which to score exactly."""
    best, order, fast = TopPairs(room), design.order[0], FastPasses(design)
    for rows, cols, tile in fast.tiles(-np.inf):
        width = cols.stop - cols.start
        for start in range(0, len(tile), step := max(1, _OFFERED // width)):
            part = slice(rows.start + start, min(rows.start + start + step, rows.stop))
            at = _may_be_among_best(
                tile[start : start + step].reshape(-1), room, best.min_hardness, fast.score_error_bound
            )
            i, j = np.divmod(at, width)
            best.add(order[part.start + i], order[cols.start + j], fast.exact_scores(part, cols, at))
    return best


def _may_be_among_best(rough: np.ndarray, room: int, bar: float, slack: float) -> np.ndarray:
    """Where fast scores, off by ``slack`` at most, leave it open that a pair is among the best ``room``."""
    if bar == -np.inf and len(rough) > room:  # nothing to measure them by but themselves
        bar = float(np.partition(rough, len(rough) - room)[-room]) - slack
    return np.flatnonzero((rough > -np.inf) & (rough >= bar - 2 * slack))
