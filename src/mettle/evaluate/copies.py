"""Embeddings that occur twice, number for number: a sample that is its own neighbour, unless ids say otherwise.

Rows are compared by a hash of their bits, −0 as 0, and equal hashes by the rows themselves.
"""

from dataclasses import dataclass

import numpy as np

from mettle.errors import DataError
from mettle.evaluate.rows import Rows

MOST, FEW = 0.5, 10  # of a side, and in all: so many rows on both sides are one set used twice, fewer may be chance
LISTED = 20  # copies that are named
_CELLS = 1 << 20


@dataclass(frozen=True, eq=False)
class Copies:
    """Rows of one table that equal another row, sample by sample.

    Attributes:
        rows: how many rows equal a row of another sample.
        vectors: how many different vectors they are.
        contradictions: how many of these vectors carry several labels.
        examples: positions of the first rows of some of them, those with several labels first.
    """

    rows: int
    vectors: int
    contradictions: int
    examples: tuple[tuple[int, ...], ...]


def within(values: np.ndarray, labels: np.ndarray, ids: np.ndarray) -> Copies:
    """Copies among the rows of one table; rows of one id are one sample and no copies."""
    first = np.sort(np.unique(ids, return_index=True)[1])
    keys, labels = hashes(values)[first], labels[first]
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0))
    groups = [order[a:b] for a, b in zip(starts, np.append(starts[1:], len(order)), strict=True) if b - a > 1]
    groups = [g for group in groups for g in _equal(values, first, group)]
    torn = {k for k, group in enumerate(groups) if len(np.unique(labels[group])) > 1}
    shown = sorted(range(len(groups)), key=lambda k: (k not in torn, int(groups[k][0])))[:LISTED]
    return Copies(
        sum(len(group) for group in groups),
        len(groups),
        len(torn),
        tuple(tuple(first[groups[k]][:4].tolist()) for k in shown),
    )


def _equal(values: np.ndarray, first: np.ndarray, group: np.ndarray) -> list[np.ndarray]:
    """A group of one hash, split where the rows differ after all."""
    found = []
    while len(group) > 1:
        same = (values[first[group]] == values[first[group[0]]]).all(axis=1)
        if np.count_nonzero(same) > 1:
            found.append(group[same])
        group = group[~same]
    return found


def across(one: Rows, two: Rows, first: str, second: str) -> tuple[str, ...]:
    """Look for samples on both sides where no ids tell samples apart.

    Args:
        one: a side.
        two: the other.
        first: what the first side is called.
        second: what the second is called.

    Returns:
        A warning, where some rows of one label are on both sides.

    Raises:
        DataError: at least half of a side, and ten rows, are on the other: one set was given twice.
    """
    if one.ids is not None and two.ids is not None:
        return ()
    double = one.double and two.double
    keys = [hashes(side.given, double) for side in (one, two)]
    marked = [key ^ side.labels.view(np.uint64) * _ODD for key, side in zip(keys, (one, two), strict=True)]
    both, *at = np.intersect1d(marked[0], marked[1], return_indices=True)
    type_ = np.float64 if double else np.float32
    rows = (np.asarray(_here(side.given, i), type_) for side, i in zip((one, two), at, strict=True))
    both = both[np.equal(*rows).all(axis=1)] if len(both) else both
    for mark, key, name, other in zip(marked, keys, (first, second), (second, first), strict=True):
        count = int(np.isin(mark, both).sum())
        if count >= max(FEW, MOST * len(key)) and (key != key[0]).any():  # all alike is a collapse, not a set twice
            raise DataError(
                f"leak: {count} of {len(key)} rows of {name} are also in {other}, number for number and with the same "
                "label; a sample compared with itself is always right, so take them out of one side, or pass sample "
                "ids for both sides"
            )
    if not len(both):
        return ()
    count = int(np.isin(marked[1], both).sum())
    return (
        f"{count} of {len(two)} rows of {second} equal a row of {first} with the same label, number for number: if "
        "they are the same samples they flatter; sample ids for both sides tell",
    )


_ODD = np.uint64(0x9E3779B97F4A7C15)


def hashes(values: object, double: bool = True) -> np.ndarray:
    """(n,) uint64, equal for rows that are equal number for number, in float32 unless both sides are ``double``."""
    shape = values.shape  # type: ignore[attr-defined]
    factors = np.random.default_rng(0).integers(1 << 62, size=2 * shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(
        1
    )
    found = np.empty(shape[0], np.uint64)
    for start in range(0, shape[0], step := max(1, _CELLS // shape[1])):
        part = _here(values, slice(start, start + step))
        part = part if double else part.astype(np.float32, copy=False)
        bits = np.ascontiguousarray(part + part.dtype.type(0)).view(np.uint32)
        found[start : start + step] = (bits * factors[: bits.shape[1]]).sum(axis=1, dtype=np.uint64)
    return found


def _here(values: object, at: slice | np.ndarray) -> np.ndarray:
    """Some rows, in main memory."""
    part = values[at]  # type: ignore[index]
    return part if isinstance(part, np.ndarray) else part.cpu().numpy()
