"""Random numbers without a stream: a draw is a pure function of what it is for.

``uniform_per_id(seed, epoch, ids, n)`` hashes (seed, epoch, id, counter), so the numbers of a sample never depend on
which batch it came in, how many workers there were, or what was drawn before. Resuming has nothing to remember.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def hash_bits(*parts: np.ndarray | int) -> np.ndarray:
    """64 well-mixed bits per element of the broadcast parts (the finaliser of SplitMix64, once per part)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _mix_bits(
            state * _GOLDEN + np.asarray(part, np.int64).reshape(np.shape(part)).astype(np.uint64) + _GOLDEN
        )
    return state


def uniform_per_id(seed: int, epoch: int, ids: np.ndarray, n: int, *, stream: int = 0) -> np.ndarray:
    """(len(ids), n) uniform numbers in [0, 1) for these samples in this epoch.

    ``stream`` separates independent uses of the same sample: the two views of self-supervised training, say.
    """
    bits = hash_bits(seed, epoch, stream, np.asarray(ids)[:, None], np.arange(n)[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def permutation(n: int, seed: int, epoch: int, *, stream: int = 0) -> np.ndarray:
    """A permutation of ``range(n)`` that depends on nothing but its arguments."""
    return np.argsort(hash_bits(seed, epoch, stream, np.arange(n)), kind="stable")


def _mix_bits(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
