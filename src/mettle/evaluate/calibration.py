"""Calibration: a threshold set on some people, carried to others, and what it really does there.

On calibration data with N_i impostor pairs and a wanted rate α, k = ⌊α·N_i⌋ errors are allowed and τ lies just above
the (k+1)-th highest impostor score. For independent scores the rate among new people then follows Beta(k+1, N_i−k),
with mean (k+1)/(N_i+1). ``conservative`` lowers k until P(rate ≤ α) ≥ 0.95. With N_i·α < 1 there is nothing to set.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import betainc, betaincinv

from mettle.errors import DataError, InputError
from mettle.evaluate import roc
from mettle.evaluate.bootstrap import Interval
from mettle.evaluate.inputs import NotMeasurable
from mettle.evaluate.scoring.pair_fingerprint import subject_labels
from mettle.evaluate.verification import Verification
from mettle.unknown_names import explain_arguments

CONFIDENCE = 0.95


@dataclass(frozen=True)
class TransferredThreshold:
    """What a threshold that was set on other people does here.

    Attributes:
        far: the rate that was wanted.
        threshold: what was carried over.
        fmr: the realised false-accept rate.
        fnmr: the realised false-reject rate.
        ratio: fmr / far.
        false_accepts: impostor pairs accepted.
        impostors: impostor pairs.
        status: by the errors that the rate allows here, N_i·far.
        fmr_interval: over resampled subjects at the fixed threshold; None where there are too few.
        fnmr_interval: likewise.
        notes: what a reader should know.
    """

    far: float
    threshold: float
    fmr: float
    fnmr: float
    ratio: float
    false_accepts: int
    impostors: int
    status: str
    fmr_interval: Interval | None = None
    fnmr_interval: Interval | None = None
    notes: tuple[str, ...] = ()

    @property
    def tar(self) -> float:
        """1 − FNMR."""
        return 1 - self.fnmr

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        found = dict(vars(self))
        for name in ("fmr_interval", "fnmr_interval"):
            found[name] = None if found[name] is None else dict(vars(found[name]))
        return {**found, "notes": list(self.notes), "tar": self.tar}


@dataclass(frozen=True, eq=False)
class Calibration:
    """A threshold for a wanted false-accept rate.

    Attributes:
        far: the rate that is wanted.
        threshold: the threshold.
        allowed: k, impostor errors on the calibration data.
        impostors: N_i of the calibration data.
        status: by N_i·far.
        expected: mean of the rate among new people, (k+1)/(N_i+1).
        likely: the central 90 % of that rate, for independent scores.
        conservative: whether k was lowered.
        people: labels of the calibration subjects; none where they are not known.
    """

    far: float
    threshold: float
    allowed: int
    impostors: int
    status: str
    expected: float
    likely: tuple[float, float]
    conservative: bool
    people: np.ndarray = field(repr=False)

    def transfer(self, test: Verification, *, intervals: bool = True) -> TransferredThreshold:
        """Judge the threshold on other people.

        Without the subjects of both sides nobody can tell whether they are others; ``notes`` then says so.

        Raises:
            DataError: a subject is on both sides.
        """
        there = subject_labels(test)
        shared = np.intersect1d(self.people, there)
        if len(shared):
            raise DataError(
                f"leak: {len(shared)} subjects are in calibration and in test, the first is {shared[0]}; a threshold "
                "is judged on people it was not set on"
            )
        sides = ("calibration", self.people), ("test", there)
        notes = tuple(
            f"disjointness not checked: who is in {side} is not known; give from_scores() the subjects of every pair"
            for side, who in sides
            if not len(who)
        )
        return apply_threshold(self.threshold, self.far, test, intervals=intervals, notes=notes)


def apply_threshold(
    threshold: float, far: float, test: Verification, *, intervals: bool = True, notes: tuple[str, ...] = ()
) -> TransferredThreshold:
    """What a threshold does on the pairs of ``test``, whoever it was set on: nothing is checked.

    Args:
        threshold: what was set elsewhere,
        far: for this false-accept rate.
        test: the pairs.
        intervals: whether to resample the subjects, where they are known.
        notes: what a reader should know.
    """
    fmr, fnmr = test.rates(threshold)
    pair = (None, None)
    if intervals and test.subjects:
        try:
            pair = test.intervals_at(threshold)
        except NotMeasurable:
            pair = (None, None)
    status = roc.sample_size_status(float(roc.allowed_errors(far, test.impostor)))
    accepts = round(fmr * test.impostor)
    return TransferredThreshold(far, threshold, fmr, fnmr, fmr / far, accepts, test.impostor, status, *pair, notes)


def count_allowed_errors(far: float, n: int, *, conservative: bool = False) -> int:
    """k: how many of ``n`` impostor pairs may reach a threshold for this rate; -1: not even none is enough.

    ``conservative``: so few that the rate among new people stays within ``far`` with probability 0.95.
    """
    most = math.floor(roc.allowed_errors(far, n))
    if not conservative:
        return most if most >= 1 else -1
    counts = range(min(most, n - 1) + 1)  # the more errors, the less likely
    return bisect_right(counts, -CONFIDENCE, key=lambda k: -betainc(k + 1, n - k, float(far))) - 1


def pairs_needed(far: float) -> int:
    """How many impostor pairs say with probability 0.95 that a rate is within ``far`` where none of them is accepted.

    29 for 0.1, 299 for 0.01, 2995 for 0.001.
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-far))


def threshold_above(scores: np.ndarray, accepts: int) -> float:
    """The next number above the (accepts + 1)-th highest score: ties with it are rejected."""
    at = len(scores) - 1 - accepts
    return float(np.nextafter(np.partition(scores, at)[at], np.asarray(np.inf, scores.dtype)))


@explain_arguments
def calibrate(v: Verification, far: float, *, conservative: bool = False) -> Calibration:
    """Set the threshold for a wanted false-accept rate on calibration data.

    Args:
        v: verification among the calibration subjects.
        far: the wanted rate.
        conservative: allow only so many errors that the rate among new people stays below ``far`` with probability
            0.95, for independent scores.

    Raises:
        NotMeasurable: too few impostor pairs.

    Example:
        >>> import numpy as np
        >>> from mettle.evaluate import verification
        >>> rng = np.random.default_rng(0)
        >>> y = np.repeat(np.arange(40), 4)
        >>> x = rng.normal(size=(40, 16))[y] + 0.7 * rng.normal(size=(160, 16))
        >>> set_on, test = (verification(x[h], y[h]) for h in (y < 20, y >= 20))
        >>> t = calibrate(set_on, far=0.01)
        >>> t.allowed, t.transfer(test).ratio < 4
        (30, True)
    """
    n, budget = v.impostor, roc.allowed_errors(far, v.impostor)
    if budget >= n:
        raise InputError(f"far={far:g} accepts everybody: ask for a rate below 1")
    allowed = count_allowed_errors(far, n, conservative=conservative)
    if budget < 1 or allowed < 0:
        need = pairs_needed(far) if conservative else roc.min_impostors(far)
        raise NotMeasurable(
            f"a threshold for far={far:g} is not measurable with {n} impostor pairs: at least {need} are needed"
        )
    tau = v.scores.threshold_above_impostor(allowed)
    likely = tuple(float(betaincinv(allowed + 1, n - allowed, q)) for q in (0.05, 0.95))
    status = roc.sample_size_status(float(budget))
    expected = (allowed + 1) / (n + 1)
    return Calibration(far, tau, allowed, n, status, expected, likely, conservative, subject_labels(v))  # type: ignore[arg-type]
