"""What a gallery answers: always with the score, the threshold, what that threshold stands for, and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verified:
    """Is the probe who it claims to be?"""

    identity: str
    score: float
    threshold: float
    far: float | None  # false-accept rate that the threshold stands for; None: a threshold given by hand
    match: bool
    templates: int  # how many the score was fused from
    basis: str = ""  # where the threshold comes from

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

    ``far`` is a rate per comparison: of unknown probes, about ``false_matches`` find somebody among all enrolled.
    """

    match: str | None  # the best candidate at or above the threshold; None: "no match"
    candidates: tuple[Candidate, ...]  # best first
    threshold: float
    far: float | None
    identities: int  # with whom the probe was compared
    basis: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        return "no match" if self.match is None else f"match: {self.match}"

    @property
    def false_matches(self) -> float | None:
        """Largest share of unknown probes that are given a name, 1 at most; None where no rate is known."""
        return None if self.far is None else min(1.0, self.far * self.identities)


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
