"""Groups: any metric by any attribute, and who is worst off.

A verification is counted again among the pairs whose two samples are both in the group; its error rates are also read
at one *global* threshold, as a deployed system would. Results that have one value per item (retrieval, identification,
probes) are averaged by group.

Groups with few subjects are listed, but a minimum over noisy estimates is biased low, so only groups with at least
``minimum`` subjects may be the worst. Who could make no error does not count: for EER, AUC and FNMR a group has as many
subjects as have genuine pairs in it (for EER and AUC impostor pairs, if those are fewer), for FMR as many as have
impostor pairs, and for a probe as many as it has test samples, which is what its interval resamples.

One group and all groups of an attribute: what slicing finds, who is worst off, and as plain numbers.

Trials files and matrices of domains: verification that somebody else laid out.

A trials file has one trial a line, two sample ids and 1 for the same subject or 0, separated by commas, tabs or spaces;
a first line of words is a header, a line that starts with # is a remark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from mettle.data.arrays import as_names, names, to_numpy
from mettle.errors import InputError, MettleError, UnknownArgument, nearest
from mettle.evaluate.bootstrap import METHOD, Interval, interval_of_mean, interval_or_none, weighted_sums
from mettle.evaluate.identification import Identification
from mettle.evaluate.inputs import (
    EmbeddingSet,
    NotMeasurable,
    Wholes,
    check_embeddings,
    check_int,
    check_ints,
    check_thresholds,
    check_trials,
    joint_codes,
)
from mettle.evaluate.linear_probe import Probe
from mettle.evaluate.metrics import ItemMetric, PairMetric, find_metric, metrics_of, parse_metric
from mettle.evaluate.notebook import html_table
from mettle.evaluate.retrieval import Retrieval
from mettle.evaluate.verification import Verification, verification
from mettle.unknown_names import explain_arguments

MINIMUM = 50


@dataclass(frozen=True, eq=False)
class Group:
    """One group.

    Attributes:
        name: the attribute's value.
        samples: rows in it.
        subjects: subjects in it that the metric rests on; test samples for a probe.
        values: by metric; None where the group cannot support it.
        verification: the group's own result, for curves and intervals; None for per-item metrics.
        items: by metric, the numbers of its items, for intervals; empty for verifications.
        item_subjects: the subject of each item.
        threshold: the global threshold, which FMR and FNMR are read at.
        why_not: why a value is missing, or why the group is not ranked.
        people: by metric, subjects that it rests on, where that is not ``subjects`` for all of them.
    """

    name: str
    samples: int
    subjects: int
    values: Mapping[str, float | None]
    verification: Verification | None = None
    why_not: str = ""
    people: Mapping[str, int] = field(default_factory=dict)
    items: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    item_subjects: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    threshold: float | None = None

    def interval(self, metric: str = "eer", level: float = 0.95, *, replicates: int = 1000, seed: int = 0) -> Interval:
        """The interval of the group's own number, over the subjects in it."""
        sampling = {"level": level, "replicates": replicates, "seed": seed}
        if self.verification is not None:
            at_threshold = {m.base for m in _list_pair_metrics() if m.takes}
            name = (metric, self.threshold) if metric in at_threshold else metric
            return self.verification.interval(name, **sampling)  # type: ignore[arg-type]
        if metric not in self.items or not len(self.items[metric]):
            why = self.why_not or "no such metric"
            raise NotMeasurable(f"group {self.name!r} has no interval of {metric!r}: {why}")
        method = f"{METHOD} of a group"
        return interval_of_mean(self.items[metric], self.item_subjects, method, **sampling)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Groups:
    """All groups of an attribute.

    Attributes:
        groups: by name.
        metric: what groups are ranked by.
        minimum: subjects that a group needs to be called the worst.
        threshold: the global threshold, for verification.
        far: the rate it was set for, or None.
        result: the kind of result that was sliced.
    """

    groups: Mapping[str, Group]
    metric: str
    minimum: int
    threshold: float | None = None
    far: float | None = None
    result: str = "verification"

    def __repr__(self) -> str:
        ranked = self.rank_groups()
        worst = f"worst={ranked[0].name!r} {ranked[0].values[self.metric]:.4g}, " if ranked else ""
        return f"Groups({self.metric}: {worst}groups={len(self.groups)}, ranked={len(ranked)})"

    def _repr_html_(self) -> str:
        """Worst first, groups that are not ranked last; the metric that ranks them in the first column."""
        ranked = self.rank_groups()
        others = [g for g in self if g not in ranked]
        metrics = list(dict.fromkeys([self.metric, *(name for g in self for name in g.values)]))
        rows = [(g.name, *(g.values.get(m) for m in metrics), g.samples, g.subjects) for g in (*ranked, *others)]
        title = f"Groups by {self.metric}, worst first"
        if self.threshold is not None:
            title += f"; error rates at the threshold {self.threshold:.4f}"
        return html_table(title, rows, self.warnings, (*metrics, "samples", "subjects"))

    def __getitem__(self, name: Any) -> Group:
        return self.groups[str(name)]

    def __iter__(self) -> Any:
        return iter(self.groups.values())

    @property
    def small_groups(self) -> tuple[str, ...]:
        """Groups too small to be ranked."""
        return tuple(g.name for g in self if g.subjects < self.minimum)

    def rank_groups(self, metric: str | None = None) -> tuple[Group, ...]:
        """Groups that have the number and enough subjects that it rests on, worst first."""
        metric = metric or self.metric
        known = {m for g in self for m in g.values}
        if metric not in known:
            raise InputError(f"no metric named {metric!r}{nearest(metric, known)}")
        sign = -1 if _is_lower_better(metric, self.result) else 1
        able = [
            g for g in self if g.people.get(metric, g.subjects) >= self.minimum and g.values.get(metric) is not None
        ]
        return tuple(sorted(able, key=lambda g: (sign * g.values[metric], g.name)))  # type: ignore[operator]

    @property
    def worst(self) -> Group:
        """The worst group by the metric.

        Raises:
            NotMeasurable: no group has enough subjects.
        """
        found = self.rank_groups()
        if not found:
            sizes = ", ".join(f"{g.name}: {g.subjects}" for g in self)
            raise NotMeasurable(
                f"no group has {self.minimum} subjects, so none can be called the worst ({sizes}); lower minimum= to "
                "rank them all the same"
            )
        return found[0]

    @property
    def gap(self) -> float:
        """Difference between the worst and the best ranked group."""
        found = self.rank_groups()
        values = [float(g.values[self.metric]) for g in found]  # type: ignore[arg-type]
        return abs(values[0] - values[-1]) if values else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before comparing groups."""
        found = []
        if self.small_groups:
            found.append(
                f"groups with fewer than {self.minimum} subjects are not ranked: {', '.join(self.small_groups)}"
            )
        found += [f"group {g.name}: {g.why_not}" for g in self if g.why_not]
        return tuple(found)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        ranked = self.rank_groups()
        rows = []
        for g in self:
            known = {"name": g.name, "samples": g.samples, "subjects": g.subjects, **g.values}
            rows.append(
                {**known, "interval": interval_or_none(lambda g=g: g.interval(self.metric)) if g.values else None}
            )
        return {
            "metric": self.metric,
            "minimum": self.minimum,
            "threshold": self.threshold,
            "far": self.far,
            "groups": rows,
            "worst": ranked[0].name if ranked else None,
            "gap": self.gap,
            "warnings": list(self.warnings),
        }


@explain_arguments
def groups(
    result: Verification | Retrieval | Identification | Probe,
    attribute: Any,
    *,
    metric: str | None = None,
    far: float = 1e-2,
    threshold: float | None = None,
    minimum: int = MINIMUM,
    gallery_attribute: Any = None,
) -> Groups:
    """Slice a result by an attribute.

    Args:
        result: of verification, retrieval, identification or probe.
        attribute: one integer or text for each row that was judged (embeddings, queries, probes, test samples), or a
            mapping of group names to masks over them, which may overlap.
        metric: what to rank groups by; by default ``"eer"``, ``"recall@1"``, ``"rank@1"`` or ``"linear"``.
        far: verification: the false-accept rate that the global threshold is set for, over all pairs.
        threshold: verification: a threshold that was set elsewhere, in place of ``far``.
        minimum: subjects that a group needs to be called the worst: those that the metric rests on (see above).
        gallery_attribute: verification against a gallery: the attribute of the gallery's rows.

    Example:
        >>> import numpy as np
        >>> from mettle.evaluate import verification
        >>> x = np.repeat(np.eye(4), 3, axis=0) + 0.01 * np.arange(48).reshape(12, 4)
        >>> g = groups(verification(x, np.repeat([0, 1, 2, 3], 3)), ["a"] * 6 + ["b"] * 6, far=0.1, minimum=2)
        >>> g.worst.values["eer"], g["a"].subjects
        (0.0, 2)
    """
    check_int(minimum, "minimum", 0)
    if isinstance(result, Verification):
        return _group_pairs(result, attribute, gallery_attribute, metric or "eer", far, threshold, minimum)
    values, positions, subjects, count = _item_values(result)
    masks = _group_masks(attribute, count, "attribute")
    chosen = metric or next(iter(values))
    if chosen not in values:
        raise InputError(f"no metric named {chosen!r}{nearest(chosen, values)}")
    found = {}
    for name, mask in masks.items():
        inside = mask[positions]
        means = {m: float(v[inside].mean()) if inside.any() else None for m, v in values.items()}
        why = "" if inside.any() else "none of its samples was judged"
        items = {m: v[inside] for m, v in values.items()}
        people = len(np.unique(subjects[inside]))
        found[name] = Group(
            name, int(mask.sum()), people, means, None, why, items=items, item_subjects=subjects[inside]
        )
    return Groups(found, chosen, minimum, result=_result_of(result))


def _item_values(
    result: Retrieval | Identification | Probe,
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, int]:
    """Values by item, which rows they belong to, what is independent in them, and how many rows there are."""
    if isinstance(result, Retrieval):
        first = dict(sorted(result.per_query.items(), key=lambda item: not item[0].startswith("recall@")))
        return first, result.queries, result.subjects, len(result.queries) + result.excluded
    if isinstance(result, Identification):
        values = {name: _per_item(result, name) for name in result.names()}
        return values, result.mated, result.subjects[result.mated], len(result.subjects)
    if isinstance(result, Probe):
        n = len(result.linear.labels)
        values = {m.key: m.per_item(result, None) for m in metrics_of("probe")}
        return values, np.arange(n), np.arange(n), n  # a closed set: classes are given, its samples are drawn
    raise InputError(
        f"groups slices a result of verification, retrieval, identification or probe: got {type(result).__name__}"
    )


def _per_item(result: Identification, name: str) -> np.ndarray:
    metric, at = parse_metric(name, "identification")
    assert isinstance(metric, ItemMetric)
    return metric.per_item(result, at)


def _result_of(result: Any) -> str:
    """The kind of a result, as metrics know it."""
    kinds = {Verification: "verification", Retrieval: "retrieval", Identification: "identification", Probe: "probe"}
    return next(name for kind, name in kinds.items() if isinstance(result, kind))


def _is_lower_better(metric: str, result: str) -> bool:
    """Of a metric by the name that groups have for it, where FMR and FNMR are those at the global threshold."""
    found = next((m for m in _list_pair_metrics() if m.base == metric), None) if result == "verification" else None
    if found is not None:
        return found.lower_is_better
    other = find_metric(result, metric)
    return other is not None and other[0].lower_is_better


def _list_pair_metrics() -> list[PairMetric]:
    """The metrics of pairs that a group is told by: all that need no rate, and error rates at the global threshold."""
    return [m for m in metrics_of("verification", PairMetric) if m.takes in ("", "threshold")]


def _group_masks(attribute: Any, n: int, name: str) -> dict[str, np.ndarray]:
    if isinstance(attribute, Mapping):
        masks = {str(k): np.asarray(v) for k, v in attribute.items()}
        for key, mask in masks.items():
            if mask.shape != (n,) or mask.dtype != bool:
                raise InputError(f"{name} {key!r} must be a mask of {n} truth values: got {mask.shape}, {mask.dtype}")
        if not masks:
            raise InputError(f"{name} names no group")
        return masks
    values = names(attribute, name, n)
    return {str(v): values == v for v in np.unique(values)}


def _group_pairs(
    v: Verification,
    attribute: Any,
    other: Any,
    metric: str,
    far: float,
    threshold: float | None,
    minimum: int,
) -> Groups:
    if v.source is None:
        raise InputError("groups needs the embeddings: slice a result of verification(), not of from_scores()")
    names = [m.base for m in _list_pair_metrics()]
    if metric not in names:
        raise InputError(f"no metric named {metric!r}{nearest(metric, names)}")
    probe, gallery = v.source.probe, v.source.gallery
    masks = _group_masks(attribute, len(probe), "attribute")
    if gallery is not None and other is None:
        raise InputError("gallery_attribute is needed: the verification compared with a gallery")
    shelf = None if gallery is None else _group_masks(other, len(gallery), "gallery_attribute")
    at = v.threshold(far) if threshold is None else check_thresholds(threshold, "threshold")[0]
    found = {}
    for name, mask in masks.items():
        among = None if shelf is None else shelf.get(name, np.zeros(len(gallery or ()), bool))
        found[name] = _measure_group(v, name, mask, among, at, metric, minimum)
    return Groups(found, metric, minimum, at, far if threshold is None else None)


def _measure_group(
    v: Verification, name: str, mask: np.ndarray, among: np.ndarray | None, threshold: float, metric: str, minimum: int
) -> Group:
    assert v.source is not None
    people, rows = len(np.unique(v.source.probe.labels[mask])), int(mask.sum())
    missing: dict[str, float | None] = dict.fromkeys(m.base for m in _list_pair_metrics())
    try:
        whole = mask.all() and (among is None or among.all())  # one group of all: nothing to count again
        own = v if whole else restrict_to(v, mask, among)
        own.refine_at((), (threshold,))
        values: dict[str, float | None] = {
            m.base: own.value((m.base, threshold) if m.takes else m.key) for m in _list_pair_metrics()
        }
    except MettleError as e:
        return Group(name, rows, people, missing, None, str(e))
    genuine, impostor = count_paired_subjects(own)
    counts = {"genuine": genuine, "impostor": impostor, "fewer": min(genuine, impostor)}
    rests = {m.base: counts[m.rests_on] for m in _list_pair_metrics()}
    on = next(m.rests_on for m in _list_pair_metrics() if m.base == metric)
    kind = "impostor" if on == "impostor" or rests[metric] < genuine else "genuine"
    few = f"{metric} rests on the {rests[metric]} of its {people} subjects that have {kind} pairs"
    why = few if rests[metric] < minimum <= people else ""
    return Group(name, rows, rests[metric], values, own, why, rests, threshold=threshold)


def count_paired_subjects(v: Verification) -> tuple[int, int]:
    """How many subjects have genuine pairs, and how many have impostor pairs: counted by rows, nothing is scored."""
    assert v.source is not None
    probe, gallery = v.source.probe, v.source.gallery
    other = probe if gallery is None else gallery
    if v.trials == "listed":
        i, j, target = check_trials(v.source.arguments["trials"], probe, gallery)
        both = np.append(probe.labels[i[~target]], other.labels[j[~target]])
        return len(np.unique(probe.labels[i[target]])), len(np.unique(both))
    genuine, impostor = _count_partners(probe, other, v.trials)
    strangers = [probe.labels[impostor > 0]]
    if gallery is not None:
        strangers.append(other.labels[_count_partners(other, probe, v.trials)[1] > 0])
    return len(np.unique(probe.labels[genuine > 0])), len(np.unique(np.concatenate(strangers)))


def _count_partners(rows: EmbeddingSet, others: EmbeddingSet, trials: str) -> tuple[np.ndarray, np.ndarray]:
    """With how many of the others each row makes a genuine pair, and an impostor pair; one sample makes none."""
    label = joint_codes(rows.labels, others.labels)
    every, alike = np.full(len(rows), len(others)), _count_equal(*label)
    same = np.zeros(len(rows), np.int64)  # pairs of one sample are pairs of one label
    sample = None
    if rows is others:
        sample = [np.arange(len(rows))] * 2 if rows.ids is None else joint_codes(rows.ids, rows.ids)
    elif rows.ids is not None and others.ids is not None:
        sample = joint_codes(rows.ids, others.ids)
    if sample is not None:
        same = _count_equal(*sample)
    if trials == "all":
        return alike - same, every - alike
    assert rows.domains is not None
    assert others.domains is not None
    domain = joint_codes(rows.domains, others.domains)
    near, both = _count_equal(*domain), _count_equal(*_joint_codes(label, domain))
    self_near = same if sample is None else _count_equal(*_joint_codes(sample, domain))
    if trials == "within":
        return both - self_near, near - both
    return alike - both - (same - self_near), every - near - (alike - both)


def _count_equal(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """How many of ``two`` equal each of ``one``."""
    ordered = np.sort(two)
    return np.searchsorted(ordered, one, side="right") - np.searchsorted(ordered, one, side="left")


def _joint_codes(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Numbers for two columns of both sides that are equal where both columns are."""
    size = 1 + max(int(side.max()) for side in b)
    return [first.astype(np.int64) * size + second for first, second in zip(a, b, strict=True)]


def restrict_to(v: Verification, mask: np.ndarray, among: np.ndarray | None = None) -> Verification:
    """The same verification among some of its rows."""
    source = v.source
    assert source is not None
    rows = _take_rows(source.probe, mask)
    gallery = None if source.gallery is None or among is None else _take_rows(source.gallery, among)
    arguments = dict(source.arguments)
    if not (arguments["trials"] is None or isinstance(arguments["trials"], str)):
        arguments["trials"] = _restrict_trials(arguments["trials"], source.probe, source.gallery, mask, among)
    shelf = None if gallery is None else (gallery.given, gallery.given_labels, gallery.domains, gallery.ids)
    return verification(rows.given, rows.given_labels, domains=rows.domains, ids=rows.ids, gallery=shelf, **arguments)


def _restrict_trials(
    trials: Any, probe: EmbeddingSet, gallery: EmbeddingSet | None, mask: np.ndarray, among: np.ndarray | None
) -> np.ndarray:
    """The listed trials between rows of a group, renumbered where they name rows."""
    t = np.asarray(trials)
    other, inside = (probe, mask) if gallery is None or among is None else (gallery, among)
    if probe.ids is not None and other.ids is not None:
        return t[np.isin(t[:, 0], probe.ids[mask]) & np.isin(t[:, 1], other.ids[inside])]
    t = t[mask[t[:, 0]] & inside[t[:, 1]]]
    new = np.cumsum(mask) - 1, np.cumsum(inside) - 1
    return np.stack([new[0][t[:, 0]], new[1][t[:, 1]], t[:, 2]], axis=1)


def _take_rows(rows: EmbeddingSet, mask: np.ndarray) -> EmbeddingSet:
    if not mask.any():
        raise NotMeasurable("the group has no samples on one side")
    return rows.take(mask)


@explain_arguments
def quantile_bins(values: Any, count: int = 4, what: str = "") -> np.ndarray:
    """Cut numbers into bands of about equal size, as an attribute: ``"1 of 4"`` holds the lowest."""
    v = to_numpy(values, "values")
    if v.ndim != 1 or v.dtype.kind not in "fiub" or not len(v) or not np.isfinite(v).all():
        raise InputError(
            f"bands cuts a vector of finite numbers: got shape {v.shape}, dtype {v.dtype}, or NaN or infinity in it"
        )
    v = v.astype(np.float64)
    check_int(count, "count", 2)
    edges = np.unique(np.quantile(v, np.linspace(0, 1, count + 1)[1:-1]))
    at = np.searchsorted(edges, v, side="right")
    return np.asarray([f"{what}{' ' if what else ''}{k + 1} of {len(edges) + 1}" for k in at])


@explain_arguments
def class_size(labels: Any, edges: Wholes = (3, 6, 11, 51)) -> np.ndarray:
    """How many samples each sample's class has, as an attribute: ``"3 to 5"``, ``"51 or more"``."""
    y = to_numpy(labels, "labels")
    if y.ndim != 1:
        raise InputError(f"labels must be a vector, one label per sample: got shape {y.shape}")
    y = as_names(y, "labels")
    size = np.unique(y, return_inverse=True, return_counts=True)
    n = size[2][size[1].reshape(-1)]
    cuts = check_ints(edges, "edges")
    words = [f"fewer than {cuts[0]}"]
    words += [f"{a} to {b - 1}" for a, b in pairwise(cuts)]
    words.append(f"{cuts[-1]} or more")
    return np.asarray(words)[np.searchsorted(cuts, n, side="right")]


def resampled_worst(values: np.ndarray, subjects: np.ndarray, group: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The lowest group mean of each replicate, for a paired comparison of minima (see ``compare``)."""
    found = []
    for g in np.unique(group):
        inside = group == g
        totals = np.bincount(subjects[inside], weights=values[inside], minlength=weights.shape[1])
        counts = weighted_sums(weights, np.bincount(subjects[inside], minlength=weights.shape[1]))
        found.append(np.where(counts > 0, weighted_sums(weights, totals) / np.maximum(counts, 1), np.inf))
    return np.min(found, axis=0)


@dataclass(frozen=True, eq=False)
class DomainMatrix:
    """Verification of every enrol domain against every probe domain.

    Attributes:
        domains: names, in the order of rows (enrol) and columns (probe).
        cells: by (enrol, probe); None where a cell lacks genuine or impostor pairs.
        why_not: why a cell is None.
    """

    domains: tuple[str, ...]
    cells: Mapping[tuple[str, str], Verification | None]
    why_not: Mapping[tuple[str, str], str]

    def __repr__(self) -> str:
        known = {key: v.eer for key, v in self.cells.items() if v is not None}
        worst = max(known, key=lambda key: known[key], default=None)
        said = "" if worst is None else f", highest eer {known[worst]:.4g} from {worst[0]!r} to {worst[1]!r}"
        return f"DomainMatrix(domains={len(self.domains)}, measured={len(known)} of {len(self.cells)}{said})"

    def __getitem__(self, key: tuple[Any, Any]) -> Verification | None:
        return self.cells[str(key[0]), str(key[1])]

    def values(self, metric: str = "eer") -> list[list[float | None]]:
        """One number per cell, rows are enrol domains."""
        found = []
        for enrol in self.domains:
            row = [self.cells[enrol, probe] for probe in self.domains]
            found.append([None if v is None else v.value(metric) for v in row])
        return found

    def summary(self, metric: str = "eer") -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        why = {f"{a} to {b}": text for (a, b), text in self.why_not.items()}
        return {"metric": metric, "domains": list(self.domains), "values": self.values(metric), "not measurable": why}


@explain_arguments
def domain_matrix(embeddings: Any, labels: Any, domains: Any, *, ids: Any = None, **options: Any) -> DomainMatrix:
    """Compare every domain with every domain: the diagonal within, all else across.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        domains: (n,) integers or text.
        ids: (n,) integer sample ids.
        options: of :func:`mettle.evaluate.verification`, such as ``mode``.

    Example:
        >>> import numpy as np
        >>> x = np.repeat(np.eye(3), 4, axis=0)
        >>> m = domain_matrix(x, np.repeat([0, 1, 2], 4), np.tile(["left", "left", "right", "right"], 3))
        >>> m.values("eer")
        [[0.0, 0.0], [0.0, 0.0]]
    """
    rows = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    if rows.domains is None:
        raise InputError("domain_matrix compares domains: pass one for each row")
    names = np.unique(rows.domains)
    if rows.ids is None:  # rows of one table are samples of their own, whatever their numbers
        rows = replace(rows, ids=np.arange(len(rows)))
    cells: dict[tuple[str, str], Verification | None] = {}
    why: dict[tuple[str, str], str] = {}
    for enrol in names:
        for probe in names:
            key = str(enrol), str(probe)
            try:
                cells[key] = _measure_cell(rows, rows.domains == enrol, rows.domains == probe, enrol == probe, options)
            except UnknownArgument:  # of the options: no cell could be measured
                raise
            except MettleError as e:
                cells[key], why[key] = None, str(e)
    return DomainMatrix(tuple(str(n) for n in names), MappingProxyType(cells), MappingProxyType(why))


def _measure_cell(rows: Any, enrol: np.ndarray, probe: np.ndarray, same: bool, options: dict[str, Any]) -> Verification:
    def side_columns(mask: np.ndarray) -> tuple[Any, ...]:
        some = rows.take(mask)
        return some.given, some.given_labels, None, some.ids

    values, y, _, known = side_columns(probe)
    return verification(values, y, ids=known, gallery=None if same else side_columns(enrol), **options)
