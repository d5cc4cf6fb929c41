"""False accepts and false rejects at every position of the threshold slider, in whole numbers."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from mettle.errors import MettleError
from mettle.evaluate import roc
from mettle.evaluate.verification import Verification
from mettle.report.format import format_rate
from mettle.workbench.run_data import RunData, load_or_compute_arrays

FEWEST = 400  # positions of the slider, at least; steps are powers of ten
CURVE_POINTS = 400  # operating points of a curve
TICKS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)  # of a DET picture


@dataclass(frozen=True, eq=False)
class ThresholdCounts:
    """Counts at the positions of the slider.

    Attributes:
        thresholds: one per position, ascending, in even steps.
        accepts: impostor pairs with a score at or above each.
        rejects: genuine pairs with a score below each.
        genuine: genuine pairs in all.
        impostor: impostor pairs in all.
        drawn: operating points of the curve, for drawing.
        marks: thresholds with a name: equal errors, and those that were set for use.
    """

    thresholds: np.ndarray
    accepts: np.ndarray
    rejects: np.ndarray
    genuine: int
    impostor: int
    drawn: roc.OperatingCurve
    marks: tuple[dict[str, Any], ...]

    def arrays(self) -> dict[str, np.ndarray]:
        """For the page: counts by position, the curve, and both rates on normal-deviate axes (NaN at 0 and 1)."""
        fmr, fnmr = self.accepts / self.impostor, self.rejects / self.genuine
        found = {"threshold": self.thresholds, "accepts": self.accepts, "rejects": self.rejects}
        found |= {"at.x": probit(fmr), "at.y": probit(fnmr)}
        found |= {"curve.fmr": self.drawn.fmr, "curve.fnmr": self.drawn.fnmr}
        found |= {"curve.x": probit(self.drawn.fmr), "curve.y": probit(self.drawn.fnmr)}
        return {name: np.asarray(array, np.float64) for name, array in found.items()}

    def facts(self) -> dict[str, Any]:
        """What the arrays mean."""
        ticks = [{"rate": t, "at": float(ndtri(t))} for t in TICKS]
        return {"genuine": self.genuine, "impostor": self.impostor, "marks": list(self.marks), "ticks": ticks}


def count_at_thresholds(data: RunData, found: Verification) -> ThresholdCounts:
    """Count at every position of the slider, and draw the curve."""
    n, low, high = found.impostor, *_score_range(found)
    thresholds = slider_positions(low, high)

    def make() -> dict[str, np.ndarray]:
        accepts, rejects = count_errors(found, thresholds)
        return {"accepts": accepts.astype(np.float64), "rejects": rejects.astype(np.float64)}  # whole up to 2⁵³

    if found.scores.is_in_memory:
        held = make()
    else:  # one more walk through all pairs
        path = data.run.folder / f"workbench-counts-{data.key}.npz"
        held = load_or_compute_arrays(path, {"accepts": thresholds.shape, "rejects": thresholds.shape}, make)
    accepts, rejects = (held[k].astype(np.int64) for k in ("accepts", "rejects"))
    drawn = found.roc.subsample(CURVE_POINTS)
    return ThresholdCounts(thresholds, accepts, rejects, found.genuine, n, drawn, tuple(_named_thresholds(data, found)))


def slider_positions(low: float, high: float) -> np.ndarray:
    """Round thresholds from below the lowest score to above the highest, in steps of a power of ten."""
    digits = 3
    while digits < 6 and (high - low) * 10**digits < FEWEST:
        digits += 1
    scale = 10**digits
    first, last = math.floor(low * scale), math.floor(high * scale) + 1
    first, last = first - (first / scale > low), last + (last / scale <= high)  # a product may be rounded across a step
    return np.arange(first, last + 1) / scale


def count_errors(found: Verification, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """#impostor ≥ τ and #genuine < τ for every threshold, exactly, whether scores are in memory or not."""
    return found.scores.count_many_errors(thresholds)


def probit(rates: np.ndarray) -> np.ndarray:
    """Φ⁻¹ of rates strictly between 0 and 1; NaN for the others, which a DET picture cannot show."""
    inside = (rates > 0) & (rates < 1)
    return np.where(inside, ndtri(np.where(inside, rates, 0.5)), np.nan)


def _score_range(found: Verification) -> tuple[float, float]:
    """The lowest and the highest finite score."""
    edges = found.histogram(1).edges
    return float(edges[0]), float(edges[-1])


def _named_thresholds(data: RunData, found: Verification) -> list[dict[str, Any]]:
    named = []
    with suppress(MettleError):  # no EER: too many failed templates
        named.append(
            (
                "equal errors",
                "where false accepts and false rejects are equally frequent",
                _equal_error_threshold(found),
            )
        )
    for far, entry in sorted(data.run.contract().get("thresholds", {}).items(), key=lambda item: -float(item[0])):
        if entry.get("threshold") is not None:
            rate, source = format_rate(float(far)), entry.get("measured_on", "other samples")
            named.append(
                (f"FAR {rate}", f"set for a false-accept rate of {rate} on {source}", float(entry["threshold"]))
            )
    marks = []
    for name, title, threshold in named:
        if math.isfinite(threshold):
            accepts, rejects = roc.error_counts(found.scores, threshold)
            marks.append(
                {"name": name, "title": title, "threshold": threshold, "accepts": int(accepts), "rejects": int(rejects)}
            )
    return marks


def _equal_error_threshold(found: Verification) -> float:
    """The operating threshold next to the EER: of the two around it, that with the more equal rates."""
    bracket = found.eer_bracket
    return min((bracket.below, bracket.above), key=lambda p: abs(p[1] - p[2]))[0]
