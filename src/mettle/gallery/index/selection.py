"""What an index loses against exact search, and how long it takes: measured on the gallery it is built for.

Which index a gallery gets, and what it costs: chosen by size and target, measured before it is used.

The rule of ``kind="auto"``:

    1. exact       where one probe takes at most ``latency_ms`` (5 by default): about 20,000 x 512 on a laptop
    2. compressed  where ``memory_mb`` is set and exact is too slow or does not fit
    3. scan        otherwise: every template as four bits a dimension, the best of them scored exactly
    4. ivf         where scan is too slow (millions of templates) and ivf reaches the wanted recall in time
    5. exact       where nothing approximate reaches the wanted recall

The effort of an approximate index is the least that reaches ``recall`` among the ten best, by two standard errors, on
probes drawn from the gallery itself. ``hnsw`` is built on request only: at 100,000 x 512 it takes ten times as long to
build as scan, is slower and finds less (benchmarks/gallery.py). What was measured travels with the index and is printed
by ``str(measured)``.
"""

import math
import time
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mettle.errors import InputError, nearest
from mettle.gallery.index.approximate import KINDS, MAX_APPROXIMATE_DIM, ApproximateIndex
from mettle.gallery.index.base import Index
from mettle.gallery.index.exact import ExactIndex, VectorTable

PROBES, TIMED, K = 400, 100, 10


IMPOSTORS = 4096  # templates with which each probe is compared to find the threshold


FAR = 1e-3


@dataclass(frozen=True)
class IndexBenchmark:
    """Facts about an index, found when it was built."""

    kind: str
    size: int
    dim: int
    recall_at: dict[int, float]  # share of the exact top k that came out, by k
    tar_loss: float | None  # share of genuine probes that exact search accepts at FAR 1e-3 and this index does not
    p50_ms: float
    p99_ms: float
    exact_p50_ms: float
    bytes: int
    probes: int = 0  # how many were measured
    recall_low: float = 1.0  # recall@10 less two standard errors

    def __str__(self) -> str:
        if not self.probes:
            return f"{self.kind} index, empty"
        recall = ", ".join(f"recall@{k} {value:.4f}" for k, value in sorted(self.recall_at.items()))
        loss = "" if self.tar_loss is None else f", TAR lost at FAR 1e-3 {self.tar_loss:.4f}"
        return (
            f"{self.kind} index of {self.size:,} x {self.dim}, {self.bytes / 1e6:.0f} MB: {recall}{loss} against exact "
            f"search on {self.probes} probes; {self.p50_ms:.2f} ms a probe (p99 {self.p99_ms:.2f}, exact "
            f"{self.exact_p50_ms:.2f})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return vars(self) | {"recall_at": {str(k): v for k, v in self.recall_at.items()}}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "IndexBenchmark":
        """From `as_dict`."""
        values: dict[str, Any] = facts | {"recall_at": {int(k): float(v) for k, v in facts["recall_at"].items()}}
        return cls(**values)


@dataclass(frozen=True, eq=False)
class SearchTrial:
    """Probes with what exact search says of them."""

    probes: np.ndarray  # (p, dim)
    skip: np.ndarray  # (p,) number that does not count for this probe (the template it was), -1: none
    scores: np.ndarray  # (p, k) exact
    numbers: np.ndarray  # (p, k) exact
    exact_p50_ms: float
    people: "TrialLabels | None"  # whose probes and templates they are; None: not known

    def lost_share(self, scores: np.ndarray, numbers: np.ndarray) -> float | None:
        """Share of probes that exact search accepts as who they are and this answer does not."""
        if self.people is None or self.people.threshold is None:
            return None
        accepted = self.people.are_accepted(self.scores, self.numbers)
        return float((accepted & ~self.people.are_accepted(scores, numbers)).mean())


@dataclass(frozen=True, eq=False)
class TrialLabels:
    """Whose probes (p,) and whose templates (n,) they are, and what makes a match."""

    probe: np.ndarray
    numbers: np.ndarray  # of templates, rising
    template: np.ndarray
    threshold: float | None  # at FAR 1e-3; None where there are too few impostors to tell

    def are_accepted(self, scores: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """(p,) whether a template of the right person came out with a score that reaches the threshold."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        own = (self.template[at] == self.probe[:, None]) & (numbers >= 0)
        return (own & (scores >= self.threshold)).any(1)


def make_trial(
    exact: ExactIndex, labels: np.ndarray | None = None, probes: np.ndarray | None = None, *, count: int = PROBES
) -> SearchTrial:
    """Search probes exactly. Given ones are taken as they are; otherwise templates of the gallery are (`drawn`)."""
    people, skip = None, None
    if probes is None:
        labels = np.arange(len(exact)) if labels is None else labels
        draw = np.random.default_rng(0)
        probes, rows, skip = draw_probes(exact.rows.numbers, exact.rows.vectors, labels, count, draw)
        order = np.argsort(exact.rows.numbers, kind="stable")
        threshold = _impostor_threshold(exact.rows.vectors, labels, probes, labels[rows], draw)
        people = TrialLabels(labels[rows], exact.rows.numbers[order], labels[order], threshold)
    probes = np.asarray(probes, np.float32)
    skip = np.full(len(probes), -1, np.int64) if skip is None else skip
    scores, numbers = drop_skipped(*exact.search(probes, K + 1), skip)
    return SearchTrial(
        probes, skip, scores, numbers, float(np.median(_time_probes(exact, probes[: TIMED // 4]))), people
    )


def draw_probes(
    numbers: np.ndarray, vectors: np.ndarray, labels: np.ndarray, count: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Probes, the rows they come from, and the numbers that do not count for them.

    Templates of people who have several, each without itself. Where there are hardly any such people, templates mixed
    with another one, so that they are still nearest to their own (cosine about 0.8).
    """
    rows = _rows_with_siblings(labels)
    if len(rows) >= min(50, len(numbers)):
        rows = draw.choice(rows, min(count, len(rows)), replace=False)
        return vectors[rows], rows, numbers[rows]
    rows = draw.choice(len(numbers), min(count, len(numbers)), replace=False)
    mixed = vectors[rows] + np.float32(0.75) * vectors[draw.choice(len(numbers), len(rows))]
    return mixed / np.maximum(np.linalg.norm(mixed, axis=1, keepdims=True), 1e-6), rows, None


def measure_index(index: Index, trial: SearchTrial) -> IndexBenchmark:
    """Search the probes of a trial and compare."""
    scores, numbers = drop_skipped(*index.search(trial.probes, K + 1), trial.skip)
    there = trial.numbers >= 0
    recall, share = {}, np.ones(len(numbers))
    for k in (1, K):
        hit = (trial.numbers[:, :k, None] == numbers[:, None, :k]).any(2) & there[:, :k]
        recall[k] = float(hit.sum() / max(1, there[:, :k].sum()))
        share = hit.sum(1) / np.maximum(1, there[:, :k].sum(1))
    times = _time_probes(index, trial.probes[:TIMED])
    return IndexBenchmark(
        kind=index.kind,
        size=len(index),
        dim=index.dim,
        recall_at=recall,
        tar_loss=trial.lost_share(scores, numbers),
        p50_ms=round(float(np.median(times)), 4),
        p99_ms=round(float(np.quantile(times, 0.99)), 4),
        exact_p50_ms=round(trial.exact_p50_ms, 4),
        bytes=index.bytes,
        probes=len(trial.probes),
        recall_low=round(recall[K] - 2 * float(share.std()) / len(share) ** 0.5, 6),
    )


def drop_skipped(scores: np.ndarray, numbers: np.ndarray, skip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Answers (p, k+1) less one number each -> (p, k)."""
    at = (numbers == skip[:, None]) & (numbers >= 0)
    at[~at.any(1), -1] = True  # it did not come out: the last one goes
    shape = (len(scores), scores.shape[1] - 1)
    return scores[~at].reshape(shape), numbers[~at].reshape(shape)


def _time_probes(index: Index, probes: np.ndarray) -> np.ndarray:
    """Milliseconds of each probe alone."""
    index.search(probes[:1], K)
    times = []
    for probe in probes:
        began = time.perf_counter()
        index.search(probe[None], K)
        times.append(1e3 * (time.perf_counter() - began))
    return np.asarray(times or [0.0])


def _rows_with_siblings(labels: np.ndarray) -> np.ndarray:
    """Rows whose label is not alone."""
    _, inverse, count = np.unique(labels, return_inverse=True, return_counts=True)
    return np.flatnonzero(count[inverse.reshape(-1)] > 1)


def _impostor_threshold(
    vectors: np.ndarray, labels: np.ndarray, probes: np.ndarray, label: np.ndarray, draw: np.random.Generator
) -> float | None:
    """The lowest score that at most one impostor in a thousand reaches; None where there are too few impostors."""
    rows = draw.choice(len(labels), min(IMPOSTORS, len(labels)), replace=False)
    strangers = label[:, None] != labels[rows]
    scores = np.sort((probes @ vectors[rows].astype(np.float32).T)[strangers])
    if len(scores) * FAR < 1:
        return None
    allowed = int(len(scores) * FAR)
    return float(np.nextafter(scores[-allowed - 1], np.float32(np.inf)))


LATENCY_MS = 5.0


SMALL = 2000  # templates: exact without a look at the clock


OUTGROWN = 2.0  # times its size when it was built


@dataclass(frozen=True)
class IndexSpec:
    """What an index should be like.

    Args:
        latency_ms: time of one probe, as a median; None: 5.
        recall: share of the ten best templates that must be found.
        memory_mb: most memory of the index, in millions of bytes; None: whatever it takes.
        kind: ``auto``, or one by name: ``exact``, ``scan``, ``compressed``, ``ivf``, ``hnsw``.
    """

    latency_ms: float | None = None
    recall: float = 0.99
    memory_mb: float | None = None
    kind: str = "auto"

    def __post_init__(self) -> None:
        known = ["auto", "exact", *KINDS]
        if not isinstance(self.kind, str) or self.kind not in known:
            raise InputError(f"kind must name an index, got {self.kind!r}{nearest(str(self.kind), known)}")
        if not 0 < _as_number(self.recall) <= 1:
            raise InputError(f"recall must lie in (0, 1], got {self.recall!r}: 0.99 is usual.")
        for name in ("latency_ms", "memory_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < _as_number(value) < math.inf:
                raise InputError(f"{name} must be a positive number, got {value!r:.80}: leave it out for no limit.")


def as_wanted(given: IndexSpec | None) -> IndexSpec:
    """What an index should be like, nothing said: the usual."""
    if given is not None and not isinstance(given, IndexSpec):
        raise InputError(f"wanted must be an IndexSpec, such as IndexSpec(kind='exact'): got {given!r:.80}")
    return given or IndexSpec()


def _as_number(value: object) -> float:
    """The number that was given; NaN, which no comparison accepts, where it is none or no float can hold it."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


@dataclass(frozen=True, eq=False)
class BuiltIndex:
    """An index and what was measured of it."""

    index: Index
    measured: IndexBenchmark


def build_index(
    vectors: np.ndarray,
    numbers: np.ndarray,
    wanted: IndexSpec | None = None,
    *,
    probes: np.ndarray | None = None,
    labels: np.ndarray | None = None,
) -> BuiltIndex:
    """Choose, build and measure an index over unit vectors (n, dim) with their numbers (n,).

    Args:
        vectors: templates.
        numbers: their 64-bit numbers.
        wanted: what the index should be like.
        probes: what to measure with; by default templates of the gallery (see `measure.trial`).
        labels: whose templates they are, (n,) integers: the loss in TAR is then that of people with several templates.

    Raises:
        InputError: wrong shapes, or a memory limit that no kind can keep.
    """
    wanted = as_wanted(wanted)
    vectors = np.asarray(vectors)
    if vectors.ndim != 2:
        raise InputError(f"vectors must be (n, dim), got shape {vectors.shape}.")
    if labels is not None and (labels := np.asarray(labels)).shape != (len(vectors),):
        raise InputError(f"labels must be ({len(vectors)},), one per vector, got shape {labels.shape}.")
    exact = _borrow_exact(vectors, numbers)
    if not len(exact):
        return BuiltIndex(
            _own_exact(exact),
            IndexBenchmark(exact.kind, 0, exact.dim, {1: 1.0, K: 1.0}, None, 0.0, 0.0, 0.0, exact.bytes),
        )
    test = make_trial(exact, labels, probes)
    kinds = _kinds_to_try(wanted, len(exact), exact.dim, exact.bytes, test.exact_p50_ms)
    tried: list[BuiltIndex] = []
    for kind in kinds:
        built = _build_kind(kind, exact, test, wanted)
        tried.append(built)
        if _is_good(built, wanted):
            return built
    return _least_bad(tried, exact, test, wanted)


def has_outgrown(size: int, measured: IndexBenchmark) -> bool:
    """Whether an index has grown so much since it was built that another kind or effort may be due."""
    return size > max(SMALL, OUTGROWN * measured.size)


def _borrow_exact(vectors: np.ndarray, numbers: np.ndarray) -> ExactIndex:
    """An exact index that borrows the caller's vectors: good to measure with, not to keep."""
    vectors = np.asarray(vectors, np.float32)
    return ExactIndex(
        vectors.shape[1], VectorTable.from_arrays(*VectorTable(vectors.shape[1]).check_rows(numbers, vectors))
    )


def _own_exact(exact: ExactIndex) -> ExactIndex:
    """With vectors of its own."""
    own = ExactIndex(exact.dim)
    own.add(exact.rows.numbers, exact.rows.vectors)
    return own


def _kinds_to_try(wanted: IndexSpec, size: int, dim: int, exact_bytes: int, exact_ms: float) -> list[str]:
    """Kinds to try, the one preferred first."""
    limit = math.inf if wanted.memory_mb is None else 1e6 * wanted.memory_mb
    if wanted.kind != "auto":
        return [wanted.kind]
    quick = size <= SMALL or exact_ms <= (wanted.latency_ms or LATENCY_MS) or dim > MAX_APPROXIMATE_DIM
    if quick and exact_bytes <= limit:
        return ["exact"]
    return ["scan", "ivf"] if wanted.memory_mb is None else ["compressed"]


def _build_kind(kind: str, exact: ExactIndex, test: SearchTrial, wanted: IndexSpec) -> BuiltIndex:
    """An index of a kind, with the least effort that reaches the wanted recall."""
    if kind == "exact":
        return BuiltIndex(_own_exact(exact), measure_index(exact, test))
    index = ApproximateIndex.build(kind, exact.rows.numbers, exact.rows.vectors)
    best: BuiltIndex | None = None
    for effort in KINDS[kind].ladder:
        tuned = index.with_params(effort)
        found = measure_index(tuned, test)
        if best is None or found.recall_at[K] > best.measured.recall_at[K]:
            best = BuiltIndex(tuned, found)
        if found.recall_low >= wanted.recall:
            break
    assert best is not None
    return best


def _is_good(built: BuiltIndex, wanted: IndexSpec) -> bool:
    """Whether it is what was wanted; one asked for by name always is, but must fit."""
    fits = wanted.memory_mb is None or built.measured.bytes <= 1e6 * wanted.memory_mb
    if not fits:
        raise InputError(
            f"memory_mb={wanted.memory_mb:g} is too little for {built.measured.size:,} x {built.measured.dim}: "
            f"{built.measured.kind!r} takes {built.measured.bytes / 1e6:.0f} MB. Allow more, or use a server."
        )
    if wanted.kind != "auto" or built.index.kind == "exact":
        return True
    return built.measured.recall_at[K] >= wanted.recall and (
        wanted.memory_mb is not None or built.measured.p50_ms <= (wanted.latency_ms or LATENCY_MS)
    )


def _least_bad(tried: list[BuiltIndex], exact: ExactIndex, test: SearchTrial, wanted: IndexSpec) -> BuiltIndex:
    """None is all that was wanted: the quickest that finds enough, else exact search where it fits."""
    enough = [b for b in tried if b.measured.recall_at[K] >= wanted.recall]
    if enough:
        return min(enough, key=lambda b: b.measured.p50_ms)
    if wanted.memory_mb is None or exact.bytes <= 1e6 * wanted.memory_mb:
        return BuiltIndex(_own_exact(exact), measure_index(exact, test))
    return max(tried, key=lambda b: b.measured.recall_at[K])
