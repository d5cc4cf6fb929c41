"""Which index a gallery gets, and what it costs: chosen by size and target, measured before it is used.

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
from dataclasses import dataclass
from numbers import Real

import numpy as np

from mettle.errors import InputError, nearest
from mettle.match.approximate import KINDS, WIDEST, Approximate
from mettle.match.index import Exact, Index
from mettle.match.measure import K, Measured, Trial, measure, trial
from mettle.match.rows import Rows

LATENCY_MS = 5.0
SMALL = 2000  # templates: exact without a look at the clock
OUTGROWN = 2.0  # times its size when it was built


@dataclass(frozen=True)
class Wanted:
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
        if not 0 < _number(self.recall) <= 1:
            raise InputError(f"recall must lie in (0, 1], got {self.recall!r}: 0.99 is usual.")
        for name in ("latency_ms", "memory_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < _number(value) < math.inf:
                raise InputError(f"{name} must be a positive number, got {value!r:.80}: leave it out for no limit.")


def as_wanted(given: Wanted | None) -> Wanted:
    """What an index should be like, nothing said: the usual."""
    if given is not None and not isinstance(given, Wanted):
        raise InputError(f"wanted must be a Wanted, such as Wanted(kind='exact'): got {given!r:.80}")
    return given or Wanted()


def _number(value: object) -> float:
    """The number that was given; NaN, which no comparison accepts, where it is none or no float can hold it."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


@dataclass(frozen=True, eq=False)
class Built:
    """An index and what was measured of it."""

    index: Index
    measured: Measured


def build(
    vectors: np.ndarray,
    numbers: np.ndarray,
    wanted: Wanted | None = None,
    *,
    probes: np.ndarray | None = None,
    labels: np.ndarray | None = None,
) -> Built:
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
    exact = _exact(vectors, numbers)
    if not len(exact):
        return Built(
            _kept(exact), Measured(exact.kind, 0, exact.dim, {1: 1.0, K: 1.0}, None, 0.0, 0.0, 0.0, exact.bytes)
        )
    test = trial(exact, labels, probes)
    kinds = _order(wanted, len(exact), exact.dim, exact.bytes, test.exact_p50_ms)
    tried: list[Built] = []
    for kind in kinds:
        built = _built(kind, exact, test, wanted)
        tried.append(built)
        if _good(built, wanted):
            return built
    return _least_bad(tried, exact, test, wanted)


def outgrown(size: int, measured: Measured) -> bool:
    """Whether an index has grown so much since it was built that another kind or effort may be due."""
    return size > max(SMALL, OUTGROWN * measured.size)


def _exact(vectors: np.ndarray, numbers: np.ndarray) -> Exact:
    """An exact index that borrows the caller's vectors: good to measure with, not to keep."""
    vectors = np.asarray(vectors, np.float32)
    return Exact(vectors.shape[1], Rows.of(*Rows(vectors.shape[1]).check(numbers, vectors)))


def _kept(exact: Exact) -> Exact:
    """With vectors of its own."""
    own = Exact(exact.dim)
    own.add(exact.rows.numbers, exact.rows.vectors)
    return own


def _order(wanted: Wanted, size: int, dim: int, exact_bytes: int, exact_ms: float) -> list[str]:
    """Kinds to try, the one preferred first."""
    limit = math.inf if wanted.memory_mb is None else 1e6 * wanted.memory_mb
    if wanted.kind != "auto":
        return [wanted.kind]
    quick = size <= SMALL or exact_ms <= (wanted.latency_ms or LATENCY_MS) or dim > WIDEST
    if quick and exact_bytes <= limit:
        return ["exact"]
    return ["scan", "ivf"] if wanted.memory_mb is None else ["compressed"]


def _built(kind: str, exact: Exact, test: Trial, wanted: Wanted) -> Built:
    """An index of a kind, with the least effort that reaches the wanted recall."""
    if kind == "exact":
        return Built(_kept(exact), measure(exact, test))
    index = Approximate.build(kind, exact.rows.numbers, exact.rows.vectors)
    best: Built | None = None
    for effort in KINDS[kind].ladder:
        tuned = index.at(effort)
        found = measure(tuned, test)
        if best is None or found.recall_at[K] > best.measured.recall_at[K]:
            best = Built(tuned, found)
        if found.recall_low >= wanted.recall:
            break
    assert best is not None
    return best


def _good(built: Built, wanted: Wanted) -> bool:
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


def _least_bad(tried: list[Built], exact: Exact, test: Trial, wanted: Wanted) -> Built:
    """None is all that was wanted: the quickest that finds enough, else exact search where it fits."""
    enough = [b for b in tried if b.measured.recall_at[K] >= wanted.recall]
    if enough:
        return min(enough, key=lambda b: b.measured.p50_ms)
    if wanted.memory_mb is None or exact.bytes <= 1e6 * wanted.memory_mb:
        return Built(_kept(exact), measure(exact, test))
    return max(tried, key=lambda b: b.measured.recall_at[K])
