"""Clustering: do k-means clusters of the embeddings find the labels?

k-means on unit vectors with as many clusters as labels, from several seeds; every number is a mean over the seeds with
its range. With n_ij samples of label i in cluster j:

    NMI  mutual information / arithmetic mean of the two entropies (not adjusted for chance: it grows with k)
    AMI  the same, adjusted: 0 for random clusters
    F1   of pairs: precision = pairs of one cluster that share their label, recall = pairs of one label that share
         their cluster
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mettle.errors import InputError, nearest
from mettle.evaluate.inputs import check_embeddings, check_int
from mettle.evaluate.metrics import ItemMetric, metrics_of, register
from mettle.evaluate.notebook import html_table
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.unknown_names import explain_arguments


@dataclass(frozen=True, eq=False)
class Clustering:
    """Agreement of clusters with labels.

    Attributes:
        per_seed: by name (``"nmi"``, ``"ami"``, ``"f1"``), one value for each seed.
        clusters: k.
        seeds: of k-means.
        warnings: what a reader should know.
    """

    per_seed: Mapping[str, np.ndarray]
    clusters: int
    seeds: tuple[int, ...]
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Clustering(nmi={self.nmi:.4f}, ami={self.ami:.4f}, f1={self.f1:.4f}, clusters={self.clusters})"

    def _repr_html_(self) -> str:
        rows = [("NMI", self.nmi), ("AMI", self.ami), ("F1 of pairs", self.f1), ("clusters", self.clusters)]
        return html_table(f"Clustering, mean of {len(self.seeds)} starts", rows, self.warnings)

    @property
    def nmi(self) -> float:
        """Normalised mutual information, mean over the seeds."""
        return float(self.per_seed["nmi"].mean())

    @property
    def ami(self) -> float:
        """Mutual information adjusted for chance, mean over the seeds."""
        return float(self.per_seed["ami"].mean())

    @property
    def f1(self) -> float:
        """F1 of pairs, mean over the seeds."""
        return float(self.per_seed["f1"].mean())

    def value(self, name: str) -> float:
        """The mean over the seeds."""
        if name not in self.per_seed:
            raise InputError(f"clustering has no metric named {name!r}{nearest(str(name), self.per_seed)}")
        return float(self.per_seed[name].mean())

    def range(self, name: str) -> tuple[float, float]:
        """The lowest and the highest value over the seeds."""
        return float(self.per_seed[name].min()), float(self.per_seed[name].max())

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        metrics = {n: {"value": float(v.mean()), "range": list(self.range(n))} for n, v in self.per_seed.items()}
        return {
            "clusters": self.clusters,
            "seeds": list(self.seeds),
            "metrics": metrics,
            "warnings": list(self.warnings),
        }


@explain_arguments
def clustering(
    embeddings: Any, labels: Any, *, clusters: int | None = None, seeds: int = 5, seed: int = 0
) -> Clustering:
    """Cluster unit vectors by k-means and compare with the labels.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        clusters: k, by default the number of labels.
        seeds: how many starts.
        seed: of the first start.

    Example:
        >>> import numpy as np
        >>> clustering(np.eye(3)[[0, 0, 1, 1, 2, 2]], [5, 5, 6, 6, 7, 7]).nmi
        1.0
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    rows = check_embeddings(embeddings, labels)
    count = len(np.unique(rows.labels))
    k = count if clusters is None else clusters
    if count < 2:
        raise InputError("clustering needs at least two labels: got one, which every clustering would agree with")
    if count == len(rows):
        raise InputError(
            f"clustering needs a label that occurs twice: all {count} labels differ, and clusters of one sample each "
            "would agree with them whatever the embeddings"
        )
    if check_int(k, "clusters", 2) > len(rows):
        raise InputError(f"clusters must lie between 2 and {len(rows)}: got {k}")
    check_int(seeds, "seeds", 1)
    check_int(seed, "seed", 0)
    unit = ExactUnitVectors.from_rows(rows.values)
    unit = unit.vectors() if rows.is_float64 else unit.as_float32()
    chosen = tuple(range(seed, seed + seeds))
    known = metrics_of("clustering", ItemMetric)
    values: dict[str, list[float]] = {metric.key: [] for metric in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct vectors than clusters: said below
        for s in chosen:
            start = KMeans(k, n_init=1, random_state=s)  # type: ignore[arg-type]
            found = start.fit_predict(unit)
            for metric in known:
                values[metric.key].append(float(metric.per_item((rows.labels, found), None)))
    distinct = len(np.unique(unit, axis=0))
    notes = (f"{distinct} distinct vectors cannot fill {k} clusters: collapse?",) if distinct < k else ()
    return Clustering(MappingProxyType({n: np.asarray(v) for n, v in values.items()}), k, chosen, notes)


def pair_f1(labels: np.ndarray, clusters: np.ndarray) -> float:
    """F1 over pairs of samples, from the contingency table, in whole numbers."""
    a = np.unique(labels, return_inverse=True)[1].reshape(-1)
    b = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    table = np.unique(a * (int(b.max()) + 1) + b, return_counts=True)[1].astype(object)
    both, first, second = (
        sum(n * (n - 1) // 2 for n in counts) for counts in (table, np.bincount(a).tolist(), np.bincount(b).tolist())
    )
    return float(2 * both / (first + second)) if first + second else 0.0


def _nmi(labels: np.ndarray, clusters: np.ndarray) -> float:
    from sklearn.metrics import normalized_mutual_info_score

    return normalized_mutual_info_score(labels, clusters, average_method="arithmetic")


def _ami(labels: np.ndarray, clusters: np.ndarray) -> float:
    from sklearn.metrics import adjusted_mutual_info_score

    return adjusted_mutual_info_score(labels, clusters)


NMI = register(
    ItemMetric(
        "nmi",
        "NMI",
        "mutual information of k-means clusters and labels / arithmetic mean of the two entropies; grows with k",
        "clustering",
        "how well clusters tell the labels; not adjusted for chance",
        per_item=lambda found, at: _nmi(*found),
        items="seeds",
    )
)
AMI = register(
    ItemMetric(
        "ami",
        "AMI",
        "the same, adjusted: 0 for random clusters",
        "clustering",
        limits=(-1.0, 1.0),
        per_item=lambda found, at: _ami(*found),
        items="seeds",
    )
)
F1 = register(
    ItemMetric(
        "f1",
        "F1 of pairs",
        "2·precision·recall / (precision + recall) of pairs of samples that share their cluster and should",
        "clustering",
        per_item=lambda found, at: pair_f1(*found),
        items="seeds",
    )
)
