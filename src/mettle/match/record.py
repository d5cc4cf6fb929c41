"""The record of a gallery: the one place where enrolled templates are the truth.

A record is SQL: `sqlite` (embedded) or `postgres` (a server). Both obey the same laws, which
``tests/match/test_record.py`` runs on either:

    acknowledged  = durable: once `enrol` or `delete` returns, no crash takes it back
    all or none   = a call that raises, or is killed, has changed nothing that a later reader sees
    numbers       = 64-bit, given by the record, never used twice, not even after deletion
    sequence      = +1 per acknowledged change; `changes(after)` tells everything that happened since
    request       = the same request name twice changes nothing the second time and gives the first receipt; a name
                    that was used for another verb or identity is refused
    calibration   = what was measured on the people enrolled; keeping or forgetting it is a change like any other

Anything faster than SQL (an index) is a view that can be thrown away and built again from here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mettle.match.calibration import Calibration, Standing

IDENTITY_BYTES = 512  # longest name of an identity, in UTF-8


@dataclass(frozen=True)
class Binding:
    """What the templates of a gallery are; a gallery is bound once and refuses templates of anything else."""

    dim: int
    model: str | None = None  # sha256 of the weights; None: embeddings from elsewhere
    preprocessing: str | None = None  # the contract's input, as sorted JSON
    fusion: str = "best"
    thresholds: Mapping[str, Any] = field(default_factory=dict)  # as in contract.json, by false-accept rate
    metric: str = "cosine"


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


@dataclass(frozen=True, eq=False)
class Changes:
    """What happened after some sequence number: first the removals, then the additions, each template at most once."""

    sequence: int  # up to here
    removed: np.ndarray  # (m,) int64
    added: Templates


@dataclass(frozen=True)
class Size:
    """How much is enrolled."""

    identities: int
    templates: int


class Record(Protocol):
    """Where templates are kept. Vectors given to it are float32 and of unit length: the gallery sees to that."""

    @property
    def binding(self) -> Binding:
        """What its templates are."""
        ...

    @property
    def identity(self) -> str:
        """Which record this is: a name that a copy of it shares and no other record has."""
        ...

    def sequence(self) -> int:
        """Number of the last acknowledged change; 0 for a new record."""
        ...

    def size(self) -> Size:
        """How much is enrolled now."""
        ...

    def enrol(
        self,
        identity: str,
        vectors: np.ndarray,
        *,
        request: str | None = None,
        replace: bool = False,
        distinct: bool = False,
        former: Sequence[str] = (),
    ) -> Receipt:
        """Add (m, dim) templates to an identity.

        With ``replace`` its former ones are removed in the same change; with ``distinct`` those that it has already
        are not added again. ``former``: other spellings under which the same request may have been served before.
        """
        ...

    def enrol_many(
        self, people: Sequence[tuple[str, np.ndarray]], *, replace: bool = False, distinct: bool = False
    ) -> Receipt:
        """The same for several identities in one change."""
        ...

    def delete(self, identity: str, *, request: str | None = None, former: Sequence[str] = ()) -> Receipt:
        """Remove an identity, or of its ``former`` spellings one that is there; UnknownIdentity where there is none."""
        ...

    def has(self, identity: str) -> bool:
        """Whether somebody is enrolled under exactly this name."""
        ...

    def standing(self) -> Standing | None:
        """The calibration that is kept, and what has changed since; None where there is none."""
        ...

    def calibrate(self, found: Calibration | None) -> Receipt:
        """Keep a calibration instead of the former one; None: forget it."""
        ...

    def for_writing(self) -> Any:
        """Refuse, where it was opened for reading."""
        ...

    def templates(self, identity: str) -> Templates:
        """All templates of an identity, read from the record itself; none: empty."""
        ...

    def names(self, numbers: np.ndarray) -> list[str | None]:
        """Whose templates these are; None for those that are not (or no longer) there."""
        ...

    def ids(self) -> Iterator[str]:
        """All identities, sorted."""
        ...

    def scan(self, *, batch: int = 65536) -> Iterator[Templates]:
        """All templates in the order of their numbers, as of one moment."""
        ...

    def changes(self, after: int) -> Changes | None:
        """What happened after a sequence number; None where the record no longer remembers (build anew by `scan`)."""
        ...

    def compact(self) -> None:
        """Erase what was deleted from disk: afterwards no byte of a deleted template is in any file of the record."""
        ...

    def check(self) -> list[str]:
        """What is wrong with the record, in words; an empty list is a sound record."""
        ...

    def digest(self) -> str:
        """A checksum over all live templates (identities, numbers of templates per identity, vectors).

        It does not depend on numbers, order of enrolment, or on which kind of record holds them, so equal digests
        mean equal content: the proof of a move.
        """
        ...

    def close(self) -> None:
        """Let go of files, locks and connections; may be called twice."""
        ...
