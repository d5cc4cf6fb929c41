"""Embeddings and what is known about them, found by sample id, as protocols name them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.errors import DataError, InputError
from mettle.evaluate.checks import integers, names
from mettle.evaluate.leakage import Part


@dataclass(frozen=True, eq=False)
class Known:
    """Embeddings and what is known about them, found by id."""

    embeddings: Any
    labels: np.ndarray
    ids: np.ndarray
    domains: np.ndarray | None
    hashes: np.ndarray | None
    looks: Any
    order: np.ndarray

    @classmethod
    def of(cls, embeddings: Any, labels: Any, ids: Any, domains: Any, hashes: Any = None, looks: Any = None) -> "Known":
        """Check the columns; the rest are found by id.

        Raises:
            InputError: an id occurs twice, or a column does not fit.
        """
        n = len(embeddings)
        known = integers(ids, "ids", n)
        order = np.argsort(known, kind="stable")
        if (np.diff(known[order]) == 0).any():
            raise InputError("ids must be unique: a protocol names samples by them")
        return cls(
            embeddings,
            names(labels, "labels", n),
            known,
            None if domains is None else names(domains, "domains", n),
            None if hashes is None else names(hashes, "hashes", n),
            looks,
            order,
        )

    def at(self, ids: tuple[int, ...]) -> np.ndarray:
        """Where these samples are.

        Raises:
            DataError: one is not there.
        """
        wanted = np.asarray(ids, np.int64)
        place = np.minimum(np.searchsorted(self.ids[self.order], wanted), len(self.ids) - 1)
        rows = self.order[place]
        missing = self.ids[rows] != wanted
        if missing.any():
            raise DataError(
                f"the protocol names id {wanted[missing][0]}, one of {missing.sum()} that have no embedding: embed "
                "all of its samples, and count failures as failed templates"
            )
        return rows

    def side(self, ids: tuple[int, ...]) -> tuple[Any, ...]:
        """These samples as metrics take them: embeddings, labels, domains, ids."""
        at = self.at(ids)
        domains = None if self.domains is None else self.domains[at]
        return self.embeddings[at], self.labels[at], domains, self.ids[at]

    def part(self, ids: tuple[int, ...]) -> Part:
        """These samples as the search for leaks takes them."""
        at = self.at(ids)
        hashes, looks = (None if column is None else column[at] for column in (self.hashes, self.looks))
        return Part(self.ids[at], self.labels[at], hashes, looks=looks)
