"""Finding rows near a probe: in an index that follows the record, or on the record's own server.

    record ── changes ──> Local: rows in an index in memory, kept on disk as a checksummed view
    record.search ──────> Remote: PostgreSQL does it

An index is never trusted over the record: it is brought up to date before every search, names come from the record
afterwards, so what has been deleted cannot be found, by whomever it was deleted.
"""

from typing import Any, Protocol

import numpy as np

from mettle.match.choose import Measured, Wanted


class Search(Protocol):
    """Where the rows of people are looked for."""

    def find(self, probes: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        """(p, m) scores and row numbers, best first, padded by -inf and -1."""
        ...

    def rows(self) -> int:
        """How many rows there are to find."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is known of it."""
        ...

    @property
    def sequence(self) -> int:
        """Up to which change of the record it has come."""
        ...

    @property
    def notes(self) -> list[str]:
        """What was found odd on opening."""
        ...

    def reindex(self, wanted: Wanted | None = None) -> Measured | None:
        """Choose and build the index anew; what was measured, where it is measured."""
        ...

    def erase(self) -> None:
        """Drop what the index still holds of deleted templates from disk."""
        ...

    def save(self) -> None:
        """Keep the index for the next opening."""
        ...

    def check(self) -> list[str]:
        """What is wrong with it, in words."""
        ...
