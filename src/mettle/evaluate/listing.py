"""Lists of trials: pairs of samples named one by one, checked before anything is scored."""

from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.checks import as_int64, to_numpy
from mettle.evaluate.rows import Rows


def check_trials(trials: Any, probe: Rows, gallery: Rows | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check integers (m, 3) of (id, id, target): both exist, are two samples, labels confirm the target, none repeats.

    Without sample ids an id is a row number. A set that is compared with itself has (a, b) and (b, a) as one pair.

    Returns:
        Rows of the first side, rows of the second, and the target.
    """
    a = to_numpy(trials, "trials")
    if a.ndim != 2 or a.shape[1] != 3 or a.dtype.kind not in "iu" or len(a) == 0:
        raise InputError(f"trials must be integers (m, 3) of (id, id, target): got shape {a.shape}, dtype {a.dtype}")
    i, j, target = as_int64(a, "trials").T
    other = probe if gallery is None else gallery
    i, j = _rows_of(i, probe, "first"), _rows_of(j, other, "second")
    own = i == j if gallery is None else np.zeros(len(i), bool)
    if probe.ids is not None and other.ids is not None:
        own |= probe.ids[i] == other.ids[j]
    if own.any():
        raise InputError(f"trial {np.argmax(own)} compares a sample with itself: take such trials out")
    wrong = (probe.labels[i] == other.labels[j]) != target
    if wrong.any():
        raise InputError(f"trial {np.argmax(wrong)} contradicts the labels: target must be 1 for equal labels, else 0")
    _once(i, j, a, gallery is None, len(other))
    return i, j, target.astype(bool)


def _once(i: np.ndarray, j: np.ndarray, trials: np.ndarray, own: bool, width: int) -> None:
    """Refuse a pair that is listed twice: repeats would make a rate look measurable on pairs that are not there."""
    low, high = (np.minimum(i, j), np.maximum(i, j)) if own else (i, j)
    pair = low * width + high
    seen = np.sort(pair)
    twice = seen[1:][seen[1:] == seen[:-1]]
    if not len(twice):
        return
    again = np.isin(pair, twice)
    places = np.flatnonzero(again)
    _, first = np.unique(pair[places], return_index=True)
    second = int(np.setdiff1d(places, places[first])[0])
    before = int(np.argmax(pair == pair[second]))
    raise InputError(
        f"trial {second} repeats trial {before}, ids {trials[second, 0]} and {trials[second, 1]}: a pair counts once, "
        f"and {len(twice)} of {len(pair)} trials are repeats; take them out"
    )


def _rows_of(ids: np.ndarray, rows: Rows, side: str) -> np.ndarray:
    """Where samples are, by id, or by row number where rows have no ids."""
    if rows.ids is None:
        if ids.min() < 0 or ids.max() >= len(rows):
            raise InputError(
                f"trials must name rows 0 … {len(rows) - 1} as their {side} id: got {ids.min()} … {ids.max()}; "
                "pass ids= if they name samples"
            )
        return ids
    order = np.argsort(rows.ids, kind="stable")
    known = rows.ids[order]
    if (known[1:] == known[:-1]).any():
        raise InputError("trials name samples by id, but some ids occur twice: give every row its own id")
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    missing = known[at] != ids
    if missing.any():
        first = int(np.argmax(missing))
        raise InputError(f"trial {first} names id {ids[first]} on its {side} side, which no embedding has")
    return order[at]
