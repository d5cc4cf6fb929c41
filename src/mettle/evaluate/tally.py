"""Scores counted by subject and bin, and weighed for every resample of the subjects.

Up to 512 subjects counts are kept by pair of subjects. Above, by subject, a pair at both of its ends; and above 2²⁷
impostor pairs from the scores of everybody against 8192 rows drawn at random.
"""

from collections.abc import Iterator

import numpy as np
import torch

from mettle.evaluate.binning import Binning
from mettle.evaluate.counted import Counted
from mettle.evaluate.design import Design
from mettle.evaluate.passes import Fast
from mettle.evaluate.point import Pairs
from mettle.evaluate.resamples import sums

DENSE_SUBJECTS = 512
MANY = 1 << 27  # impostor pairs from which everybody is compared with PARTNERS rows only
PARTNERS = 8192


def is_dense(scores: Pairs) -> bool:
    """Whether subjects are few enough to count by pairs of them."""
    return scores.subjects <= DENSE_SUBJECTS


def weighed(genuine: np.ndarray, impostor: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `tally` counted in each bin, weighed by every row of weights."""
    positive = sums(weights, genuine)  # whole numbers below 2⁵³, and a product of floats is a fast one
    return positive, _products(weights, impostor) if impostor.ndim == 3 else _expansion(weights, impostor)


def tally(scores: Pairs, thresholds: np.ndarray, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Count scores by subject and bin; bin k holds the scores that thresholds 0 … k-1 accept.

    Returns:
        (S, bins) genuine counts, and impostor counts: (S, S, bins) float32 if dense, else (S, bins) int64 in
        which a pair is counted at both of its subjects.
    """
    subjects, bins = scores.subjects, len(thresholds) + 1
    place = Binning.of(thresholds)
    design = None if dense else sampled(scores)
    if design is not None:
        return _tally_of_some(design, place, subjects, bins)
    genuine = np.zeros(subjects * bins, np.int64)
    impostor = np.zeros(subjects**2 * bins, np.float32) if dense else np.zeros(subjects * bins, np.int64)
    narrow = np.int32 if subjects * bins < 1 << 31 else np.int64
    # A score that is off by 1e-5 leaves an interval what it is; where all scores are kept there may be ties to respect.
    fast = scores.design if isinstance(scores, Counted) else None
    for block in (scores.stream if fast is None else Fast(fast).stream)(True):
        at = block.genuine_subject.astype(np.int64) * bins + place(block.genuine)
        genuine += np.bincount(at, minlength=len(genuine))
        column = place(block.impostor)
        first, second = block.impostor_subjects
        if dense:
            pair = (first.astype(np.int64) * subjects + second) * bins
            np.add.at(impostor, (pair + column).reshape(-1), np.float32(1))
        else:
            for side in (first, second):
                key = torch.from_numpy(side.astype(narrow) * narrow(bins) + column)
                impostor += torch.bincount(key.view(-1), minlength=len(impostor)).numpy()
    shape = (subjects, subjects, bins) if dense else (subjects, bins)
    return genuine.reshape(subjects, bins), impostor.reshape(shape)


def sampled(scores: Pairs) -> Design | None:
    """Which pairs there are, where they are so many that a sample of them is resampled."""
    return scores.design if isinstance(scores, Counted) and scores.impostors > MANY else None


def _tally_of_some(design: Design, place: Binning, subjects: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Genuine counts of all pairs; impostor counts of every row against some rows of the other side, scaled up."""
    genuine = np.zeros(subjects * bins, np.int64)
    for block in Fast(design).genuine_blocks():
        at = block.genuine_subject.astype(np.int64) * bins + place(block.genuine)
        genuine += np.bincount(at, minlength=len(genuine))
    impostor = np.zeros(subjects * bins)
    for side in (0,) if design.own else (0, 1):
        some = design.some(side, PARTNERS)
        found = torch.zeros(subjects * bins, dtype=torch.int64)
        for block in Fast(some).stream(True):
            key = block.impostor_subjects[0].astype(np.int64) * bins + place(block.impostor)
            found += torch.bincount(torch.from_numpy(key).view(-1), minlength=len(found))
        impostor += found.numpy() * (len(design.rows[1 - side]) / len(some.rows[1]))
    return genuine.reshape(subjects, bins), impostor.reshape(subjects, bins)


def _products(weights: np.ndarray, impostor: np.ndarray) -> np.ndarray:
    """Σ_st w_s w_t C_st by bin, for every row of weights: matrix products, some t and some replicates at a time.

    A set that is compared with itself has its pairs at (s, t) with s before t: nearly half of C is empty and left out.
    """
    out = np.zeros((len(weights), impostor.shape[2]))
    w = weights.astype(np.float32)
    for some in _parts(impostor.shape[1], 32):
        last = int(np.flatnonzero(impostor[:, some].any(axis=(1, 2)))[-1:].sum()) + 1
        part_of = impostor[:last, some]
        flat = part_of.reshape(last, -1)
        for part in _parts(len(w), 256):
            half = (w[part, :last] @ flat).reshape(-1, *part_of.shape[1:])
            out[part] += np.matmul(w[part, None, some], half)[:, 0]
    return out


def _expansion(weights: np.ndarray, impostor: np.ndarray) -> np.ndarray:
    """Σ_st (w_s + w_t − 1) C_st by bin: the histogram of s holds both roles, so Σ_s w_s H_s − Σ_s H_s / 2."""
    return sums(weights, impostor) - impostor.sum(axis=0) / 2


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, n, size))
