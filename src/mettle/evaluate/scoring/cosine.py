"""Unit vectors on an integer grid: cosines that are the same bits in any tile, any order and on any device.

**Why integers.** A matrix product rounds differently for different tile shapes, threads and devices, so equal
pairs would get unequal scores and a tie would depend on the batch size. Here unit vectors are rounded once to
multiples of 2⁻²⁶. Every product is then a multiple of 2⁻⁵² and, by Cauchy-Schwarz, every partial sum is at
most one in size: at most 2⁵² steps, which float64 holds exactly in any order of summation. The same pair has
the same score, bit for bit, in any tile, on any device. Rounding moves a cosine by about 1e-8, less than
float32 itself does, and the score is then stored as float32. For float64 rows a second limb continues each
component to 2⁻⁴⁶; scores are good to about 1e-14 and equal ones are those equal to 12 decimals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

HIGH, LOW = 2.0**26, 2.0**46
DECIMALS = 12  # of the scores of float64 rows
_CACHE = 1 << 16  # components normalised at a time
_ROOM = 1 << 24  # the same on an accelerator
_SQUARES = 2.0**36  # squares are summed as whole numbers of this: exact up to 2¹⁷ of them


@dataclass(frozen=True, eq=False)
class ExactUnitVectors:
    """Unit vectors on an integer grid; :meth:`cosine` and :meth:`paired` are exact, hence order-free.

    Attributes:
        high: (n, d) float64, the components as multiples of 2⁻²⁶.
        low: (n, d) float64, the rest as multiples of 2⁻⁴⁶, or None for float32 rows.
    """

    high: np.ndarray
    low: np.ndarray | None

    @classmethod
    def from_rows(
        cls, values: np.ndarray, double: bool | None = None, order: np.ndarray | None = None
    ) -> "ExactUnitVectors":
        """Normalise (n, d) rows, in another order where one is given; two limbs if ``double`` (float64 rows are)."""
        double = values.dtype == np.float64 if double is None else double
        high, low = np.empty(values.shape), np.empty(values.shape) if double else None
        for start in range(0, len(values), step := max(1, _CACHE // values.shape[1])):
            part = slice(start, start + step)
            x = values[part if order is None else order[part]].astype(np.float64)
            x /= np.maximum(x.max(axis=1), -x.min(axis=1))[:, None]  # so that squares neither overflow nor vanish
            x /= np.sqrt(_sum_squares(x, np.rint))[:, None]
            np.rint(np.multiply(x, HIGH, out=high[part]), out=high[part])
            high[part] /= HIGH
            if low is not None:
                np.subtract(x, high[part], out=x)
                np.rint(np.multiply(x, LOW, out=low[part]), out=low[part])
                low[part] /= LOW
        return cls(high, low)

    @property
    def dtype(self) -> type:
        """What scores are stored in: float64 for float64 rows, else float32."""
        return np.float32 if self.low is None else np.float64

    def __len__(self) -> int:
        return len(self.high)

    def vectors(self) -> np.ndarray:
        """The unit vectors in float64."""
        return self.high if self.low is None else self.high + self.low

    def as_float32(self) -> np.ndarray:
        """The vectors in float32, for fast scores."""
        return self.vectors().astype(np.float32)

    def take(self, at: np.ndarray | slice) -> "ExactUnitVectors":
        """Some of the rows."""
        return ExactUnitVectors(self.high[at], None if self.low is None else self.low[at])

    def cosine(self, other: "ExactUnitVectors", room: np.ndarray | None = None) -> np.ndarray:
        """s_ij = <u_i, v_j> as an (a, b) tile; ``room`` is a float64 buffer for the product, to be used again."""
        shape = len(self), len(other)
        out = None if room is None else room[: shape[0] * shape[1]].reshape(shape)
        if self.low is None or other.low is None:
            return _round_scores(np.matmul(self.high, other.high.T, out=out))
        cross = np.hstack([self.high, self.low]) @ np.hstack([other.low, other.high]).T
        return _round_scores(self.high @ other.high.T, cross)

    def rowwise_cosine(self, other: "ExactUnitVectors") -> np.ndarray:
        """s_i = <u_i, v_i>, one per row of two equally long sets."""
        if self.low is None or other.low is None:
            return _round_scores(np.einsum("ij,ij->i", self.high, other.high))
        cross = np.einsum("ij,ij->i", self.high, other.low) + np.einsum("ij,ij->i", self.low, other.high)
        return _round_scores(np.einsum("ij,ij->i", self.high, other.high), cross)


@dataclass(frozen=True, eq=False)
class ExactUnitTensor:
    """The same numbers on an accelerator: every step is one that all devices round alike."""

    high: Tensor
    low: Tensor | None

    @classmethod
    def from_rows(cls, values: Tensor, double: bool) -> "ExactUnitTensor":
        """Normalise (n, d) rows; two limbs if ``double``."""
        high = torch.empty(values.shape, dtype=torch.float64, device=values.device)
        low = torch.empty_like(high) if double else None
        for start in range(0, len(values), step := max(1, _ROOM // values.shape[1])):
            part = slice(start, start + step)
            x = values[part].double()
            x = x / x.abs().amax(1, keepdim=True)
            x = x / _sum_squares(x, torch.round).sqrt()[:, None]
            high[part] = torch.round(x * HIGH) / HIGH
            if low is not None:
                low[part] = torch.round((x - high[part]) * LOW) / LOW
        return cls(high, low)

    def vectors(self) -> Tensor:
        """The unit vectors in float64."""
        return self.high if self.low is None else self.high + self.low

    def rowwise_cosine(self, other: "ExactUnitTensor", i: Tensor, j: Tensor) -> Tensor:
        """The scores of some pairs, by position on either side."""
        one, two = self.high[i], other.high[j]
        dot = (one * two).sum(1)
        if self.low is None or other.low is None:
            return dot.float().clamp_(-1, 1)
        cross = (one * other.low[j]).sum(1) + (self.low[i] * two).sum(1)
        return torch.round((dot + cross) * 10.0**DECIMALS) / 10.0**DECIMALS


def normalize_rows(x: np.ndarray) -> np.ndarray:
    """Rows of length 1 in float64, whatever their length was; a row of zeros stays one."""
    x = x.astype(np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)  # first: squares of huge or tiny numbers are none
    x /= np.where(largest > 0, largest, 1)
    length = np.sqrt((x * x).sum(axis=1, keepdims=True))
    return x / np.where(length > 0, length, 1)


def _sum_squares(x: Any, rint: Callable[[Any], Any]) -> Any:
    """Σ x² of each row, entries at most one in size, as whole numbers of two sizes: no order of summation shows."""
    square = x * x * _SQUARES
    coarse = rint(square)
    fine = rint((square - coarse) * _SQUARES)
    return (coarse.sum(1) + fine.sum(1) / _SQUARES) / _SQUARES


def _round_scores(dot: np.ndarray, cross: np.ndarray | None = None) -> np.ndarray:
    """Round exact products to scores: float32 from one limb, 12 decimals of float64 from two."""
    if cross is None:
        s = dot.astype(np.float32)
        return np.clip(s, -1, 1, out=s)
    dot += cross
    return np.round(dot, DECIMALS, out=dot)
