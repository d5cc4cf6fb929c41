"""Verification: is this pair the same? Error rates over all pairs, with their exact counts.

    embeddings, labels ─ check ─ Design (which pairs) ─┬─ Scores (sorted) ──┬─ eer, auc, tar(far), roc, det, min_dcf
    scores, target ───── check ─ Listed ───────────────┴─ Counted (binned) ─┴─ interval(name)

Similarity is the cosine; accept iff s ≥ τ. Definitions are in :mod:`mettle.evaluate.curve`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mettle.errors import InputError, nearest
from mettle.evaluate import curve, intervals
from mettle.evaluate.checks import (
    NotMeasurable,
    Rows,
    both_kinds,
    check_embeddings,
    check_gallery,
    check_scores,
    check_trials,
    codes,
)
from mettle.evaluate.cohort import normalisers
from mettle.evaluate.counted import Counted, counted
from mettle.evaluate.curve import OperatingPoint
from mettle.evaluate.intervals import Interval
from mettle.evaluate.scores import WIDEST, Design, Listed, Norm, Scores, Unit

TRIALS = ("all", "within", "across")
MODES = ("exact", "histogram")
MEMORY = 1 << 28
EXACT_PAIRS = 1 << 25  # 8192 rows with each other


@dataclass(frozen=True, eq=False)
class Verification:
    """What verification found. Numbers are computed from exact counts when read, and kept."""

    scores: curve.Pairs = field(repr=False)
    trials: str = "all"
    mode: str = "exact"
    source: "Source | None" = field(default=None, repr=False)
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
        return self.scores.impostors

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
    def _auc(self) -> tuple[float, float]:
        if isinstance(self.scores, Counted):
            return self.scores.auc()
        return float(curve.auc(self.scores)), 0.0

    @property
    def auc(self) -> float:
        """Chance that a genuine pair scores above an impostor pair, ties counting one half."""
        return self._auc[0]

    @cached_property
    def bounds(self) -> dict[str, float]:
        """How far each number can be from the exact one: all 0 in exact mode.

        In histogram mode EER and operating points are exact too (the window around them is scored again); AUC and
        the detection cost rest on bins.
        """
        return {"eer": 0.0, "tar": 0.0, "auc": self._auc[1], "min_dcf": self._cost.bound}

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
    def _cost(self) -> "Cost":
        return self.detection_cost()

    def detection_cost(self, prior: float = 0.01, *, miss: float = 1.0, false_accept: float = 1.0) -> "Cost":
        """The least normalised detection cost over all thresholds, for a share of targets and two costs."""
        if not 0 < prior < 1 or not 0 < miss < math.inf or not 0 < false_accept < math.inf:
            raise InputError(f"prior must lie between 0 and 1, costs above 0: got {prior}, {miss}, {false_accept}")
        return Cost(*curve.min_dcf(self.scores, prior, miss, false_accept))

    def rates(self, threshold: float) -> tuple[float, float]:
        """FMR and FNMR at any threshold, such as one that was set on other people."""
        if math.isnan(threshold):
            raise InputError("threshold must be a number: got NaN")
        accepts, rejects = curve.counts(self.scores, threshold)
        return int(accepts) / self.impostor, int(rejects) / self.genuine

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
        failed = self.scores.failed
        if failed:
            found.append(f"{failed} pairs have a failed template (−inf) and count as non-matches")
        return tuple(found)

    def interval(
        self, name: str | tuple[str, float], level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> Interval:
        """Interval of ``"eer"``, ``"auc"`` or, say, ``"tar@1e-3"`` (or ``("tar", 1e-3)``), over resampled subjects.

        Thresholds are found anew in every replicate. The first call walks through the pairs once; further
        names and levels are then nearly free. See :mod:`mettle.evaluate.intervals`.

        Raises:
            NotMeasurable: the value itself is not measurable, or there are too few subjects.
        """
        metric, far = named(name)
        point = self.value(name)
        drawn = self.replicates(replicates, seed)
        values = drawn.tar(far) if far is not None else getattr(drawn, metric)()
        shifted = np.clip(values[1:] + (point - values[0]), 0, 1)
        found = intervals.percentile(shifted, point, drawn.weights, level, seed, drawn.method, rate=self.genuine)
        return intervals.zero_errors(found, self.subjects, point) if point in (0, 1) else found

    def intervals_at(
        self, threshold: float, level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> tuple[Interval, Interval]:
        """Intervals of FMR and FNMR at a fixed threshold, such as one that was set on other people."""
        *drawn, weights = intervals.at_threshold(self.scores, threshold, replicates=replicates, seed=seed)
        found = []
        rests = self.impostor, self.genuine
        for values, point, rest in zip(drawn, self.rates(threshold), rests, strict=True):
            method = f"{intervals.METHOD}, threshold fixed"
            one = intervals.percentile(values, point, weights, level, seed, method, rate=rest)
            found.append(intervals.zero_errors(one, self.subjects, point) if point in (0, 1) else one)
        return found[0], found[1]

    def value(self, name: str | tuple[str, float]) -> float:
        """A number by the name that :meth:`interval` knows."""
        metric, far = named(name)
        return self.tar(far) if far is not None else getattr(self, metric)

    def replicates(self, replicates: int = 1000, seed: int = 0) -> intervals.Replicates:
        """The error curves of every resample of the subjects, drawn once and kept."""
        key = (replicates, seed)
        if key not in self._kept:
            self._kept[key] = intervals.resample(self.scores, replicates=replicates, seed=seed)
        return self._kept[key]

    def look_at(self, fars: Sequence[float]) -> None:
        """In histogram mode: look into the windows of the EER and of several rates in one pass, not one by one."""
        if not isinstance(self.scores, Counted) or self.scores._seen:
            return
        wanted = [curve.crossing_bins(self.scores)]
        budgets = [curve.rate(far) * self.impostor for far in fars]
        wanted += [curve.budget_bins(self.scores, math.floor(b)) for b in budgets if b >= 1]
        self.scores.look([self.scores.around(*w) for w in wanted])

    def summary(self, fars: tuple[float, ...] = (1e-1, 1e-2, 1e-3)) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; what does not exist is None (EER, an infinite threshold)."""
        self.look_at(fars)
        points = []
        for far in fars:
            point = self.operating_point(far)
            entry = {k: v for k, v in vars(point).items() if k != "threshold"}
            finite = point.threshold is not None and math.isfinite(point.threshold)
            entry["threshold"] = point.threshold if finite else None
            entry["interval"] = self._stated(f"tar@{far!r}") if point.tar is not None else None
            points.append(entry)
        try:
            eer, half_gap = self.eer, self.eer_bracket.half_gap
        except NotMeasurable:  # too many failed templates
            eer, half_gap = None, None
        return {
            "trials": self.trials,
            "mode": self.mode,
            "genuine": self.genuine,
            "impostor": self.impostor,
            "subjects": self.subjects,
            "eer": {
                "value": eer,
                "half_gap": half_gap,
                "interval": None if eer is None else self._stated("eer"),
            },
            "auc": {"value": self.auc, "bound": self.bounds["auc"], "interval": self._stated("auc")},
            "min_dcf": self.min_dcf,
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


@dataclass(frozen=True)
class Cost:
    """A detection cost, the threshold that attains it, and how much less it could be in histogram mode."""

    value: float
    threshold: float
    bound: float


@dataclass(frozen=True, eq=False)
class Source:
    """What a verification was computed from, so that groups and comparisons can pair the same rows again."""

    probe: Rows
    gallery: Rows | None
    arguments: Mapping[str, Any]


def verification(
    embeddings: Any,
    labels: Any,
    *,
    domains: Any = None,
    trials: Any = "all",
    gallery: tuple[Any, ...] | None = None,
    ids: Any = None,
    cohort: Any = None,
    cohort_top: int | None = None,
    mode: str | None = None,
    memory: int = MEMORY,
    chunk: int | None = None,
) -> Verification:
    """Compare pairs of embeddings by cosine and count errors.

    Args:
        embeddings: (n, d) array or tensor; float64 is scored in float64 (ties are equal to 12 decimals),
            anything else in float32.
        labels: (n,) integers, the subject of each row.
        domains: (n,) integers or text: device, session, camera.
        trials: "all" (every unordered pair once; None means the same), "within" (both of one domain),
            "across" (two domains), or integers (m, 3) of (id, id, target); see
            :func:`mettle.evaluate.read_trials`. Without ``ids`` an id is a row number.
        gallery: ``(embeddings, labels[, domains[, ids]])`` to compare every row with, instead of with each
            other.
        ids: (n,) integer sample ids; pairs of one id are left out. With a gallery, give ids on both sides.
        cohort: (c, d) embeddings of other people: scores are normalised by what each side scores against them,
            s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j).
        cohort_top: how many of its nearest cohort members a row is measured against; by default all.
        mode: "exact" (scores in memory, or exact counts where they do not fit) or "histogram" (64k bins, see
            :mod:`mettle.evaluate.counted`); by default exact up to 2²⁵ pairs, which is 8192 rows.
        memory: bytes that scores and tiles may take, about.
        chunk: rows scored at a time; it changes memory, never the result.

    Example:
        >>> import numpy as np
        >>> v = verification(np.eye(3)[[0, 0, 1, 1]], [7, 7, 8, 8])
        >>> v.eer, v.auc, v.genuine, v.impostor
        (0.0, 1.0, 2, 4)
    """
    if mode not in (None, *MODES):
        raise InputError(f"no mode named {mode!r}{nearest(str(mode), MODES)}")
    probe = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    other = None if gallery is None else check_gallery(gallery, probe)
    norm = None if cohort is None else normalisers(probe, other, cohort, cohort_top)
    kept = {"trials": trials, "cohort": cohort, "cohort_top": cohort_top, "mode": mode, "memory": memory}
    source = Source(probe, other, MappingProxyType(kept))
    if not (trials is None or isinstance(trials, str)):
        return replace(_listed(probe, other, trials, norm), source=source)
    keep = "all" if trials is None else trials
    if keep not in TRIALS:
        raise InputError(f"no trials named {keep!r}{nearest(keep, TRIALS)}")
    if keep != "all" and any(r.domains is None for r in (probe, other or probe)):
        raise InputError(f"trials={keep!r} compares domains: pass domains, one per row on every side")
    design = Design.of(probe, other, keep, _rows(chunk, memory, len(other or probe)), norm)
    subjects = 1 + max(int(side.max()) for side in design.subject)
    pairs = sum(design.bound())
    mode = mode or ("exact" if pairs <= EXACT_PAIRS else "histogram")
    if mode == "exact" and pairs * np.dtype(design.dtype).itemsize <= memory:
        found: curve.Pairs = Scores.of(design.stream, design.bound(), design.dtype, subjects)
    else:
        both_kinds(*design.bound())
        found = counted(design, subjects, exact=mode == "exact", device=_device(embeddings))
    return Verification(found, keep, mode, source)


def _rows(chunk: int | None, memory: int, columns: int) -> int:
    """Rows of a tile: at most 512, and what a quarter of the memory holds at 32 bytes a pair."""
    if memory < 1 << 20:
        raise InputError(f"memory must be at least one mebibyte, in bytes: got {memory}")
    if chunk is None:
        return int(np.clip(memory // 4 // (32 * min(columns, WIDEST)), 1, 512))
    if chunk < 1:
        raise InputError(f"chunk must be at least 1: got {chunk}")
    return chunk


def _device(embeddings: Any) -> Any:
    """Where to score: on the accelerator that the embeddings are on."""
    on = isinstance(embeddings, torch.Tensor) and embeddings.device.type == "cuda"
    return embeddings.device if on else None


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


def _listed(probe: Rows, gallery: Rows | None, trials: Any, norm: Any) -> Verification:
    """Score the pairs that a list names."""
    i, j, target = check_trials(trials, probe, gallery)
    other = probe if gallery is None else gallery
    double = probe.values.dtype == np.float64 or other.values.dtype == np.float64
    first = Unit.of(probe.values, double)
    second = first if gallery is None else Unit.of(other.values, double)

    both = None if norm is None else Norm(*norm)

    def score(part: slice) -> np.ndarray:
        s = first.take(i[part]).paired(second.take(j[part]))
        return s if both is None else both.pairs(s, i[part], j[part])

    dtype = first.dtype if both is None else np.float64
    return _from_list(score, target, dtype, (probe.labels[i], other.labels[j]), chunk=1 << 14)


def _from_list(score: Any, target: np.ndarray, dtype: type, pairs: Any, chunk: int = 1 << 18) -> Verification:
    subject = None if pairs is None else codes(*pairs)
    listed = Listed(score, target, None if subject is None else (subject[0], subject[1]), chunk)
    genuine = int(np.count_nonzero(target))
    subjects = 0 if subject is None else 1 + max(int(side.max()) for side in subject)
    found = Scores.of(listed.stream, (genuine, len(target) - genuine), dtype, subjects)
    return Verification(found, "listed")


def named(name: str | tuple[str, float]) -> tuple[str, float | None]:
    """A metric and its rate: ``"eer"``, ``"auc"``, ``"tar@1e-3"`` or ``("tar", 1e-3)``."""
    if isinstance(name, tuple):
        metric, far = (*name, None)[:2]
        given = len(name) == 2
    else:
        metric, _, text = str(name).partition("@")
        far, given = (_number(text) if text else None), bool(text)
    if metric not in ("eer", "auc", "tar") or (metric == "tar") != given:
        raise InputError(f"no interval named {name!r}{nearest(str(name), ('eer', 'auc', 'tar@1e-3'))}")
    return metric, far  # type: ignore[return-value]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"a false-accept rate must be a number, as in 'tar@1e-3': got {text!r}") from None
