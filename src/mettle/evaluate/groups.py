"""Groups: any metric by any attribute, and who is worst off.

A verification is counted again among the pairs whose two samples are both in the group; its error rates are also read
at one *global* threshold, as a deployed system would. Results that have one value per item (retrieval, identification,
probes) are averaged by group.

Groups with few subjects are listed, but a minimum over noisy estimates is biased low, so only groups with at least
``minimum`` subjects may be the worst. Who could make no error does not count: for EER, AUC and FNMR a group has as many
subjects as have genuine pairs in it (for EER and AUC impostor pairs, if those are fewer), for FMR as many as have
impostor pairs, and for a probe as many as it has test samples, which is what its interval resamples.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mettle.errors import InputError, MettleError, nearest
from mettle.evaluate.checks import NotMeasurable, Rows, as_names, codes, names, to_numpy, whole
from mettle.evaluate.group import Group, Groups
from mettle.evaluate.identification import Identification
from mettle.evaluate.listing import check_trials
from mettle.evaluate.probe import Probe
from mettle.evaluate.resamples import sums
from mettle.evaluate.retrieval import Retrieval
from mettle.evaluate.several import Wholes, thresholds, wholes
from mettle.evaluate.verification import Verification, verification
from mettle.unknown_names import explain_arguments

MINIMUM = 50
RATES = ("eer", "auc", "fmr", "fnmr")  # of a verification


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
        metric: what to rank groups by; by default ``"eer"``, ``"recall@1"``, ``"rank_1"`` or ``"linear"``.
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
    whole(minimum, "minimum", 0)
    if isinstance(result, Verification):
        return _pairs(result, attribute, gallery_attribute, metric or "eer", far, threshold, minimum)
    values, positions, subjects, count = _items(result)
    masks = _masks(attribute, count, "attribute")
    chosen = metric or next(iter(values))
    if chosen not in values:
        raise InputError(f"no metric named {chosen!r}{nearest(chosen, values)}")
    found = {}
    for name, mask in masks.items():
        inside = mask[positions]
        means = {m: float(v[inside].mean()) if inside.any() else None for m, v in values.items()}
        why = "" if inside.any() else "none of its samples was judged"
        found[name] = Group(name, int(mask.sum()), len(np.unique(subjects[inside])), means, None, why)
    return Groups(found, chosen, minimum)


def _items(
    result: Retrieval | Identification | Probe,
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, int]:
    """Values by item, which rows they belong to, what is independent in them, and how many rows there are."""
    if isinstance(result, Retrieval):
        first = dict(sorted(result.per_query.items(), key=lambda item: not item[0].startswith("recall@")))
        return first, result.queries, result.subjects, len(result.queries) + result.excluded
    if isinstance(result, Identification):
        return {"rank_1": result.found(1)}, result.mated, result.subjects[result.mated], len(result.subjects)
    if isinstance(result, Probe):
        n = len(result.linear.labels)
        values = {"linear": result.linear.correct, "knn": result.knn.correct}
        return values, np.arange(n), np.arange(n), n  # a closed set: classes are given, its samples are drawn
    raise InputError(
        f"groups slices a result of verification, retrieval, identification or probe: got {type(result).__name__}"
    )


def _masks(attribute: Any, n: int, name: str) -> dict[str, np.ndarray]:
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


def _pairs(
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
    if metric not in RATES:
        raise InputError(f"no metric named {metric!r}{nearest(metric, RATES)}")
    probe, gallery = v.source.probe, v.source.gallery
    masks = _masks(attribute, len(probe), "attribute")
    if gallery is not None and other is None:
        raise InputError("gallery_attribute is needed: the verification compared with a gallery")
    shelf = None if gallery is None else _masks(other, len(gallery), "gallery_attribute")
    at = v.threshold(far) if threshold is None else thresholds(threshold, "threshold")[0]
    found = {}
    for name, mask in masks.items():
        among = None if shelf is None else shelf.get(name, np.zeros(len(gallery or ()), bool))
        found[name] = _group(v, name, mask, among, at, metric, minimum)
    return Groups(found, metric, minimum, at, far if threshold is None else None)


def _group(
    v: Verification, name: str, mask: np.ndarray, among: np.ndarray | None, threshold: float, metric: str, minimum: int
) -> Group:
    assert v.source is not None
    people, rows = len(np.unique(v.source.probe.labels[mask])), int(mask.sum())
    missing: dict[str, float | None] = dict.fromkeys(RATES)
    try:
        whole = mask.all() and (among is None or among.all())  # one group of all: nothing to count again
        own = v if whole else again(v, mask, among)
        own.look_at((), (threshold,))
        fmr, fnmr = own.rates(threshold)
        values: dict[str, float | None] = {"eer": own.eer, "auc": own.auc, "fmr": fmr, "fnmr": fnmr}
    except MettleError as e:
        return Group(name, rows, people, missing, None, str(e))
    genuine, impostor = paired(own)
    fewer = min(genuine, impostor)
    rests = {"eer": fewer, "auc": fewer, "fmr": impostor, "fnmr": genuine}
    kind = "impostor" if metric == "fmr" or rests[metric] < genuine else "genuine"
    few = f"{metric} rests on the {rests[metric]} of its {people} subjects that have {kind} pairs"
    return Group(name, rows, rests[metric], values, own, few if rests[metric] < minimum <= people else "", rests)


def paired(v: Verification) -> tuple[int, int]:
    """How many subjects have genuine pairs, and how many have impostor pairs: counted by rows, nothing is scored."""
    assert v.source is not None
    probe, gallery = v.source.probe, v.source.gallery
    other = probe if gallery is None else gallery
    if v.trials == "listed":
        i, j, target = check_trials(v.source.arguments["trials"], probe, gallery)
        both = np.append(probe.labels[i[~target]], other.labels[j[~target]])
        return len(np.unique(probe.labels[i[target]])), len(np.unique(both))
    genuine, impostor = _partners(probe, other, v.trials)
    strangers = [probe.labels[impostor > 0]]
    if gallery is not None:
        strangers.append(other.labels[_partners(other, probe, v.trials)[1] > 0])
    return len(np.unique(probe.labels[genuine > 0])), len(np.unique(np.concatenate(strangers)))


def _partners(rows: Rows, others: Rows, trials: str) -> tuple[np.ndarray, np.ndarray]:
    """With how many of the others each row makes a genuine pair, and an impostor pair; one sample makes none."""
    label = codes(rows.labels, others.labels)
    every, alike = np.full(len(rows), len(others)), _equal(*label)
    same = np.zeros(len(rows), np.int64)  # pairs of one sample are pairs of one label
    sample = None
    if rows is others:
        sample = [np.arange(len(rows))] * 2 if rows.ids is None else codes(rows.ids, rows.ids)
    elif rows.ids is not None and others.ids is not None:
        sample = codes(rows.ids, others.ids)
    if sample is not None:
        same = _equal(*sample)
    if trials == "all":
        return alike - same, every - alike
    assert rows.domains is not None
    assert others.domains is not None
    domain = codes(rows.domains, others.domains)
    near, both = _equal(*domain), _equal(*_joint(label, domain))
    self_near = same if sample is None else _equal(*_joint(sample, domain))
    if trials == "within":
        return both - self_near, near - both
    return alike - both - (same - self_near), every - near - (alike - both)


def _equal(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """How many of ``two`` equal each of ``one``."""
    ordered = np.sort(two)
    return np.searchsorted(ordered, one, side="right") - np.searchsorted(ordered, one, side="left")


def _joint(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Numbers for two columns of both sides that are equal where both columns are."""
    size = 1 + max(int(side.max()) for side in b)
    return [first.astype(np.int64) * size + second for first, second in zip(a, b, strict=True)]


def again(v: Verification, mask: np.ndarray, among: np.ndarray | None = None) -> Verification:
    """The same verification among some of its rows."""
    source = v.source
    assert source is not None
    rows = _some(source.probe, mask)
    gallery = None if source.gallery is None or among is None else _some(source.gallery, among)
    arguments = dict(source.arguments)
    if not (arguments["trials"] is None or isinstance(arguments["trials"], str)):
        arguments["trials"] = _trials(arguments["trials"], source.probe, source.gallery, mask, among)
    shelf = None if gallery is None else (gallery.given, gallery.given_labels, gallery.domains, gallery.ids)
    return verification(rows.given, rows.given_labels, domains=rows.domains, ids=rows.ids, gallery=shelf, **arguments)


def _trials(trials: Any, probe: Rows, gallery: Rows | None, mask: np.ndarray, among: np.ndarray | None) -> np.ndarray:
    """The listed trials between rows of a group, renumbered where they name rows."""
    t = np.asarray(trials)
    other, inside = (probe, mask) if gallery is None or among is None else (gallery, among)
    if probe.ids is not None and other.ids is not None:
        return t[np.isin(t[:, 0], probe.ids[mask]) & np.isin(t[:, 1], other.ids[inside])]
    t = t[mask[t[:, 0]] & inside[t[:, 1]]]
    new = np.cumsum(mask) - 1, np.cumsum(inside) - 1
    return np.stack([new[0][t[:, 0]], new[1][t[:, 1]], t[:, 2]], axis=1)


def _some(rows: Rows, mask: np.ndarray) -> Rows:
    if not mask.any():
        raise NotMeasurable("the group has no samples on one side")
    return rows.take(mask)


@explain_arguments
def bands(values: Any, count: int = 4, what: str = "") -> np.ndarray:
    """Cut numbers into bands of about equal size, as an attribute: ``"1 of 4"`` holds the lowest."""
    v = to_numpy(values, "values")
    if v.ndim != 1 or v.dtype.kind not in "fiub" or not len(v) or not np.isfinite(v).all():
        raise InputError(
            f"bands cuts a vector of finite numbers: got shape {v.shape}, dtype {v.dtype}, or NaN or infinity in it"
        )
    v = v.astype(np.float64)
    whole(count, "count", 2)
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
    cuts = wholes(edges, "edges")
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
        counts = sums(weights, np.bincount(subjects[inside], minlength=weights.shape[1]))
        found.append(np.where(counts > 0, sums(weights, totals) / np.maximum(counts, 1), np.inf))
    return np.min(found, axis=0)
