"""Search on the record's own server."""

from typing import Any

import numpy as np

from mettle.errors import GalleryError
from mettle.match.choose import Wanted, as_wanted
from mettle.match.postgres import PostgresRecord


class Remote:
    """The record's own server searches its templates, and looks after its index itself."""

    def __init__(self, record: PostgresRecord):
        self.record = record
        self.notes: list[str] = []

    @property
    def sequence(self) -> int:
        """The server is never behind."""
        return self.record.sequence()

    def reindex(self, wanted: Wanted | None = None) -> None:
        """Let the server search exactly, or by its own graph."""
        kind = as_wanted(wanted).kind
        if kind not in ("auto", "exact", "hnsw"):
            raise GalleryError("a gallery on a server has the indexes exact and hnsw: ask for one of these")
        self.record.index("exact" if kind == "exact" else "hnsw")

    def erase(self) -> None:
        """The record has done so."""

    def save(self) -> None:
        """Nothing is kept here."""

    def check(self) -> list[str]:
        """There is nothing beside the record."""
        return []

    def find(self, probes: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        """By pgvector."""
        return self.record.search(probes, m)

    def rows(self) -> int:
        """All templates."""
        return self.record.size().templates

    def facts(self) -> dict[str, Any]:
        """Where it is."""
        return {"kind": "pgvector, on the server"}
