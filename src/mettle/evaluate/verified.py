"""What verification found: error rates over all pairs, computed from exact counts when read."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.evaluate import curve, failures, hull, intervals, point, several
from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.counted import Counted
from mettle.evaluate.intervals import Interval
from mettle.evaluate.named import named
from mettle.evaluate.rows import Source
from mettle.evaluate.scores import acting
from mettle.evaluate.several import Numbers

METRICS = "eer", "auc", "tar@1e-3"  # what has an interval; TAR at a rate


@dataclass(frozen=True, eq=False)
class Verification:
    """What verification found. Numbers are computed from exact counts when read, and kept."""

    scores: point.Pairs = field(repr=False)
    trials: str = "all"
    mode: str = "exact"
    source: Source | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    people: np.ndarray | None = field(default=None, repr=False)  # label of each subject, where pairs were listed

    def __repr__(self) -> str:
        return (
            f"Verification(eer={self.eer:.4g}, auc={self.auc:.6g}, genuine={self.genuine}, impostor={self.impostor}, "
            f"subjects={self.subjects}, trials={self.trials!r})"
        )

    @property
    def genuine(self) -> int:
        """Number of genuine pairs."""
        return len(self.scores.genuine)

    @property
    def impostor(self) -> int:
        """Number of impostor pairs."""
        return self.scores.impostors

    @property
    def subjects(self) -> int:
        """Number of subjects, 0 when unknown."""
        return self.scores.subjects

    @cached_property
    def _eer(self) -> tuple[Fraction, point.Bracket]:
        return point.eer(self.scores)

    @property
    def eer(self) -> float:
        """Equal error rate: where the path through the operating points meets FMR = FNMR."""
        return float(self._eer[0])

    @property
    def eer_bracket(self) -> point.Bracket:
        """The operating points on both sides of the EER, and half the gap they leave."""
        return self._eer[1]

    @property
    def eer_rocch(self) -> float:
        """EER on the convex hull of the operating points: never above the EER, and another number; see ``hull``."""
        return self._hull[0]

    @cached_property
    def _hull(self) -> tuple[float, float]:
        return hull.eer_rocch(self.scores)

    @cached_property
    def _auc(self) -> tuple[float, float]:
        if isinstance(self.scores, Counted):
            return self.scores.auc()
        return float(point.auc(self.scores)), 0.0

    @property
    def auc(self) -> float:
        """Chance that a genuine pair scores above an impostor pair, ties counting one half."""
        return self._auc[0]

    @cached_property
    def bounds(self) -> dict[str, float]:
        """How far each number can be from the exact one: all 0 in exact mode.

        In histogram mode EER and operating points are exact too (the window around them is scored again); AUC, the
        detection cost and the EER on the convex hull rest on bins.
        """
        hulled = self._hull[1] if isinstance(self.scores, Counted) else 0.0  # sorted scores may have none at all
        return {"eer": 0.0, "tar": 0.0, "auc": self._auc[1], "min_dcf": self._cost.bound, "eer_rocch": hulled}

    @cached_property
    def roc(self) -> curve.Roc:
        """All operating points: ``thresholds``, ``fmr``, ``fnmr``, ``tar``; ``thinned(k)`` for drawing."""
        return curve.Roc(self.scores)

    @property
    def det(self) -> curve.Roc:
        """The same points for a DET picture, FNMR against FMR; ``probit()`` gives its axes."""
        return self.roc

    @property
    def min_dcf(self) -> float:
        """The least normalised detection cost with one target in a hundred and equal costs; 1 is a useless system."""
        return self._cost.value

    @cached_property
    def _cost(self) -> point.Cost:
        return self.detection_cost()

    def detection_cost(self, prior: float = 0.01, *, miss: float = 1.0, false_accept: float = 1.0) -> point.Cost:
        """The least normalised detection cost over all thresholds, for a share of targets and two costs."""
        if not 0 < prior < 1 or not 0 < miss < math.inf or not 0 < false_accept < math.inf:
            raise InputError(f"prior must lie between 0 and 1, costs above 0: got {prior}, {miss}, {false_accept}")
        return point.min_dcf(self.scores, prior, miss, false_accept)

    def rates(self, threshold: float) -> tuple[float, float]:
        """FMR and FNMR at any threshold, such as one that was set on other people."""
        accepts, rejects = self._errors(threshold)
        return accepts / self.impostor, rejects / self.genuine

    def _errors(self, threshold: float) -> tuple[int, int]:
        if not isinstance(threshold, Real) or math.isnan(threshold):
            raise InputError(f"threshold must be a number: got {threshold!r}")
        accepts, rejects = point.counts(self.scores, threshold)
        return int(accepts), int(rejects)

    def system_rates(
        self, threshold: float, *, fta: float | None = None, fte: float | None = None
    ) -> failures.SystemRates:
        """FAR and FRR of the whole system at a threshold: errors of comparisons and samples without a template.

        Args:
            threshold: any, such as one that was set on other people.
            fta: share of the probes that gave no template and were left out.
            fte: share of the enrolments that gave no template and were left out.

        Raises:
            InputError: rates of failures that scores of −∞ count already.
            NotMeasurable: every pair of one kind has a failed template.
        """
        errors, (genuine, impostor) = self._errors(threshold), self.scores.failed
        pairs, failed = (self.impostor, self.genuine), (impostor, genuine)
        return failures.system_rates(float(threshold), errors, pairs, failed, fta, fte)

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
                f"at least {point.least(far)} are needed, ten times as many for a headline"
            )
        return value

    def operating_point(self, far: float) -> point.OperatingPoint:
        """The operating point for a wanted false-accept rate, with the status it deserves."""
        return point.operating_point(self.scores, far)

    def histogram(self, bins: int = 100) -> curve.Histogram:
        """Both score distributions in equal bins over the finite scores, the last bin closed."""
        return curve.histogram(self.scores, bins)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the numbers."""
        found = list(self.notes)
        if self.auc < 0.5:
            asked = (  # only scores from elsewhere can be the wrong way round
                "orientation? a distance may have been passed as a similarity"
                if self.source is None
                else "genuine pairs are less alike than impostor pairs, which is worse than guessing; do the labels "
                "belong to these embeddings?"
            )
            found.append(f"AUC {self.auc:.4f} is below 0.5: {asked}")
        failed = sum(self.scores.failed)
        if failed:
            found.append(f"{failed} pairs have a failed template (−inf) and count as non-matches")
        return tuple(found)

    def interval(
        self, name: str | tuple[str, float], level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> Interval:
        """Interval of ``"eer"``, ``"auc"`` or, say, ``"tar@1e-3"`` (or ``("tar", 1e-3)``), over resampled subjects.

        Thresholds are found anew in every replicate. The first call walks through the pairs once; further
        names and levels are then nearly free. Subjects that count are those with genuine pairs for TAR, and for EER
        and AUC the fewer of those with genuine and those with impostor pairs. See :mod:`mettle.evaluate.intervals`.

        Raises:
            NotMeasurable: the value itself is not measurable, or fewer than six subjects have pairs of either kind.
        """
        metric, far = named(name, METRICS)
        value = self.value(name)
        drawn = self.replicates(replicates, seed)
        values = drawn.tar(far) if far is not None else getattr(drawn, metric)()
        shifted = np.clip(values[1:] + (value - values[0]), 0, 1)
        rests = {"rate": self.genuine, "among": drawn.among(metric)}
        return intervals.of_rate(shifted, value, drawn.weights, level, seed, drawn.method, **rests)

    def intervals_at(
        self, threshold: float, level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> tuple[Interval, Interval]:
        """Intervals of FMR and FNMR at a fixed threshold, such as one that was set on other people."""
        key = (threshold, replicates, seed)
        if key not in self._kept:
            self.resample_at([threshold], replicates=replicates, seed=seed)
        *drawn, weights, (genuine, impostor) = self._kept[key]
        rests = (self.impostor, impostor), (self.genuine, genuine)
        method = f"{intervals.METHOD}, threshold fixed"
        first, second = (
            intervals.of_rate(values, value, weights, level, seed, method, rate=rest, among=among)
            for values, value, (rest, among) in zip(drawn, self.rates(threshold), rests, strict=True)
        )
        return first, second

    def resample_at(self, thresholds: Numbers, *, replicates: int = 1000, seed: int = 0) -> None:
        """Draw what :meth:`intervals_at` needs for several thresholds, in one walk through the pairs."""
        levels = several.thresholds(thresholds)
        drawn = intervals.at_thresholds(self.scores, levels, replicates=replicates, seed=seed)
        for threshold, found in zip(levels, drawn, strict=True):
            self._kept[threshold, replicates, seed] = found

    def value(self, name: str | tuple[str, float]) -> float:
        """A number by the name that :meth:`interval` knows."""
        metric, far = named(name, METRICS)
        return self.tar(far) if far is not None else getattr(self, metric)

    def replicates(self, replicates: int = 1000, seed: int = 0) -> intervals.Replicates:
        """The error curves of every resample of the subjects, drawn once and kept."""
        key = (replicates, seed)
        if key not in self._kept:
            self._kept[key] = intervals.resample(self.scores, replicates=replicates, seed=seed)
        return self._kept[key]

    def look_at(self, fars: Numbers, thresholds: Numbers = ()) -> None:
        """In histogram mode: look into the windows of the EER, of rates and of thresholds, all in one pass."""
        rates, levels = several.rates(fars, least=0), several.thresholds(thresholds, least=0)
        if not isinstance(self.scores, Counted) or self.scores.looked:
            return
        wanted = [point.crossing_bins(self.scores)]
        budgets = [point.budget(far, self.impostor) for far in rates]
        wanted += [point.budget_bins(self.scores, math.floor(b)) for b in budgets if b >= 1]
        typed = [float(acting(t, self.scores.dtype)) for t in levels if math.isfinite(t)]
        self.scores.look([self.scores.around(*w) for w in wanted] + [(t, t) for t in typed])

    def summary(self, fars: Numbers = (1e-1, 1e-2, 1e-3)) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; what does not exist is None (EER, an infinite threshold)."""
        rates = several.rates(fars, least=0)
        self.look_at(rates)
        points = []
        for far in rates:
            at = self.operating_point(far)
            entry = {**vars(at), "threshold": at.usable, "verdict": at.verdict}
            entry["interval"] = self._stated(f"tar@{far!r}") if at.tar is not None else None
            points.append(entry)
        try:
            eer, half_gap, hulled = self.eer, self.eer_bracket.half_gap, self.eer_rocch
        except NotMeasurable:  # too many failed templates
            eer, half_gap, hulled = None, None, None
        return {
            "trials": self.trials,
            "mode": self.mode,
            "genuine": self.genuine,
            "impostor": self.impostor,
            "subjects": self.subjects,
            "failed": dict(zip(("genuine", "impostor"), self.scores.failed, strict=True)),
            "eer": {"value": eer, "half_gap": half_gap, "interval": None if eer is None else self._stated("eer")},
            "eer_rocch": hulled,
            "auc": {"value": self.auc, "bound": self.bounds["auc"], "interval": self._stated("auc")},
            "min_dcf": self.min_dcf,
            "tar": points,
            "warnings": list(self.warnings),
        }

    def _stated(self, name: str) -> dict[str, Any] | None:
        """An interval as plain numbers, or None where subjects are unknown or too few."""
        return intervals.stated(lambda: self.interval(name)) if self.subjects else None
