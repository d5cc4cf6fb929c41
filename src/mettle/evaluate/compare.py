"""Comparing two models on the same people: the interval of a difference, not two overlapping intervals.

Both results are resampled with the *same* subjects in every replicate, so what makes a subject hard for both models
cancels:  Δ_b = first_b − second_b.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.data.arrays import names
from mettle.errors import InputError
from mettle.evaluate import bootstrap
from mettle.evaluate.bootstrap import Interval
from mettle.evaluate.groups import resampled_worst
from mettle.evaluate.linear_probe import Probe
from mettle.evaluate.metrics import PairMetric, parse_metric
from mettle.evaluate.notebook import html_table
from mettle.evaluate.retrieval import Retrieval
from mettle.evaluate.scoring import pair_fingerprint
from mettle.evaluate.verification import Verification
from mettle.unknown_names import explain_arguments


@dataclass(frozen=True)
class Comparison:
    """Two values of one metric on the same subjects, and their difference.

    Attributes:
        name: the metric.
        first: value of the first result.
        second: value of the second.
        difference: first − second.
        interval: of the difference.
    """

    name: str
    first: float
    second: float
    difference: float
    interval: Interval

    def _repr_html_(self) -> str:
        ends = f"{self.interval.low:+.4f} to {self.interval.high:+.4f}"
        rows: list[tuple[str, object]] = [("first", self.first), ("second", self.second)]
        rows += [("first − second", self.difference), (f"{100 * self.interval.level:g} % interval", ends)]
        return html_table(f"Comparison, {self.name}", rows)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.interval.low <= 0 <= self.interval.high

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        return {**vars(self), "interval": dict(vars(self.interval)), "decided": self.excludes_zero}


@explain_arguments
def compare(
    first: Verification | Retrieval | Probe,
    second: Verification | Retrieval | Probe,
    name: str | tuple[str, float] | None = None,
    level: float = 0.95,
    *,
    replicates: int = 1000,
    seed: int = 0,
    groups: Any = None,
) -> Comparison:
    """Difference of two results on the same samples, with its interval over resampled subjects.

    Args:
        first: of one model.
        second: of another, same kind, same labels, same pairs; for retrieval, same queries and gallery; for probes, the
            same test samples in one order.
        name: ``"eer"`` (default), ``"auc"``, ``"tar@1e-3"``; for retrieval a name of ``per_query`` (by default
            ``"recall@1"``), for probes ``"linear"`` (default), ``"knn"``.
        level: nominal coverage.
        replicates: how many resamples.
        seed: of the resampling.
        groups: retrieval only: one group per row; then the *worst* group's mean is compared, found anew in every
            replicate.

    Raises:
        InputError: the two were not measured on the same subjects and pairs, or queries and gallery.
        NotMeasurable: fewer than six subjects, in all or in a group.

    Example:
        >>> import numpy as np
        >>> from mettle.evaluate import verification
        >>> rng, y = np.random.default_rng(0), np.repeat(np.arange(30), 4)
        >>> x = rng.normal(size=(30, 8))[y]
        >>> a, b = (verification(x + s * rng.normal(size=x.shape), y) for s in (0.5, 1.5))
        >>> compare(a, b, "auc").excludes_zero
        True
    """
    if isinstance(first, Verification) and isinstance(second, Verification):
        if groups is not None:
            raise InputError(
                "groups is for two retrievals: got two verifications, whose pairs lie between groups as well; compare "
                "one group of both with evaluate.groups(v, groups)[name].verification"
            )
        return _compare_verifications(first, second, name or "eer", level, replicates, seed)
    if isinstance(first, Retrieval) and isinstance(second, Retrieval):
        return _compare_retrievals(first, second, name or "recall@1", level, replicates, seed, groups)
    if isinstance(first, Probe) and isinstance(second, Probe):
        if groups is not None:
            raise InputError("groups is for two retrievals: got two probes")
        return _probes(first, second, name or "linear", level, replicates, seed)
    kinds = f"{type(first).__name__} and {type(second).__name__}"
    raise InputError(f"compare takes two verifications, two retrievals or two probes: got {kinds}")


def _compare_verifications(
    a: Verification, b: Verification, name: str | tuple[str, float], level: float, replicates: int, seed: int
) -> Comparison:
    _check_same_pairs(a, b)
    metric, at = parse_metric(name, "verification")
    assert isinstance(metric, PairMetric)
    if metric.replicates is None:
        raise InputError(f"compare takes no {metric.key!r}: thresholds of two models mean different things")
    values, drawn = [a.value(name), b.value(name)], [v.replicates(replicates, seed) for v in (a, b)]
    both = np.intersect1d(drawn[0].rows, drawn[1].rows)
    shifted = []
    for d, point in zip(drawn, values, strict=True):
        shifted.append(d.values(metric, at, point)[np.searchsorted(d.rows, both)])
    weights = drawn[0].weights[np.searchsorted(drawn[0].rows, both)]
    difference, method = values[0] - values[1], f"paired {drawn[0].method}"
    among = drawn[0].subjects_of(metric)
    found = bootstrap.bca_interval(shifted[0] - shifted[1], difference, weights, level, seed, method, among=among)
    return Comparison(_title(name), values[0], values[1], difference, found)


def _check_same_pairs(a: Verification, b: Verification) -> None:
    if a.subjects == 0 or b.subjects == 0:
        raise InputError("compare resamples subjects: give from_scores() the subjects of every pair")
    of = pair_fingerprint.of_subjects if a.source is None or b.source is None else pair_fingerprint.of_pairs
    other = of(a).difference(of(b))
    if other is not None:
        raise InputError(
            f"compare needs two results on the same labels and the same pairs: {other} differ; evaluate both models on "
            "one protocol"
        )


def _compare_retrievals(
    a: Retrieval, b: Retrieval, name: str | tuple[str, float], level: float, replicates: int, seed: int, groups: Any
) -> Comparison:
    both_values = [r.items(name)[0] for r in (a, b)]
    alike = np.array_equal(a.queries, b.queries) and np.array_equal(a.subjects, b.subjects)
    other = None if alike else "queries"
    if alike and a.basis is not None and b.basis is not None:  # a result made by hand has none
        other = a.basis.difference(b.basis)
    if other is not None:
        raise InputError(
            f"compare needs the same queries and the same gallery in both results: {other} differ; evaluate both "
            "models on one protocol"
        )
    count = 1 + int(a.subjects.max())
    weights = bootstrap.bootstrap_weights(count, replicates, seed)
    if groups is None:
        group = np.zeros(len(a.queries), np.int64)
    else:
        group = names(groups, "groups", len(a.queries) + a.excluded)[a.queries]
        for one in np.unique(group):
            people = len(np.unique(a.subjects[group == one]))
            bootstrap.check_subjects(people, f"subjects in group {str(one)!r}")
    ones = np.ones((1, count), np.int64)
    points = [float(resampled_worst(values, a.subjects, group, ones)[0]) for values in both_values]
    drawn = [resampled_worst(values, a.subjects, group, weights) for values in both_values]
    method = f"paired query-{bootstrap.METHOD}, gallery fixed" + ("" if groups is None else ", worst group")
    difference = points[0] - points[1]
    found = bootstrap.bca_interval(drawn[0] - drawn[1], difference, weights, level, seed, method)
    title = _title(name) if groups is None else f"worst group {_title(name)}"
    return Comparison(title, points[0], points[1], difference, found)


def _probes(a: Probe, b: Probe, name: str | tuple[str, float], level: float, replicates: int, seed: int) -> Comparison:
    if not np.array_equal(a.linear.labels, b.linear.labels):
        raise InputError("compare needs the same test samples in one order in both results: their labels differ")
    values = [one.items(name)[0] for one in (a, b)]
    weights = bootstrap.bootstrap_weights(len(values[0]), replicates, seed)
    first, second = (float(v.mean()) for v in values)
    drawn = bootstrap.weighted_sums(weights, values[0] - values[1]) / len(values[0])
    found = bootstrap.bca_interval(drawn, first - second, weights, level, seed, f"paired {a.method}")
    return Comparison(_title(name), first, second, first - second, found)


def _title(name: str | tuple[str, float]) -> str:
    return name if isinstance(name, str) else f"{name[0]}@{name[1]:g}"
