"""Embeddings that occur twice: a sample that is its own neighbour, unless ids say otherwise.

Rows are equal number for number (by a hash of their bits, −0 as 0, then by the rows themselves), or, between two sides,
up to their length, because cosines do not see it: a normalised gallery against the queries it was made of. Those are
found along a fixed random direction g: where cos(u, v) ≥ 1 − ε, the places <g, u> and <g, v> are within √(2ε), so that
only neighbours along g, and near along three more, are looked at. No grid is laid over the places: there is no edge for
a pair to fall across.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mettle.errors import DataError
from mettle.evaluate.inputs import EmbeddingSet
from mettle.evaluate.scoring.cosine import normalize_rows

MOST, FEW = 0.5, 10  # of a side, and in all: so many rows on both sides are one set used twice, fewer may be chance
LISTED = 20  # copies that are named
COSINE = 1 - 1e-6  # of one direction: float32 and float16 round by less
NEAR = 16  # neighbours along g that are looked at, to either side; a copy is nearly always the first
_REACH = (2 * (1 - COSINE)) ** 0.5
_CELLS = 1 << 20
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Duplicates:
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


def find_duplicates(values: np.ndarray | torch.Tensor, labels: np.ndarray, ids: np.ndarray) -> Duplicates:
    """Copies among the rows of one table; rows of one id are one sample and no copies."""
    first = np.sort(np.unique(ids, return_index=True)[1])
    keys, labels = hash_rows(values)[first], labels[first]
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0))
    sizes = np.diff(np.append(starts, len(order)))
    several = zip(starts[sizes > 1], sizes[sizes > 1], strict=True)
    groups = [g for a, n in several for g in _split_unequal(values, first, order[a : a + n])]
    torn = {k for k, group in enumerate(groups) if len(np.unique(labels[group])) > 1}
    shown = sorted(range(len(groups)), key=lambda k: (k not in torn, int(groups[k][0])))[:LISTED]
    return Duplicates(
        sum(len(group) for group in groups),
        len(groups),
        len(torn),
        tuple(tuple(first[groups[k]][:4].tolist()) for k in shown),
    )


def _split_unequal(values: np.ndarray | torch.Tensor, first: np.ndarray, group: np.ndarray) -> list[np.ndarray]:
    """A group of one hash, split where the rows differ after all."""
    found = []
    rows = _rows_in_memory(values, first[group])
    while len(group) > 1:
        same = (rows == rows[0]).all(axis=1)
        if np.count_nonzero(same) > 1:
            found.append(group[same])
        group, rows = group[~same], rows[~same]
    return found


def warn_duplicates(rows: EmbeddingSet) -> tuple[str, ...]:
    """A warning of copies in a set that is compared with itself, where there are some."""
    c = find_duplicates(rows.given, rows.labels, np.arange(len(rows)) if rows.ids is None else rows.ids)
    if not c.rows or (c.vectors == 1 and c.rows == len(rows)):  # all alike is a collapse: ties tell
        return ()
    torn = f"; {c.contradictions:,} of these vectors carry several labels" if c.contradictions else ""
    return (
        f"{c.rows:,} of {len(rows):,} rows are exact copies of another row ({c.vectors:,} vectors occur more than "
        f"once, first rows {c.examples[0][0]} and {c.examples[0][1]}{torn}): copies find each other, so errors look "
        "rarer than they are; leave one of each, or give copies one id",
    )


def check_shared_samples(one: EmbeddingSet, two: EmbeddingSet, first: str, second: str) -> tuple[str, ...]:
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
    (left, right), several = _find_equal_rows(one, two)
    how = "number for number"
    if several and _is_telling(one, two):
        at = _project_directions(one), _project_directions(two)
        scaled = _find_same_direction(one, two, ~left, *at), _find_same_direction(two, one, ~right, *at[::-1])
        how = "up to their length" if any(side.any() for side in scaled) else how
        left, right = left | scaled[0], right | scaled[1]
    for side, name, other in ((left, first, second), (right, second, first)):
        count = int(side.sum())
        if several and count >= max(FEW, MOST * len(side)):
            raise DataError(
                f"leak: {count} of {len(side)} rows of {name} are also in {other}, {how} and with the same label; a "
                "sample compared with itself is always right, so take them out of one side, or pass sample ids for "
                "both sides"
            )
    if not right.any():
        return ()
    return (
        f"{int(right.sum())} of {len(two)} rows of {second} equal a row of {first} with the same label, {how}: if "
        "they are the same samples they flatter; sample ids for both sides tell",
    )


def in_cohort(cohort: np.ndarray, *sides: EmbeddingSet) -> tuple[str, ...]:
    """A warning of cohort members that are compared themselves, where there are some."""
    members = EmbeddingSet(cohort, np.zeros(len(cohort), np.int64))
    found = np.zeros(len(cohort), bool)
    for side in sides:
        others = EmbeddingSet(side.given, np.zeros(len(side), np.int64))
        found |= _find_same_direction(
            members, others, ~found, _project_directions(members), _project_directions(others)
        )
    if not found.any():
        return ()
    return (
        f"{int(found.sum())} of {len(cohort)} members of the cohort are samples that are compared here: a cohort is of "
        "people who take part in no trial, else scores are normalised by their own subjects",
    )


def _find_equal_rows(one: EmbeddingSet, two: EmbeddingSet) -> tuple[list[np.ndarray], bool]:
    """Rows of either side that equal a row of one label on the other; whether both sides are more than one vector."""
    double = one.is_float64 and two.is_float64
    keys = [hash_rows(side.given, double) for side in (one, two)]
    marked = [key ^ side.labels.view(np.uint64) * _ODD for key, side in zip(keys, (one, two), strict=True)]
    both, *at = np.intersect1d(marked[0], marked[1], return_indices=True)
    type_ = np.float64 if double else np.float32
    rows = (np.asarray(_rows_in_memory(side.given, i), type_) for side, i in zip((one, two), at, strict=True))
    both = both[np.equal(*rows).all(axis=1)] if len(both) else both
    several = all((key != key[0]).any() for key in keys)  # all alike is a collapse, not a set used twice
    return [np.isin(mark, both) for mark in marked], several


def _is_telling(one: EmbeddingSet, two: EmbeddingSet) -> bool:
    """Whether a direction says which sample it is: not where all people, or all samples of one, share theirs."""
    rng = np.random.default_rng(0)
    i, j = rng.integers(len(one), size=1000), rng.integers(len(two), size=1000)
    others = one.labels[i] != two.labels[j]
    if others.any() and _have_one_direction(one, i[others], two, j[others]).mean() > 0.01:
        return False
    for side in (one, two):
        order = np.argsort(side.labels, kind="stable")
        pairs = np.flatnonzero(side.labels[order][1:] == side.labels[order][:-1])[:1000]
        if len(pairs) and _have_one_direction(side, order[pairs], side, order[pairs + 1]).mean() > 0.5:
            return False
    return True


def _find_same_direction(
    one: EmbeddingSet, two: EmbeddingSet, wanted: np.ndarray, own: np.ndarray, others: np.ndarray
) -> np.ndarray:
    """Rows of one side, of those wanted, that have the direction and the label of a row on the other, by places."""
    labels = np.unique(np.concatenate([one.labels, two.labels]), return_inverse=True)[1].reshape(-1)
    rows = np.flatnonzero(wanted)
    own = own[rows]
    here = 3.0 * labels[: len(one)][rows] + own[:, 0]  # places lie in [−1, 1]: labels stay apart
    there = 3.0 * labels[len(one) :] + others[:, 0]
    order = np.argsort(there, kind="stable")
    there, others = there[order], others[order]
    at = np.searchsorted(there, here)
    found = np.zeros(len(one), bool)
    for step in range(NEAR):
        looked = 0
        for place in (at + step, at - 1 - step):
            inside_ = (place >= 0) & (place < len(there)) & ~found[rows]
            k = np.flatnonzero(inside_)
            k = k[np.abs(there[place[k]] - here[k]) <= _REACH]
            looked += len(k)
            k = k[(np.abs(others[place[k]] - own[k]) <= _REACH).all(axis=1)]
            found[rows[k]] |= _have_one_direction(one, rows[k], two, order[place[k]])
        if not looked:
            break
    return found


def _have_one_direction(one: EmbeddingSet, i: np.ndarray, two: EmbeddingSet, j: np.ndarray) -> np.ndarray:
    """Whether these pairs of rows have one direction."""
    found = np.empty(len(i), bool)
    for start in range(0, len(i), step := max(1, _CELLS // one.dim)):
        part = slice(start, start + step)
        a, b = (
            normalize_rows(_rows_in_memory(one.given, i[part])),
            normalize_rows(_rows_in_memory(two.given, j[part])),
        )
        found[part] = ((a - b) ** 2).sum(axis=1) <= _REACH**2  # 2 − 2 cos, which is finer near 1
    return found


def _project_directions(side: EmbeddingSet) -> np.ndarray:
    """(n, 4): where the direction of each row lies along four fixed random ones, between −1 and 1."""
    along = np.random.default_rng(1).normal(size=(side.dim, 4))
    along /= np.linalg.norm(along, axis=0)
    found = np.empty((len(side), 4))
    for start in range(0, len(side), step := max(1, _CELLS // side.dim)):
        part = slice(start, start + step)
        found[part] = normalize_rows(_rows_in_memory(side.given, part)) @ along
    return found


def hash_rows(values: np.ndarray | torch.Tensor, double: bool = True) -> np.ndarray:
    """(n,) uint64, equal for rows that are equal number for number, in float32 unless both sides are ``double``."""
    n, d = values.shape
    factors = np.random.default_rng(0).integers(1 << 62, size=2 * d, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    found = np.empty(n, np.uint64)
    for start in range(0, n, step := max(1, _CELLS // d)):
        part = values[start : start + step]
        sums = (
            _hash_columns(part, factors, double)
            if isinstance(part, np.ndarray)
            else _summed_there(part, factors, double)
        )
        found[start : start + step] = sums
    return found


def _hash_columns(part: np.ndarray, factors: np.ndarray, double: bool) -> np.ndarray:
    part = part if double else part.astype(np.float32, copy=False)
    bits = np.ascontiguousarray(part + part.dtype.type(0)).view(np.uint32)
    return (bits * factors[: bits.shape[1]]).sum(axis=1, dtype=np.uint64)


def _summed_there(part: torch.Tensor, factors: np.ndarray, double: bool) -> np.ndarray:
    """The same sums on the device that the rows are on: int64 wraps as uint64 does."""
    part = part if double else part.float()
    bits = (part + 0.0).contiguous().view(torch.int32).long() & 0xFFFFFFFF
    odd = torch.from_numpy(factors[: bits.shape[1]].view(np.int64)).to(part.device)
    return (bits * odd).sum(1).cpu().numpy().view(np.uint64)


def _rows_in_memory(values: np.ndarray | torch.Tensor, at: slice | np.ndarray) -> np.ndarray:
    """Some rows, in main memory."""
    if isinstance(values, np.ndarray):
        return values[at]
    return values[at if isinstance(at, slice) else torch.from_numpy(at).to(values.device)].cpu().numpy()
