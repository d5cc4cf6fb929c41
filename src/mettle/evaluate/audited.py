"""What an audit found: one frozen result with its warnings, and all of it as plain numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mettle.evaluate.calibrate import Carried
from mettle.evaluate.clustering import Clustering
from mettle.evaluate.copies import Copies
from mettle.evaluate.geometry import Geometry
from mettle.evaluate.groups import Groups, paired
from mettle.evaluate.identification import Identification
from mettle.evaluate.intervals import LEAST
from mettle.evaluate.probe import Probe
from mettle.evaluate.retrieval import Retrieval
from mettle.evaluate.suspects import Confused, HardPair, Suspects, Twins
from mettle.evaluate.table import Embedded
from mettle.evaluate.trials import Matrix
from mettle.evaluate.verification import Verification

KEPT = 1000  # suspects in the summary, at most
FIRST = 50  # and that many whatever the cut, if they fit another label better
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
    ways: Mapping[str, Way]
    domains: Matrix | None
    groups: Mapping[str, Groups]
    slices: Mapping[str, Groups]
    recalls: Mapping[str, Groups]
    carried: tuple[Carried, ...]
    identification: Identification | None
    clustering: Clustering | None
    probe: Probe | None
    label_errors: Suspects | None
    same_subject: tuple[Twins, ...]
    hardest: Mapping[str, tuple[HardPair, ...]]
    confusion: tuple[Confused, ...]
    geometry: Geometry | None
    sample: np.ndarray
    copies: Copies
    missing: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    def __repr__(self) -> str:
        v = self.headline.verification
        return (
            f"Audit(eer={v.eer:.4g}, auc={v.auc:.6g}, trials={v.trials!r}, samples={len(self.table)}, "
            f"identities={len(np.unique(self.table.label.codes))}, missing={sorted(self.missing)})"
        )

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
        v = self.ways["all"].verification
        found += [f"{text}." for text in v.warnings if text not in v.notes]  # copies are told below, by name
        found += self._copied()
        if self.table.split is not None and (self.table.split == 0).any():
            found.append(
                "The file holds a training split: numbers on people who were trained on flatter. Audit the others "
                "alone with --where split=test."
            )
        people, _ = paired(v)  # who has one sample only makes impostor pairs, and no miss
        who = f"{people} identities" + ("" if people == v.subjects else f" with two samples, of {v.subjects:,} in all")
        if people < LEAST:
            found.append(
                f"Only {who}: too few for any interval, which needs {LEAST}; the numbers may be far from "
                "those of other people or things."
            )
        elif people < 30:
            found.append(f"Only {who}: intervals are rough, and probably too short.")
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
            "probe": None if self.probe is None else self._probe(self.probe),
            "label_errors": {
                "better_elsewhere": None if suspects is None else suspects.count,
                "estimate": None if suspects is None else {**vars(suspects.noise), "said": str(suspects.noise)},
                "ranked": [
                    {
                        **self._named(int(suspects.order[k])),
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
                    {"score": p.score, "first": self._named(p.first), "second": self._named(p.second)} for p in pairs
                ]
                for kind, pairs in self.hardest.items()
            },
            "copies": {
                "rows": self.copies.rows,
                "vectors": self.copies.vectors,
                "contradictions": self.copies.contradictions,
                "examples": [[self._named(at) for at in group] for group in self.copies.examples],
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
            "geometry": None if self.geometry is None else self._geometry(self.geometry),
            "sampled": len(self.sample),
            "warnings": list(self.warnings),
            "limits": list(self.limits),
            "missing": dict(self.missing),
        }
        return _plain(found)

    def _copied(self) -> list[str]:
        """What a reader should know of copies, the first of them by name."""
        c = self.copies
        if not c.rows:
            return []
        two = " and ".join(self.table.called(at) for at in c.examples[0][:2])
        text = (
            f"{c.rows:,} of {len(self.table):,} rows are exact copies of another row ({c.vectors:,} vectors occur more "
            f"than once, first {two}): copies find each other, so errors look rarer than they are. Leave one of each, "
            "or give copies one id."
        )
        if c.contradictions:
            text += f" {c.contradictions:,} of these vectors carry several labels."
        return [text]

    def _named(self, at: int) -> dict[str, Any]:
        """A row as people know it."""
        t = self.table
        found: dict[str, Any] = {"row": at, "id": str(t.names[at]), "label": t.label.names[t.label.codes[at]]}
        if t.domain is not None:
            found["domain"] = t.domain.names[t.domain.codes[at]]
        if t.images is not None:
            found["image"] = str(t.images[at])
        return found

    def _probe(self, p: Probe) -> dict[str, Any]:
        found = p.summary()
        for name in ("linear", "knn"):
            worst = found[name]["worst_class"]
            worst["label"] = self.table.label.names[worst["label"]]
        return {**found, "samples": len(p.linear.labels), "labels": len(np.unique(p.linear.labels))}

    def _geometry(self, g: Geometry) -> dict[str, Any]:
        order = np.argsort(-g.occurrence, kind="stable")[:10]
        hubs = [{**self._named(int(self.sample[g.rows[k]])), "times": float(g.occurrence[k])} for k in order]
        return {**g.summary(), "collapsed": g.collapsed, "hubs": hubs}


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
