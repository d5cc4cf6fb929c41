"""What a gallery answers: always with the score, the threshold, what that threshold stands for, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mettle.match.operating import Operating
from mettle.match.record import Size


@dataclass(frozen=True)
class Verified:
    """Is the probe who it claims to be?"""

    identity: str
    score: float
    threshold: float
    far: float | None  # false-accept rate of one comparison at the threshold; None: a threshold given by hand
    match: bool
    templates: int  # how many the score was fused from
    basis: str = ""  # where the threshold comes from
    false_accepts: float | None = None  # largest share of strangers that this person accepts; None: not known

    @property
    def verdict(self) -> str:
        """In words."""
        return f"match: {self.identity}" if self.match else "no match"


@dataclass(frozen=True)
class Candidate:
    """Somebody whom the probe may be."""

    identity: str
    score: float
    match: bool


@dataclass(frozen=True)
class Identified:
    """Who is the probe, if anybody enrolled?

    ``far`` is the rate of one comparison. A probe is compared with every template of everybody: of probes of people
    who are not enrolled, up to ``false_matches`` are given a name.
    """

    match: str | None  # the best candidate at or above the threshold; None: "no match"
    candidates: tuple[Candidate, ...]  # best first
    threshold: float
    far: float | None
    identities: int  # with whom the probe was compared
    basis: str = ""
    templates: int = 0  # of all of them
    false_matches: float | None = None  # largest share of unknown probes that are given a name; None: not known

    @property
    def verdict(self) -> str:
        """In words."""
        return "no match" if self.match is None else f"match: {self.match}"


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
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    bytes: int | None = None


def distinct(numbers: np.ndarray, scores: np.ndarray, names: Mapping[int, str | None]) -> list[tuple[str, float]]:
    """People in the order of their best row; rows of people deleted meanwhile have no name and are left out."""
    best: dict[str, float] = {}
    for number, score in zip(numbers.tolist(), scores.tolist(), strict=True):
        name = names.get(number) if number >= 0 else None
        if name is not None and name not in best:
            best[name] = min(1.0, max(-1.0, score))
    return list(best.items())


def identified(best: list[tuple[str, float]], point: Operating, size: Size, bound: float | None) -> Identified:
    """The best people as an answer at an operating point; ``bound``: how many unknown probes find somebody."""
    candidates = tuple(Candidate(name, score, score >= point.threshold) for name, score in best)
    first = candidates[0].identity if candidates and candidates[0].match else None
    return Identified(
        first, candidates, point.threshold, point.far, size.identities, point.basis, size.templates, bound
    )
