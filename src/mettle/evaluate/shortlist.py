"""A list of the hardest pairs that stays short: however many pairs are equally hard, memory does not grow.

Pairs have one order: harder ones first, equally hard ones by their two positions. The list holds the first of all that
were offered, whatever order they came in.
"""

import numpy as np

_PIECE = 1 << 16  # pairs that are sorted at a time


class Shortlist:
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
    def bar(self) -> float:
        """How hard a pair must be, at least, to be of interest."""
        return float(self.hardness[-1]) if len(self.hardness) == self.room else -np.inf

    def offer(self, one: np.ndarray, two: np.ndarray, hardness: np.ndarray) -> None:
        """Put these pairs where they belong, as far as they do."""
        for start in range(0, len(one), _PIECE):
            part = slice(start, start + _PIECE)
            self._offer(np.minimum(one[part], two[part]), np.maximum(one[part], two[part]), hardness[part])

    def _offer(self, first: np.ndarray, second: np.ndarray, hardness: np.ndarray) -> None:
        new = hardness >= self.bar
        if len(self.hardness) == self.room:  # among those as hard as the last one only earlier ones
            i, j = self.first[-1], self.second[-1]
            new &= (hardness > self.bar) | (first < i) | ((first == i) & (second < j))
        if not new.any():
            return
        first, second = np.append(self.first, first[new]), np.append(self.second, second[new])
        hardness = np.append(self.hardness, hardness[new].astype(np.float64))
        best = np.lexsort((second, first, -hardness))[: self.room]
        self.first, self.second, self.hardness = first[best], second[best], hardness[best]
