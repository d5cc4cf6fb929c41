"""Tuples from labels: for every sample one of its class and one of another, drawn as a pure function of a seed."""

import numpy as np

from mettle.data.draws import draws
from mettle.data.samples import SPLITS, Samples
from mettle.errors import DataError


def same_class(samples: Samples, each: int, seed: int) -> tuple[np.ndarray, ...]:
    """Ids of anchors, of a sample of the same class for each, of one of another class; and their splits."""
    found: list[list[np.ndarray]] = []
    for code in range(len(SPLITS)):
        part = samples.where(samples.split == code)
        order = np.lexsort((part.ids, part.labels))
        labels, ids, n = part.labels[order], part.ids[order], len(part)
        _, starts, counts = np.unique(labels, return_index=True, return_counts=True)
        start, count = np.repeat(starts, counts), np.repeat(counts, counts)
        usable = np.flatnonzero((count > 1) & (count < n))
        start, count = start[usable], count[usable]
        for k in range(each):
            u = draws(seed, k, ids[usable], 2, stream=17)
            step = 1 + (u[:, 0] * (count - 1)).astype(np.int64)
            positive = start + (usable - start + step) % count
            negative = (start + count + (u[:, 1] * (n - count)).astype(np.int64)) % n
            found.append([ids[usable], ids[positive], ids[negative], np.full(len(usable), code, np.int8)])
    if not any(len(columns[0]) for columns in found):
        raise DataError(
            f"no same-class pairs in {samples.origin or 'the samples'}: a split needs two classes, one with two samples"
        )
    return tuple(np.concatenate(columns) for columns in zip(*found, strict=True))
