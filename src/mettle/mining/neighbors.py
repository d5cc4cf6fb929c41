"""The nearest rows of other labels, for the rows of one set: exactly, or by cells whose recall is measured.

Both ways first take a few more rows than are wanted by float32 scores and then rank these by their cosines in float64,
equal ones by their number. So the order does not depend on how the work was cut into blocks. Memory beyond the
embeddings is bounded by the size of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mettle.errors import MissingExtra

Search = Literal["auto", "exact", "approximate"]

EXACT_WORK = 2e12  # rows² x dimensions up to which exact search takes about a minute on two cores
WIDEST = 4096  # dimensions; beyond, exact search is as quick
SPARE = 16  # rows that are ranked beyond those that are wanted
TILE = (512, 1 << 15)  # scores in one tile: 64 MiB
BLOCK = 4096  # anchors that are looked up in cells at a time
LISTED = 1 << 22  # rows that are listed for all anchors of a block
SHORTLIST = 512, 16  # rows scored exactly for an anchor: at least so many, and so many for each one that is wanted
OWN = 1024  # rows of the anchor's label that there is room for beside them
PILOT, SAMPLED = 1000, 10_000  # anchors that decide the effort, and that recall is measured on
CELLS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # looked at, until it suffices


@dataclass(frozen=True)
class SearchFacts:
    """How the nearest rows of other labels were found.

    Attributes:
        kind: ``exact`` or ``approximate``.
        recall: share of the true nearest rows that were found, measured on ``sampled`` anchors; 1 for exact search.
        sampled: how many anchors were compared with all rows to measure it.
        rescued: anchors of an approximate search that were compared with all rows, for want of rows of other labels.
    """

    kind: Literal["exact", "approximate"]
    recall: float = 1.0
    sampled: int = 0
    rescued: int = 0

    def __str__(self) -> str:
        if self.kind == "exact":
            return "every row was compared with every other"
        more = f"; {self.rescued:,} anchors were compared with all rows" if self.rescued else ""
        measured = f"recall {self.recall:.4f} against exact search on {self.sampled:,} sampled rows"
        return f"approximate neighbours, {measured}{more}"


@dataclass(frozen=True, eq=False)
class Nearest:
    """The nearest rows of other labels of some anchors.

    Attributes:
        anchors: (b,) rows.
        rows: (b, depth) their nearest rows of other labels, nearest first, -1 where there are no more.
        scores: (b, depth) float64 cosines, falling, -inf where there are no more.
    """

    anchors: np.ndarray
    rows: np.ndarray
    scores: np.ndarray


class NegativeSearch:
    """Finds the nearest rows of other labels within one set of rows.

    Args:
        unit: (n, d) float32 rows of unit length.
        labels: (n,) integers.
        rows: the rows of the set, rising.
        depth: how many rows of other labels are wanted for each anchor.
        search: the way; ``auto`` takes the approximate one where the exact one would take minutes.
        recall: what the approximate one must reach.
    """

    def __init__(
        self, unit: np.ndarray, labels: np.ndarray, rows: np.ndarray, depth: int, search: Search, recall: float
    ) -> None:
        # Sorted by label, rows of one label are side by side, so that few cells of a tile must be masked.
        self.numbers = rows[np.argsort(labels[rows], kind="stable")]
        self.unit, self.labels, self.depth = unit[self.numbers], labels[self.numbers], depth
        _, inverse, sizes = np.unique(self.labels, return_inverse=True, return_counts=True)
        self.others = len(rows) - sizes[inverse]  # rows of other labels, for each
        self.rescued = 0
        n, d = self.unit.shape
        quick = float(n) * n * d <= EXACT_WORK or d > WIDEST
        self.kind: Literal["exact", "approximate"] = "approximate"
        if search == "exact" or (search == "auto" and quick):
            self.kind = "exact"
            return
        try:
            from mettle.gallery.index import faiss_index
        except MissingExtra:
            raise MissingExtra(
                f"mining among {n:,} rows looks for neighbours with Faiss, which is not installed: "
                "pip install 'mettle-ml[gallery]', or ask for exact search, which takes longer"
            ) from None
        self._score_rows = faiss_index.score_rows
        self._cells = faiss_index.train_cells(self.unit)
        self._cells.append(self.unit)
        self._reach, self._length = CELLS[0], max(SHORTLIST[0], SHORTLIST[1] * depth) + min(int(sizes.max()), OWN)
        self._choose_effort(recall)

    def blocks(self, is_anchor: np.ndarray) -> Iterator[Nearest]:
        """The nearest rows of other labels of all anchors, block by block; ``is_anchor`` is for rows of the table."""
        at = np.flatnonzero(is_anchor[self.numbers])
        most, length = (TILE[0], self.depth + SPARE) if self.kind == "exact" else (BLOCK, self._length)
        step = max(1, min(most, LISTED // length))
        for start in range(0, len(at), step):
            part = at[start : start + step]
            found, scores = self._look_exactly(part) if self.kind == "exact" else self._look_into_cells(part)
            rows = np.where(found >= 0, self.numbers[found], -1)
            yield Nearest(self.numbers[part], rows, scores)

    def measure_recall(self, is_anchor: np.ndarray, sampled: int = SAMPLED) -> SearchFacts:
        """How much of what exact search finds the search found, on anchors drawn with a fixed seed."""
        if self.kind == "exact":
            return SearchFacts("exact")
        rescued = self.rescued
        at = _sample_positions(np.flatnonzero(is_anchor[self.numbers]), sampled, seed=1)
        hits = [
            self._hits(self._look_exactly(part)[0], self._look_into_cells(part)[0])
            for part in np.split(at, np.arange(TILE[0], len(at), TILE[0]))
        ]
        return SearchFacts("approximate", float(np.concatenate(hits).mean()), len(at), rescued)

    def _choose_effort(self, recall: float) -> None:
        """The fewest cells that reach the recall on a pilot sample, by two standard errors."""
        at = _sample_positions(np.arange(len(self.numbers)), PILOT, seed=0)
        parts = np.split(at, np.arange(TILE[0], len(at), TILE[0]))
        truth = [self._look_exactly(part)[0] for part in parts]
        for self._reach in CELLS:
            found = [self._look_into_cells(part)[0] for part in parts]
            hits = np.concatenate([self._hits(*pair) for pair in zip(truth, found, strict=True)])
            if hits.mean() - 2 * hits.std() / len(hits) ** 0.5 >= recall:
                break
        self.rescued = 0

    @staticmethod
    def _hits(truth: np.ndarray, found: np.ndarray) -> np.ndarray:
        """For each anchor, the share of the rows of exact search that were found."""
        there = truth >= 0
        first = np.arange(len(truth))[:, None] * (max(truth.max(), found.max()) + 2)  # no two anchors share a number
        return (np.isin(truth + first, found + first) & there).sum(1) / np.maximum(there.sum(1), 1)

    def _look_exactly(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and scores (b, depth) by comparing with all rows; ``at`` rises."""
        unit, labels = torch.from_numpy(self.unit), torch.from_numpy(self.labels)
        width = min(self.depth + SPARE, len(unit))
        first = int(np.searchsorted(self.labels, self.labels[at[0]], "left"))
        last = int(np.searchsorted(self.labels, self.labels[at[-1]], "right"))
        probes = unit[torch.from_numpy(at)]
        best = torch.empty(len(at), 0), torch.empty(len(at), 0, dtype=torch.long)
        for start in range(0, len(unit), TILE[1]):
            tile = probes @ unit[start : start + TILE[1]].T
            a, b = max(first, start), min(last, start + tile.shape[1])
            if a < b:  # only there are rows of the anchors' labels
                own = labels[at][:, None] == labels[a:b]
                tile[:, a - start : b - start].masked_fill_(own, -torch.inf)
            scores, found = tile.topk(min(width, tile.shape[1]), dim=1)
            scores, found = torch.cat([best[0], scores], 1), torch.cat([best[1], found + start], 1)
            top = scores.topk(min(width, scores.shape[1]), dim=1)
            best = top.values, found.gather(1, top.indices)
        return self._rank(at, best[1].numpy(), torch.isfinite(best[0]).numpy())

    def _look_into_cells(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and scores (b, depth) of the best rows in the cells that are nearest to each anchor."""
        probes, width = self.unit[at], self.depth + SPARE
        found = self._cells.shortlist(probes, self._length, self._reach)
        scores = self._score_rows(probes, self.unit, found)
        scores[self.labels[found] == self.labels[at][:, None]] = -np.inf
        if width < scores.shape[1]:
            best = np.argpartition(scores, scores.shape[1] - width, axis=1)[:, -width:]
            found, scores = np.take_along_axis(found, best, 1), np.take_along_axis(scores, best, 1)
        rows, values = self._rank(at, found, np.isfinite(scores))
        poor = np.flatnonzero((rows >= 0).sum(1) < np.minimum(self.depth, self.others[at]))
        for part in np.split(poor, np.arange(TILE[0], len(poor), TILE[0])):
            if len(part):
                rows[part], values[part] = self._look_exactly(at[part])
        self.rescued += len(poor)
        return rows, values

    def _rank(self, at: np.ndarray, found: np.ndarray, is_there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first ``depth`` of some positions (b, m), by exact cosine and then by the number of the row."""
        scores = score_lists(self.unit, at, found)
        scores[~is_there] = -np.inf
        order = np.lexsort((self.numbers[found], -scores), axis=-1)[:, : self.depth]
        rows = np.full((len(at), self.depth), -1)
        values = np.full((len(at), self.depth), -np.inf)
        values[:, : order.shape[1]] = np.take_along_axis(scores, order, 1)
        rows[:, : order.shape[1]] = np.take_along_axis(found, order, 1)
        rows[np.isneginf(values)] = -1
        return rows, values


def score_pairs(unit: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines (m,) of pairs of rows, in float64."""
    scores = np.empty(len(first))
    step = max(1, (1 << 23) // unit.shape[1])
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        a, b = unit[first[part]].astype(np.float64), unit[second[part]].astype(np.float64)
        scores[part] = np.einsum("nd,nd->n", a, b)
    return scores


def score_lists(unit: np.ndarray, anchors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Cosines (b, m) of anchors (b,) with rows (b, m), in float64."""
    return score_pairs(unit, np.repeat(anchors, rows.shape[1]), rows.reshape(-1)).reshape(rows.shape)


def combine_facts(parts: list[SearchFacts]) -> SearchFacts:
    """The facts of several sets as those of one search: recall over all sampled anchors."""
    measured = [part for part in parts if part.kind == "approximate"]
    if not measured:
        return SearchFacts("exact")
    sampled = sum(part.sampled for part in measured)
    recall = sum(part.recall * part.sampled for part in measured) / max(sampled, 1)
    return SearchFacts("approximate", recall, sampled, sum(part.rescued for part in measured))


def _sample_positions(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Some of the positions, rising."""
    if len(positions) <= count:
        return positions
    return np.sort(np.random.default_rng(seed).choice(positions, count, replace=False))
