"""How often each subject is drawn, replicate by replicate: small integers, and products of them some at a time.

A product in floats needs eight bytes a cell, so it is made of parts of the table. Parts are cut at multiples of
``_STEP``: the kernels of a matrix product take rows and columns in groups of a power of two, and what they round for a
row then does not depend on the part it is in (on one thread; several threads cut by themselves, and move a last bit).
"""

from collections.abc import Iterator

import numpy as np

_CELLS = 1 << 21  # of a part, in floats 16 MB
_STEP = 64


def drawn(subjects: int, replicates: int, seed: int) -> np.ndarray:
    """(replicates, subjects), int8 unless a count is larger: ``subjects`` draws with replacement in every row."""
    rng, found = np.random.default_rng(seed), np.empty((replicates, subjects), np.int8)
    for part in parts(replicates, subjects):
        who = rng.integers(subjects, size=(part.stop - part.start, subjects))
        who += subjects * np.arange(len(who))[:, None]
        counts = np.bincount(who.ravel(), minlength=who.size).reshape(who.shape)
        found = found.astype(np.promote_types(found.dtype, np.min_scalar_type(-1 - int(counts.max()))), copy=False)
        found[part] = counts
    return found


def sums(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Σ_s w_s·v_s, or v_s a row of them, for every replicate, in float64."""
    found = np.empty((len(weights), *values.shape[1:]))
    for part in parts(*weights.shape):
        found[part] = weights[part].astype(np.float64) @ values
    return found


def moved(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Σ_b (w_bs − 1)·v_b for every subject."""
    found = np.empty(weights.shape[1])
    for part in parts(weights.shape[1], len(weights)):
        found[part] = (weights[:, part] - 1.0).T @ values
    return found


def parts(count: int, width: int) -> Iterator[slice]:
    """Slices of ``count`` rows of this width; a rest of a few rows goes with the part before it."""
    step = max(_STEP, _CELLS // max(width, 1) // _STEP * _STEP)
    starts = [*range(0, max(count - _STEP, 1), step)]
    yield from (slice(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True))


def some(weights: np.ndarray, able: np.ndarray) -> np.ndarray:
    """The replicates that are usable: all of them without a copy, where they are."""
    return weights if able.all() else weights[able]
