"""Ranked candidates of each query, with their tie groups: the core of retrieval.

Tiles of scores become short lists of the nearest candidates. A list that ends inside a tie group would hide
part of it, so those queries, and only those, are ranked again over the whole gallery.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mettle.errors import InputError
from mettle.evaluate.checks import Rows, codes
from mettle.evaluate.scores import Unit

_TILE = 1 << 22  # scores held at a time


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


def ranked(query: Rows, gallery: Rows, other_domain: bool, most: int, chunk: int | None) -> Iterator[Ranked]:
    """Rank the candidates of every query that has a relevant one, as far as max(most, R) needs.

    Args:
        query: checked queries.
        gallery: checked gallery; the same object when a set is searched in itself.
        other_domain: whether candidates of the query's own domain are left out.
        most: the largest K.
        chunk: queries in one tile, by default what fits.
    """
    double = query.values.dtype == np.float64 or gallery.values.dtype == np.float64
    first = Unit.of(query.values, double)
    second = first if gallery is query else Unit.of(gallery.values, double)
    labels, among = codes(query.labels, gallery.labels)
    frequency = np.bincount(among, minlength=int(labels.max()) + 1)
    own = _Same.of(query, gallery)
    domain = codes(query.domains, gallery.domains) if other_domain else None  # type: ignore[arg-type]
    step = chunk or max(1, _TILE // len(gallery))
    for start in range(0, len(query), step):
        part = slice(start, min(start + step, len(query)))
        tile = first.take(part).cosine(second)
        candidates = len(gallery) - own.remove(tile, part)
        # One id is one label, so whatever its id took out was relevant.
        total = frequency[labels[part]] - (len(gallery) - candidates)
        if domain is not None:
            tile[domain[0][part, None] == domain[1][None]] = -np.inf
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
            yield from _lists(rows, labels[start + judged], among, start + judged, total[judged], most)


def _lists(
    tile: np.ndarray, labels: np.ndarray, among: np.ndarray, queries: np.ndarray, total: np.ndarray, most: int
) -> Iterator[Ranked]:
    """Short lists, and full ones for the queries whose short list ends inside a tie group that matters."""
    need = np.maximum(total, most)
    width = min(tile.shape[1], int(need.max()) + 1)
    first = _top(tile, width, labels, among, queries, total)
    if width == tile.shape[1]:
        yield first
        return
    cut = np.take_along_axis(first.scores, need[:, None] - 1, 1)[:, 0] == first.scores[:, -1]
    if not cut.any():
        yield first
        return
    whole = np.flatnonzero(~cut)
    if len(whole):
        yield Ranked(queries[whole], first.scores[whole], first.relevant[whole], total[whole])
    again, step = np.flatnonzero(cut), max(1, _TILE // tile.shape[1] // 8)
    for start in range(0, len(again), step):
        at = again[start : start + step]
        yield _top(tile[at], tile.shape[1], labels[at], among, queries[at], total[at])


def _top(
    tile: np.ndarray,
    width: int,
    labels: np.ndarray,
    among: np.ndarray,
    queries: np.ndarray,
    total: np.ndarray,
) -> Ranked:
    best = torch.topk(torch.from_numpy(tile), width, dim=1)
    scores = best.values.numpy()
    relevant = (among[best.indices.numpy()] == labels[:, None]) & (scores > -np.inf)
    return Ranked(queries, scores, relevant, total)


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


def judge(lists: Ranked, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Every metric of every query, in expectation over the order inside tie groups.

    Returns:
        ``recall@K``, ``least@K`` and ``most@K`` (the worst and the best order) for each K,
        ``precision_at_1``, ``r_precision`` and ``map_at_r``.
    """
    groups = _groups(lists.scores, lists.relevant)
    found: dict[str, np.ndarray] = {}
    for k in ks:
        a, t, p, h = (g[:, k - 1] for g in groups)
        r, sure = k - a, h > 0
        found[f"recall@{k}"] = np.where(sure, 1.0, 1 - _none(t, p, r))
        found[f"least@{k}"] = (sure | (r > t - p)).astype(float)
        found[f"most@{k}"] = (sure | (p > 0)).astype(float)
    found["precision_at_1"] = 1 - _none(groups[1][:, 0], groups[2][:, 0], np.ones(len(lists.total), int))
    total = lists.total
    a, t, p, h = (np.take_along_axis(g, total[:, None] - 1, 1)[:, 0] for g in groups)
    found["r_precision"] = (h + p * (total - a) / t) / total
    found["map_at_r"] = _average_precision(groups, total)
    return found


def _average_precision(groups: tuple[np.ndarray, ...], total: np.ndarray) -> np.ndarray:
    """(1/R) Σ_{i≤R} E[P(i)·rel(i)], where E = ((h + 1)·p/t + (j − 1)·p(p−1)/(t(t−1))) / i."""
    width = int(total.max())
    a, t, p, h = (g[:, :width] for g in groups)
    place = np.arange(width)
    expected = (h + 1) * (p / t)
    if (t > 1).any():
        expected += (place - a) * (p * (p - 1) / np.maximum(t * (t - 1), 1))
    # Summed in the order of places, so that the width of the list does not show in the last bit.
    running = np.cumsum(expected / (place + 1), axis=1)
    return np.take_along_axis(running, total[:, None] - 1, 1)[:, 0] / total


def _groups(scores: np.ndarray, relevant: np.ndarray) -> tuple[np.ndarray, ...]:
    """At each place: where its tie group starts (a), its size t, the relevant in it p and before it h."""
    n, width = scores.shape
    place = np.broadcast_to(np.arange(width), scores.shape)
    before = np.cumsum(relevant, axis=1) - relevant
    fresh = np.ones((n, width), bool)
    fresh[:, 1:] = scores[:, 1:] != scores[:, :-1]
    if fresh.all():  # no ties: every item is its own group
        return place, np.ones_like(before), relevant.astype(np.int64), before
    start = np.maximum.accumulate(np.where(fresh, place, 0), axis=1)
    final = np.ones((n, width), bool)
    final[:, :-1] = fresh[:, 1:]
    end = np.minimum.accumulate(np.where(final, place, width)[:, ::-1], axis=1)[:, ::-1]
    h = np.take_along_axis(before, start, 1)
    p = np.take_along_axis(before + relevant, end, 1) - h
    return start, end - start + 1, p, h


def _none(t: np.ndarray, p: np.ndarray, r: np.ndarray) -> np.ndarray:
    """C(t−p, r) / C(t, r): the chance that r of t items, p of them relevant, hold no relevant one."""
    chance = np.ones(len(t))
    for j in range(int(np.minimum(r, t).max())):
        factor = np.maximum(t - p - j, 0) / np.maximum(t - j, 1)
        chance *= np.where(j < r, factor, 1.0)
    return chance
