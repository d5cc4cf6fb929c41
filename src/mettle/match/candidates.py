"""The best people of each probe: rows that a search finds, under the names that the record gives."""

from collections.abc import Mapping

import numpy as np

from mettle.match.record import Record, Size
from mettle.match.search import Search

TRIES = 5  # searches of one answer, where the people found are being changed


class Candidates:
    """Who comes near a probe, and among how many."""

    def __init__(self, record: Record, search: Search):
        self._record, self._search = record, search
        self._size: tuple[int, Size] = (-1, Size(0, 0))  # as of a change of the record

    def best(self, probes: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
        """The best k people of each probe, with scores: as many rows as it takes to see k different ones."""
        m, tries = k, 0
        found: list[list[tuple[str, float]]] = [[] for _ in probes]
        pending = np.arange(len(probes))
        while len(pending):
            scores, numbers = self._search.find(probes[pending], m)
            known = np.unique(numbers[numbers >= 0])
            names = dict(zip(known.tolist(), self._record.names(known), strict=True))
            if None in names.values() and tries < TRIES:  # changed since the search, which follows when asked again
                tries += 1
                continue
            short = []
            for row, probe in enumerate(pending.tolist()):
                found[probe] = distinct(numbers[row], scores[row], names)[:k]
                if len(found[probe]) < k:
                    short.append(probe)
            if m >= self._search.rows():
                break
            pending, m = np.asarray(short, np.int64), min(4 * m, max(self._search.rows(), 1))
        return found

    def size(self) -> Size:
        """Numbers of people and templates, counted once per change."""
        # A search has just asked how far the record has come: asking again would cost as much as the answer is worth.
        sequence = self._search.sequence
        if self._size[0] != sequence:
            self._size = (sequence, self._record.size())
        return self._size[1]


def distinct(numbers: np.ndarray, scores: np.ndarray, names: Mapping[int, str | None]) -> list[tuple[str, float]]:
    """People in the order of their best row; rows of people deleted meanwhile have no name and are left out."""
    best: dict[str, float] = {}
    for number, score in zip(numbers.tolist(), scores.tolist(), strict=True):
        name = names.get(number) if number >= 0 else None
        if name is not None and name not in best:
            best[name] = min(1.0, max(-1.0, score))
    return list(best.items())
