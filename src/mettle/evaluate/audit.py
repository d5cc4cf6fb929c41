"""Audit: everything this room can say about embeddings with labels, from any model, in one frozen result.

    Embedded ─┬─ scenarios   all pairs; within and across domains where there are some: verification, retrieval
              ├─ domains     enrol domain x probe domain
              ├─ groups      each attribute: own error, error at the global threshold, the worst
              ├─ use         thresholds carried to other people, open-set identification, clustering, probes
              └─ sample      slices by difficulty and class size, hardest pairs, confusion, geometry

What grows with the square of the rows and is not streamed runs on whole identities drawn at random, at most ``MOST``
rows; ``limits`` says so. What the data cannot support is named in ``missing`` with the reason, and is no number.

What an audit found: one frozen result, and all of it as plain numbers. What a reader should know before trusting them
says :func:`mettle.report.caveats.rank_audit_caveats`.

What an audit says of embeddings in use: strangers at the door, clusters, simple classifiers.

What an audit leaves out: parts that cannot be measured, with the reason, and rows that would take too long.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from mettle.data.embeddings import Embedded
from mettle.errors import InputError, MettleError
from mettle.evaluate import protocol
from mettle.evaluate.calibration import TransferredThreshold, calibrate
from mettle.evaluate.clustering import Clustering, clustering
from mettle.evaluate.diagnostics import duplicates
from mettle.evaluate.diagnostics.duplicates import Duplicates
from mettle.evaluate.diagnostics.geometry import Geometry, geometry
from mettle.evaluate.diagnostics.hard_pairs import HardPair, hardest_pairs
from mettle.evaluate.diagnostics.label_errors import (
    ConfusedLabel,
    DuplicateIdentities,
    LabelErrors,
    confusion,
    sample_difficulty,
)
from mettle.evaluate.diagnostics.label_errors import label_errors as find_label_errors
from mettle.evaluate.diagnostics.label_errors import same_subject as find_same_subject
from mettle.evaluate.groups import DomainMatrix, Groups, class_size, domain_matrix, quantile_bins
from mettle.evaluate.groups import groups as slice_by
from mettle.evaluate.identification import Identification
from mettle.evaluate.inputs import Numbers, check_int, check_rates
from mettle.evaluate.linear_probe import Probe, probe
from mettle.evaluate.notebook import html_table
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.scoring.tile_threads import keep_to_one_core
from mettle.evaluate.verification import Verification, verification
from mettle.unknown_names import explain_arguments

FARS = (1e-1, 1e-2, 1e-3)
KS = (1, 2, 4, 8)
MOST = 12_000  # rows of what is not streamed
LISTED = 24  # domains in the matrix
KEPT = 1000  # suspects in the summary, at most
FIRST = 50  # and that many whatever the cut, if they fit another label better
FORMAT = 1
PAIRED = 10_000_000  # rows x clusters of one k-means, and of all its seeds together
FITTED = 200_000_000  # rows x labels x dimension of a linear probe


@dataclass(frozen=True, eq=False)
class PairingResult:
    """One way of pairing the rows: in words, and what was found."""

    title: str
    verification: Verification
    retrieval: Retrieval | None


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. Parts that the data cannot support are None, and ``missing`` says why.

    Attributes:
        table: what was audited.
        fars: false-accept rates that were asked for.
        ways: ``"all"``, and ``"in-domain"``, ``"cross-domain"`` where there are domains; the hardest is the last.
        domains: enrol domain x probe domain.
        groups: by attribute, the domain among them, at the global threshold over all pairs.
        slices: by ``"difficulty"`` and ``"class size"``, among the sampled rows.
        recalls: the same slices of retrieval.
        carried: for each rate, a threshold set on half of the people and judged on the other half.
        identification: half of the people enrolled with one sample, the others strangers.
        clustering: k-means against the labels.
        probe: classifiers fitted on the training rows and judged on the test rows, where both have the same labels.
        label_errors: samples that may carry the wrong label.
        same_subject: labels that may be one subject.
        hardest: ``"genuine"`` and ``"impostor"`` pairs, by position.
        confusion: labels by how often their nearest neighbour is of another.
        geometry: hubness, alignment, uniformity, effective rank.
        sample: positions of the rows behind ``slices``, ``hardest``, ``confusion`` and ``geometry``.
        copies: rows that equal a row of another sample, number for number.
        missing: by part, why it is None.
        limits: what was not measured on everything.
    """

    table: Embedded
    fars: tuple[float, ...]
    ways: Mapping[str, PairingResult]
    domains: DomainMatrix | None
    groups: Mapping[str, Groups]
    slices: Mapping[str, Groups]
    recalls: Mapping[str, Groups]
    carried: tuple[TransferredThreshold, ...]
    identification: Identification | None
    clustering: Clustering | None
    probe: Probe | None
    label_errors: LabelErrors | None
    same_subject: tuple[DuplicateIdentities, ...]
    hardest: Mapping[str, tuple[HardPair, ...]]
    confusion: tuple[ConfusedLabel, ...]
    geometry: Geometry | None
    sample: np.ndarray
    copies: Duplicates
    missing: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    def __repr__(self) -> str:
        v = self.headline.verification
        return (
            f"Audit(eer={v.eer:.4g}, auc={v.auc:.6g}, trials={v.trials!r}, samples={len(self.table)}, "
            f"identities={len(np.unique(self.table.label.codes))}, missing={sorted(self.missing)})"
        )

    def _repr_html_(self) -> str:
        ways = list(self.ways.values())
        pairs, near = [way.verification for way in ways], [way.retrieval for way in ways]
        rows: list[tuple[object, ...]] = [("EER", *(v.eer for v in pairs)), ("AUC", *(v.auc for v in pairs))]
        for far in self.fars:
            points = [v.operating_point(far) for v in pairs]
            rows.append((f"TAR at FAR {far:g}", *(p.tar if p.status == "ok" else p.status for p in points)))
        rows.append(("Recall@1", *(None if r is None else r.recall[1] for r in near)))
        rows.append(("MAP@R", *(None if r is None else r.map_at_r for r in near)))
        rows += [("genuine pairs", *(v.genuine for v in pairs)), ("impostor pairs", *(v.impostor for v in pairs))]
        known = [
            ("NMI", None if self.clustering is None else self.clustering.nmi),
            ("rank 1", None if self.identification is None else self.identification.rank_1),
            ("labels that may be wrong", None if self.label_errors is None else self.label_errors.noise.listed),
            ("rows that are copies", self.copies.rows),
        ]
        rest = [(name, value, *[""] * (len(ways) - 1)) for name, value in known]
        notes = [*self.ways["all"].verification.warnings, *self.limits]
        notes += [f"not measured: {name}: {why}" for name, why in self.missing.items()]
        who = f"{len(self.table):,} samples of {len(np.unique(self.table.label.codes)):,} identities"
        return html_table(f"Audit of {self.table.origin}, {who}", [*rows, *rest], notes, [way.title for way in ways])

    @property
    def headline(self) -> PairingResult:
        """The hardest way of pairing there is: across domains before all pairs."""
        return list(self.ways.values())[-1]

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers and names, ready for JSON; what does not exist is None."""
        return self._summary

    @cached_property
    def _summary(self) -> dict[str, Any]:
        t, name = self.table, self.table.label.names
        suspects = self.label_errors
        listed = [] if suspects is None else range(min(suspects.count, max(FIRST, 2 * suspects.noise.listed), KEPT))
        found = {
            "format": FORMAT,
            "file": t.origin,
            "columns": dict(t.columns),
            "samples": len(t),
            "identities": len(np.unique(t.label.codes)),
            "dimension": int(t.values.shape[1]),
            "dtype": str(t.values.dtype),
            "fars": list(self.fars),
            "scenarios": {
                key: {
                    "title": way.title,
                    "verification": way.verification.summary(self.fars),
                    "retrieval": None if way.retrieval is None else way.retrieval.summary(),
                }
                for key, way in self.ways.items()
            },
            "domains": None if self.domains is None else self.domains.summary(),
            "groups": {key: g.summary() for key, g in self.groups.items()},
            "slices": {
                key: {"verification": g.summary(), "retrieval": self.recalls[key].summary()}
                for key, g in self.slices.items()
            },
            "thresholds": [c.summary() for c in self.carried],
            "identification": None if self.identification is None else self.identification.summary(),
            "clustering": None if self.clustering is None else self.clustering.summary(),
            "probe": None if self.probe is None else self._summarize_probe(self.probe),
            "label_errors": {
                "better_elsewhere": None if suspects is None else suspects.count,
                "estimate": None if suspects is None else {**vars(suspects.noise), "said": str(suspects.noise)},
                "ranked": [
                    {
                        **self._describe_row(int(suspects.order[k])),
                        "suggested": name[suspects.suggested[k]],
                        "suspicion": float(suspects.suspicion[k]),
                        "above_cut": k < suspects.noise.listed,
                    }
                    for k in listed
                    if suspects is not None
                ],
            },
            "same_subject": [
                {"first": name[int(s.first)], "second": name[int(s.second)], "suspicion": s.suspicion}
                for s in self.same_subject
            ],
            "hardest": {
                kind: [
                    {"score": p.score, "first": self._describe_row(p.first), "second": self._describe_row(p.second)}
                    for p in pairs
                ]
                for kind, pairs in self.hardest.items()
            },
            "copies": {
                "rows": self.copies.rows,
                "vectors": self.copies.vectors,
                "contradictions": self.copies.contradictions,
                "examples": [[self._describe_row(at) for at in group] for group in self.copies.examples],
            },
            "confusion": [
                {
                    "label": name[int(c.label)],  # an audit is made of codes
                    "error": c.error,
                    "most": None if c.most is None else name[int(c.most)],
                    "share": c.share,
                }
                for c in self.confusion
            ],
            "geometry": None if self.geometry is None else self._summarize_geometry(self.geometry),
            "sampled": len(self.sample),
            "limits": list(self.limits),
            "missing": dict(self.missing),
        }
        return _as_json(found)

    def _describe_row(self, at: int) -> dict[str, Any]:
        """A row as people know it."""
        t = self.table
        found: dict[str, Any] = {"row": at, "id": str(t.names[at]), "label": t.label.names[t.label.codes[at]]}
        if t.domain is not None:
            found["domain"] = t.domain.names[t.domain.codes[at]]
        if t.images is not None:
            found["image"] = str(t.images[at])
        return found

    def _summarize_probe(self, p: Probe) -> dict[str, Any]:
        found = p.summary()
        for name in ("linear", "knn"):
            worst = found[name]["worst_class"]
            worst["label"] = self.table.label.names[worst["label"]]
        return {**found, "samples": len(p.linear.labels), "labels": len(np.unique(p.linear.labels))}

    def _summarize_geometry(self, g: Geometry) -> dict[str, Any]:
        order = np.argsort(-g.occurrence, kind="stable")[:10]
        hubs = [{**self._describe_row(int(self.sample[g.rows[k]])), "times": float(g.occurrence[k])} for k in order]
        return {**g.summary(), "collapsed": g.collapsed, "hubs": hubs}


@explain_arguments
def audit(
    table: Embedded | Any,
    labels: Any = None,
    *,
    domains: Any = None,
    groups: Mapping[str, Any] | None = None,
    ids: Any = None,
    fars: Numbers = FARS,
    count: int = 24,
    most: int = MOST,
    seed: int = 0,
    across_ranks: bool = False,
) -> Audit:
    """Judge embeddings in every way that their columns allow.

    Args:
        table: (n, d) array or tensor; or a whole table of :func:`mettle.evaluate.read_embeddings`, without the four
            arguments that follow.
        labels: (n,) integers or text: who or what each row is.
        domains: (n,) integers or text: device, session, camera.
        groups: other attributes to slice by, each (n,) integers or text, by name.
        ids: (n,) integers or text; rows of one id are one sample.
        fars: false-accept rates, or one.
        count: pairs and twins in each list.
        most: rows of what is not streamed.
        seed: of every draw.
        across_ranks: share the comparisons of all rows with each other with the other ranks of `torch.distributed`:
            every rank makes this call with the same table and has the whole audit.

    Raises:
        InputError: no genuine or no impostor pair, a rate outside (0, 1).

    Example:
        >>> import numpy as np
        >>> y = np.repeat(np.arange(8), 4)
        >>> x = np.eye(8)[y] + 0.1 * np.random.default_rng(0).normal(size=(32, 8))
        >>> found = audit(x, y)
        >>> found.headline.verification.eer, found.missing["groups"]
        (0.0, 'the file has no column to slice by')
    """
    chosen = _check_rates(fars)
    check_int(count, "count", 1)
    check_int(most, "most", 2)
    check_int(seed, "seed", 0)
    table = _as_table(table, labels, {"domains": domains, "groups": groups, "ids": ids})
    x, y, ids = table.values, table.label.codes, table.ids
    domain = None if table.domain is None else table.domain.codes
    part = Sections()
    ways = _measure_pairings(x, y, ids, domain, chosen, part, across_ranks)
    everything = ways["all"].verification
    entire = len(y) <= most and ways["all"].retrieval is not None
    at = _group_threshold(everything, chosen)
    single = np.unique(ids, return_index=True)[1]  # a protocol names every sample once
    cut = sample_identities(y, most, seed)
    if len(cut) < len(y):
        part.limits.append(
            f"Slices by difficulty and class size, hardest pairs, confusion and geometry rest on {len(cut):,} rows of "
            f"{len(np.unique(y[cut])):,} identities drawn at random (whole identities), of {len(y):,} rows."
        )
    attributes = dict(table.groups)
    if table.domain is not None:
        attributes = {table.columns.get("domain") or "domain": table.domain} | attributes
    if not attributes:
        part.missing["groups"] = "the file has no column to slice by"
    known = (everything, ways["all"].retrieval) if entire else (None, None)
    sliced, recalled = _slice_groups(x[cut], y[cut], ids[cut], at, part, *known)
    return Audit(
        table,
        chosen,
        ways,
        _domain_matrix(x, y, ids, table, part),
        {
            key: found
            for key, column in attributes.items()
            if (found := part.try_measure(key, lambda c=column: slice_by(everything, c.values().astype(str), **at)))
        },
        sliced,
        recalled,
        _transfer_thresholds(x[single], y[single], chosen, seed, part, across_ranks),
        part.try_measure("identification", lambda: measure_identification(x[single], y[single], seed)),
        part.try_measure("clustering", lambda: measure_clustering(x, y, seed, part)),
        part.try_measure("probe", lambda: fit_probes(table, seed, part)),
        part.try_measure("label errors", lambda: find_label_errors(x, y)),
        tuple(part.try_measure("same subject", lambda: find_same_subject(x, y, count)) or ()),
        {kind: _find_hardest(x, y, ids, cut, kind, count, part) for kind in ("genuine", "impostor")},
        tuple(part.try_measure("confusion", lambda: confusion(x[cut], y[cut])) or ()),
        part.try_measure("geometry", lambda: geometry(x[cut], y[cut], seed=seed)),
        cut,
        duplicates.find_duplicates(x, y, ids),
        part.missing,
        tuple(part.limits),
    )


def _check_rates(fars: Any) -> tuple[float, ...]:
    """False-accept rates, the largest first."""
    return tuple(sorted(set(check_rates(fars, below_one=True)), reverse=True))


def _as_table(given: Any, labels: Any, others: Mapping[str, Any]) -> Embedded:
    """A table, made of arrays if those came."""
    if isinstance(given, Embedded):
        extra = [name for name, value in (("labels", labels), *others.items()) if value is not None]
        if extra:
            raise InputError(f"{extra[0]} goes with arrays: got a table too, which holds its own columns")
        return given
    if isinstance(given, str | PathLike):
        raise InputError(f"audit takes arrays or a table: read the file first, audit(read_embeddings({str(given)!r}))")
    if labels is None:
        raise InputError("labels are missing: audit(embeddings, labels), one integer or text per row")
    return Embedded.of(given, labels, **others)


@dataclass(frozen=True)
class Sections:
    """What could not be measured, and what was measured on some rows only, as it is found out."""

    missing: dict[str, str] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)

    def try_measure(self, name: str, make: Callable[[], Any]) -> Any:
        """The part, or None with the reason kept."""
        try:
            return make()
        except MettleError as error:
            self.missing[name] = str(error)
            return None


def _measure_pairings(
    x: np.ndarray,
    y: np.ndarray,
    ids: np.ndarray,
    domain: np.ndarray | None,
    fars: Sequence[float],
    part: Sections,
    across_ranks: bool,
) -> dict[str, PairingResult]:
    rows: dict[str, Any] = {"ids": ids, "domains": domain, "across_ranks": across_ranks}
    ks = tuple(k for k in KS if k < len(y)) or (1,)

    def measure_pairing(name: str, title: str, trials: str) -> PairingResult:
        v = verification(x, y, trials=trials, **rows)
        v.refine_at(fars)
        apart = trials == "across"
        near = None
        if trials != "within":  # the nearest of one's own domain is what "all" mostly finds anyway
            near = part.try_measure(
                f"retrieval, {name}", lambda: retrieval(x, y, k=ks, exclude_same_domain=apart, **rows)
            )
        return PairingResult(title, v, near)

    found = {"all": measure_pairing("all", "every pair", "all")}
    if domain is not None:
        for name, title, trials in (
            ("in-domain", "pairs of one domain", "within"),
            ("cross-domain", "pairs of two domains", "across"),
        ):
            one = part.try_measure(name, lambda n=name, t=title, k=trials: measure_pairing(n, t, k))
            if one is not None:
                found[name] = one
    return found


def _group_threshold(v: Verification, fars: Sequence[float]) -> dict[str, Any]:
    """The global threshold of groups: of the lowest rate that can be relied on, else where both errors are equal."""
    usable = [p for p in (v.operating_point(far) for far in fars) if p.finite_threshold is not None]
    good = [p for p in usable if p.status == "ok" and p.far <= 1e-2] or [p for p in usable if p.status == "ok"]
    if good:
        return {"far": max(p.far for p in good)}
    return {"far": usable[0].far} if usable else {"threshold": v.eer_bracket.above[0]}


def _domain_matrix(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, table: Embedded, part: Sections
) -> DomainMatrix | None:
    if table.domain is None:
        part.missing["domains"] = "the file has no domain column with two domains"
        return None
    values, counts = np.unique(table.domain.codes, return_counts=True)
    keep = np.isin(table.domain.codes, values[np.argsort(-counts, kind="stable")][:LISTED])
    if len(values) > LISTED:
        part.limits.append(f"The matrix of domains shows the {LISTED} largest of {len(values)} domains.")
    text = table.domain.values().astype(str)[keep]
    return part.try_measure("domains", lambda: domain_matrix(x[keep], y[keep], text, ids=ids[keep]))


def _slice_groups(
    x: np.ndarray,
    y: np.ndarray,
    ids: np.ndarray,
    at: Mapping[str, Any],
    part: Sections,
    v: Verification | None,
    near: Retrieval | None,
) -> tuple[dict[str, Groups], dict[str, Groups]]:
    """The sampled rows by how hard they are and by how many samples their class has."""
    if v is None or near is None:
        v = part.try_measure("slices", lambda: verification(x, y, ids=ids))
        near = part.try_measure("slices of retrieval", lambda: retrieval(x, y, k=(1,), ids=ids))
    if v is None or near is None:
        return {}, {}
    pairs: dict[str, Groups] = {}
    recalls: dict[str, Groups] = {}
    alone = np.isin(y, *_single_samples(y))
    hard = sample_difficulty(x, y)
    hard[alone] = hard[~alone].max() if (~alone).any() else 0  # no relative: as hard as the hardest
    made = {"difficulty": lambda: quantile_bins(hard, 4), "class size": lambda: class_size(y)}
    for name, make in made.items():
        kind = make()
        one = part.try_measure(name, lambda k=kind: (slice_by(v, k, **at), slice_by(near, k)))
        if one is not None:
            pairs[name], recalls[name] = one
    return pairs, recalls


def _single_samples(y: np.ndarray) -> tuple[np.ndarray]:
    values, counts = np.unique(y, return_counts=True)
    return (values[counts == 1],)


def _transfer_thresholds(
    x: np.ndarray, y: np.ndarray, fars: Sequence[float], seed: int, part: Sections, across_ranks: bool
) -> tuple[TransferredThreshold, ...]:
    """Thresholds set on half of the people and judged on the other half."""
    ids = np.arange(len(y))
    halves = part.try_measure(
        "thresholds", lambda: protocol.class_disjoint(ids, y, test=0.5, calibration=0.5, seed=seed)
    )
    if halves is None:
        return ()
    sides = [np.isin(ids, side) for side in (halves.calibration, halves.probes)]
    pair = part.try_measure(
        "thresholds", lambda: [verification(x[side], y[side], across_ranks=across_ranks) for side in sides]
    )
    if pair is None:
        return ()
    pair[0].refine_at(fars)
    sets = {far: part.try_measure(f"threshold for FAR {far:g}", lambda f=far: calibrate(pair[0], f)) for far in fars}
    chosen = {far: one for far, one in sets.items() if one is not None}
    levels = [one.threshold for one in chosen.values()]
    pair[1].refine_at((), levels)
    part.try_measure("intervals of thresholds", lambda: pair[1].resample_at(levels) if levels else None)
    carried = [
        part.try_measure(f"threshold for FAR {far:g}", lambda o=one: o.transfer(pair[1])) for far, one in chosen.items()
    ]
    return tuple(one for one in carried if one is not None)


def _find_hardest(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, cut: np.ndarray, kind: Any, count: int, part: Sections
) -> tuple[HardPair, ...]:
    """The hardest pairs of the sampled rows, by position in the file; two rows of one sample are no pair."""
    first = np.sort(np.unique(ids[cut], return_index=True)[1])
    at = cut[first]
    found = part.try_measure(f"hardest {kind}", lambda: hardest_pairs(x[at], y[at], kind, count=count))
    return tuple(HardPair(int(at[p.first]), int(at[p.second]), p.score) for p in found or ())


def _as_json(value: Any) -> Any:
    """Numbers that JSON knows: NumPy scalars as Python's, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(k): _as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def measure_identification(x: np.ndarray, y: np.ndarray, seed: int) -> Identification:
    """Half of the people enrolled with one sample each, the others strangers."""
    ids = np.arange(len(y))
    found = protocol.known_unknown(ids, y, known=0.5, k=1, seed=seed).run(x, y, ids)
    assert isinstance(found, Identification)
    return found


def measure_clustering(x: np.ndarray, y: np.ndarray, seed: int, part: Sections) -> Clustering:
    """k-means, on fewer identities and from fewer seeds where rows x clusters would take minutes."""
    at = identities_within_budget(y, PAIRED, seed)
    seeds = int(np.clip(PAIRED // (len(at) * len(np.unique(y[at]))), 1, 5))
    if len(at) < len(y):
        part.limits.append(f"Clustering rests on {len(at):,} rows of {len(np.unique(y[at])):,} identities.")
    # Threads of k-means wait for each other at full power after every small step; on one core nothing waits.
    with keep_to_one_core(len(at) * len(np.unique(y[at]))):
        return clustering(x[at], y[at], seeds=seeds, seed=seed)


def fit_probes(table: Embedded, seed: int, part: Sections) -> Probe:
    """A linear and a kNN probe, fitted on the rows of the training split and judged on those of the test split."""
    if table.split is None or not {0, 2} <= set(np.unique(table.split).tolist()):
        raise InputError(
            "the file has no column split with train and test: a probe is fitted on some samples of every label and "
            "judged on others, and only you know which were trained on"
        )
    y = table.label.codes
    train, test = table.split == 0, table.split == 2
    both = np.intersect1d(y[train], y[test])
    if len(both) < 2:
        raise InputError(
            f"{len(both)} labels are in train and in test: a probe is a closed-set task, and people never seen in "
            "training are judged by verification"
        )
    keep = np.isin(y, both) & (train | test)
    at = np.flatnonzero(keep)[identities_within_budget(y[keep], FITTED // table.values.shape[1], seed)]
    if not keep[test].all() or len(at) < keep.sum():
        rows, of = np.count_nonzero(test[at]), np.count_nonzero(test)
        part.limits.append(f"Probes are judged on {rows:,} of {of:,} test rows, of {len(np.unique(y[at])):,} labels.")
    one, two = (at[table.split[at] == code] for code in (0, 2))
    return probe(*((table.values[at], y[at], None, table.ids[at]) for at in (one, two)))


def sample_identities(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Positions of whole identities drawn at random, at most ``most`` of them; rows at random if two do not fit."""
    if len(labels) <= most:
        return np.arange(len(labels))
    drawn = np.random.default_rng(seed)
    values, counts = np.unique(labels, return_counts=True)
    order = drawn.permutation(len(values))
    fits = order[np.cumsum(counts[order]) <= most]
    if len(fits) < 2:
        return np.sort(drawn.permutation(len(labels))[:most])
    return np.flatnonzero(np.isin(labels, values[fits]))


def identities_within_budget(y: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """Positions of whole identities, so few that rows x identities stay within a budget."""
    rows = len(y)
    while True:
        at = sample_identities(y, rows, seed)
        cost = len(at) * len(np.unique(y[at]))
        if cost <= budget or rows < 1000:
            return at
        rows = min(rows - 1, int(rows * math.sqrt(budget / cost)))
