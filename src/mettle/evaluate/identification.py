"""Identification: who is it, if anybody? Probes against enrolled people, known and unknown probes.

Scores of one identity's templates are fused by a named rule before ranking. A probe is *mated* if its identity is
enrolled, otherwise *unknown*. Per probe, never per pair, accept iff s ≥ τ:

    FPIR(τ)    share of unknown probes with at least one identity at or above τ
    TPIR(τ, R) share of mated probes whose own identity scores at or above τ and is among the R best
    rank-R     TPIR(−∞, R)

Among equal scores the order is random: with a identities strictly above the own one and t at its score (itself
included), the chance to be among the R best is (R − a) / t, cut to [0, 1].
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mettle.errors import InputError, nearest
from mettle.evaluate import bootstrap, inputs, roc
from mettle.evaluate.bootstrap import Interval, select_replicates, slice_rows
from mettle.evaluate.diagnostics.duplicates import check_shared_samples
from mettle.evaluate.inputs import (
    NotMeasurable,
    Numbers,
    check_apart,
    check_int,
    check_tuple,
    joint_codes,
    share_label_codes,
)
from mettle.evaluate.metrics import ItemMetric, metrics_of, parse_metric, register
from mettle.evaluate.notebook import html_table
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.unknown_names import explain_arguments

FUSIONS = ("max", "mean")
_CELLS = 1 << 22


@dataclass(frozen=True)
class IdentificationRate:
    """TPIR at one operating point.

    Attributes:
        fpir: the rate that was wanted.
        attained: the rate attained, never above it.
        tpir: share of mated probes found; None where not measurable.
        threshold: the smallest operating threshold with FPIR ≤ fpir.
        rank: R.
        enrolled: N, identities in the gallery.
        mated: mated probes.
        unknown: unknown probes.
        status: by the unknown probes that the rate allows, as for verification.
    """

    fpir: float
    attained: float | None
    tpir: float | None
    threshold: float | None
    rank: int
    enrolled: int
    mated: int
    unknown: int
    status: str


@dataclass(frozen=True, eq=False)
class Identification:
    """What identification found, one value per probe.

    Attributes:
        own: score of each mated probe's own identity.
        above: how many identities score strictly above it.
        tied: how many have its score, itself included.
        best: highest score of each unknown probe.
        mated: positions of the mated probes.
        unknown: positions of the unknown ones.
        subjects: subject code of every probe.
        enrolled: identities in the gallery.
        fusion: the rule.
        notes: what was seen in the data, for ``warnings``.
    """

    own: np.ndarray
    above: np.ndarray
    tied: np.ndarray
    best: np.ndarray
    mated: np.ndarray
    unknown: np.ndarray
    subjects: np.ndarray
    enrolled: int
    fusion: str
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Identification(rank_1={self.rank_1:.4f}, enrolled={self.enrolled}, mated={len(self.mated)}, "
            f"unknown={len(self.unknown)}, fusion={self.fusion!r})"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        for name in self.names():
            metric, at = parse_metric(name, "identification")
            rows.append((metric.title.format(at), self.value(name)))
        for fpir in (0.1, 0.01):
            point = self.operating_point(fpir)
            rows.append((f"TPIR at FPIR {fpir:g}", point.tpir if point.status == "ok" else point.status))
        rows += [("enrolled identities", self.enrolled), ("mated probes", len(self.mated))]
        rows.append(("unknown probes", len(self.unknown)))
        return html_table(f"Identification, fusion by {self.fusion}", rows, self.warnings)

    def found_within_rank(self, rank: int = 1) -> np.ndarray:
        """For each mated probe, the chance that its identity is among the ``rank`` best."""
        if check_int(rank, "rank", 1) > self.enrolled:
            raise InputError(f"rank must lie between 1 and the {self.enrolled} enrolled identities: got {rank}")
        return np.clip((rank - self.above) / self.tied, 0, 1)

    def rank(self, rank: int = 1) -> float:
        """Share of mated probes whose identity is among the ``rank`` best, whatever its score."""
        return float(self.found_within_rank(rank).mean())

    @property
    def rank_1(self) -> float:
        """Share of mated probes whose identity scores best."""
        return self.rank(1)

    @property
    def cmc(self) -> np.ndarray:
        """rank(1) … rank(20), or as many as there are identities."""
        return np.asarray([self.rank(r) for r in range(1, min(20, self.enrolled) + 1)])

    @cached_property
    def _thresholds(self) -> np.ndarray:
        return np.append(np.unique(np.append(self.own, self.best)), np.inf)

    def operating_point(self, fpir: float, rank: int = 1) -> IdentificationRate:
        """The smallest threshold that keeps FPIR at or below a rate, and TPIR there."""
        counts = self.enrolled, len(self.mated), len(self.unknown)
        found = self.found_within_rank(rank)
        budget = roc.allowed_errors(fpir, len(self.unknown), "fpir")
        if budget < 1:
            return IdentificationRate(fpir, None, None, None, rank, *counts, "not measurable")
        alarms = len(self.best) - np.searchsorted(np.sort(self.best), self._thresholds, side="left")
        at = int(np.argmax(alarms <= math.floor(budget)))
        tau = float(self._thresholds[at])
        tpir = float((found * (self.own >= tau)).mean())
        status = roc.sample_size_status(float(budget))
        return IdentificationRate(fpir, int(alarms[at]) / len(self.best), tpir, tau, rank, *counts, status)

    def tpir(self, fpir: float, rank: int = 1) -> float:
        """Share of mated probes found among the ``rank`` best at the threshold for a false-positive rate.

        Raises:
            NotMeasurable: fewer than 1/fpir unknown probes.
        """
        value = self.operating_point(fpir, rank).tpir
        if value is None:
            raise NotMeasurable(
                f"tpir at fpir={fpir:g} is not measurable with {len(self.unknown)} unknown probes: give probes whose "
                "identity is not enrolled, at least 1/fpir of them"
            )
        return value

    def threshold(self, fpir: float) -> float:
        """The smallest operating threshold with FPIR ≤ fpir."""
        self.tpir(fpir)
        return float(self.operating_point(fpir).threshold)  # type: ignore[arg-type]

    def interval(
        self, name: str | tuple[str, float], level: float = 0.95, *, replicates: int = 1000, seed: int = 0
    ) -> Interval:
        """Interval of ``"rank@1"`` or, say, ``"tpir@0.01"``: probe subjects are resampled, the gallery stays fixed.

        Raises:
            NotMeasurable: fewer than six subjects have mated probes, or, where a rate is kept, unknown ones.
        """
        metric, at = parse_metric(name, "identification")
        kept = at if metric.takes == "fpir" else None
        point = self.value(name)
        count = 1 + int(self.subjects.max())
        bootstrap.check_subjects(len(np.unique(self.subjects[self.mated])), "subjects with mated probes")
        if kept is not None:
            bootstrap.check_subjects(len(np.unique(self.subjects[self.unknown])), "subjects with unknown probes")
        weights = bootstrap.bootstrap_weights(count, replicates, seed)
        walk = slice_rows(replicates, len(self.subjects))
        drawn = [self._count_found(weights[part], metric, at) for part in walk]
        hits, total = (np.concatenate(column) for column in zip(*drawn, strict=True))
        able = total > 0
        values = hits[able] / total[able]
        method = f"probe-{bootstrap.METHOD}, gallery fixed"
        among = np.isin(np.arange(count), self.subjects[self.mated])  # a stranger cannot be missed
        weights, probes = select_replicates(weights, able), len(self.mated)
        return bootstrap.of_rate(values, point, weights, level, seed, method, rate=probes, among=among)

    def names(self) -> list[str]:
        """What the summary tells beside rates of false alarms."""
        known = [metric for metric in metrics_of("identification") if metric.takes != "fpir"]
        return [metric.name_at(1) if metric.takes else metric.key for metric in known]

    def value(self, name: str | tuple[str, float]) -> float:
        """A number by the name that :meth:`interval` knows."""
        metric, at = parse_metric(name, "identification")
        assert isinstance(metric, ItemMetric)
        return float(metric.per_item(self, at).mean())

    def _count_found(self, weights: np.ndarray, metric: Any, at: float | None) -> tuple[np.ndarray, np.ndarray]:
        """How many mated probes each replicate finds, and how many it has."""
        w, u = weights[:, self.subjects[self.mated]], weights[:, self.subjects[self.unknown]]
        if metric.takes != "fpir" or at is None:
            hits = np.broadcast_to(metric.per_item(self, at), w.shape)
        else:
            hits = self.found_within_rank(1) * (self.own >= self._bootstrap_thresholds(u, at)[:, None])
        return (w * hits).sum(axis=1), w.sum(axis=1)

    def _bootstrap_thresholds(self, weights: np.ndarray, fpir: float) -> np.ndarray:
        """The threshold of each replicate: just above the score at which the allowed share of alarms is exceeded."""
        order = np.argsort(-self.best, kind="stable")
        scores, alarms = self.best[order], np.cumsum(weights[:, order], axis=1)
        over = alarms > fpir * (1 + 1e-12) * np.maximum(weights.sum(axis=1, keepdims=True), 1)
        first = np.argmax(over, axis=1)
        level = np.where(over.any(axis=1), scores[first], -np.inf)
        return np.nextafter(level, np.asarray(np.inf, level.dtype))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the numbers."""
        notes = self.notes
        if self.enrolled == 1:
            notes += (
                "one identity is enrolled: rank 1 and CMC are 1 whatever the scores; TPIR at an FPIR still tells",
            )
        if len(self.unknown):
            return notes
        return (*notes, "no unknown probes: a closed-set result, which says nothing about strangers")

    def summary(self, fpirs: Numbers = (0.1, 0.01)) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; interval None where subjects are too few."""
        points = []
        for fpir in inputs.check_rates(fpirs, "fpirs", least=0):
            entry = dict(vars(self.operating_point(fpir)))
            tau = entry["threshold"]
            entry["threshold"] = tau if tau is not None and np.isfinite(tau) else None
            entry["interval"] = bootstrap.interval_or_none(lambda rate=fpir: self.interval(f"tpir@{rate!r}"))
            points.append(entry)
        return {
            "enrolled": self.enrolled,
            "mated": len(self.mated),
            "unknown": len(self.unknown),
            "fusion": self.fusion,
            "metrics": {
                name: {
                    "value": self.value(name),
                    "interval": bootstrap.interval_or_none(lambda n=name: self.interval(n)),
                }
                for name in self.names()
            },
            "cmc": self.cmc.tolist(),
            "tpir": points,
            "warnings": list(self.warnings),
        }


@explain_arguments
def identification(
    gallery: tuple[Any, ...], probes: tuple[Any, ...], *, fusion: str = "max", chunk: int | None = None
) -> Identification:
    """Search every probe among the enrolled identities.

    Args:
        gallery: ``(embeddings, labels[, domains[, ids]])``: who is enrolled, with one or several templates.
        probes: the same for the probes; those whose label is not in the gallery are the unknown ones.
        fusion: how the scores of one identity's templates become one: "max" or "mean".
        chunk: probes scored at a time; it changes memory, never the result.

    Raises:
        DataError: a sample id on both sides, or, without ids, half of a side on the other.
        InputError: no probe of an enrolled identity, non-finite values, wrong shapes.

    Example:
        >>> import numpy as np
        >>> i = identification((np.eye(3)[:2], [7, 8]), (np.eye(3) + 0.1, [7, 8, 9]))
        >>> i.rank_1, i.tpir(fpir=1.0), len(i.unknown)
        (1.0, 1.0, 1)
    """
    if fusion not in FUSIONS:
        raise InputError(f"no fusion named {fusion!r}{nearest(fusion, FUSIONS)}")
    sides = check_tuple(gallery, "gallery"), check_tuple(probes, "probes")
    enrolled, probe = share_label_codes(*sides, "the gallery", "the probes")
    check_apart(enrolled, probe, "gallery", "probes")
    notes = check_shared_samples(enrolled, probe, "the gallery", "the probes")
    if chunk is not None:
        check_int(chunk, "chunk", 1)
    double = any(r.is_float64 for r in (enrolled, probe))
    order = np.argsort(enrolled.labels, kind="stable")
    people, starts, sizes = np.unique(enrolled.labels[order], return_index=True, return_counts=True)
    templates, units = (
        ExactUnitVectors.from_rows(enrolled.values[order], double),
        ExactUnitVectors.from_rows(probe.values, double),
    )
    at = np.minimum(np.searchsorted(people, probe.labels), len(people) - 1)
    known = people[at] == probe.labels
    if not known.any():
        raise InputError("no probe has an enrolled identity: nobody can be identified; check the labels of both sides")
    parts = []
    step = chunk or max(1, _CELLS // len(order))
    for start in range(0, len(probe), step):
        part = slice(start, min(start + step, len(probe)))
        fused = _fuse_templates(units.take(part).cosine(templates), starts, sizes, fusion)
        own = fused[np.arange(len(fused)), at[part]]
        above, tied = (fused > own[:, None]).sum(axis=1), (fused == own[:, None]).sum(axis=1)
        parts.append((own, above, tied, fused.max(axis=1)))
    own, above, tied, best = (np.concatenate(p) for p in zip(*parts, strict=True))
    subjects = joint_codes(probe.labels)[0]
    a, b = np.flatnonzero(known), np.flatnonzero(~known)
    return Identification(own[a], above[a], tied[a], best[b], a, b, subjects, len(people), fusion, notes)


def _fuse_templates(tile: np.ndarray, starts: np.ndarray, sizes: np.ndarray, fusion: str) -> np.ndarray:
    """One score per identity; templates of one identity are neighbours."""
    if fusion == "max":
        return np.maximum.reduceat(tile, starts, axis=1)
    return np.round(np.add.reduceat(tile.astype(np.float64), starts, axis=1) / sizes, 12)


RANK = register(
    ItemMetric(
        "rank@k",
        "rank {}",
        "share of enrolled people's probes whose identity is among the R best, whatever its score",
        "identification",
        "probes of enrolled identities whose identity scores best",
        per_item=lambda found, rank: found.found_within_rank(int(rank)),
        items="mated probes",
        resample="subjects of probes",
        headline=(1,),
    )
)
TPIR = register(
    ItemMetric(
        "tpir@fpir",
        "TPIR at FPIR {}",
        "share of enrolled people's probes found best, and scoring above the threshold that at most a share FPIR of "
        "the strangers reach",
        "identification",
        per_item=lambda found, fpir: found.found_within_rank(1) * (found.own >= found.threshold(fpir)),
        items="mated probes",
        resample="subjects of probes",
    )
)
