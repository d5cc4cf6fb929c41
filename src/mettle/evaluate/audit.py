"""Audit: everything this room can say about embeddings with labels, from any model, in one frozen result.

    Embedded ─┬─ scenarios   all pairs; within and across domains where there are some: verification, retrieval
              ├─ domains     enrol domain x probe domain
              ├─ groups      each attribute: own error, error at the global threshold, the worst
              ├─ use         thresholds carried to other people, open-set identification, clustering
              └─ sample      slices by difficulty and class size, hardest pairs, confusion, geometry

What grows with the square of the rows and is not streamed runs on whole identities drawn at random, at most ``MOST``
rows; ``limits`` says so. What the data cannot support is named in ``missing`` with the reason, and is no number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mettle.errors import InputError, MettleError
from mettle.evaluate import plan
from mettle.evaluate.calibrate import Carried
from mettle.evaluate.clustering import Clustering, clustering
from mettle.evaluate.geometry import Geometry, geometry
from mettle.evaluate.groups import Groups, bands, class_size, groups
from mettle.evaluate.identification import Identification
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.suspects import Confused, HardPair, Suspects, Twins, confusion, difficulty, hardest
from mettle.evaluate.suspects import label_errors as find_label_errors
from mettle.evaluate.suspects import same_subject as find_same_subject
from mettle.evaluate.table import Embedded
from mettle.evaluate.trials import Matrix, domain_matrix
from mettle.evaluate.verification import Verification, verification

FARS = (1e-1, 1e-2, 1e-3)
KS = (1, 2, 4, 8)
MOST = 12_000  # rows of what is not streamed
PAIRED = 10_000_000  # rows x clusters of one k-means, and of all its seeds together
LISTED = 24  # domains in the matrix
KEPT = 1000  # suspects in the summary
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Way:
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
        label_errors: samples that may carry the wrong label.
        same_subject: labels that may be one subject.
        hardest: ``"genuine"`` and ``"impostor"`` pairs, by position.
        confusion: labels by how often their nearest neighbour is of another.
        geometry: hubness, alignment, uniformity, effective rank.
        sample: positions of the rows behind ``slices``, ``hardest``, ``confusion`` and ``geometry``.
        missing: by part, why it is None.
        limits: what was not measured on everything.
    """

    table: Embedded
    fars: tuple[float, ...]
    ways: Mapping[str, Way]
    domains: Matrix | None
    groups: Mapping[str, Groups]
    slices: Mapping[str, Groups]
    recalls: Mapping[str, Groups]
    carried: tuple[Carried, ...]
    identification: Identification | None
    clustering: Clustering | None
    label_errors: Suspects | None
    same_subject: tuple[Twins, ...]
    hardest: Mapping[str, tuple[HardPair, ...]]
    confusion: tuple[Confused, ...]
    geometry: Geometry | None
    sample: np.ndarray
    missing: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    @property
    def headline(self) -> Way:
        """The hardest way of pairing there is: across domains before all pairs."""
        return list(self.ways.values())[-1]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the numbers, most serious first."""
        found = []
        if self.geometry is not None and self.geometry.collapsed:
            found.append(f"{self.geometry.verdict[0].upper()}{self.geometry.verdict[1:]}.")
        found += [f"{text}." for text in self.ways["all"].verification.warnings]
        splits = [g for name, g in self.table.groups.items() if name.lower() in ("split", "subset", "fold")]
        if any("train" in {n.lower() for n in column.names} for column in splits):
            found.append(
                "The file holds a training split: numbers on people who were trained on flatter. Audit the others "
                "alone with --where split=test."
            )
        people = self.ways["all"].verification.subjects
        if people < 30:
            found.append(f"Only {people} identities: intervals are rough, and probably too short.")
        for name, way in self.ways.items():
            for far in self.fars:
                point = way.verification.operating_point(far)
                if point.status != "ok":
                    found.append(
                        f"{'All pairs' if name == 'all' else name}: TAR at FAR {far:g} is {point.status}: "
                        f"{point.impostors:,} impostor pairs allow {far * point.impostors:.3g} false accepts, "
                        "30 are wanted."
                    )
        if self.table.domain is None:
            found.append("No domains: nothing here says how the model does across devices, cameras or sessions.")
        return tuple(found)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers and names, ready for JSON; what does not exist is None."""
        return self._summary

    @cached_property
    def _summary(self) -> dict[str, Any]:
        t, name = self.table, self.table.label.names
        suspects = self.label_errors
        listed = [] if suspects is None else range(min(suspects.count, KEPT))
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
            "label_errors": {
                "better_elsewhere": None if suspects is None else suspects.count,
                "ranked": [
                    {
                        **self._named(int(suspects.order[k])),
                        "suggested": name[suspects.suggested[k]],
                        "suspicion": float(suspects.suspicion[k]),
                    }
                    for k in listed
                    if suspects is not None
                ],
            },
            "same_subject": [
                {"first": name[s.first], "second": name[s.second], "suspicion": s.suspicion} for s in self.same_subject
            ],
            "hardest": {
                kind: [
                    {"score": p.score, "first": self._named(p.first), "second": self._named(p.second)} for p in pairs
                ]
                for kind, pairs in self.hardest.items()
            },
            "confusion": [
                {
                    "label": name[c.label],
                    "error": c.error,
                    "most": None if c.most is None else name[c.most],
                    "share": c.share,
                }
                for c in self.confusion
            ],
            "geometry": None if self.geometry is None else self._geometry(self.geometry),
            "sampled": len(self.sample),
            "warnings": list(self.warnings),
            "limits": list(self.limits),
            "missing": dict(self.missing),
        }
        return _plain(found)

    def _named(self, at: int) -> dict[str, Any]:
        """A row as people know it."""
        t = self.table
        found: dict[str, Any] = {"row": at, "id": str(t.names[at]), "label": t.label.names[t.label.codes[at]]}
        if t.domain is not None:
            found["domain"] = t.domain.names[t.domain.codes[at]]
        if t.images is not None:
            found["image"] = str(t.images[at])
        return found

    def _geometry(self, g: Geometry) -> dict[str, Any]:
        order = np.argsort(-g.occurrence, kind="stable")[:10]
        hubs = [{**self._named(int(self.sample[g.rows[k]])), "times": float(g.occurrence[k])} for k in order]
        return {**g.summary(), "collapsed": g.collapsed, "hubs": hubs}


def audit(table: Embedded, *, fars: Sequence[float] = FARS, count: int = 24, most: int = MOST, seed: int = 0) -> Audit:
    """Judge embeddings in every way that their columns allow.

    Args:
        table: embeddings with labels; see :func:`mettle.evaluate.table.read_embeddings`.
        fars: false-accept rates.
        count: pairs and twins in each list.
        most: rows of what is not streamed.
        seed: of every draw.

    Raises:
        InputError: no genuine or no impostor pair, a rate outside (0, 1).

    Example:
        >>> import numpy as np
        >>> from mettle.data.samples import Column
        >>> y = np.repeat(np.arange(8), 4)
        >>> x = np.eye(8)[y] + 0.1 * np.random.default_rng(0).normal(size=(32, 8))
        >>> found = audit(Embedded(x, Column.of(y), np.arange(32), np.arange(32).astype(str)))
        >>> found.headline.verification.eer, found.missing["groups"]
        (0.0, 'the file has no column to slice by')
    """
    chosen = tuple(sorted({float(far) for far in fars}, reverse=True))
    if not chosen or not all(0 < far < 1 for far in chosen):
        raise InputError(f"far must be rates between 0 and 1, such as 0.001: got {', '.join(map(str, fars))}")
    x, y, ids = table.values, table.label.codes, table.ids
    domain = None if table.domain is None else table.domain.codes
    part = _Parts()
    ways = _ways(x, y, ids, domain, chosen, part)
    everything = ways["all"].verification
    at = _threshold(everything, chosen)
    single = np.unique(ids, return_index=True)[1]  # a protocol names every sample once
    cut = sampled(y, most, seed)
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
    sliced, recalled = _slices(x[cut], y[cut], ids[cut], at, part)
    return Audit(
        table,
        chosen,
        ways,
        _domains(x, y, ids, table, part),
        {
            key: found
            for key, column in attributes.items()
            if (found := part.attempt(key, lambda c=column: groups(everything, c.values().astype(str), **at)))
        },
        sliced,
        recalled,
        _carried(x[single], y[single], chosen, seed, part),
        part.attempt("identification", lambda: _identified(x[single], y[single], seed)),
        part.attempt("clustering", lambda: _clustered(x, y, seed, part)),
        part.attempt("label errors", lambda: find_label_errors(x, y)),
        tuple(part.attempt("same subject", lambda: find_same_subject(x, y, count)) or ()),
        {kind: _hardest(x, y, ids, cut, kind, count, part) for kind in ("genuine", "impostor")},
        tuple(part.attempt("confusion", lambda: confusion(x[cut], y[cut])) or ()),
        part.attempt("geometry", lambda: geometry(x[cut], y[cut], seed=seed)),
        cut,
        part.missing,
        tuple(part.limits),
    )


@dataclass(frozen=True)
class _Parts:
    """What could not be measured, and what was measured on some rows only, as it is found out."""

    missing: dict[str, str] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)

    def attempt(self, name: str, make: Callable[[], Any]) -> Any:
        """The part, or None with the reason kept."""
        try:
            return make()
        except MettleError as error:
            self.missing[name] = str(error)
            return None


def sampled(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
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


def _ways(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, domain: np.ndarray | None, fars: Sequence[float], part: _Parts
) -> dict[str, Way]:
    rows: dict[str, Any] = {"ids": ids, "domains": domain}
    ks = tuple(k for k in KS if k < len(y)) or (1,)

    def way(name: str, title: str, trials: str) -> Way:
        v = verification(x, y, trials=trials, **rows)
        v.look_at(fars)
        apart = trials == "across"
        near = None
        if trials != "within":  # the nearest of one's own domain is what "all" mostly finds anyway
            near = part.attempt(f"retrieval, {name}", lambda: retrieval(x, y, k=ks, exclude_same_domain=apart, **rows))
        return Way(title, v, near)

    found = {"all": way("all", "every pair", "all")}
    if domain is not None:
        for name, title, trials in (
            ("in-domain", "pairs of one domain", "within"),
            ("cross-domain", "pairs of two domains", "across"),
        ):
            one = part.attempt(name, lambda n=name, t=title, k=trials: way(n, t, k))
            if one is not None:
                found[name] = one
    return found


def _threshold(v: Verification, fars: Sequence[float]) -> dict[str, Any]:
    """The global threshold of groups: of the lowest rate that can be relied on, else where both errors are equal."""
    points = [v.operating_point(far) for far in fars]
    usable = [p for p in points if p.threshold is not None and math.isfinite(p.threshold)]
    good = [p for p in usable if p.status == "ok" and p.far <= 1e-2] or [p for p in usable if p.status == "ok"]
    if good:
        return {"far": max(p.far for p in good)}
    return {"far": usable[0].far} if usable else {"threshold": v.eer_bracket.above[0]}


def _domains(x: np.ndarray, y: np.ndarray, ids: np.ndarray, table: Embedded, part: _Parts) -> Matrix | None:
    if table.domain is None:
        part.missing["domains"] = "the file has no domain column with two domains"
        return None
    values, counts = np.unique(table.domain.codes, return_counts=True)
    keep = np.isin(table.domain.codes, values[np.argsort(-counts, kind="stable")][:LISTED])
    if len(values) > LISTED:
        part.limits.append(f"The matrix of domains shows the {LISTED} largest of {len(values)} domains.")
    text = table.domain.values().astype(str)[keep]
    return part.attempt("domains", lambda: domain_matrix(x[keep], y[keep], text, ids=ids[keep]))


def _slices(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, at: Mapping[str, Any], part: _Parts
) -> tuple[dict[str, Groups], dict[str, Groups]]:
    """The sampled rows by how hard they are and by how many samples their class has."""
    v = part.attempt("slices", lambda: verification(x, y, ids=ids))
    near = part.attempt("slices of retrieval", lambda: retrieval(x, y, k=(1,), ids=ids))
    if v is None or near is None:
        return {}, {}
    pairs: dict[str, Groups] = {}
    recalls: dict[str, Groups] = {}
    alone = np.isin(y, *_singles(y))
    hard = difficulty(x, y)
    hard[alone] = hard[~alone].max() if (~alone).any() else 0  # no relative: as hard as the hardest
    made = {"difficulty": lambda: bands(hard, 4), "class size": lambda: class_size(y)}
    for name, make in made.items():
        kind = make()
        one = part.attempt(name, lambda k=kind: (groups(v, k, **at), groups(near, k)))
        if one is not None:
            pairs[name], recalls[name] = one
    return pairs, recalls


def _singles(y: np.ndarray) -> tuple[np.ndarray]:
    values, counts = np.unique(y, return_counts=True)
    return (values[counts == 1],)


def _carried(x: np.ndarray, y: np.ndarray, fars: Sequence[float], seed: int, part: _Parts) -> tuple[Carried, ...]:
    """Thresholds set on half of the people and judged on the other half."""
    ids = np.arange(len(y))
    halves = part.attempt("thresholds", lambda: plan.class_disjoint(ids, y, test=0.5, calibration=0.5, seed=seed))
    if halves is None:
        return ()
    found = []
    for far in fars:
        one = part.attempt(f"threshold for FAR {far:g}", lambda f=far: halves.carry(x, y, ids, f))
        if one is not None:
            found.append(one)
    return tuple(found)


def _identified(x: np.ndarray, y: np.ndarray, seed: int) -> Identification:
    ids = np.arange(len(y))
    found = plan.known_unknown(ids, y, known=0.5, k=1, seed=seed).run(x, y, ids)
    assert isinstance(found, Identification)
    return found


def _clustered(x: np.ndarray, y: np.ndarray, seed: int, part: _Parts) -> Clustering:
    """k-means, on fewer identities and from fewer seeds where rows x clusters would take minutes."""
    rows = len(y)
    while True:
        at = sampled(y, rows, seed)
        cost = len(at) * len(np.unique(y[at]))
        if cost <= PAIRED or rows < 1000:
            break
        rows = min(rows - 1, int(rows * math.sqrt(PAIRED / cost)))
    seeds = int(np.clip(PAIRED // cost, 1, 5))
    if len(at) < len(y):
        part.limits.append(f"Clustering rests on {len(at):,} rows of {len(np.unique(y[at])):,} identities.")
    return clustering(x[at], y[at], seeds=seeds, seed=seed)


def _hardest(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, cut: np.ndarray, kind: Any, count: int, part: _Parts
) -> tuple[HardPair, ...]:
    """The hardest pairs of the sampled rows, by position in the file; two rows of one sample are no pair."""
    first = np.sort(np.unique(ids[cut], return_index=True)[1])
    at = cut[first]
    found = part.attempt(f"hardest {kind}", lambda: hardest(x[at], y[at], kind, count=count))
    return tuple(HardPair(int(at[p.first]), int(at[p.second]), p.score) for p in found or ())


def _plain(value: Any) -> Any:
    """Numbers that JSON knows: NumPy scalars as Python's, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
