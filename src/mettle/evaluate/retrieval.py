"""Retrieval: who is nearest? One value per query, then means.

Candidates of a query are the gallery less the items with its own sample id (and, on request, its own domain). Those
with its label are relevant. Queries without any are left out of the means and counted. What each metric is, and its
exact expectation where scores tie, stands in :mod:`mettle.evaluate.ranking_metrics`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mettle.errors import InputError, nearest
from mettle.evaluate import bootstrap
from mettle.evaluate.bootstrap import Interval, sums
from mettle.evaluate.diagnostics.duplicates import across, inside
from mettle.evaluate.inputs import Wholes, check_embeddings, check_gallery, whole, wholes
from mettle.evaluate.ranking_metrics import TieGroups, all_metrics
from mettle.evaluate.scoring.cosine import Unit
from mettle.evaluate.scoring.pair_fingerprint import Basis, of_ranking
from mettle.evaluate.scoring.rank_parts import require_same_call
from mettle.evaluate.scoring.relevant_ranks import FastCosine, Relevance, rank_relevant
from mettle.pairs.distributed import ALONE, RankGroup
from mettle.unknown_names import explain_arguments

QUERIES = "queries"  # beside the metrics of these queries, their positions


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What retrieval found: one value per query that has a relevant candidate, and their means.

    Attributes:
        per_query: by name (``"recall@1"``, ``"precision@1"``, ``"ndcg@1"``, ``"map"``, ``"mrr"``, ``"ndcg"``,
            ``"map_at_r"``, ``"r_precision"``), one value for each entry of ``queries``.
        queries: positions of the judged queries.
        subjects: subject code of each judged query.
        excluded: how many queries have no relevant candidate.
        pessimistic: mean Recall@K if every tie went against us.
        optimistic: mean Recall@K if every tie went our way.
        notes: what was seen in the data, for ``warnings``.
        basis: what was ranked, for ``compare``.
    """

    per_query: Mapping[str, np.ndarray]
    queries: np.ndarray
    subjects: np.ndarray
    excluded: int
    pessimistic: Mapping[int, float]
    optimistic: Mapping[int, float]
    notes: tuple[str, ...] = ()
    basis: Basis | None = None

    def __repr__(self) -> str:
        recall = ", ".join(f"{k}: {v:.4f}" for k, v in self.recall.items())
        return f"Retrieval(recall={{{recall}}}, map_at_r={self.map_at_r:.4f}, queries={len(self.queries)})"

    @property
    def recall_at(self) -> Mapping[int, np.ndarray]:
        """Recall@K of each judged query, by K."""
        return {k: self.per_query[f"recall@{k}"] for k in self.pessimistic}

    @property
    def recall(self) -> Mapping[int, float]:
        """Mean Recall@K over the judged queries, by K."""
        return {k: float(v.mean()) for k, v in self.recall_at.items()}

    @property
    def recall_counting_excluded(self) -> Mapping[int, float]:
        """Mean Recall@K when queries without a relevant candidate count as misses."""
        share = len(self.queries) / (len(self.queries) + self.excluded)
        return {k: v * share for k, v in self.recall.items()}

    @property
    def map_at_r(self) -> float:
        """Mean average precision at R."""
        return float(self.per_query["map_at_r"].mean())

    @property
    def r_precision(self) -> float:
        """Mean R-precision."""
        return float(self.per_query["r_precision"].mean())

    @property
    def map(self) -> float:
        """Mean average precision over the whole ranking."""
        return float(self.per_query["map"].mean())

    @property
    def mrr(self) -> float:
        """Mean reciprocal rank of the first relevant candidate."""
        return float(self.per_query["mrr"].mean())

    @property
    def ndcg(self) -> float:
        """Mean normalised discounted cumulative gain over the whole ranking."""
        return float(self.per_query["ndcg"].mean())

    @property
    def precision(self) -> Mapping[int, float]:
        """Mean share of relevant ones among the K nearest, by K."""
        return {k: float(self.per_query[f"precision@{k}"].mean()) for k in self.pessimistic}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the numbers."""
        found = [
            f"ties: recall@{k} lies between {self.pessimistic[k]:.4f} and {self.optimistic[k]:.4f} depending "
            "on the order of equal scores"
            for k in self.pessimistic
            if self.optimistic[k] - self.pessimistic[k] > 1e-3
        ]
        if self.excluded:
            found.append(f"{self.excluded} queries have no relevant candidate and are left out of the means")
        return (*self.notes, *found)

    def interval(self, name: str, level: float = 0.95, *, replicates: int = 1000, seed: int = 0) -> Interval:
        """Interval of a mean in ``per_query``: query subjects are resampled, the gallery stays fixed.

        mean_b = Σ_s w_s·(sum over queries of s) / Σ_s w_s·(queries of s). It says how the mean would move
        with other queries against this gallery, not with another gallery.

        Raises:
            NotMeasurable: fewer than six query subjects.
        """
        if name not in self.per_query:
            raise InputError(f"no interval named {name!r}{nearest(str(name), self.per_query)}")
        values = self.per_query[name]
        totals = np.bincount(self.subjects, weights=values)
        counts = np.bincount(self.subjects)
        weights = bootstrap.draw(len(counts), replicates, seed)
        drawn = sums(weights, totals) / sums(weights, counts)
        point, method = float(values.mean()), f"query-{bootstrap.METHOD}, gallery fixed"
        return bootstrap.of_rate(drawn, point, weights, level, seed, method, rate=len(values))

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; interval None where subjects are too few."""
        return {
            "queries": len(self.queries),
            "excluded": self.excluded,
            "subjects": len(np.unique(self.subjects)),
            "metrics": {
                name: {
                    "value": float(values.mean()),
                    "interval": bootstrap.stated(lambda n=name: self.interval(n)),
                }
                for name, values in self.per_query.items()
            },
            "recall_pessimistic": {str(k): v for k, v in self.pessimistic.items()},
            "recall_optimistic": {str(k): v for k, v in self.optimistic.items()},
            "recall_counting_excluded": {str(k): v for k, v in self.recall_counting_excluded.items()},
            "warnings": list(self.warnings),
        }


@explain_arguments
def retrieval(
    embeddings: Any,
    labels: Any,
    *,
    k: Wholes = (1, 2, 4, 8),
    ids: Any = None,
    gallery: tuple[Any, ...] | None = None,
    domains: Any = None,
    exclude_same_domain: bool = False,
    only_same_domain: bool = False,
    chunk: int | None = None,
    across_ranks: bool = False,
) -> Retrieval:
    """Rank a gallery for every query by cosine.

    Args:
        embeddings: (n, d) array or tensor, the queries.
        labels: (n,) integers or text.
        k: the K of Recall@K, one or many.
        ids: (n,) integer sample ids; a candidate with the query's id is the query itself and is left out.
            Without a gallery they default to the row numbers; with one, give them on both sides.
        gallery: ``(embeddings, labels[, domains[, ids]])``; by default the queries themselves.
        domains: (n,) integers or text, needed for the two that follow.
        exclude_same_domain: leave out candidates of the query's own domain (same camera, same session).
        only_same_domain: leave out all others.
        chunk: queries scored at a time; it changes memory, never the result.
        across_ranks: share the queries with the other ranks of `torch.distributed`: every rank makes this call with the
            same rows and has the result of all of them.

    Raises:
        DataError: one set was given as queries and as gallery, without ids.
        InputError: a query has fewer candidates than the largest K, no query has a relevant candidate, or all
            candidates have one label.

    Example:
        >>> import numpy as np
        >>> retrieval(np.eye(3)[[0, 0, 1, 1]], [7, 7, 8, 8], k=(1,)).recall[1]
        1.0
    """
    ks = wholes(k, "k")
    if chunk is not None:
        whole(chunk, "chunk", 1)
    query = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    if gallery is None and query.ids is None:
        query = replace(query, ids=np.arange(len(query)))
    query, other = (query, query) if gallery is None else check_gallery(gallery, query)
    notes = inside(query) if gallery is None else across(query, other, "the queries", "the gallery")
    if exclude_same_domain and only_same_domain:
        raise InputError("exclude_same_domain and only_same_domain leave no candidate: give one of them")
    trials = "across" if exclude_same_domain else "within" if only_same_domain else "all"
    if trials != "all" and (query.domains is None or other.domains is None):
        asked = "exclude_same_domain" if exclude_same_domain else "only_same_domain"
        raise InputError(f"{asked} needs domains, one per row on every side")
    double = query.double or other.double
    units = Unit.of(query.values, double)
    fast = FastCosine.of(units, units if other is query else Unit.of(other.values, double))
    relevance, shared = Relevance.of(query, other, trials), RankGroup.current() if across_ranks else ALONE
    sides = [query] if other is query else [query, other]
    require_same_call(shared, "what they rank", *sides, trials=trials, k=ks, chunk=chunk)

    def judge() -> dict[str, np.ndarray]:
        """The metrics of this rank's queries, in the order of the queries."""
        parts = [
            all_metrics(TieGroups.of(ranks), ks) | {QUERIES: ranks.queries}
            for ranks in rank_relevant(relevance, fast.score, fast, most=max(ks), chunk=chunk, ranks=shared)
        ]
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]} if parts else {}

    found = [part for part in shared.compute(judge) if part]
    if not found:
        raise InputError(
            f"no query has a relevant candidate: none of the {len(query)} labels occurs among its candidates"
        )
    if (other.labels == other.labels[0]).all():
        raise InputError(
            f"retrieval needs at least two labels among the candidates: all {len(other)} have label "
            f"{other.given_labels[0]}, so every neighbour would be right"
        )
    merged = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    if shared.size > 1:
        order = np.argsort(merged[QUERIES], kind="stable")
        merged = {name: values[order] for name, values in merged.items()}
    queries = merged.pop(QUERIES)
    subjects = np.unique(query.labels[queries], return_inverse=True)[1].reshape(-1)
    return Retrieval(
        MappingProxyType({n: v for n, v in merged.items() if not n.startswith(("least", "most"))}),
        queries,
        subjects,
        len(query) - len(queries),
        MappingProxyType({k: float(merged[f"least@{k}"].mean()) for k in ks}),
        MappingProxyType({k: float(merged[f"most@{k}"].mean()) for k in ks}),
        notes,
        of_ranking(query, other, named=ids is not None, trials=trials),
    )
