"""Retrieval: who is nearest? One value per query, then means.

Candidates of a query are the gallery less the items with its own sample id (and, on request, its own domain). Those
with its label are relevant. Queries without any are left out of the means and counted. What each metric is, and its
exact expectation where scores tie, stands in :mod:`mettle.evaluate.ranking_metrics`.

:func:`reidentification` ranks by the rule of Market-1501 instead, where numbers of papers come from: what has the
query's label *and* its domain is no candidate, everything else is, distractors included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mettle.data.arrays import to_numpy
from mettle.errors import InputError, nearest
from mettle.evaluate import bootstrap
from mettle.evaluate.bootstrap import Interval, ResultPerItem, interval_of_mean
from mettle.evaluate.diagnostics.duplicates import check_shared_samples, warn_duplicates
from mettle.evaluate.inputs import (
    EmbeddingSet,
    Wholes,
    check_embeddings,
    check_gallery,
    check_int,
    check_ints,
    check_label_sets,
    check_tuple,
    is_label_sets,
    share_label_codes,
)
from mettle.evaluate.metrics import parse_metric
from mettle.evaluate.notebook import html_table
from mettle.evaluate.ranking_metrics import TieGroups, all_metrics, hit_rate
from mettle.evaluate.scoring.pair_fingerprint import PairFingerprint, of_ranking
from mettle.evaluate.scoring.rank_parts import require_same_call
from mettle.evaluate.scoring.relevant_ranks import FastCosine, Relevance, ScoreRows, rank_relevant
from mettle.evaluate.scoring.reranking import KReciprocal, QueryExpansion
from mettle.evaluate.scoring.similarity import SIMILARITIES, score_rows
from mettle.pairs.distributed import ALONE, RankGroup
from mettle.unknown_names import explain_arguments

QUERIES = "queries"  # beside the metrics of these queries, their positions
ENDS = ("least", "most")  # Recall@K of each in the worst order of ties, and in the best
AVERAGES = ("micro", "macro")
RULES = {
    "all": "all candidates",
    "across": "candidates of other domains",
    "within": "candidates of the query's domain",
    "other_views": "all but those of the query's label and domain (the rule of Market-1501)",
}


@dataclass(frozen=True, eq=False)
class Retrieval(ResultPerItem):
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
        ranking: by what candidates were ranked, in words.
        rule: which of the gallery were candidates, in words.
    """

    per_query: Mapping[str, np.ndarray]
    queries: np.ndarray
    subjects: np.ndarray
    excluded: int
    pessimistic: Mapping[int, float]
    optimistic: Mapping[int, float]
    notes: tuple[str, ...] = ()
    basis: PairFingerprint | None = None
    ranking: str = "cosine"
    rule: str = RULES["all"]

    result = "retrieval"

    def __repr__(self) -> str:
        recall = ", ".join(f"{k}: {v:.4f}" for k, v in self.recall.items())
        said = "".join(f", {name}={text!r}" for name, text in self._unusual().items())
        return f"Retrieval(recall={{{recall}}}, map_at_r={self.map_at_r:.4f}, queries={len(self.queries)}{said})"

    def _unusual(self) -> dict[str, str]:
        """What must not be mistaken for the plain numbers: another similarity, re-ranking, another rule."""
        found = {"ranking": self.ranking, "rule": self.rule}
        return {name: text for name, text in found.items() if text not in ("cosine", RULES["all"])}

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [(f"Recall@{k}", value) for k, value in self.recall.items()]
        rows += [("MAP@R", self.map_at_r), ("MAP", self.map), ("R-precision", self.r_precision), ("MRR", self.mrr)]
        rows += [("nDCG", self.ndcg), ("queries", len(self.queries))]
        return html_table("Retrieval", rows, self.warnings)

    @property
    def recall_at(self) -> Mapping[int, np.ndarray]:
        """Recall@K of each judged query, by K."""
        return {k: self.per_query[f"recall@{k}"] for k in self.pessimistic}

    @property
    def recall(self) -> Mapping[int, float]:
        """Mean Recall@K over the judged queries, by K."""
        return {k: float(v.mean()) for k, v in self.recall_at.items()}

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

    def items(self, name: str | tuple[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """One value per query by the name of a metric, and the subject of each query."""
        metric, at = parse_metric(name, self.result)
        known = metric.key if at is None else metric.name_at(int(at))
        if known not in self.per_query:
            raise InputError(f"no metric named {name!r} was measured{nearest(known, self.per_query)}")
        return self.per_query[known], self.subjects

    @property
    def method(self) -> str:
        """Subjects of queries are drawn."""
        return f"query-{bootstrap.METHOD}, gallery fixed"

    def per_class(self, name: str | tuple[str, float]) -> np.ndarray:
        """The mean over the queries of each subject, in ascending order of their labels."""
        values, subjects = self.items(name)
        return np.bincount(subjects, weights=values) / np.bincount(subjects)

    def value(self, name: str | tuple[str, float], average: str = "micro") -> float:
        """A mean by name: over queries ("micro"), or over the means of classes ("macro")."""
        return float(self._average_items(name, average)[0].mean())

    def interval(
        self,
        name: str | tuple[str, float],
        level: float = 0.95,
        *,
        average: str = "micro",
        replicates: int = 1000,
        seed: int = 0,
    ) -> Interval:
        """Interval of a mean in ``per_query``: query subjects are resampled, the gallery stays fixed.

        It says how the mean would move with other queries against this gallery, not with another gallery.

        Raises:
            NotMeasurable: fewer than six query subjects.
        """
        values, subjects = self._average_items(name, average)
        return interval_of_mean(values, subjects, self.method, level, replicates=replicates, seed=seed)

    def _average_items(self, name: str | tuple[str, float], average: str) -> tuple[np.ndarray, np.ndarray]:
        """What the mean is over, and whose it is."""
        if average not in AVERAGES:
            raise InputError(f"no average named {average!r}{nearest(average, AVERAGES)}")
        if average == "micro":
            return self.items(name)
        classes = self.per_class(name)
        return classes, np.arange(len(classes))

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON; interval None where subjects are too few."""
        return {
            "queries": len(self.queries),
            "excluded": self.excluded,
            "subjects": len(np.unique(self.subjects)),
            "metrics": {
                name: {
                    "value": float(values.mean()),
                    "interval": bootstrap.interval_or_none(lambda n=name: self.interval(n)),
                }
                for name, values in self.per_query.items()
            },
            "recall_pessimistic": {str(k): v for k, v in self.pessimistic.items()},
            "recall_optimistic": {str(k): v for k, v in self.optimistic.items()},
            **self._unusual(),
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
    similarity: str = "cosine",
    rerank: KReciprocal | QueryExpansion | None = None,
    chunk: int | None = None,
    across_ranks: bool = False,
) -> Retrieval:
    """Rank a gallery for every query.

    Args:
        embeddings: (n, d) array or tensor, the queries.
        labels: (n,) integers or text; or n collections of them (or an (n, c) array of truth values), where candidates
            that share a label with the query are relevant.
        k: the K of Recall@K, one or many.
        ids: (n,) integer sample ids; a candidate with the query's id is the query itself and is left out.
            Without a gallery they default to the row numbers; with one, give them on both sides.
        gallery: ``(embeddings, labels[, domains[, ids]])``; by default the queries themselves.
        domains: (n,) integers or text, needed for the two that follow.
        exclude_same_domain: leave out candidates of the query's own domain (same camera, same session).
        only_same_domain: leave out all others.
        similarity: "cosine", "dot", "l2" or "l1"; the last two are distances, the nearest is the most alike.
        rerank: change the ranking afterwards, by :class:`KReciprocal` or :class:`QueryExpansion` on cosines; the
            result says so.
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
    labels, gallery, related = _code_label_sets(labels, gallery)
    query = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    if gallery is None and query.ids is None:
        query = replace(query, ids=np.arange(len(query)))
    query, other = (query, query) if gallery is None else check_gallery(gallery, query)
    notes = (
        warn_duplicates(query) if gallery is None else check_shared_samples(query, other, "the queries", "the gallery")
    )
    if exclude_same_domain and only_same_domain:
        raise InputError("exclude_same_domain and only_same_domain leave no candidate: give one of them")
    rule = "across" if exclude_same_domain else "within" if only_same_domain else "all"
    if rule != "all" and (query.domains is None or other.domains is None):
        asked = "exclude_same_domain" if exclude_same_domain else "only_same_domain"
        raise InputError(f"{asked} needs domains, one per row on every side")
    scoring, ranks = _scoring(query, other, similarity, rerank), RankGroup.current() if across_ranks else ALONE
    found = _rank(query, other, scoring, check_ints(k, "k"), rule, chunk, related, ranks)
    return replace(found, notes=notes, basis=of_ranking(query, other, named=ids is not None, trials=rule))


@explain_arguments
def reidentification(
    query: tuple[Any, ...],
    gallery: tuple[Any, ...],
    *,
    k: Wholes = (1, 5, 10),
    similarity: str = "cosine",
    rerank: KReciprocal | QueryExpansion | None = None,
    chunk: int | None = None,
) -> Retrieval:
    """Rank by the rule of Market-1501: the query's identity seen by the query's camera is no candidate, all else is.

    Distractors stay in the gallery. Detections that a data set calls junk (label −1 in Market-1501) belong to no
    gallery: leave them out. ``rank-k`` of papers is Recall@K, their mAP is ``map``, or ``map_trapezoid`` as the
    evaluation code of Market-1501 computes it. Numbers are not those of ``retrieval(exclude_same_domain=True)``, which
    leaves out *everything* of the query's camera.

    Args:
        query: ``(embeddings, labels, cameras[, ids])``.
        gallery: the same.
        k: the K of Recall@K, one or many.
        similarity: as for :func:`retrieval`.
        rerank: as for :func:`retrieval`.
        chunk: queries scored at a time; it changes memory, never the result.

    Example:
        >>> import numpy as np
        >>> x = np.eye(4)[[0, 0, 1, 2]]
        >>> reidentification((x[:1], [7], [1]), (x[1:], [7, 7, 9], [1, 2, 1]), k=1).rule
        "all but those of the query's label and domain (the rule of Market-1501)"
    """
    first, second = check_tuple(query, "query"), check_tuple(gallery, "gallery")
    if first.domains is None or second.domains is None:
        raise InputError("reidentification needs cameras: give query and gallery as (embeddings, labels, cameras)")
    if first.dim != second.dim:
        raise InputError(f"gallery embeddings must have the queries' dimension {first.dim}: got {second.dim}")
    first, second = share_label_codes(first, second, "the queries", "the gallery")
    if (first.ids is None) != (second.ids is None):
        raise InputError("sample ids must be given on both sides or on none")
    found = _rank(first, second, _scoring(first, second, similarity, rerank), check_ints(k, "k"), "other_views", chunk)
    return replace(found, basis=of_ranking(first, second, named=first.ids is not None, trials="other_views"))


@explain_arguments
def retrieval_from_scores(
    scores: Any,
    labels: Any,
    gallery_labels: Any = None,
    *,
    k: Wholes = (1, 2, 4, 8),
    ids: Any = None,
    gallery_ids: Any = None,
    chunk: int | None = None,
) -> Retrieval:
    """Rank by a matrix of scores that came from anywhere.

    Args:
        scores: (n, m) finite numbers, higher meaning more alike; equal means equal.
        labels: (n,) labels of the rows, or n collections of them.
        gallery_labels: (m,) labels of the columns; by default those of the rows, and no row is its own candidate.
        k: the K of Recall@K, one or many.
        ids: (n,) integer sample ids of the rows.
        gallery_ids: (m,) those of the columns.
        chunk: queries ranked at a time; it changes memory, never the result.

    Example:
        >>> r = retrieval_from_scores([[0.9, 0.1, 0.8], [0.2, 0.7, 0.7]], [1, 2], [1, 2, 1], k=1)
        >>> r.recall[1], r.map
        (0.75, 0.875)
    """
    s = to_numpy(scores, "scores")
    if s.ndim != 2 or 0 in s.shape or s.dtype.kind not in "fiu":
        raise InputError(f"scores must be a matrix of real numbers: got shape {s.shape}, dtype {s.dtype}")
    if not np.isfinite(s).all():
        raise InputError(f"scores must be finite: {np.count_nonzero(~np.isfinite(s))} of {s.size} are NaN or infinite")
    if gallery_labels is None and s.shape[0] != s.shape[1]:
        raise InputError(f"gallery_labels are missing: the {s.shape[1]} columns are not the {s.shape[0]} rows")
    s = s.astype(np.float64 if s.dtype.kind in "iu" else s.dtype, copy=False)
    own = gallery_labels is None
    shelf = None if own else (np.ones((s.shape[1], 1)), gallery_labels)
    labels, shelf, related = _code_label_sets(labels, shelf)
    query = check_embeddings(np.ones((s.shape[0], 1)), labels, ids=ids)
    if own:
        query = query if query.ids is not None else replace(query, ids=np.arange(len(query)))
        other = query
    else:
        assert shelf is not None
        query, other = check_gallery((*shelf, None, gallery_ids), query)

    def score(rows: np.ndarray) -> np.ndarray:
        return s[rows].copy()

    found = _rank(query, other, (score, None, "given scores"), check_ints(k, "k"), "all", chunk, related)
    return replace(found, basis=of_ranking(query, other, named=ids is not None, trials="all"))


def _code_label_sets(labels: Any, gallery: tuple[Any, ...] | None) -> tuple[Any, tuple[Any, ...] | None, Any]:
    """Collections of labels as one code per row, and which codes share a label; plain labels as they are."""
    sides = [labels] if gallery is None or len(gallery) < 2 else [labels, gallery[1]]
    sets = [is_label_sets(side) for side in sides]
    if not any(sets):
        return labels, gallery, None
    if not all(sets):
        raise InputError("labels must be of one kind on both sides: those of one are collections, the others are not")
    coded, related = check_label_sets(*sides)
    if gallery is None:
        return coded[0], None, related
    other: list[Any] = list(gallery)
    other[1] = coded[1]
    return coded[0], tuple(other), related


def _scoring(
    query: EmbeddingSet, other: EmbeddingSet, similarity: str, rerank: Any
) -> tuple[ScoreRows, FastCosine | None, str]:
    """How queries are scored against the gallery: exactly, fast where that can be had, and in words."""
    if similarity not in SIMILARITIES:
        raise InputError(f"no similarity named {similarity!r}{nearest(str(similarity), SIMILARITIES)}")
    if rerank is None:
        return *score_rows(query, other, similarity), similarity
    if not isinstance(rerank, KReciprocal | QueryExpansion):
        raise InputError(f"rerank takes KReciprocal() or QueryExpansion(): got {rerank!r}")
    if similarity != "cosine":
        raise InputError(f"re-ranking rests on cosines: got similarity={similarity!r}")
    return *rerank.score_rows(query, other), f"cosine, then {rerank}"


def _rank(
    query: EmbeddingSet,
    other: EmbeddingSet,
    scoring: tuple[ScoreRows, FastCosine | None, str],
    ks: Sequence[int],
    rule: str,
    chunk: int | None,
    related: Any = None,
    ranks: RankGroup = ALONE,
) -> Retrieval:
    """Every metric of every query that has a relevant candidate."""
    if chunk is not None:
        check_int(chunk, "chunk", 1)
    score, fast, ranking = scoring
    relevance = Relevance.from_sets(query, other, rule, related)
    sides = [query] if other is query else [query, other]
    require_same_call(ranks, "what they rank", *sides, rule=rule, k=ks, chunk=chunk, ranking=ranking)

    def measure() -> dict[str, np.ndarray]:
        """The metrics of this rank's queries, in the order of the queries."""
        parts = []
        for found in rank_relevant(relevance, score, fast, most=max(ks), chunk=chunk, ranks=ranks):
            ties = TieGroups.from_ranks(found)
            ends = {k: hit_rate(ties, k)[1:] for k in ks}
            bounds = {f"{end}@{k}": ends[k][at] for at, end in enumerate(ENDS) for k in ks}
            parts.append(all_metrics(ties, ks) | bounds | {QUERIES: found.queries})
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]} if parts else {}

    found = [part for part in ranks.compute(measure) if part]
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
    if ranks.size > 1:
        order = np.argsort(merged[QUERIES], kind="stable")
        merged = {name: values[order] for name, values in merged.items()}
    queries = merged.pop(QUERIES)
    worst, best = (MappingProxyType({k: float(merged.pop(f"{end}@{k}").mean()) for k in ks}) for end in ENDS)
    subjects = np.unique(query.labels[queries], return_inverse=True)[1].reshape(-1)
    left_out = len(query) - len(queries)
    per_query = MappingProxyType(merged)
    return Retrieval(per_query, queries, subjects, left_out, worst, best, ranking=ranking, rule=RULES[rule])
