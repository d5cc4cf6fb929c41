"""What ranks count, put together: the same numbers as one process has, whatever the number of ranks.

Every rank takes its own tiles of one grid, which does not depend on the number of ranks; counts are whole numbers and
add up, genuine scores and the scores inside a window are exact and are sorted again.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from mettle.evaluate.inputs import EmbeddingSet
from mettle.evaluate.scoring.bins import ScoreWindow
from mettle.pairs.distributed import RankGroup


def split_rows(n: int, ranks: RankGroup, step: int, *, triangle: bool) -> slice:
    """This rank's rows of n, in whole steps: about as many pairs for every rank, of those above the diagonal if asked.

    Rows before r have r·n − r²/2 of the n²/2 pairs above the diagonal: a share f of them ends at r = n·(1 − √(1 − f)).
    """
    steps = -(-n // step)

    def end(rank: int) -> int:
        share = rank / ranks.size
        return min(n, step * round(steps * (1 - math.sqrt(1 - share) if triangle else share)))

    return slice(end(ranks.rank), end(ranks.rank + 1))


def gather_sorted(score: Callable[[], np.ndarray], ranks: RankGroup) -> np.ndarray:
    """The ascending scores that every rank has, as one ascending array."""
    parts = [part["scores"] for part in ranks.compute(lambda: {"scores": score()})]
    return parts[0] if ranks.size == 1 else np.sort(np.concatenate(parts))


def sum_counts(parts: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """Counts of all ranks in whole numbers."""
    return np.stack([part["counts"] for part in parts]).sum(axis=0, dtype=np.int64)


def pack_windows(windows: Sequence[ScoreWindow]) -> dict[str, np.ndarray]:
    """Windows as arrays, to be sent."""
    found = {"above": np.asarray([w.above for w in windows], np.int64)}
    for k, w in enumerate(windows):
        found |= {f"values{k}": w.values, f"counts{k}": w.counts}
    return found


def merge_windows(ends: Sequence[tuple[float, float]], parts: Sequence[dict[str, np.ndarray]]) -> list[ScoreWindow]:
    """The windows of all ranks as one: equal scores are counted together."""
    found = []
    for k, (low, high) in enumerate(ends):
        scores = np.concatenate([part[f"values{k}"] for part in parts])
        counts = np.concatenate([part[f"counts{k}"] for part in parts])
        values, at = np.unique(scores, return_inverse=True)
        merged = np.zeros(len(values), np.int64)
        np.add.at(merged, at.reshape(-1), counts)
        found.append(ScoreWindow(low, high, values, merged, sum(int(part["above"][k]) for part in parts)))
    return found


def require_same_call(ranks: RankGroup, what: str, *rows: EmbeddingSet, **options: object) -> None:
    """Refuse ranks that do not make the same call on the same rows."""
    if ranks.size == 1:
        return
    digest = hashlib.blake2b(repr(sorted(options.items())).encode())
    for side in rows:
        for array in (side.values, side.given_labels, side.ids, side.domains):
            known = None if array is None else np.ascontiguousarray(array)
            digest.update(b"none" if known is None else f"{known.dtype}{known.shape}".encode())
            if known is not None:
                digest.update(known.reshape(-1).view(np.uint8).data)
    ranks.require_equal(what, digest.hexdigest())
