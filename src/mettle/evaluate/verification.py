"""Verification: is this pair the same? Error rates over all pairs, with their exact counts.

    embeddings, labels ─ check ─ Design (which pairs) ─┬─ SortedScores ────┬─ value(name), eer, auc, tar(far), roc
    scores, target ───── check ─ Listed ───────────────┴─ HistogramScores ─┴─ interval(name), summary()

Similarity is the cosine; accept iff s ≥ τ. Definitions are in :mod:`mettle.evaluate.roc`.

What verification found: error rates over all pairs, computed from exact counts when read.

Failures to acquire and to enrol: the error rates of a whole system, not of comparisons alone.

    FTA   probes without a template / all probes                FAR = FMR·(1−FTA)·(1−FTE)
    FTE   enrolments without a template / all enrolments        FRR = FTE + (1−FTE)·(FTA + FNMR·(1−FTA))

FMR and FNMR are here those of pairs that have both templates. A pair with a failed template can be kept with a score
of −∞: it is never accepted and stays in every denominator, so that ``rates(τ)`` of such scores are FAR and FRR already,
and what is missing is how much of them the failures are. Or failed samples were left out, as embeddings must be, and
are told as FTA and FTE. One way or the other: a failure that is told twice counts twice.
"""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mettle.data.arrays import check_matrix
from mettle.errors import InputError, nearest
from mettle.evaluate import bootstrap, inputs
from mettle.evaluate.bootstrap import Interval
from mettle.evaluate.diagnostics.duplicates import check_shared_samples, in_cohort, warn_duplicates
from mettle.evaluate.inputs import (
    EmbeddingSet,
    NotMeasurable,
    Numbers,
    VerificationSource,
    as_numbers,
    both_kinds,
    check_embeddings,
    check_gallery,
    check_int,
    check_scores,
    check_trials,
    joint_codes,
)
from mettle.evaluate.metrics import PairMetric, metrics_of, parse_metric
from mettle.evaluate.notebook import html_table
from mettle.evaluate.roc import (
    DetectionCost,
    EERBracket,
    Histogram,
    OperatingPoint,
    RocPoints,
    allowed_errors,
    eer,
    error_counts,
    min_dcf,
    not_measurable,
    operating_point,
    score_histogram,
)
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.evaluate.scoring.histogram import count_scores
from mettle.evaluate.scoring.pair_tiles import WIDEST, PairTiles
from mettle.evaluate.scoring.rank_parts import require_same_call
from mettle.evaluate.scoring.score_norm import SNorm, fit_snorm
from mettle.evaluate.scoring.scores import ScoreStore, SortedScores, TrialList
from mettle.pairs.distributed import ALONE, RankGroup
from mettle.unknown_names import explain_arguments

if TYPE_CHECKING:
    from mettle.evaluate.plots import Plot

TRIALS = ("all", "within", "across")
MODES = ("exact", "histogram")
MEMORY = 1 << 28
EXACT_PAIRS = 1 << 25  # 8192 rows with each other
LOOKED_UP = (1e-1, 1e-2, 1e-3)  # rates whose operating points all ranks find together


@dataclass(frozen=True)
class SystemRates:
    """Error rates at one threshold, of comparisons and of the whole system.

    Attributes:
        threshold: accept iff s ≥ τ.
        fmr: share of impostor pairs accepted, of those with both templates.
        fnmr: share of genuine pairs rejected, of those with both templates.
        fta_impostor: share of impostor pairs without a probe's template; FTA where that was given.
        fta_genuine: share of genuine pairs without one; the same where FTA was given.
        fte: share of enrolments without a template; 0 where failures are scores of −∞, whichever side failed.
        far: share of impostor attempts that are accepted.
        frr: share of genuine attempts that are not, whatever the reason.
    """

    threshold: float
    fmr: float
    fnmr: float
    fta_impostor: float
    fta_genuine: float
    fte: float
    far: float
    frr: float


@dataclass(frozen=True, eq=False)
class Verification:
    """What verification found. Numbers are computed from exact counts when read, and kept."""

    scores: ScoreStore = field(repr=False)
    trials: str = "all"
    mode: str = "exact"
    source: VerificationSource | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    _values: dict[Any, float] = field(default_factory=dict, repr=False)
    people: np.ndarray | None = field(default=None, repr=False)  # label of each subject, where pairs were listed

    def __repr__(self) -> str:
        return (
            f"Verification(eer={self.eer:.4g}, auc={self.auc:.6g}, genuine={self.genuine}, impostor={self.impostor}, "
            f"subjects={self.subjects}, trials={self.trials!r})"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("EER", self.eer), ("AUC", self.auc)]
        for far in (0.1, 0.01, 0.001):
            point = self.operating_point(far)
            known = point.tar is not None and point.status == "ok"
            rows.append((f"TAR at FAR {far:g}", point.tar if known else point.status))
        rows += [("genuine pairs", self.genuine), ("impostor pairs", self.impostor), ("subjects", self.subjects)]
        return html_table(f"Verification, {self.trials} pairs", rows, self.warnings)

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
    def _eer(self) -> tuple[Fraction, EERBracket]:
        return eer(self.scores)

    @property
    def eer(self) -> float:
        """Equal error rate: where the path through the operating points meets FMR = FNMR."""
        return float(self._eer[0])

    @property
    def eer_bracket(self) -> EERBracket:
        """The operating points on both sides of the EER, and half the gap they leave."""
        return self._eer[1]

    @property
    def eer_rocch(self) -> float:
        """EER on the convex hull of the operating points: never above the EER, and another number."""
        return self.value("eer_rocch")

    @property
    def auc(self) -> float:
        """Chance that a genuine pair scores above an impostor pair, ties counting one half."""
        return self.value("auc")

    @cached_property
    def bounds(self) -> dict[str, float]:
        """How far each number can be from the exact one: all 0 in exact mode.

        In histogram mode EER and operating points are exact too (the window around them is scored again); AUC, the
        detection cost and the EER on the convex hull rest on bins.
        """
        known = metrics_of("verification", PairMetric)
        return {m.base: m.bound(self.scores, None) if m.bound and not m.takes else 0.0 for m in known}

    @cached_property
    def roc(self) -> RocPoints:
        """All operating points: ``thresholds``, ``fmr``, ``fnmr``, ``tar``; ``thinned(k)`` for drawing."""
        return RocPoints(self.scores)

    @property
    def det(self) -> RocPoints:
        """The same points for a DET picture, FNMR against FMR; ``probit()`` gives its axes."""
        return self.roc

    @property
    def min_dcf(self) -> float:
        """The least normalised detection cost with one target in a hundred and equal costs; 1 is a useless system."""
        return self.value("min_dcf")

    def detection_cost(self, prior: float = 0.01, *, miss: float = 1.0, false_accept: float = 1.0) -> DetectionCost:
        """The least normalised detection cost over all thresholds, for a share of targets and two costs."""
        if not 0 < prior < 1 or not 0 < miss < math.inf or not 0 < false_accept < math.inf:
            raise InputError(f"prior must lie between 0 and 1, costs above 0: got {prior}, {miss}, {false_accept}")
        return min_dcf(self.scores, prior, miss, false_accept)

    def rates(self, threshold: float) -> tuple[float, float]:
        """FMR and FNMR at any threshold, such as one that was set on other people."""
        accepts, rejects = self._count_errors(threshold)
        return accepts / self.impostor, rejects / self.genuine

    def _count_errors(self, threshold: float) -> tuple[int, int]:
        if not isinstance(threshold, Real) or math.isnan(threshold):
            raise InputError(f"threshold must be a number: got {threshold!r}")
        accepts, rejects = error_counts(self.scores, threshold)
        return int(accepts), int(rejects)

    def system_rates(self, threshold: float, *, fta: float | None = None, fte: float | None = None) -> SystemRates:
        """FAR and FRR of the whole system at a threshold: errors of comparisons and samples without a template.

        Args:
            threshold: any, such as one that was set on other people.
            fta: share of the probes that gave no template and were left out.
            fte: share of the enrolments that gave no template and were left out.

        Raises:
            InputError: rates of failures that scores of −∞ count already.
            NotMeasurable: every pair of one kind has a failed template.
        """
        errors, (genuine, impostor) = self._count_errors(threshold), self.scores.failed_pairs
        pairs, failed = (self.impostor, self.genuine), (impostor, genuine)
        return system_rates(float(threshold), errors, pairs, failed, fta, fte)

    def tar(self, far: float) -> float:
        """Share of genuine pairs accepted at the smallest threshold with FMR ≤ far.

        Raises:
            NotMeasurable: fewer than 1/far impostor pairs.
        """
        return self._measurable_point(far, "tar")

    def threshold(self, far: float) -> float:
        """The smallest operating threshold with FMR ≤ far.

        Raises:
            NotMeasurable: fewer than 1/far impostor pairs.
        """
        return self._measurable_point(far, "threshold")

    def _measurable_point(self, far: float, what: str) -> float:
        value = getattr(self.operating_point(far), what)
        if value is None:
            raise not_measurable(what, far, self.impostor)
        return value

    def operating_point(self, far: float) -> OperatingPoint:
        """The operating point for a wanted false-accept rate, with the status it deserves."""
        return operating_point(self.scores, far)

    def plot(self, kind: str = "all", *, fars: Numbers = (0.1, 0.01, 0.001), intervals: bool = False) -> "Plot":
        """ROC curve, DET curve and score histograms, for a notebook or a file: ``v.plot().save("plot.svg")``.

        Args:
            kind: ``"roc"``, ``"det"`` or ``"scores"`` alone, or ``"all"`` side by side.
            fars: operating points to mark; those that cannot be measured are left out.
            intervals: whether to draw the interval of TAR at each, which resamples subjects.

        Raises:
            InputError: another kind of plot.
        """
        from mettle.evaluate.plots import plot_verification  # matplotlib, for those who draw

        points = []
        for far in inputs.check_rates(fars):
            point = self.operating_point(far)
            if point.tar is not None and point.finite_threshold is not None:
                band = bootstrap.interval_or_none(lambda far=far: self.interval(("tar", far))) if intervals else None
                shown = {
                    "far": far,
                    "fmr": point.fmr,
                    "tar": point.tar,
                    "threshold": point.finite_threshold,
                    "interval": band,
                }
                points.append(shown)
        return plot_verification(self.roc.subsample(256), self.histogram(80), points, kind)

    def histogram(self, bins: int = 100) -> Histogram:
        """Both score distributions in equal bins over the finite scores, the last bin closed."""
        return score_histogram(self.scores, bins)

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
        failed = sum(self.scores.failed_pairs)
        if failed:
            found.append(f"{failed} pairs have a failed template (−inf) and count as non-matches")
        return tuple(found)

    def interval(
        self, name: str | tuple[str, float], level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> Interval:
        """Interval of ``"eer"``, ``"min_dcf"`` or, say, ``"tar@1e-3"`` or ``("tar", 1e-3)``: subjects are resampled.

        Thresholds are found anew in every replicate, but for ``"fmr@0.4"`` and ``"fnmr@0.4"``, which have one. The
        first call walks through the pairs once; further names and levels are then nearly free. Subjects that count are
        those with genuine pairs for TAR and FNMR, with impostor pairs for FMR, else the fewer of those with genuine and
        those with impostor pairs. See :mod:`mettle.evaluate.bootstrap`.

        Raises:
            NotMeasurable: the value itself is not measurable, or fewer than six subjects have pairs of either kind.
        """
        metric, at = parse_metric(name, "verification")
        assert isinstance(metric, PairMetric)
        if metric.takes == "threshold":
            assert at is not None
            both = self.intervals_at(at, level, replicates=replicates, seed=seed)
            return both[metric.rests_on == "genuine"]
        value = self.value(name)
        drawn = self.replicates(replicates, seed)
        among = drawn.subjects_of(metric)
        values = drawn.values(metric, at, value)
        return bootstrap.of_rate(
            values, value, drawn.weights, level, seed, drawn.method, rate=self.genuine, among=among
        )

    def intervals_at(
        self, threshold: float, level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> tuple[Interval, Interval]:
        """Intervals of FMR and FNMR at a fixed threshold, such as one that was set on other people."""
        key = (threshold, replicates, seed)
        if key not in self._kept:
            self.resample_at([threshold], replicates=replicates, seed=seed)
        *drawn, weights, (genuine, impostor) = self._kept[key]
        rests = (self.impostor, impostor), (self.genuine, genuine)
        method = f"{bootstrap.METHOD}, threshold fixed"
        first, second = (
            bootstrap.of_rate(values, value, weights, level, seed, method, rate=rest, among=among)
            for values, value, (rest, among) in zip(drawn, self.rates(threshold), rests, strict=True)
        )
        return first, second

    def resample_at(self, thresholds: Numbers, *, replicates: int = 1000, seed: int = 0) -> None:
        """Draw what :meth:`intervals_at` needs for several thresholds, in one walk through the pairs."""
        levels = inputs.check_thresholds(thresholds)
        drawn = bootstrap.at_thresholds(self.scores, levels, replicates=replicates, seed=seed)
        for threshold, found in zip(levels, drawn, strict=True):
            self._kept[threshold, replicates, seed] = found

    def value(self, name: str | tuple[str, float]) -> float:
        """A number by the name that :meth:`interval` knows."""
        metric, at = parse_metric(name, "verification")
        assert isinstance(metric, PairMetric)
        if metric.key == "eer":
            return self.eer
        if metric.takes == "threshold":
            assert at is not None
            inputs.check_thresholds(at, "threshold")
        key = metric.key, at
        if key not in self._values:
            self._values[key] = metric.value(self.scores, at)
        return self._values[key]

    def replicates(self, replicates: int = 1000, seed: int = 0) -> bootstrap.BootstrapCurves:
        """The error curves of every resample of the subjects, drawn once and kept."""
        key = (replicates, seed)
        if key not in self._kept:
            self._kept[key] = bootstrap.bootstrap_curves(self.scores, replicates=replicates, seed=seed)
        return self._kept[key]

    def refine_at(self, fars: Numbers, thresholds: Numbers = ()) -> None:
        """In histogram mode: look into the windows of the EER, of rates and of thresholds, all in one pass.

        After ``across_ranks=True`` all ranks look together: every rank makes this call.
        """
        self._refine_at(fars, thresholds, together=True)

    def _refine_at(self, fars: Numbers, thresholds: Numbers = (), *, together: bool = False) -> None:
        rates, levels = inputs.check_rates(fars, least=0), inputs.check_thresholds(thresholds, least=0)
        budgets = [allowed_errors(far, self.impostor) for far in rates]
        self.scores.refine([math.floor(errors) for errors in budgets if errors >= 1], levels, together=together)

    def summary(self, fars: Numbers = (1e-1, 1e-2, 1e-3)) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; what does not exist is None (EER, an infinite threshold)."""
        rates = inputs.check_rates(fars, least=0)
        self._refine_at(rates)
        known = metrics_of("verification", PairMetric)
        return {
            "trials": self.trials,
            "mode": self.mode,
            "genuine": self.genuine,
            "impostor": self.impostor,
            "subjects": self.subjects,
            "failed": dict(zip(("genuine", "impostor"), self.scores.failed_pairs, strict=True)),
            **{metric.key: self._describe_value(metric) for metric in known if not metric.takes},
            **{m.base: [self._describe_rate(m, far) for far in rates] for m in known if m.takes == "far"},
            "warnings": list(self.warnings),
        }

    def _describe_value(self, metric: PairMetric) -> dict[str, Any]:
        """A number with its interval; None where too many templates failed."""
        extra: dict[str, Any] = {} if metric.bound is None else {"bound": None}
        extra |= {"half_gap": None} if metric.key == "eer" else {}
        try:
            value = self.value(metric.key)
        except NotMeasurable:
            return {"value": None, "interval": None, **extra}
        if metric.key == "eer":
            extra["half_gap"] = self.eer_bracket.half_gap
        if metric.bound is not None:
            extra["bound"] = metric.bound(self.scores, None)
        return {"value": value, "interval": self._interval_or_none(metric.key), **extra}

    def _describe_rate(self, metric: PairMetric, far: float) -> dict[str, Any]:
        """A number at a wanted false-accept rate, with what was attained and the status that it deserves."""
        at = self.operating_point(far)
        entry = {**vars(at), "threshold": at.finite_threshold, "verdict": at.verdict}
        if at.tar is None:
            return entry | {metric.base: None, "interval": None}
        name = metric.base, far
        return entry | {metric.base: self.value(name), "interval": self._interval_or_none(name)}

    def _interval_or_none(self, name: str | tuple[str, float]) -> dict[str, Any] | None:
        """An interval as plain numbers, or None where subjects are unknown or too few."""
        return bootstrap.interval_or_none(lambda: self.interval(name)) if self.subjects else None


@explain_arguments
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
    across_ranks: bool = False,
) -> Verification:
    """Compare pairs of embeddings by cosine and count errors.

    Args:
        embeddings: (n, d) array or tensor; float64 is scored in float64 (ties are equal to 12 decimals),
            anything else in float32.
        labels: (n,) integers or text, the subject of each row.
        domains: (n,) integers or text: device, session, camera.
        trials: "all" (every unordered pair once; None means the same), "within" (both of one domain),
            "across" (two domains), or integers (m, 3) of (id, id, target); see
            :func:`mettle.evaluate.read_trials`. Without ``ids`` an id is a row number.
        gallery: ``(embeddings, labels[, domains[, ids]])`` to compare every row with, instead of with each
            other.
        ids: (n,) integer sample ids; pairs of one id are left out. With a gallery, give ids on both sides: without,
            rows that are on both, number for number, are warned of, and refused from half of a side up.
        cohort: (c, d) embeddings of other people: scores are normalised by what each side scores against them,
            s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j).
        cohort_top: how many of its nearest cohort members a row is measured against; by default all.
        mode: "exact" (scores in memory, or exact counts where they do not fit) or "histogram" (64k bins, see
            :mod:`mettle.evaluate.scoring.histogram`); by default exact up to 2²⁵ pairs, which is 8192 rows.
        memory: bytes that scores and tiles may take, about.
        chunk: rows scored at a time; it changes memory, never the result.
        across_ranks: where scores do not fit into memory, share the pairs with the other ranks of
            `torch.distributed`: every rank makes this call with the same rows and has the result of all of them. The
            EER and the operating points at 0.1, 0.01 and 0.001 are looked up together; further ones by
            :meth:`Verification.refine_at` on every rank, else by the rank that reads them, alone.

    Raises:
        DataError: one set was given as probes and as gallery, without ids.
        InputError: non-finite values, wrong shapes, no genuine or no impostor pair.

    Example:
        >>> import numpy as np
        >>> v = verification(np.eye(3)[[0, 0, 1, 1]], [7, 7, 8, 8])
        >>> v.eer, v.auc, v.genuine, v.impostor
        (0.0, 1.0, 2, 4)
    """
    if mode not in (None, *MODES):
        raise InputError(f"no mode named {mode!r}{nearest(str(mode), MODES)}")
    probe = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    probe, other = (probe, None) if gallery is None else check_gallery(gallery, probe)
    notes = (
        warn_duplicates(probe) if other is None else check_shared_samples(probe, other, "the embeddings", "the gallery")
    )
    norm = None
    if cohort is not None:
        cohort = check_matrix(cohort, "cohort ")
        norm = fit_snorm(probe, other, cohort, cohort_top)
        notes += in_cohort(cohort, *(side for side in (probe, other) if side is not None))
    kept = {"trials": trials, "cohort": cohort, "cohort_top": cohort_top, "mode": mode, "memory": memory}
    source = VerificationSource(probe, other, MappingProxyType(kept))
    if not (trials is None or isinstance(trials, str)):
        return replace(_score_listed(probe, other, trials, norm), source=source, notes=notes)
    keep = "all" if trials is None else trials
    if keep not in TRIALS:
        raise InputError(f"no trials named {keep!r}{nearest(keep, TRIALS)}")
    if keep != "all" and any(r.domains is None for r in (probe, other or probe)):
        raise InputError(f"trials={keep!r} compares domains: pass domains, one per row on every side")
    design = PairTiles.from_sets(probe, other, keep, _tile_rows(chunk, memory, len(other or probe)), norm)
    subjects = 1 + max(int(side.max()) for side in design.subject)
    pairs = sum(design.max_pairs())
    mode = mode or ("exact" if pairs <= EXACT_PAIRS else "histogram")
    if mode == "exact" and pairs * np.dtype(design.dtype).itemsize <= memory:
        found: ScoreStore = SortedScores.of(design.stream, design.max_pairs(), design.dtype, subjects)
    else:
        both_kinds(*design.max_pairs())
        ranks = RankGroup.current() if across_ranks else ALONE
        sides = [probe] if other is None else [probe, other]
        require_same_call(ranks, "what they compare", *sides, trials=keep, mode=mode, chunk=design.chunk)
        found = count_scores(design, subjects, exact=mode == "exact", device=_find_device(embeddings), ranks=ranks)
        if ranks.size > 1:
            (result := Verification(found, keep, mode, source, notes)).refine_at(LOOKED_UP)
            return result
    return Verification(found, keep, mode, source, notes)


def _tile_rows(chunk: int | None, memory: int, columns: int) -> int:
    """Rows of a tile: at most 512, and what a quarter of the memory holds at 32 bytes a pair."""
    if not isinstance(memory, Integral) or memory < 1 << 20:
        raise InputError(f"memory must be at least one mebibyte, in whole bytes: got {memory!r}")
    if chunk is None:
        return int(np.clip(memory // 4 // (32 * min(columns, WIDEST)), 1, 512))
    return check_int(chunk, "chunk", 1)


def _find_device(embeddings: Any) -> Any:
    """Where to score: on the accelerator that the embeddings are on."""
    on = isinstance(embeddings, torch.Tensor) and embeddings.device.type == "cuda"
    return embeddings.device if on else None


@explain_arguments
def from_scores(scores: Any, target: Any, subjects: Any = None) -> Verification:
    """Count errors of scores that came from anywhere.

    Args:
        scores: (m,) similarities, higher meaning more alike; −∞ marks a failed template. Equal means equal.
        target: (m,) 1 for a genuine pair, 0 for an impostor pair.
        subjects: (m, 2) labels of the two sides, integers or text; needed only for intervals.

    Example:
        >>> from_scores([0.9, 0.8, 0.3, 0.2], [1, 1, 0, 0]).tar(far=0.5)
        1.0
    """
    s, t, pairs, texts = check_scores(scores, target, subjects)
    both = None if pairs is None else (pairs[:, 0], pairs[:, 1])
    return _from_list(lambda part: s[part], t, s.dtype.type, both, texts)


def _score_listed(probe: EmbeddingSet, gallery: EmbeddingSet | None, trials: Any, norm: Any) -> Verification:
    """Score the pairs that a list names."""
    i, j, target = check_trials(trials, probe, gallery)
    other = probe if gallery is None else gallery
    double = probe.is_float64 or other.is_float64
    first = ExactUnitVectors.from_rows(probe.values, double)
    second = first if gallery is None else ExactUnitVectors.from_rows(other.values, double)

    both = None if norm is None else SNorm(*norm)

    def score_part(part: slice) -> np.ndarray:
        s = first.take(i[part]).rowwise_cosine(second.take(j[part]))
        return s if both is None else both.normalize_pairs(s, i[part], j[part])

    dtype = first.dtype if both is None else np.float64
    return _from_list(score_part, target, dtype, (probe.labels[i], other.labels[j]), probe.names, chunk=1 << 14)


def _from_list(
    score: Any, target: np.ndarray, dtype: type, pairs: Any, texts: np.ndarray | None, chunk: int = 1 << 18
) -> Verification:
    subject = None if pairs is None else joint_codes(*pairs)
    listed = TrialList(score, target, None if subject is None else (subject[0], subject[1]), chunk)
    genuine = int(np.count_nonzero(target))
    subjects = 0 if subject is None else 1 + max(int(side.max()) for side in subject)
    people = None
    if pairs is not None and subject is not None:
        people = np.empty(subjects, np.int64)
        people[subject[0]], people[subject[1]] = pairs
        people = people if texts is None else texts[people]
    found = SortedScores.of(listed.stream, (genuine, len(target) - genuine), dtype, subjects)
    return Verification(found, "listed", people=people)


def system_rates(
    threshold: float,
    errors: tuple[int, int],
    pairs: tuple[int, int],
    failed: tuple[int, int],
    fta: float | None,
    fte: float | None,
) -> SystemRates:
    """FAR and FRR from counts; of two numbers the first is of impostor pairs, the second of genuine ones.

    Args:
        threshold: what the errors were counted at.
        errors: pairs accepted, and pairs rejected, those that failed among them.
        pairs: how many there are.
        failed: how many have a failed template.
        fta: share of the probes that are in no pair because they gave no template.
        fte: share of the enrolments that are in no pair because they gave none.
    """
    if any(failed) and not (fta is None and fte is None):
        raise InputError(
            f"fta and fte are of samples left out, but {sum(failed)} failed pairs (−inf) are counted already: "
            "leave fta and fte out, or leave out those pairs"
        )
    for kind, n, bad in zip(("impostor", "genuine"), pairs, failed, strict=True):
        if bad == n:
            raise NotMeasurable(f"every {kind} pair has a failed template (−inf): no comparison is left to rate")
    fmr = Fraction(errors[0], pairs[0] - failed[0])
    fnmr = Fraction(errors[1] - failed[1], pairs[1] - failed[1])
    missed, unenrolled = _exact_share(fta, "fta"), _exact_share(fte, "fte")
    lost = [Fraction(bad, n) if any(failed) else missed for bad, n in zip(failed, pairs, strict=True)]
    far = fmr * (1 - lost[0]) * (1 - unenrolled)
    frr = unenrolled + (1 - unenrolled) * (lost[1] + fnmr * (1 - lost[1]))
    found = (float(rate) for rate in (fmr, fnmr, lost[0], lost[1], unenrolled, far, frr))
    return SystemRates(threshold, *found)


def _exact_share(value: Any, name: str) -> Fraction:
    """A share as the exact number that came; none is 0."""
    if value is None:
        return Fraction(0)
    found = as_numbers(value)
    if found is None or len(found) != 1 or not 0 <= found[0] <= 1:
        raise InputError(f"{name} must be a share between 0 and 1, failed samples / all of them: got {value!r}")
    return Fraction(found[0])
