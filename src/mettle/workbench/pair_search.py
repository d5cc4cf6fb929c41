"""Pairs to look at: the hardest, those at the threshold, and samples beside the label that fits them better.

A filter keeps a pair when at least one of its two samples passes: impostors of one class, or pairs of two domains,
would otherwise vanish as soon as a class or a domain is chosen.
"""

from dataclasses import dataclass

import numpy as np

from mettle.evaluate.diagnostics.hard_pairs import Block, HardPair, PairQuery
from mettle.workbench.run_data import RunData

MOST_PAIRS = 1 << 26  # pairs looked at; of more, an even share of the rows


@dataclass(frozen=True)
class FoundPairs:
    """Pairs in order, and the share of all pairs that was looked at."""

    pairs: tuple[HardPair, ...]
    looked: float


@dataclass(frozen=True)
class LabelSuspect:
    """A sample, the nearest sample of the label that fits it better, their cosine, and by how much it fits better."""

    first: int
    second: int
    score: float
    suspicion: float


def query_false_accepts(threshold: float) -> PairQuery:
    """Impostors just above a threshold, the closest first."""
    return PairQuery("impostor", lowest=True, low=float(np.float32(threshold)))


def query_false_rejects(threshold: float) -> PairQuery:
    """Genuine pairs just below a threshold, the closest first."""
    return PairQuery("genuine", lowest=False, high=float(np.float32(threshold)))


def find_pairs(data: RunData, query: PairQuery, passes: np.ndarray, count: int, each: int | None = None) -> FoundPairs:
    """The first ``count`` pairs of the headline scenario, exactly, with at most ``each`` for the same two labels."""
    blocks, looked = _thin_blocks(_passing_blocks(data, passes))
    found = data.scenario.search_pairs(data.embeddings, data.samples, query, count=count, each=each, blocks=blocks)
    return FoundPairs(tuple(found), looked)


def find_label_suspects(data: RunData, passes: np.ndarray, count: int) -> tuple[list[LabelSuspect], int]:
    """Samples that pass and fit another label better than their own, and how many there are in all."""
    found = data.suspects
    better = passes[found.order] & (found.suspicion > 0)
    shown = []
    for at in np.flatnonzero(better)[:count].tolist():
        own, label = int(found.order[at]), int(found.suggested[at])
        others = np.flatnonzero(data.label.codes == label)
        score = data.unit.take(np.asarray([own])).cosine(data.unit.take(others))[0]
        best = int(score.argmax())
        shown.append(LabelSuspect(own, int(others[best]), float(score[best]), float(found.suspicion[at])))
    return shown, int(np.count_nonzero(better))


def _passing_blocks(data: RunData, passes: np.ndarray) -> list[Block]:
    """Rows and columns that hold every pair of which one side passes, each pair once."""
    probe, gallery = data.scenario.probe, data.scenario.gallery
    if gallery is None:
        return [(probe[passes[probe]], None), (probe[passes[probe]], probe[~passes[probe]])]
    return [(probe[passes[probe]], gallery), (probe[~passes[probe]], gallery[passes[gallery]])]


def _thin_blocks(blocks: list[Block]) -> tuple[list[Block], float]:
    """The blocks with every k-th row, so that at most about ``MOST_PAIRS`` pairs remain; and the share of them.

    Of rows that are compared with each other every k-th one is compared with all: a share of up to 2/k of the pairs.
    """
    pairs = sum(map(_count_pairs, blocks))
    cells = sum(len(rows) * len(rows if cols is None else cols) for rows, cols in blocks)
    stride = -(-cells // MOST_PAIRS) if pairs > MOST_PAIRS else 1
    thin: list[Block] = []
    for rows, cols in blocks:
        thin.append((rows[::stride], cols))
        if cols is None and stride > 1:
            thin.append((rows[::stride], np.delete(rows, np.s_[::stride])))
    return thin, sum(map(_count_pairs, thin)) / pairs if pairs else 1.0


def _count_pairs(block: Block) -> int:
    rows, cols = block
    return len(rows) * (len(rows) - 1) // 2 if cols is None else len(rows) * len(cols)
