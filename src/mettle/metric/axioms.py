"""Which of the four axioms of a metric a distance obeys on some points, with a counterexample for each that fails."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from mettle.errors import InputError

Axiom = Literal["non_negativity", "identity", "symmetry", "triangle_inequality"]
AXIOMS: tuple[Axiom, ...] = ("non_negativity", "identity", "symmetry", "triangle_inequality")


@dataclass(frozen=True)
class Counterexample:
    """Points, by their rows, for which an axiom fails, and the distances that show it."""

    axiom: Axiom
    rows: tuple[int, ...]
    distances: tuple[float, ...]
    explanation: str

    def __str__(self) -> str:
        return self.explanation


@dataclass(frozen=True)
class AxiomCheck:
    """What was found on these points. An axiom that holds here may fail elsewhere; one that fails here fails.

    Attributes:
        counterexamples: for each axiom the worst violation, None where there is none.
        n_points: how many points were compared.
    """

    counterexamples: dict[Axiom, Counterexample | None]
    n_points: int

    def holds(self, axiom: Axiom) -> bool:
        """Whether no points break this axiom."""
        if axiom not in self.counterexamples:
            raise InputError(f"no axiom {axiom!r}: known are {', '.join(AXIOMS)}")
        return self.counterexamples[axiom] is None

    @property
    def is_metric(self) -> bool:
        """All four axioms hold."""
        return all(map(self.holds, AXIOMS))

    @property
    def is_pseudo_metric(self) -> bool:
        """All hold, but that distinct points may be at distance 0."""
        found = self.counterexamples["identity"]
        return all(self.holds(a) for a in AXIOMS if a != "identity") and (found is None or len(set(found.rows)) == 2)

    def __str__(self) -> str:
        lines = [f"{axiom}: {found or 'holds'}" for axiom, found in self.counterexamples.items()]
        return "\n".join(lines)


def check_axioms(distance: Any, points: ArrayLike | None = None, *, tolerance: float = 1e-9) -> AxiomCheck:
    """Check a distance for non-negativity, identity of indiscernibles, symmetry and the triangle inequality.

    All pairs and all triples of the points are looked at: n² distances, n³ comparisons.

    Args:
        distance: a function of two points (d,) that returns a number; a fitted metric of `mettle.metric`, or anything
            with ``pair_distance(X, Y)`` of two arrays (n, d); a symmetric Mahalanobis matrix (d, d), whose distance is
            √(δᵀMδ), −√−(δᵀMδ) where that is negative; or without ``points`` the (n, n) matrix of all distances.
        points: (n, d), finite. Equal rows are one point.
        tolerance: what rounding may do, as part of the largest distance; distinct points are at distance 0 where their
            distance, divided by their Euclidean distance, is below this part of the largest such quotient.
    """
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise InputError(f"tolerance must be at least 0 and below 1, got {tolerance!r}")
    if points is None:
        d = _finite_array(distance, "the matrix of distances")
        if d.ndim != 2 or d.shape[0] != d.shape[1] or not d.size:
            raise InputError(
                f"without points, distance must be the (n, n) matrix of all distances, got shape {d.shape}"
            )
        apart = 1.0 - np.eye(len(d))
    else:
        x = _finite_array(points, "points")
        if x.ndim != 2 or not x.size:
            raise InputError(f"points must be (n, d), not empty, got shape {x.shape}")
        d = _all_distances(distance, x)
        apart = np.linalg.norm(x[:, None] - x[None], axis=2)
    slack = tolerance * float(np.abs(d).max())
    return AxiomCheck(
        {
            "non_negativity": _find_negative(d, slack),
            "identity": _find_unidentical(d, apart, slack, tolerance),
            "symmetry": _find_asymmetric(d, slack),
            "triangle_inequality": _find_detour(d, slack),
        },
        len(d),
    )


def _find_negative(d: np.ndarray, slack: float) -> Counterexample | None:
    i, j = _argmin(d)
    if d[i, j] >= -slack:
        return None
    return Counterexample("non_negativity", (i, j), (d[i, j],), f"d({i}, {j}) = {d[i, j]:.6g} is negative")


def _find_unidentical(d: np.ndarray, apart: np.ndarray, slack: float, tolerance: float) -> Counterexample | None:
    """Equal points at a distance, or else distinct points at none."""
    equal = np.where(apart == 0, np.abs(d), 0)
    i, j = _argmin(-equal)
    if equal[i, j] > slack:
        which = "the same point" if i == j else "equal points"
        return Counterexample("identity", (i, j), (d[i, j],), f"d({i}, {j}) = {d[i, j]:.6g} is not 0 for {which}")
    quotient = np.abs(d) / np.where(apart == 0, np.inf, apart)
    quotient[apart == 0] = np.inf
    i, j = _argmin(quotient)
    largest = np.where(np.isfinite(quotient), quotient, 0).max()
    if not np.isfinite(quotient[i, j]) or quotient[i, j] > tolerance * largest:
        return None
    text = f"d({i}, {j}) = {d[i, j]:.6g}, which is 0 but for rounding, for distinct points"
    return Counterexample("identity", (i, j), (d[i, j],), text)


def _find_asymmetric(d: np.ndarray, slack: float) -> Counterexample | None:
    difference = d - d.T
    i, j = _argmin(difference)
    if difference[i, j] >= -slack:
        return None
    text = f"d({i}, {j}) = {d[i, j]:.6g}, but d({j}, {i}) = {d[j, i]:.6g}"
    return Counterexample("symmetry", (i, j), (d[i, j], d[j, i]), text)


def _find_detour(d: np.ndarray, slack: float) -> Counterexample | None:
    worst, at = -slack, None
    for middle in range(len(d)):
        gain = d[:, middle, None] + d[middle] - d
        i, j = _argmin(gain)
        if gain[i, j] < worst:
            worst, at = gain[i, j], (i, middle, j)
    if at is None:
        return None
    i, middle, j = at
    legs = d[i, j], d[i, middle], d[middle, j]
    text = f"d({i}, {j}) = {legs[0]:.6g} > d({i}, {middle}) + d({middle}, {j}) = {legs[1]:.6g} + {legs[2]:.6g}"
    return Counterexample("triangle_inequality", at, legs, text)


def _all_distances(distance: Any, x: np.ndarray) -> np.ndarray:
    """(n, n), from whatever says how far two points are apart; finite, or refused with the first pair that is not."""
    n = len(x)
    i, j = np.divmod(np.arange(n * n), n)
    if hasattr(distance, "pair_distance"):
        found = np.asarray(distance.pair_distance(x[i], x[j]), dtype=np.float64)
    elif callable(distance):
        found = _call_for_pairs(distance, x)
    else:
        matrix = _finite_array(distance, "a Mahalanobis matrix")
        if matrix.shape != (x.shape[1],) * 2:
            raise InputError(
                f"distance must be a function, a fitted metric or a ({x.shape[1]}, {x.shape[1]}) matrix for these "
                f"points, got shape {matrix.shape}"
            )
        found = _signed_root(x[i] - x[j], matrix)
    if found.shape != (n * n,):
        raise InputError(f"pair_distance must return one number per pair, ({n * n},), got shape {found.shape}")
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        k = bad[0]
        raise InputError(
            f"the distance of points {i[k]} and {j[k]} is {found[k]:g}: only finite distances can be checked"
        )
    return found.reshape(n, n)


def _call_for_pairs(distance: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    found = np.empty(len(x) ** 2)
    for k in range(len(found)):
        i, j = divmod(k, len(x))
        value = np.asarray(distance(x[i].copy(), x[j].copy()))
        if value.size != 1 or value.dtype.kind not in "fiub":
            raise InputError(
                f"the distance of two points must be one real number, got shape {value.shape} of {value.dtype}"
            )
        found[k] = float(value.reshape(()))
    return found


def _signed_root(delta: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """√(δᵀMδ) with the sign of the form; what is 0 but for rounding is 0, or its root would look like a distance."""
    form = ((delta @ matrix) * delta).sum(1)
    rounding = delta.shape[1] * np.finfo(np.float64).eps * np.abs(matrix).max() * (delta**2).sum(1)
    form[np.abs(form) <= rounding] = 0
    return np.sign(form) * np.sqrt(np.abs(form))


def _finite_array(values: Any, name: str) -> np.ndarray:
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be an array of numbers, got {type(values).__name__}") from None
    if not np.isfinite(found).all():
        raise InputError(f"{name} must be finite, got NaN or infinity: leave such rows out")
    return found


def _argmin(values: np.ndarray) -> tuple[int, int]:
    i, j = np.unravel_index(int(values.argmin()), values.shape)
    return int(i), int(j)
