"""Pairs to look at: the hardest, those at the threshold, and samples beside the label that fits them better.

A filter keeps a pair when at least one of its two samples passes: impostors of one class, or pairs of two domains,
would otherwise vanish as soon as a class or a domain is chosen.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mettle.evaluate.diagnostics.hard_pairs import HardPair
from mettle.workbench.run_data import RunData

TILE_CELLS = 1 << 20  # scores in one tile
MOST_PAIRS = 1 << 26  # pairs looked at; of more, an even share of the rows

Kind = Literal["genuine", "impostor"]


@dataclass(frozen=True)
class PairQuery:
    """Which pairs: of one kind, with a score in [low, high), the lowest or the highest of them first."""

    kind: Kind
    lowest: bool
    low: float = -np.inf
    high: float = np.inf


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


def query_hardest_positives() -> PairQuery:
    """Genuine pairs that look different."""
    return PairQuery("genuine", lowest=True)


def query_hardest_negatives() -> PairQuery:
    """Impostor pairs that look alike."""
    return PairQuery("impostor", lowest=False)


def query_false_accepts(threshold: float) -> PairQuery:
    """Impostors just above a threshold, the closest first."""
    return PairQuery("impostor", lowest=True, low=float(np.float32(threshold)))


def query_false_rejects(threshold: float) -> PairQuery:
    """Genuine pairs just below a threshold, the closest first."""
    return PairQuery("genuine", lowest=False, high=float(np.float32(threshold)))


def find_pairs(data: RunData, wanted: PairQuery, passes: np.ndarray, count: int, each: int | None = None) -> FoundPairs:
    """The first ``count`` pairs of the headline scenario, exactly, with at most ``each`` for the same two labels."""
    blocks, looked = _thin_blocks(_blocks(data, passes))
    room = count if each is None else 64 * count
    best: list[tuple[float, int, int]] = []
    sign = -1 if wanted.lowest else 1
    for rows, cols in blocks:
        for start in range(0, len(rows), step := max(1, TILE_CELLS // max(1, len(cols)))):
            part = rows[start : start + step]
            score = data.unit.take(part).cosine(data.unit.take(cols))
            keep = _pair_mask(data, part, cols, passes, wanted.kind) & (score >= wanted.low) & (score < wanted.high)
            if len(best) == room:  # a full list: only what beats its last entry is of interest
                keep &= sign * score > best[-1][0]
            i, j = np.nonzero(keep)
            value = sign * score[i, j]
            if len(value) > room:
                few = np.flatnonzero(value >= np.partition(value, -room)[-room])  # ties at the end included,
                few = few[np.argsort(-value[few], kind="stable")[:room]]  # then cut in the order of positions
                i, j, value = i[few], j[few], value[few]
            new = zip(value.tolist(), part[i].tolist(), cols[j].tolist(), strict=True)
            best = sorted([*best, *new], key=lambda t: (-t[0], t[1], t[2]))[:room]
    capped = _cap_per_label_pair(best, data.label.codes, count if each is None else each)[:count]
    return FoundPairs(tuple(HardPair(a, b, sign * value) for value, a, b in capped), looked)


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


Block = tuple[np.ndarray, np.ndarray]  # positions: every row is compared with every column


def _blocks(data: RunData, passes: np.ndarray) -> list[Block]:
    """Rows and columns that hold every pair of which one side passes."""
    probe, gallery = data.scenario.probe, data.scenario.gallery
    if gallery is None:
        return [(probe[passes[probe]], probe)]
    return [(probe[passes[probe]], gallery), (probe[~passes[probe]], gallery[passes[gallery]])]


def _thin_blocks(blocks: list[Block]) -> tuple[list[Block], float]:
    """The blocks with every k-th row, so that at most about ``MOST_PAIRS`` pairs remain; and the share of them."""
    pairs = sum(len(rows) * len(cols) for rows, cols in blocks)
    stride = max(1, -(-pairs // MOST_PAIRS))
    thin = [(rows[::stride], cols) for rows, cols in blocks]
    return thin, sum(len(rows) * len(cols) for rows, cols in thin) / pairs if pairs else 1.0


def _pair_mask(data: RunData, rows: np.ndarray, cols: np.ndarray, passes: np.ndarray, kind: Kind) -> np.ndarray:
    """Which cells are pairs of this kind in the headline scenario."""
    label, samples, scenario = data.label.codes, data.samples, data.scenario
    keep = (label[rows, None] == label[cols]) == (kind == "genuine")
    keep &= samples.ids[rows, None] != samples.ids[cols]
    if scenario.gallery is None:  # every unordered pair once: where both pass, by the earlier one
        keep &= (rows[:, None] < cols) | ~passes[cols]
    if scenario.trials != "all" and samples.domain is not None:
        same = samples.domain.codes[rows, None] == samples.domain.codes[cols]
        keep &= same if scenario.trials == "within" else ~same
    return keep


def _cap_per_label_pair(
    best: list[tuple[float, int, int]], labels: np.ndarray, each: int
) -> list[tuple[float, int, int]]:
    """The list with at most ``each`` entries for the same two labels."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for entry in best:
        two = tuple(sorted((int(labels[entry[1]]), int(labels[entry[2]]))))
        seen[two] = seen.get(two, 0) + 1
        if seen[two] <= each:
            found.append(entry)
    return found
