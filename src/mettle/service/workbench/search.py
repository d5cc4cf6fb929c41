"""Pairs to look at: the hardest, those at the threshold, and samples beside the label that fits them better.

A filter keeps a pair when at least one of its two samples passes: impostors of one class, or pairs of two domains,
would otherwise vanish as soon as a class or a domain is chosen.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mettle.evaluate.diagnostics.hard_pairs import HardPair
from mettle.service.workbench.scene import Scene

CELLS = 1 << 20  # scores in one tile
MOST = 1 << 26  # pairs looked at; of more, an even share of the rows

Kind = Literal["genuine", "impostor"]


@dataclass(frozen=True)
class Wanted:
    """Which pairs: of one kind, with a score in [low, high), the lowest or the highest of them first."""

    kind: Kind
    lowest: bool
    low: float = -np.inf
    high: float = np.inf


@dataclass(frozen=True)
class Found:
    """Pairs in order, and the share of all pairs that was looked at."""

    pairs: tuple[HardPair, ...]
    looked: float


@dataclass(frozen=True)
class Suspect:
    """A sample, the nearest sample of the label that fits it better, their cosine, and by how much it fits better."""

    first: int
    second: int
    score: float
    suspicion: float


def hardest_positives() -> Wanted:
    """Genuine pairs that look different."""
    return Wanted("genuine", lowest=True)


def hardest_negatives() -> Wanted:
    """Impostor pairs that look alike."""
    return Wanted("impostor", lowest=False)


def false_accepts(threshold: float) -> Wanted:
    """Impostors just above a threshold, the closest first."""
    return Wanted("impostor", lowest=True, low=float(np.float32(threshold)))


def false_rejects(threshold: float) -> Wanted:
    """Genuine pairs just below a threshold, the closest first."""
    return Wanted("genuine", lowest=False, high=float(np.float32(threshold)))


def search(scene: Scene, wanted: Wanted, passes: np.ndarray, count: int, each: int | None = None) -> Found:
    """The first ``count`` pairs of the headline scenario, exactly, with at most ``each`` for the same two labels."""
    blocks, looked = _thinned(_blocks(scene, passes))
    room = count if each is None else 64 * count
    kept: list[tuple[float, int, int]] = []
    sign = -1 if wanted.lowest else 1
    for rows, cols in blocks:
        for start in range(0, len(rows), step := max(1, CELLS // max(1, len(cols)))):
            part = rows[start : start + step]
            score = scene.unit.take(part).cosine(scene.unit.take(cols))
            keep = _compared(scene, part, cols, passes, wanted.kind) & (score >= wanted.low) & (score < wanted.high)
            if len(kept) == room:  # a full list: only what beats its last entry is of interest
                keep &= sign * score > kept[-1][0]
            i, j = np.nonzero(keep)
            value = sign * score[i, j]
            if len(value) > room:
                few = np.flatnonzero(value >= np.partition(value, -room)[-room])  # ties at the end included,
                few = few[np.argsort(-value[few], kind="stable")[:room]]  # then cut in the order of positions
                i, j, value = i[few], j[few], value[few]
            new = zip(value.tolist(), part[i].tolist(), cols[j].tolist(), strict=True)
            kept = sorted([*kept, *new], key=lambda t: (-t[0], t[1], t[2]))[:room]
    capped = _capped(kept, scene.label.codes, count if each is None else each)[:count]
    return Found(tuple(HardPair(a, b, sign * value) for value, a, b in capped), looked)


def suspects(scene: Scene, passes: np.ndarray, count: int) -> tuple[list[Suspect], int]:
    """Samples that pass and fit another label better than their own, and how many there are in all."""
    found = scene.suspects
    better = passes[found.order] & (found.suspicion > 0)
    shown = []
    for at in np.flatnonzero(better)[:count].tolist():
        own, label = int(found.order[at]), int(found.suggested[at])
        others = np.flatnonzero(scene.label.codes == label)
        score = scene.unit.take(np.asarray([own])).cosine(scene.unit.take(others))[0]
        best = int(score.argmax())
        shown.append(Suspect(own, int(others[best]), float(score[best]), float(found.suspicion[at])))
    return shown, int(np.count_nonzero(better))


Block = tuple[np.ndarray, np.ndarray]  # positions: every row is compared with every column


def _blocks(scene: Scene, passes: np.ndarray) -> list[Block]:
    """Rows and columns that hold every pair of which one side passes."""
    probe, gallery = scene.way.probe, scene.way.gallery
    if gallery is None:
        return [(probe[passes[probe]], probe)]
    return [(probe[passes[probe]], gallery), (probe[~passes[probe]], gallery[passes[gallery]])]


def _thinned(blocks: list[Block]) -> tuple[list[Block], float]:
    """The same blocks with every k-th row, so that at most about ``MOST`` pairs remain; and the share that does."""
    pairs = sum(len(rows) * len(cols) for rows, cols in blocks)
    stride = max(1, -(-pairs // MOST))
    thin = [(rows[::stride], cols) for rows, cols in blocks]
    return thin, sum(len(rows) * len(cols) for rows, cols in thin) / pairs if pairs else 1.0


def _compared(scene: Scene, rows: np.ndarray, cols: np.ndarray, passes: np.ndarray, kind: Kind) -> np.ndarray:
    """Which cells are pairs of this kind in the headline scenario."""
    label, samples, way = scene.label.codes, scene.samples, scene.way
    keep = (label[rows, None] == label[cols]) == (kind == "genuine")
    keep &= samples.ids[rows, None] != samples.ids[cols]
    if way.gallery is None:  # every unordered pair once: where both pass, by the earlier one
        keep &= (rows[:, None] < cols) | ~passes[cols]
    if way.trials != "all" and samples.domain is not None:
        same = samples.domain.codes[rows, None] == samples.domain.codes[cols]
        keep &= same if way.trials == "within" else ~same
    return keep


def _capped(kept: list[tuple[float, int, int]], labels: np.ndarray, each: int) -> list[tuple[float, int, int]]:
    """The list with at most ``each`` entries for the same two labels."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for entry in kept:
        two = tuple(sorted((int(labels[entry[1]]), int(labels[entry[2]]))))
        seen[two] = seen.get(two, 0) + 1
        if seen[two] <= each:
            found.append(entry)
    return found
