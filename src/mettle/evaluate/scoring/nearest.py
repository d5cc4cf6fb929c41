"""Ranked candidates of each query, with their tie groups: the core of retrieval.

Tiles of fast float32 scores become short lists of the nearest candidates. A fast score is off by at most
δ = (d + 4)·2⁻²⁴, so where neighbours in a list differ by more than 2δ, down to the first place that no metric reads,
the order is the exact one and holds no tie. Other lists are scored again exactly; a list that may then end inside a
tie group, or may miss somebody, is ranked over the whole gallery. The result is that of the exact definition.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mettle.errors import InputError
from mettle.evaluate.inputs import Rows, codes
from mettle.evaluate.scoring.cosine import Unit

_TILE = 1 << 22  # scores held at a time
_SPARE = 6  # places of a list beyond what metrics read, so that few lists must be ranked again
_BLOCK = 32
_DEAR = 16  # scoring a listed pair costs about as much as so many in a tile


@dataclass(frozen=True, eq=False)
class Ranked:
    """Nearest candidates of some queries, best first, every tie group complete up to max(K, R).

    Attributes:
        queries: (q,) positions of the queries.
        scores: (q, w), −∞ where there is no candidate.
        relevant: (q, w) whether the candidate has the query's label.
        total: (q,) R, relevant candidates in all, at least one.
    """

    queries: np.ndarray
    scores: np.ndarray
    relevant: np.ndarray
    total: np.ndarray


def ranked(query: Rows, gallery: Rows, trials: str, most: int, chunk: int | None) -> Iterator[Ranked]:
    """Rank the candidates of every query that has a relevant one, as far as max(most, R) needs.

    Args:
        query: checked queries.
        gallery: checked gallery; the same object when a set is searched in itself.
        trials: ``"all"`` candidates, those of the query's own domain (``"within"``), or of others (``"across"``).
        most: the largest K.
        chunk: queries in one tile, by default what fits.
    """
    double = query.double or gallery.double
    first = Unit.of(query.values, double)
    second = first if gallery is query else Unit.of(gallery.values, double)
    quick = first.rounded(), second.rounded()
    labels, among = codes(query.labels, gallery.labels)
    frequency = np.bincount(among, minlength=int(labels.max()) + 1)
    own = _Same.of(query, gallery)
    domain = codes(query.domains, gallery.domains) if trials != "all" else None  # type: ignore[arg-type]
    step = min(chunk or max(1, _TILE // len(gallery)), len(query))
    room = np.empty((step, len(gallery)), np.float32)
    for start in range(0, len(query), step):
        part = slice(start, min(start + step, len(query)))
        tile = np.matmul(quick[0][part], quick[1].T, out=room[: part.stop - start])
        removed = own.remove(tile, part)
        candidates = len(gallery) - removed
        # One id is one label, so whatever its id took out was relevant.
        total = frequency[labels[part]] - removed
        if domain is not None:
            same = domain[0][part, None] == domain[1][None]
            tile[same if trials == "across" else ~same] = -np.inf
            there = tile > -np.inf
            candidates, total = there.sum(axis=1), (there & (labels[part, None] == among)).sum(axis=1)
        judged = np.flatnonzero(total > 0)
        few = judged[candidates[judged] < most]
        if len(few):
            raise InputError(
                f"k={most} exceeds the candidates of query {start + few[0]}, which has {candidates[few[0]]}: "
                "ask for a smaller k or give a larger gallery"
            )
        if len(judged):
            rows = tile if len(judged) == len(tile) else tile[judged]
            search = _Search(first.take(start + judged), second, labels[start + judged], among)
            yield from search.lists(rows, start + judged, total[judged], most)


@dataclass(frozen=True, eq=False)
class _Search:
    """Some queries against a gallery: from fast scores to lists that are exact where it matters."""

    query: Unit
    gallery: Unit
    labels: np.ndarray
    among: np.ndarray

    @property
    def slack(self) -> float:
        return (self.query.high.shape[1] + 4) * 2.0**-24

    def lists(self, tile: np.ndarray, queries: np.ndarray, total: np.ndarray, most: int) -> Iterator[Ranked]:
        """Short lists; exact ones where neighbours are close; whole ones where even that leaves something open."""
        need = np.maximum(total, most)
        width = int(need.max()) + 1 + _SPARE
        if width * _DEAR > tile.shape[1]:
            yield from self._whole(tile, np.arange(len(tile)), queries, total, need)
            return
        scores, at = _nearest(tile, width)
        place = np.arange(width - 1)
        with np.errstate(invalid="ignore"):  # −∞ − −∞ behind the last candidate, which nobody reads
            close = ~(scores[:, :-1] - scores[:, 1:] > 2 * self.slack) & (place < need[:, None])
        doubtful = close.any(axis=1)
        sure = np.flatnonzero(~doubtful)
        if len(sure):
            yield self._ranked(scores[sure], at[sure], sure, queries, total)
        again, step = np.flatnonzero(doubtful), max(1, _TILE // (width * self.query.high.shape[1]))
        open_: list[np.ndarray] = []
        for start in range(0, len(again), step):
            some = again[start : start + step]
            exact, places = self._exactly(some, scores[some], at[some])
            last = np.take_along_axis(exact, need[some, None] - 1, 1)[:, 0]
            missed = ~(last > scores[some, -1] + self.slack)
            open_.append(some[missed])
            kept = np.flatnonzero(~missed)
            if len(kept):
                yield self._ranked(exact[kept], places[kept], some[kept], queries, total)
        if open_:
            yield from self._whole(tile, np.concatenate(open_), queries, total, need)

    def _exactly(self, some: np.ndarray, scores: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Short lists scored and sorted again."""
        n, width = at.shape
        exact = self.query.take(np.repeat(some, width)).paired(self.gallery.take(at.ravel())).reshape(n, width)
        exact[np.isneginf(scores)] = -np.inf
        order = np.argsort(-exact, axis=1, kind="stable")
        return np.take_along_axis(exact, order, 1), np.take_along_axis(at, order, 1)

    def _whole(
        self, tile: np.ndarray, some: np.ndarray, queries: np.ndarray, total: np.ndarray, need: np.ndarray
    ) -> Iterator[Ranked]:
        """Exact scores of whole galleries, as far as metrics read, and to the end where a tie runs beyond that."""
        step = max(1, _TILE // tile.shape[1] // 4)
        for start in range(0, len(some), step):
            rows = some[start : start + step]
            exact = self.query.take(rows).cosine(self.gallery)
            exact[np.isneginf(tile[rows])] = -np.inf
            width = min(exact.shape[1], int(need[rows].max()) + 1)
            scores, at = _nearest(exact, width)
            cut = np.take_along_axis(scores, need[rows, None] - 1, 1)[:, 0] == scores[:, -1]
            cut &= width < exact.shape[1]
            if not cut.all():
                yield self._ranked(scores[~cut], at[~cut], rows[~cut], queries, total)
            if cut.any():
                best = torch.topk(torch.from_numpy(exact[cut]), exact.shape[1], dim=1)
                yield self._ranked(best.values.numpy(), best.indices.numpy(), rows[cut], queries, total)

    def _ranked(
        self, scores: np.ndarray, at: np.ndarray, rows: np.ndarray, queries: np.ndarray, total: np.ndarray
    ) -> Ranked:
        relevant = (self.among[at] == self.labels[rows, None]) & (scores > -np.inf)
        return Ranked(queries[rows], scores, relevant, total[rows])


def _nearest(tile: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The highest scores of each row, best first, and where they are.

    The w-th highest of the maxima of blocks is reached by at least w scores, and by few more: those are sorted, in
    place of the whole row.
    """
    whole, (n, size) = torch.from_numpy(tile), tile.shape
    blocks = size // _BLOCK
    if blocks > 2 * width:
        peaks = whole[:, : blocks * _BLOCK].view(n, blocks, _BLOCK).amax(2)
        floor = torch.topk(peaks, width, dim=1, sorted=False).values.amin(1, keepdim=True).numpy()
        found = np.flatnonzero(tile >= floor) if np.isfinite(floor).all() else np.empty(0, np.int64)
        row, col = np.divmod(found, size)
        count = np.bincount(row, minlength=n)
        if len(found) and count.max() <= 8 * width:
            place = np.arange(len(found)) - np.repeat(np.cumsum(count) - count, count)
            few, at = np.full((n, count.max()), -np.inf, tile.dtype), np.zeros((n, count.max()), np.int64)
            few[row, place], at[row, place] = tile.reshape(-1)[found], col
            best = torch.topk(torch.from_numpy(few), width, dim=1)
            return best.values.numpy(), np.take_along_axis(at, best.indices.numpy(), 1)
    best = torch.topk(whole, width, dim=1)
    return best.values.numpy(), best.indices.numpy()


@dataclass(frozen=True, eq=False)
class _Same:
    """Where the gallery holds a query's own sample id: positions order[first] … order[last-1]."""

    order: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, query: Rows, gallery: Rows) -> "_Same":
        if query.ids is None or gallery.ids is None:
            nothing = np.zeros(len(query), np.int64)
            return cls(nothing, nothing, nothing)
        order = np.argsort(gallery.ids, kind="stable")
        ids = gallery.ids[order]
        return cls(order, np.searchsorted(ids, query.ids), np.searchsorted(ids, query.ids, side="right"))

    def remove(self, tile: np.ndarray, part: slice) -> np.ndarray:
        """Take each query's own sample out of its row; returns how many entries went."""
        count = self.last[part] - self.first[part]
        rows = np.repeat(np.arange(len(count)), count)
        inside = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        tile[rows, self.order[self.first[part][rows] + inside]] = -np.inf
        return count
