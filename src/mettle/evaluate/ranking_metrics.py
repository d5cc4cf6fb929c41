"""Metrics of a ranking, one value per query, exact where scores tie.

R is how many candidates are relevant, rel(i) whether the i-th is, P(i) how many of the i nearest are, divided by i.

    hit rate@K       1 if one of the K nearest is relevant                                 (``recall@K``)
    precision@K      P(K)
    R-precision      P(R)
    reciprocal rank  1 / place of the first relevant one                                    (mean: ``mrr``)
    AP               (1/R) Σ_i P(i)·rel(i), over the whole ranking                          (mean: ``map``)
    AP@R             the same sum up to i = R                                               (mean: ``map_at_r``)
    nDCG@K           Σ_{i≤K} rel(i)/log₂(i + 1), divided by its value with all relevant ones first
    trapezoid AP     (1/R) Σ_i rel(i)·(P(i) + P(i − 1))/2 with P(0) = 1                     (of the Market-1501 code)

**Ties.** Candidates with equal scores have no order; each metric is its exact expectation over a random order of every
tie group, so no number depends on the order of rows. For a group of t candidates, p of them relevant, that starts after
a candidates with h relevant ones, at the j-th place of the group:

    E[rel]                = p/t
    E[rel·hits before it] = h·p/t + (j − 1)·p(p−1)/(t(t−1))
    no hit in r places    = C(t−p, r) / C(t, r)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.evaluate.metrics import ItemMetric, metrics_of, register
from mettle.evaluate.scoring.relevant_ranks import RelevantRanks


@dataclass(frozen=True, eq=False)
class TieGroups:
    """The tie groups of some rankings that hold a relevant candidate, best first.

    Attributes:
        row: (g,) which ranking each group is of, ascending.
        a: (g,) candidates before the group.
        t: (g,) candidates in it.
        p: (g,) relevant ones in it.
        h: (g,) relevant ones before it.
        total: (q,) R of each ranking.
        first: (q,) the first group of each ranking.
        longest: the largest number of candidates.
    """

    row: np.ndarray
    a: np.ndarray
    t: np.ndarray
    p: np.ndarray
    h: np.ndarray
    total: np.ndarray
    first: np.ndarray
    longest: int

    @classmethod
    def from_ranks(cls, ranks: RelevantRanks) -> "TieGroups":
        """Relevant candidates with equal scores are of one group."""
        order = np.lexsort((ranks.above, ranks.row))
        row, above = ranks.row[order], ranks.above[order]
        fresh = np.ones(len(row), bool)
        fresh[1:] = (row[1:] != row[:-1]) | (above[1:] != above[:-1])
        start = np.flatnonzero(fresh)
        count = np.diff(np.append(start, len(row)))
        total = np.bincount(row, minlength=len(ranks.queries))
        group_row = row[start]
        begin = np.cumsum(total) - total
        first = np.searchsorted(group_row, np.arange(len(total)))
        tied = ranks.tied[order][start]
        return cls(
            group_row, above[start], tied, count, start - begin[group_row], total, first, int(ranks.candidates.max())
        )

    def sum_by_ranking(self, values: np.ndarray) -> np.ndarray:
        """Sums of a value per group, by ranking, in the order of places."""
        return np.bincount(self.row, values, minlength=len(self.total))

    @property
    def leading(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """a, t and p of the first group of each ranking."""
        return self.a[self.first], self.t[self.first], self.p[self.first]


def hit_rate(g: TieGroups, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chance of a relevant candidate among the K nearest; 1 or 0 in the worst order of ties, and in the best."""
    a, t, p = g.leading
    r = np.clip(k - a, 0, t)
    return 1 - _no_hit(t, p, r), (r > t - p).astype(float), (r > 0).astype(float)


def precision(g: TieGroups, k: int | np.ndarray) -> np.ndarray:
    """Relevant among the K nearest / K."""
    cut = np.broadcast_to(k, g.total.shape)
    return g.sum_by_ranking(g.p * (np.clip(cut[g.row] - g.a, 0, g.t) / g.t)) / cut


def reciprocal_rank(g: TieGroups) -> np.ndarray:
    """1 / place of the first relevant candidate."""
    a, t, p = g.leading
    found = 1 / (a + 1.0)
    tied = np.flatnonzero(p < t)
    kinds, at = np.unique(np.stack([a[tied], t[tied], p[tied]]), axis=1, return_inverse=True)
    found[tied] = np.array([_first_place(*kind) for kind in kinds.T.tolist()], float)[at.reshape(-1)]
    return found


def average_precision(g: TieGroups, cut: np.ndarray | None = None) -> np.ndarray:
    """(1/R) Σ P(i)·rel(i), over the whole ranking or up to a place."""
    places = g.t if cut is None else np.clip(cut[g.row] - g.a, 0, g.t)
    harmonic = _harmonic_numbers(g.longest)
    inverse = harmonic[g.a + places] - harmonic[g.a]  # Σ 1/(a + j)
    later = places - (g.a + 1) * inverse  # Σ (j − 1)/(a + j)
    single = np.where(places > 0, (g.h + 1) / (g.a + 1.0), 0.0)
    several = (g.h + 1) * (g.p / g.t) * inverse + _both_relevant(g) * later
    return g.sum_by_ranking(np.where(g.t == 1, single, several)) / g.total


def trapezoid_precision(g: TieGroups) -> np.ndarray:
    """(1/R) Σ rel(i)·(P(i) + P(i − 1))/2, P(0) = 1: the area that the Market-1501 code computes."""
    harmonic = _harmonic_numbers(g.longest)
    # P(i − 1)·rel(i): hits before the place / (a + j − 1); at the first place of all it is rel(1).
    begin = np.maximum(g.a, 1)
    inverse = harmonic[g.a + g.t - 1] - harmonic[begin - 1]  # Σ 1/(a + j − 1), j from 1, or from 2 where a = 0
    later = np.where(g.a == 0, g.t - 1.0, g.t - g.a * inverse)  # Σ (j − 1)/(a + j − 1)
    before = g.h * (g.p / g.t) * inverse + _both_relevant(g) * later + np.where(g.a == 0, g.p / g.t, 0.0)
    return (average_precision(g) + g.sum_by_ranking(before) / g.total) / 2


def ndcg(g: TieGroups, k: int | None = None) -> np.ndarray:
    """Discounted cumulative gain of binary relevance, divided by the best that there could be."""
    size = g.longest if k is None else min(k, g.longest)
    gain = np.append(0.0, np.cumsum(1 / np.log2(np.arange(2, size + 2))))
    group = gain[np.minimum(g.a + g.t, size)] - gain[np.minimum(g.a, size)]
    return g.sum_by_ranking(g.p * (group / g.t)) / gain[np.minimum(g.total, size)]


def all_metrics(g: TieGroups, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Every registered metric of every ranking, by name."""
    found: dict[str, np.ndarray] = {}
    for metric in metrics_of("retrieval", ItemMetric):
        for k in ks if metric.takes else (None,):
            found[metric.name_at(k)] = metric.per_item(g, k)
    return found


def _both_relevant(g: TieGroups) -> np.ndarray:
    """p(p−1) / (t(t−1)): two places of a group are both relevant."""
    return g.p * (g.p - 1.0) / np.maximum(g.t * (g.t - 1.0), 1)


def _harmonic_numbers(size: int) -> np.ndarray:
    """H(0) … H(size)."""
    return np.append(0.0, np.cumsum(1 / np.arange(1.0, size + 1)))


def _no_hit(t: np.ndarray, p: np.ndarray, r: np.ndarray) -> np.ndarray:
    """C(t−p, r) / C(t, r): the chance that r of t items, p of them relevant, hold no relevant one."""
    chance = np.ones(len(t))
    for j in range(int(r.max(initial=0))):
        factor = np.maximum(t - p - j, 0) / np.maximum(t - j, 1)
        chance *= np.where(j < r, factor, 1.0)
    return chance


def _first_place(a: int, t: int, p: int) -> float:
    """E[1/(a + J)], J the place of the first of p among t in random order."""
    j = np.arange(t - p)
    still = np.append(1.0, np.cumprod((t - p - j) / (t - j)))  # none among the first j
    here = still * p / (t - np.arange(t - p + 1))
    return float((here / (a + 1 + np.arange(t - p + 1))).sum())


EVERYWHERE = frozenset({"table", "tile", "comparison", "terminal"})


def _register(key: str, title: str, definition: str, per_item: Any, meaning: str = "", **options: Any) -> ItemMetric:
    """A metric of the rankings of queries, whose subjects are resampled."""
    known = {"meaning": meaning, "per_item": per_item, "items": "queries", "resample": "subjects of queries"}
    return register(ItemMetric(key, title, definition, "retrieval", **known, **options))


RECALL = _register(
    "recall@k",
    "Recall@{}",
    "share of queries with a relevant candidate among the K nearest (a hit rate)",
    lambda g, k: hit_rate(g, k)[0],
    "samples whose nearest neighbour is the right identity",
    shown=EVERYWHERE,
    headline=(1,),
)
MAP_AT_R = _register(
    "map_at_r",
    "MAP@R",
    "mean over queries of (1/R) Σ P(i)·rel(i) over the R nearest; R = number of relevant candidates, "
    "P(i) = relevant among the i nearest / i",
    lambda g, at: average_precision(g, g.total),
    "how purely the nearest neighbours are the right identity",
    shown=EVERYWHERE,
)
MAP = _register(
    "map",
    "MAP",
    "mean over queries of AP = (1/R) Σ P(i)·rel(i) over the whole ranking",
    lambda g, at: average_precision(g),
    "how early relevant candidates come in the whole ranking",
    shown=frozenset({"table", "comparison"}),
)
MRR = _register("mrr", "MRR", "mean of 1 / place of the first relevant candidate", lambda g, at: reciprocal_rank(g))
NDCG = _register(
    "ndcg",
    "nDCG",
    "Σ rel(i)/log₂(i + 1) over the whole ranking, divided by its value with all relevant candidates first",
    lambda g, at: ndcg(g),
)
R_PRECISION = _register(
    "r_precision", "R-precision", "relevant among the R nearest / R", lambda g, at: precision(g, g.total)
)
PRECISION = _register(
    "precision@k", "Precision@{}", "relevant candidates among the K nearest / K", precision, shown=frozenset()
)
NDCG_AT_K = _register("ndcg@k", "nDCG@{}", "nDCG of the K nearest", ndcg, shown=frozenset())
TRAPEZOID_MAP = _register(
    "map_trapezoid",
    "MAP, trapezoids",
    "mean of (1/R) Σ rel(i)·(P(i) + P(i − 1))/2 with P(0) = 1, which the evaluation code of Market-1501 computes",
    lambda g, at: trapezoid_precision(g),
    shown=frozenset(),
)
