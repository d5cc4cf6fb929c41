"""Where the relevant candidates of a query stand in its ranking: all that metrics of retrieval need.

Every metric of a ranking of relevant and irrelevant candidates is a function of two counts for each *relevant* one:
how many candidates score strictly above it, and how many have its score. So nothing is listed and no permutation is
made: the scores of one query are sorted as numbers, and relevant ones are looked up among them.

Tiles of cosines are computed fast, in float32. Such a score is off by at most δ = (d + 4)·2⁻²⁴, so what lies more
than δ from the exact score of a relevant candidate is on the same side of it as in the exact ranking. What lies closer
is scored again exactly; where that is much, the whole query is. The counts are those of the exact definition. Other
measures, and scores that came ready-made, are exact from the start.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import EmbeddingSet, joint_codes
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.evaluate.scoring.scores import round_threshold_up
from mettle.evaluate.scoring.tile_threads import count_threads, map_in_threads
from mettle.pairs.distributed import ALONE, RankGroup

_TILE = 1 << 22  # scores held at a time, at most
_QUICK_TILE, _QUICK_ROWS = 1 << 20, 64  # scores that are new pages of memory in no tile, and rows that a product wants
_DEAR = 16  # scoring a listed pair costs about as much as so many in a tile
_WINDOWS = 24  # so many passes over a row cost about as much as scoring it exactly

ScoreRows = Callable[[np.ndarray], np.ndarray]  # positions of some queries -> (q, n) scores, an array of the caller's


@dataclass(frozen=True, eq=False)
class RelevantRanks:
    """The relevant candidates of some queries.

    Attributes:
        queries: (q,) positions of the queries; each has a relevant candidate.
        candidates: (q,) how many candidates each has.
        row: (p,) which of these queries each relevant candidate belongs to, ascending.
        above: (p,) how many candidates score strictly above it.
        tied: (p,) how many have its score, itself included.
    """

    queries: np.ndarray
    candidates: np.ndarray
    row: np.ndarray
    above: np.ndarray
    tied: np.ndarray


@dataclass(frozen=True, eq=False)
class Relevance:
    """Which candidates are relevant to a query, and which are no candidates at all.

    Attributes:
        code: label codes of the queries and of the gallery.
        related: for labels that are sets: the codes that share a label with each code, as a CSR matrix (starts and
            codes); None where a code is related to itself alone.
        ids: sample ids of both sides, or None: a query is no candidate of its own.
        domain: domain codes of both sides, or None.
        keep: with domains, which candidates stay: ``"all"``; those of the query's domain (``"within"``); those of
            other domains (``"across"``); all but those of its label *and* its domain (``"other_views"``).
    """

    code: tuple[np.ndarray, np.ndarray]
    related: tuple[np.ndarray, np.ndarray] | None = None
    ids: tuple[np.ndarray, np.ndarray] | None = None
    domain: tuple[np.ndarray, np.ndarray] | None = None
    keep: str = "all"

    @classmethod
    def from_sets(
        cls,
        query: EmbeddingSet,
        gallery: EmbeddingSet,
        keep: str = "all",
        related: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> "Relevance":
        """Of checked rows; ``related`` speaks of the labels as they are in both."""
        code = (
            (query.labels, gallery.labels) if related is not None else tuple(joint_codes(query.labels, gallery.labels))
        )
        ids = None if query.ids is None or gallery.ids is None else (query.ids, gallery.ids)
        domain = None
        if keep != "all" and query.domains is not None and gallery.domains is not None:
            domain = tuple(joint_codes(query.domains, gallery.domains))
        return cls(code, related, ids, domain, keep)  # type: ignore[arg-type]

    def relevant_pairs(self, rows: np.ndarray, shelf: "_GalleryByLabel") -> tuple[np.ndarray, np.ndarray]:
        """Each query and relevant candidate: places in ``rows``, ascending, and positions in the gallery."""
        place, code = np.arange(len(rows)), self.code[0][rows]
        if self.related is not None:
            starts, others = self.related
            at, found = _expand_ranges(starts[code], starts[code + 1] - starts[code])
            place, code = place[at], others[found]
        at, found = _expand_ranges(shelf.starts[code], shelf.starts[code + 1] - shelf.starts[code])
        place, col = place[at], shelf.order[found]
        stay = np.ones(len(col), bool)
        if self.ids is not None:
            stay &= self.ids[0][rows[place]] != self.ids[1][col]
        if self.domain is not None:
            same = self.domain[0][rows[place]] == self.domain[1][col]
            stay &= same if self.keep == "within" else ~same
        return place[stay], col[stay]

    def excluded_candidates(
        self, rows: np.ndarray, shelf: "_GalleryByLabel", own: "_OwnSamples"
    ) -> tuple[np.ndarray | None, tuple]:
        """What is no candidate of some queries: a mask, or None, and (place, position) of single ones."""
        single = own.own_pairs(rows)
        if self.domain is None:
            return None, single
        if self.keep == "other_views":
            place, col = _without_ids(self, rows, shelf)
            same = self.domain[0][rows[place]] == self.domain[1][col]
            return None, tuple(np.append(a, b) for a, b in zip(single, (place[same], col[same]), strict=True))
        same = self.domain[0][rows, None] == self.domain[1][None]
        return (same if self.keep == "across" else ~same), single


@dataclass(frozen=True, eq=False)
class _GalleryByLabel:
    """The gallery by label: those of code c are order[starts[c]] … order[starts[c + 1] − 1]."""

    order: np.ndarray
    starts: np.ndarray

    @classmethod
    def from_relevance(cls, relevance: Relevance) -> "_GalleryByLabel":
        first, second = relevance.code
        size = 1 + max(int(first.max()), int(second.max()))
        if relevance.related is not None:
            size = len(relevance.related[0]) - 1
        return cls(np.argsort(second, kind="stable"), np.append(0, np.cumsum(np.bincount(second, minlength=size))))


@dataclass(frozen=True, eq=False)
class _OwnSamples:
    """Where the gallery holds a query's own sample id: positions order[first] … order[last − 1]."""

    order: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def from_relevance(cls, relevance: Relevance) -> "_OwnSamples":
        if relevance.ids is None:
            nothing = np.zeros(len(relevance.code[0]), np.int64)
            return cls(nothing, nothing, nothing)
        query, gallery = relevance.ids
        order = np.argsort(gallery, kind="stable")
        ids = gallery[order]
        return cls(order, np.searchsorted(ids, query), np.searchsorted(ids, query, side="right"))

    def own_pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place, at = _expand_ranges(self.first[rows], self.last[rows] - self.first[rows])
        return place, self.order[at]


def rank_relevant(
    relevance: Relevance,
    score: ScoreRows,
    fast: "FastCosine | None" = None,
    *,
    most: int = 0,
    chunk: int | None = None,
    ranks: RankGroup = ALONE,
) -> Iterator[RelevantRanks]:
    """Rank every query that has a relevant candidate.

    Args:
        relevance: who is relevant to whom.
        score: exact scores of some queries against the whole gallery, higher meaning more alike.
        fast: the same scores, fast and almost exact, and one by one; None where ``score`` is all there is.
        most: candidates that each of these queries must have.
        chunk: queries in one tile, by default what fits.
        ranks: of several processes each has its own tiles.

    Raises:
        InputError: a query has fewer than ``most`` candidates.
    """
    count, size = (len(side) for side in relevance.code)
    shelf, own = _GalleryByLabel.from_relevance(relevance), _OwnSamples.from_relevance(relevance)
    step = min(chunk or max(1, min(_TILE // size, max(_QUICK_TILE // size, _QUICK_ROWS))), count)

    def rank_from(start: int) -> RelevantRanks | None:
        """Rank the queries of one tile."""
        rows = np.arange(start, min(start + step, count))
        return _rank_tile(relevance, score, fast, rows, shelf, own, most)

    threads = 1 if fast is None else count_threads(count * size // ranks.size)
    found = map_in_threads(rank_from, ranks.share(range(0, count, step)), threads)
    yield from (tile for tile in found if tile is not None)


def _rank_tile(
    relevance: Relevance,
    score: ScoreRows,
    fast: "FastCosine | None",
    rows: np.ndarray,
    shelf: _GalleryByLabel,
    own: _OwnSamples,
    most: int,
) -> RelevantRanks | None:
    """Rank some queries; None where none of them has a relevant candidate."""
    size = len(relevance.code[1])
    place, col = relevance.relevant_pairs(rows, shelf)
    mask, single = relevance.excluded_candidates(rows, shelf, own)
    left = np.unique(np.stack(single), axis=1)[0] if len(single[0]) else single[0]
    candidates = size - np.bincount(left, minlength=len(rows))
    if mask is not None:
        mask[single] = True
        candidates = size - mask.sum(axis=1)
    total = np.bincount(place, minlength=len(rows))
    judged = np.flatnonzero(total)
    few = judged[candidates[judged] < most]
    if len(few):
        raise InputError(
            f"k={most} exceeds the candidates of query {rows[few[0]]}, which has {candidates[few[0]]}: "
            "ask for a smaller k or give a larger gallery"
        )
    if not len(judged):
        return None

    def remove_excluded(tile: np.ndarray, some: np.ndarray) -> None:
        """Take what is no candidate of the queries at ``some`` out of their scores."""
        if mask is not None:
            tile[mask[some]] = -np.inf
            return
        at = np.full(int(some.max()) + 1, -1)
        at[some] = np.arange(len(some))
        inside = single[0] < len(at)
        here = at[single[0][inside]]
        tile[here[here >= 0], single[1][inside][here >= 0]] = -np.inf

    above, tied = np.empty(len(place), np.int64), np.empty(len(place), np.int64)
    todo = judged
    if fast is not None and len(place) * _DEAR < len(judged) * size:
        todo = _count_fast(fast, rows, judged, place, col, remove_excluded, above, tied)
    chosen = np.isin(place, todo)
    for some in _slice_values(todo, max(1, _TILE // size // 4) if fast is not None else len(todo)):
        exact = score(rows[some])
        remove_excluded(exact, some)
        mine = np.flatnonzero(chosen & (place >= some[0]) & (place <= some[-1]))
        local = np.searchsorted(some, place[mine])
        wanted = exact[local, col[mine]]
        exact.sort(axis=1)
        first = _search_rows(exact, local, wanted, right=False)
        last = _search_rows(exact, local, wanted, right=True)
        above[mine], tied[mine] = size - last, last - first
    return RelevantRanks(rows[judged], candidates[judged], np.searchsorted(judged, place), above, tied)


@dataclass(frozen=True, eq=False)
class FastCosine:
    """Cosines in float32, each within ``error`` of the exact one, and exact ones pair by pair."""

    query: ExactUnitVectors
    gallery: ExactUnitVectors
    quick: tuple[np.ndarray, np.ndarray]

    @classmethod
    def from_sets(cls, query: ExactUnitVectors, gallery: ExactUnitVectors) -> "FastCosine":
        """Both sides rounded once."""
        first = query.as_float32()
        return cls(query, gallery, (first, first if gallery is query else gallery.as_float32()))

    @property
    def error(self) -> float:
        """δ: the most that a fast score is off."""
        return (self.query.high.shape[1] + 4) * 2.0**-24

    def fast_scores(self, rows: np.ndarray) -> np.ndarray:
        """(q, n) fast scores."""
        return self.quick[0][rows] @ self.quick[1].T

    def exact_scores(self, rows: np.ndarray) -> np.ndarray:
        """(q, n) exact scores."""
        return self.query.take(rows).cosine(self.gallery)

    def exact_pair_scores(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """Exact scores of single pairs, in float64."""
        found, step = np.empty(len(rows)), max(1, _TILE // self.query.high.shape[1])
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            found[part] = self.query.take(rows[part]).rowwise_cosine(self.gallery.take(cols[part]))
        return found


def _count_fast(
    fast: FastCosine,
    rows: np.ndarray,
    judged: np.ndarray,
    place: np.ndarray,
    col: np.ndarray,
    remove: Callable[[np.ndarray, np.ndarray], None],
    above: np.ndarray,
    tied: np.ndarray,
) -> np.ndarray:
    """Fill in both counts from fast scores; returns the queries that must be scored exactly as a whole."""
    tile = fast.fast_scores(rows[judged])
    remove(tile, judged)
    local, size = np.searchsorted(judged, place), tile.shape[1]
    exact = fast.exact_pair_scores(rows[place], col)
    low, high = exact - fast.error, exact + fast.error
    ordered = np.sort(tile, axis=1)
    above[:] = size - _search_rows(ordered, local, high, right=True)
    window = size - above - _search_rows(ordered, local, low, right=False)
    tied[:] = 1
    doubtful = np.flatnonzero(window > 1)  # somebody beside the candidate itself
    if not len(doubtful):
        return judged[:0]
    windows = np.bincount(local[doubtful], minlength=len(judged))
    inside = np.bincount(local[doubtful], window[doubtful], minlength=len(judged))
    whole = (windows > _WINDOWS) | (inside * _DEAR > size)
    open_ = doubtful[~whole[local[doubtful]]]
    first, last = (
        round_threshold_up(low, tile.dtype),
        -round_threshold_up(-high, tile.dtype),
    )  # one type is compared fast
    found = [np.flatnonzero((tile[local[p]] >= first[p]) & (tile[local[p]] <= last[p])) for p in open_]
    if found:
        counts = np.array([len(f) for f in found])
        near = fast.exact_pair_scores(np.repeat(rows[place[open_]], counts), np.concatenate(found))
        own, at = np.repeat(exact[open_], counts), np.repeat(np.arange(len(open_)), counts)
        above[open_] += np.bincount(at[near > own], minlength=len(open_))
        tied[open_] = np.bincount(at[near == own], minlength=len(open_))
    return judged[whole]


def _search_rows(ordered: np.ndarray, row: np.ndarray, values: np.ndarray, *, right: bool) -> np.ndarray:
    """``np.searchsorted`` of each value in its own row of a matrix with ascending rows."""
    low, high = np.zeros(len(row), np.int64), np.full(len(row), ordered.shape[1], np.int64)
    for _ in range(int(ordered.shape[1]).bit_length()):
        middle = (low + high) // 2
        there = ordered[row, np.minimum(middle, ordered.shape[1] - 1)]
        goes = ((there <= values) if right else (there < values)) & (low < high)
        low, high = np.where(goes, middle + 1, low), np.where(goes, high, middle)
    return low


def _without_ids(relevance: Relevance, rows: np.ndarray, shelf: _GalleryByLabel) -> tuple[np.ndarray, np.ndarray]:
    """Each query and every row of the gallery with its label, whatever its id or domain."""
    return Relevance(relevance.code, relevance.related).relevant_pairs(rows, shelf)


def _expand_ranges(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges written out: which range each number is of, and the number."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)


def _slice_values(values: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (values[start : start + size] for start in range(0, len(values), max(1, size)))
