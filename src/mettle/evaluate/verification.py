"""Verification: is this pair the same? Error rates over all pairs, with their exact counts.

    embeddings, labels ─ check ─ Design (which pairs) ─ stream ─ Scores (sorted) ─┬─ eer, auc, tar(far), roc
    scores, target ───── check ─ Listed ──────────────────┘                       └─ interval(name)

Similarity is the cosine; accept iff s ≥ τ. Definitions are in :mod:`mettle.evaluate.curve`.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from mettle.errors import InputError, nearest
from mettle.evaluate import curve, intervals
from mettle.evaluate.checks import (
    NotMeasurable,
    Rows,
    check_embeddings,
    check_gallery,
    check_scores,
    check_trials,
    codes,
)
from mettle.evaluate.curve import OperatingPoint
from mettle.evaluate.intervals import Interval
from mettle.evaluate.scores import Design, Listed, Scores, Unit

TRIALS = ("all", "within", "across")


@dataclass(frozen=True, eq=False)
class Verification:
    """What verification found. Numbers are computed from exact counts when read, and kept."""

    scores: Scores = field(repr=False)
    trials: str = "all"
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return (
            f"Verification(auc={self.auc:.6g}, genuine={self.genuine}, impostor={self.impostor}, "
            f"subjects={self.subjects}, trials={self.trials!r})"
        )

    @property
    def genuine(self) -> int:
        """Number of genuine pairs."""
        return len(self.scores.genuine)

    @property
    def impostor(self) -> int:
        """Number of impostor pairs."""
        return len(self.scores.impostor)

    @property
    def subjects(self) -> int:
        """Number of subjects, 0 when unknown."""
        return self.scores.subjects

    @cached_property
    def _eer(self) -> tuple[Fraction, curve.Bracket]:
        return curve.eer(self.scores)

    @property
    def eer(self) -> float:
        """Equal error rate: where the path through the operating points meets FMR = FNMR."""
        return float(self._eer[0])

    @property
    def eer_bracket(self) -> curve.Bracket:
        """The operating points on both sides of the EER, and half the gap they leave."""
        return self._eer[1]

    @cached_property
    def auc(self) -> float:
        """Chance that a genuine pair scores above an impostor pair, ties counting one half."""
        return float(curve.auc(self.scores))

    @cached_property
    def roc(self) -> curve.Roc:
        """All operating points: ``thresholds``, ``fmr``, ``fnmr``, ``tar``; ``thinned(k)`` for drawing."""
        return curve.Roc(self.scores)

    def tar(self, far: float) -> float:
        """Share of genuine pairs accepted at the smallest threshold with FMR ≤ far.

        Raises:
            NotMeasurable: fewer than 1/far impostor pairs.
        """
        return self._measured(far, "tar")

    def threshold(self, far: float) -> float:
        """The smallest operating threshold with FMR ≤ far.

        Raises:
            NotMeasurable: fewer than 1/far impostor pairs.
        """
        return self._measured(far, "threshold")

    def _measured(self, far: float, what: str) -> float:
        value = getattr(self.operating_point(far), what)
        if value is None:
            raise NotMeasurable(
                f"{what} at far={far:g} is not measurable with {self.impostor} impostor pairs: "
                f"at least {math.ceil(1 / curve.rate(far))} are needed, ten times as many for a headline"
            )
        return value

    def operating_point(self, far: float) -> OperatingPoint:
        """The operating point for a wanted false-accept rate, with the status it deserves."""
        return curve.operating_point(self.scores, far)

    def histogram(self, bins: int = 100) -> curve.Histogram:
        """Both score distributions in equal bins over the finite scores, the last bin closed."""
        return curve.histogram(self.scores, bins)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the numbers."""
        found = []
        if self.auc < 0.5:
            found.append(
                f"AUC {self.auc:.4f} is below 0.5: orientation? a distance may have been passed as a similarity"
            )
        failed = sum(int(np.isneginf(side).sum()) for side in (self.scores.genuine, self.scores.impostor))
        if failed:
            found.append(f"{failed} pairs have a failed template (−inf) and count as non-matches")
        return tuple(found)

    def interval(self, name: str, level: float = 0.95, *, replicates: int = 1000, seed: int = 0) -> Interval:
        """Interval of ``"eer"``, ``"auc"`` or, say, ``"tar@1e-3"``, over resampled subjects.

        Thresholds are found anew in every replicate. The first call walks through the pairs once; further
        names and levels are then nearly free. See :mod:`mettle.evaluate.intervals`.

        Raises:
            NotMeasurable: the value itself is not measurable, or there are too few subjects.
        """
        metric, _, rate = name.partition("@")
        if metric not in ("eer", "auc", "tar") or (metric == "tar") != bool(rate):
            raise InputError(f"no interval named {name!r}{nearest(name, ('eer', 'auc', 'tar@1e-3'))}")
        far = _number(rate) if rate else None
        point = self.tar(far) if far is not None else getattr(self, metric)
        key = (replicates, seed)
        if key not in self._kept:
            self._kept[key] = intervals.resample(self.scores, replicates=replicates, seed=seed)
        drawn: intervals.Replicates = self._kept[key]
        values = drawn.tar(far) if far is not None else getattr(drawn, metric)()
        shifted = np.clip(values[1:] + (point - values[0]), 0, 1)
        found = intervals.percentile(shifted, level, seed, drawn.method)
        return intervals.zero_errors(found, self.subjects, point) if point in (0, 1) else found

    def summary(self, fars: tuple[float, ...] = (1e-1, 1e-2, 1e-3)) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; an infinite threshold is written as None."""
        points = []
        for far in fars:
            point = self.operating_point(far)
            entry = {k: v for k, v in vars(point).items() if k != "threshold"}
            finite = point.threshold is not None and math.isfinite(point.threshold)
            entry["threshold"] = point.threshold if finite else None
            entry["interval"] = self._stated(f"tar@{far!r}") if point.tar is not None else None
            points.append(entry)
        return {
            "trials": self.trials,
            "genuine": self.genuine,
            "impostor": self.impostor,
            "subjects": self.subjects,
            "eer": {
                "value": self.eer,
                "half_gap": self.eer_bracket.half_gap,
                "interval": self._stated("eer"),
            },
            "auc": {"value": self.auc, "interval": self._stated("auc")},
            "tar": points,
            "warnings": list(self.warnings),
        }

    def _stated(self, name: str) -> dict[str, Any] | None:
        """An interval as plain numbers, or None where subjects are unknown or too few."""
        if self.subjects < 2:
            return None
        try:
            return dict(vars(self.interval(name)))
        except NotMeasurable:
            return None


def verification(
    embeddings: Any,
    labels: Any,
    *,
    domains: Any = None,
    trials: Any = "all",
    gallery: tuple[Any, ...] | None = None,
    ids: Any = None,
    chunk: int = 512,
) -> Verification:
    """Compare pairs of embeddings by cosine and count errors.

    Args:
        embeddings: (n, d) array or tensor; float64 is scored in float64 (ties are equal to 12 decimals),
            anything else in float32.
        labels: (n,) integers, the subject of each row.
        domains: (n,) integers or text: device, session, camera.
        trials: "all" (every unordered pair once; None means the same), "within" (both of one domain),
            "across" (two domains), or integers (m, 3) of (i, j, target).
        gallery: ``(embeddings, labels[, domains[, ids]])`` to compare every row with, instead of with each
            other.
        ids: (n,) integer sample ids; pairs of one id are left out. With a gallery, give ids on both sides.
        chunk: rows scored at a time; it changes memory, never the result.

    Example:
        >>> import numpy as np
        >>> v = verification(np.eye(3)[[0, 0, 1, 1]], [7, 7, 8, 8])
        >>> v.eer, v.auc, v.genuine, v.impostor
        (0.0, 1.0, 2, 4)
    """
    if chunk < 1:
        raise InputError(f"chunk must be at least 1: got {chunk}")
    probe = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    other = None if gallery is None else check_gallery(gallery, probe)
    if not (trials is None or isinstance(trials, str)):
        return _listed(probe, other, trials)
    keep = "all" if trials is None else trials
    if keep not in TRIALS:
        raise InputError(f"no trials named {keep!r}{nearest(keep, TRIALS)}")
    if keep != "all" and any(r.domains is None for r in (probe, other or probe)):
        raise InputError(f"trials={keep!r} compares domains: pass domains, one per row on every side")
    design = Design.of(probe, other, keep, chunk)
    subjects = 1 + max(int(side.max()) for side in design.subject)
    found = Scores.of(design.stream, design.bound(), design.probe.dtype, subjects)
    return Verification(found, keep)


def from_scores(scores: Any, target: Any, subjects: Any = None) -> Verification:
    """Count errors of scores that came from anywhere.

    Args:
        scores: (m,) similarities, higher meaning more alike; −∞ marks a failed template. Equal means equal.
        target: (m,) 1 for a genuine pair, 0 for an impostor pair.
        subjects: (m, 2) integer labels of the two sides; needed only for intervals.

    Example:
        >>> from_scores([0.9, 0.8, 0.3, 0.2], [1, 1, 0, 0]).tar(far=0.5)
        1.0
    """
    s, t, pairs = check_scores(scores, target, subjects)
    return _from_list(lambda part: s[part], t, s.dtype.type, None if pairs is None else (pairs[:, 0], pairs[:, 1]))


def _listed(probe: Rows, gallery: Rows | None, trials: Any) -> Verification:
    """Score the pairs that a list names."""
    i, j, target = check_trials(trials, probe, gallery)
    other = probe if gallery is None else gallery
    double = probe.values.dtype == np.float64 or other.values.dtype == np.float64
    first = Unit.of(probe.values, double)
    second = first if gallery is None else Unit.of(other.values, double)

    def score(part: slice) -> np.ndarray:
        return first.take(i[part]).paired(second.take(j[part]))

    return _from_list(score, target, first.dtype, (probe.labels[i], other.labels[j]), chunk=1 << 14)


def _from_list(score: Any, target: np.ndarray, dtype: type, pairs: Any, chunk: int = 1 << 18) -> Verification:
    subject = None if pairs is None else codes(*pairs)
    listed = Listed(score, target, None if subject is None else (subject[0], subject[1]), chunk)
    genuine = int(np.count_nonzero(target))
    subjects = 0 if subject is None else 1 + max(int(side.max()) for side in subject)
    found = Scores.of(listed.stream, (genuine, len(target) - genuine), dtype, subjects)
    return Verification(found, "listed")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"a false-accept rate must be a number, as in 'tar@1e-3': got {text!r}") from None
