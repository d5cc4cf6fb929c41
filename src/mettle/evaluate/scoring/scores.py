"""Scores of pairs, in blocks by kind, and all of them sorted.

Where they come from:

    Rows -> Unit (unit vectors on an integer grid) -> Design (which pairs) -> blocks ─┬─► Scores   sorted, in memory
                                                                                     └─► Counted  bins (counted.py)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import both_kinds


def acting(threshold: float | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A threshold among scores of this type: the least of their numbers that is not below it, nor −∞.

    Rounded to the nearest, 0.5 + 1e-9 would be 0.5 in float32, and accept what scores less than was asked for.
    """
    wanted = np.asarray(threshold, np.float64)
    with np.errstate(over="ignore"):
        t = wanted.astype(dtype)
    t = np.where(t < wanted, np.nextafter(t, np.asarray(np.inf, dtype)), t)
    return np.maximum(t, np.finfo(dtype).min).astype(dtype)


class Block(NamedTuple):
    """Some scored pairs; subjects are empty unless asked for.

    With subjects, impostors may come as a tile, whose subjects are then a column and a row.
    """

    genuine: np.ndarray
    genuine_subject: np.ndarray
    impostor: np.ndarray
    impostor_subjects: tuple[np.ndarray, np.ndarray]


Stream = Callable[[bool], Iterator[Block]]  # stream(with_subjects) replays all pairs from the start


@dataclass(frozen=True, eq=False)
class Scores:
    """All scores of one evaluation, sorted, and the way to walk through the pairs again.

    Attributes:
        genuine: genuine scores, ascending.
        impostor: impostor scores, ascending.
        subjects: how many subjects take part, 0 when unknown.
        stream: replays the pairs with subject codes 0 … subjects-1; what the bootstrap needs is not stored
            (two codes for each of 32 million pairs) but computed again, identically, when asked for.
    """

    genuine: np.ndarray
    impostor: np.ndarray
    subjects: int
    stream: Stream

    @classmethod
    def of(cls, stream: Stream, bound: tuple[int, int], dtype: type, subjects: int) -> "Scores":
        """Drain a stream of at most ``bound`` (genuine, impostor) pairs and sort it in place."""
        sides = tuple(np.empty(n, dtype) for n in bound)  # untouched pages of an upper bound cost nothing
        filled = [0, 0]
        for block in stream(False):
            for side, part in enumerate((block.genuine, block.impostor)):
                sides[side][filled[side] : filled[side] + len(part)] = part
                filled[side] += len(part)
        both_kinds(*filled)
        genuine, impostor = (a[:n] for a, n in zip(sides, filled, strict=True))
        genuine.sort()
        impostor.sort()
        return cls(genuine, impostor, subjects, stream)

    @property
    def impostors(self) -> int:
        """Number of impostor pairs."""
        return len(self.impostor)

    @property
    def dtype(self) -> np.dtype:
        """Of the scores."""
        return self.impostor.dtype

    @property
    def failed(self) -> tuple[int, int]:
        """Genuine and impostor pairs with a failed template, whose score is −∞."""
        genuine, impostor = (np.searchsorted(a, a.dtype.type(-np.inf), "right") for a in (self.genuine, self.impostor))
        return int(genuine), int(impostor)

    def below(self, thresholds: np.ndarray) -> np.ndarray:
        """#impostor < τ for each threshold."""
        return np.searchsorted(self.impostor, acting(thresholds, self.dtype), side="left")

    def quantiles(self, ranks: np.ndarray) -> np.ndarray:
        """The impostor scores at these ascending ranks."""
        return self.impostor[np.clip(np.rint(ranks), 0, len(self.impostor) - 1).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class Listed:
    """Pairs named one by one: (m, 2) row numbers and the truth, with vectors or ready-made scores."""

    score: Callable[[slice], np.ndarray]
    target: np.ndarray
    subject: tuple[np.ndarray, np.ndarray] | None
    chunk: int = 1 << 18

    def stream(self, with_subjects: bool) -> Iterator[Block]:
        """Score the list, piece by piece."""
        if with_subjects and self.subject is None:
            raise InputError("intervals resample subjects: pass subjects, the (m, 2) labels of the scored pairs")
        for start in range(0, len(self.target), self.chunk):
            part = slice(start, start + self.chunk)
            s, t = self.score(part), self.target[part]
            if with_subjects and self.subject is not None:
                a, b = self.subject[0][part], self.subject[1][part]
            else:
                a = b = np.empty(len(t), np.int32)
            yield Block(s[t], a[t], s[~t], (a[~t], b[~t]))
