"""What a gallery answers: always with the score, the threshold, what that threshold stands for, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.gallery.thresholds import DecisionThreshold

if TYPE_CHECKING:
    from mettle.gallery.storage.integrity import RowSum


@dataclass(frozen=True)
class Receipt:
    """An acknowledged change."""

    sequence: int
    numbers: tuple[int, ...]  # templates that were added (enrol) or removed (delete)
    repeated: bool = False  # this request was served before; nothing changed now
    skipped: int = 0  # templates that the person had already, and that were not added again


@dataclass(frozen=True, eq=False)
class Templates:
    """Some templates, row by row."""

    numbers: np.ndarray  # (n,) int64, rising
    identities: tuple[str, ...]
    vectors: np.ndarray  # (n, dim) float32, unit length
    checksums: np.ndarray  # (n,) int64, of the storage's rows


@dataclass(frozen=True, eq=False)
class Changes:
    """What happened after some sequence number: first the removals, then the additions, each template at most once."""

    sequence: int  # up to here
    removed: np.ndarray  # (m,) int64
    added: Templates
    removed_checksums: np.ndarray  # (m,) int64
    held: "RowSum"  # what the storage holds at ``sequence``: what an index that followed holds, too


@dataclass(frozen=True)
class Size:
    """How much is enrolled."""

    identities: int
    templates: int


@dataclass(frozen=True)
class VerifyResult:
    """Is the probe who it claims to be?"""

    identity: str
    score: float
    threshold: float | None  # None: none was measured and none was given; the verdict is "not calibrated"
    far: float | None  # false-accept rate at the threshold, of what ``per`` says; None: not known
    match: bool
    templates: int  # how many the score was fused from
    basis: str = ""  # where the threshold comes from
    false_accepts: float | None = None  # largest share of strangers that this person accepts; None: not known
    per: str | None = None  # what ``far`` counts: a "comparison" with one template, or a whole "person"

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict_text(self.identity if self.match else None, self.threshold)


@dataclass(frozen=True)
class Candidate:
    """Somebody whom the probe may be."""

    identity: str
    score: float
    match: bool


@dataclass(frozen=True)
class IdentifyResult:
    """Who is the probe, if anybody enrolled?

    ``far`` is the rate of one comparison with a template, or where the gallery was calibrated with a person: ``per``
    says which. A probe is compared with every template of everybody: of probes of people who are not enrolled, up to
    ``false_matches`` are given a name.
    """

    match: str | None  # the best candidate at or above the threshold; None: "no match", or "not calibrated"
    candidates: tuple[Candidate, ...]  # best first
    threshold: float | None  # None: none was measured and none was given; the verdict is "not calibrated"
    far: float | None
    identities: int  # with whom the probe was compared
    basis: str = ""
    templates: int = 0  # of all of them
    false_matches: float | None = None  # largest share of unknown probes that are given a name; None: not known
    per: str | None = None  # what ``far`` counts: a "comparison" with one template, or a whole "person"

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict_text(self.match, self.threshold)


@dataclass(frozen=True)
class Info:
    """A gallery at a glance."""

    where: str
    kind: str  # "sqlite" or "postgresql"
    identities: int
    templates: int
    dim: int
    model: str | None
    fusion: str
    sequence: int
    index: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Mapping[str, Any] = field(default_factory=dict)  # that answers are given at
    bytes: int | None = None
    calibration: Mapping[str, Any] | None = (
        None  # kept in the storage: on what it was measured, and whether it is stale
    )


def verdict_text(match: str | None, threshold: float | None) -> str:
    """An answer in words: "match: " and who, "no match", or "not calibrated" where there is no threshold to say so."""
    if threshold is None:
        return "not calibrated"
    return "no match" if match is None else f"match: {match}"


def verify_result(
    identity: str, score: float, point: DecisionThreshold, templates: int, bound: float | None
) -> VerifyResult:
    """A score as an answer at an operating point; ``bound``: how many strangers this person accepts."""
    return VerifyResult(
        identity=identity,
        score=score,
        threshold=point.threshold,
        far=point.far,
        match=point.accepts(score),
        templates=templates,
        basis=point.basis,
        false_accepts=bound,
        per=point.counts,
    )


def identify_result(
    best: list[tuple[str, float]], point: DecisionThreshold, size: Size, bound: float | None
) -> IdentifyResult:
    """The best people as an answer at an operating point; ``bound``: how many unknown probes find somebody."""
    candidates = tuple([Candidate(name, score, point.accepts(score)) for name, score in best])
    first = candidates[0].identity if candidates and candidates[0].match else None
    return IdentifyResult(
        match=first,
        candidates=candidates,
        threshold=point.threshold,
        far=point.far,
        identities=size.identities,
        basis=point.basis,
        templates=size.templates,
        false_matches=bound,
        per=point.counts,
    )
